"""Triton kernels of the gated delta rule ops; the Kimi Delta Attention ops launch them too.

Every decay is the exp of a sum over the tokens it spans, never of a difference of longer sums: all exponents are at
most 0, and small decays keep their digits after a huge one. For tiles see materialize_kernels.py.
"""

import triton
import triton.language as tl

from ..triton_rounding import state_kind
from .materialize_kernels import (
    add_rows,
    channels,
    gdn_materialize,
    load_tile,
    programs_of,
    split_rows,
    store_tile,
    strided,
    tiling_of,
    wrap,
)

__all__ = ["gdn_materialize", "gdn_replay", "gdn_update"]


@triton.jit
def _log_decay(a, A_log, bias, lower_bound):
    """-exp(A_log) softplus(a + bias), or the safe gate lower_bound * sigmoid(exp(A_log) (a + bias))."""
    x = a + bias
    rate = tl.exp(A_log)
    if lower_bound is None:
        y = tl.exp(tl.minimum(x, 20.0))
        # log(1 + y) loses y's digits where 1 + y rounds; log(w) y / (w - 1) has them back
        w = 1.0 + y
        exact = w == 1.0
        log1p = tl.where(exact, y, tl.log(w) * (y / tl.where(exact, 1.0, w - 1.0)))
        g = -rate * tl.where(x > 20.0, x, log1p)
    else:
        g = lower_bound / (1.0 + tl.exp(-rate * x))
    return g


@triton.jit
def _sum_keys(x):
    """[KC, n, KB] -> [n]."""
    return tl.sum(tl.sum(x, axis=0), axis=1)


@triton.jit
def _normalise(x):
    """Rows of [KC, n, KB] divided by their length."""
    return x * tl.rsqrt(_sum_keys(x * x) + 1e-6)[None, :, None]


@triton.jit
def _pick(x, chosen):
    """The chosen row of [.., n, ..], exactly."""
    return tl.sum(tl.where(chosen[None, :, None], x, 0.0), axis=1)


@triton.jit
def _read(b_state, b_k, b_u, x, carried, faded):
    """(state diag(carried) + sum of u_j (k_j faded)^T) x: state [KC, V, KB], k [KC, n, KB], u [n, V], x [KC, KB]."""
    weights = _sum_keys(b_k * (x * faded)[:, None, :])
    return _sum_keys(b_state * (x * carried)[:, None, :]) + tl.sum(weights[:, None] * b_u, axis=0)


@triton.jit
def _load_keys(p, o_row, inside, o_channel, N: tl.constexpr, K: tl.constexpr, KC: tl.constexpr, KB: tl.constexpr):
    """Rows at offsets o_row [KC * N] from pointers p [KC * N, KB] -> [KC, N, KB]; 0 where not inside."""
    b = tl.load(p + o_row[:, None], mask=inside[:, None] & (o_channel < K), other=0.0)
    return tl.reshape(b, [KC, N, KB])


@triton.jit
def _decay_history(p_g, row_stride, gate_stride, start, committed, ring_len, GATE: tl.constexpr,
                   W: tl.constexpr, GC: tl.constexpr, GB: tl.constexpr):
    """Log decay of live row j up to the newest one, by the gates of the rows after it, and the checkpoint's by all.

    p_g: ring row 0. Returns [GC, W, GB] and [GC, GB].
    """
    o_w = tl.arange(0, W)
    if GATE == 1:
        rows = wrap(start + o_w, ring_len)
        b_g = tl.load(p_g + rows * row_stride, mask=o_w < committed, other=0.0)
        b_after = tl.sum(tl.where(o_w[None, :] > o_w[:, None], b_g[None, :], 0.0), axis=1)[None, :, None]
        b_total = tl.zeros([GC, GB], tl.float32) + tl.sum(b_g, axis=0)
    else:
        o_gate = tl.arange(0, GC * GB)
        first = tl.load(p_g + start * row_stride + o_gate * gate_stride, other=0.0,
                        mask=o_gate < tl.where(committed > 0, GATE, 0))
        rows = wrap(wrap(start + o_w, ring_len) + 1, ring_len)
        b_g = tl.load(p_g + (rows * row_stride)[:, None] + o_gate[None, :] * gate_stride, other=0.0,
                      mask=(o_w + 1 < committed)[:, None] & (o_gate < GATE)[None, :])
        b_total = tl.reshape(first + tl.sum(b_g, axis=0), [GC, GB])
        b_after = tl.permute(tl.reshape(tl.cumsum(b_g, axis=0, reverse=True), [W, GC, GB]), (1, 0, 2))
    return b_after, b_total


@triton.jit(do_not_specialize=["ring_len", "window"])
def _replay_gdn_kernel(
    p_state, s_state, p_scale, s_scale, p_u, s_u, p_kr, s_kr, p_g, s_g, p_start, s_start, p_committed, s_committed,
    p_q, s_q, p_k, s_k, p_v, s_v, p_a, s_a, p_b, s_b, p_A, s_A, p_bias, s_bias, p_slots, s_slots, p_lens, s_lens,
    p_seed, p_out, ring_len, window, scale, lower_bound,
    HV: tl.constexpr, RATIO: tl.constexpr, V: tl.constexpr, K: tl.constexpr, T: tl.constexpr, GATE: tl.constexpr,
    L2NORM: tl.constexpr, KIND: tl.constexpr, ROUNDS: tl.constexpr, KC: tl.constexpr, KB: tl.constexpr,
    GC: tl.constexpr, GB: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_T: tl.constexpr,
):
    """One program per (row, value head, V tile). The state is read once and written by flushing rows only.

    Programs of one row need each other's scalars and keys and compute them again, all to the same bits.
    """
    TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    tile = tl.program_id(0) % TILES
    head = (tl.program_id(0) // TILES % HV).to(tl.int64)
    row = (tl.program_id(0) // (TILES * HV)).to(tl.int64)
    o_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    o_t = tl.arange(0, BLOCK_T)
    in_v = o_v < V

    slot = tl.load(p_slots + row * s_slots[0]).to(tl.int64)
    count = T
    if p_lens is not None:
        count = tl.load(p_lens + row * s_lens[0]).to(tl.int32)
    count = tl.where(slot > 0, count, 0)
    p_out += row * (T * HV * V) + head * V + o_v
    idle = (o_t >= count) & (o_t < T)
    nothing = tl.zeros([BLOCK_T, BLOCK_V], p_out.dtype.element_ty)
    tl.store(p_out[None, :] + (o_t * (HV * V))[:, None], nothing, mask=idle[:, None] & in_v[None, :])
    if count == 0:
        return

    o_k = channels(tl.arange(0, KC), KB)
    o_gate = channels(tl.arange(0, GC), GB)
    in_k = o_k < K
    in_gate = o_gate < GATE
    key_head = head // RATIO
    real = o_t < count
    o_token, o_chunk = split_rows(BLOCK_T, KC)
    o_channel = channels(o_chunk, KB)
    p_k += row * s_k[0] + key_head * s_k[2] + o_channel * s_k[3]
    p_q += row * s_q[0] + key_head * s_q[2] + o_channel * s_q[3]
    b_k = _load_keys(p_k, o_token * s_k[1], o_token < count, o_channel, BLOCK_T, K, KC, KB)
    b_q = _load_keys(p_q, o_token * s_q[1], o_token < count, o_channel, BLOCK_T, K, KC, KB)
    p_v += row * s_v[0] + head * s_v[2]
    values = real[:, None] & in_v[None, :]
    b_v = tl.load(p_v + (o_t * s_v[1])[:, None] + (o_v * s_v[3])[None, :], mask=values, other=0.0)
    o_gated, o_part = split_rows(BLOCK_T, GC)
    o_part = channels(o_part, GB)
    p_a += row * s_a[0] + head * s_a[2] + o_part * s_a[3]
    b_a = _load_keys(p_a, o_gated * s_a[1], o_gated < count, o_part, BLOCK_T, GATE, GC, GB)
    b_b = tl.load(p_b + row * s_b[0] + o_t * s_b[1] + head * s_b[2], mask=real, other=0.0)
    b_bias = tl.load(p_bias + head * s_bias[0] + o_gate * s_bias[1], mask=in_gate, other=0.0).to(tl.float32)
    A_log = tl.load(p_A + head * s_A[0]).to(tl.float32)

    # loaded after the keys and queries: Triton would else lay the state out as it does those
    o_item, o_chunk = split_rows(BLOCK_V, KC)
    o_row = tile * BLOCK_V + o_item
    o_state = channels(o_chunk, KB)
    inside = (o_row < V)[:, None] & (o_state < K)
    p_state += slot * s_state[0] + head * s_state[1]
    p_state += (o_row * s_state[2])[:, None] + o_state * s_state[3]
    if KIND > 0:
        p_scale += slot * s_scale[0] + head * s_scale[1] + o_v * s_scale[2]
    b_state = load_tile(p_state, inside, p_scale, in_v, KIND, KC, BLOCK_V, KB)

    # the live rows: only they are loaded, the others may hold NaN
    p_u += slot * s_u[0] + head * s_u[1] + o_v * s_u[3]
    p_kr += slot * s_kr[0] + key_head * s_kr[1]
    p_g += slot * s_g[0] + head * s_g[1]
    start = tl.load(p_start + slot * s_start[0])
    committed = tl.load(p_committed + slot * s_committed[0])
    o_past, o_chunk = split_rows(BLOCK_W, KC)
    rows = wrap(start + o_past, ring_len)
    o_old = channels(o_chunk, KB)
    b_old_k = _load_keys(p_kr + o_old * s_kr[3], rows * s_kr[2], o_past < committed, o_old, BLOCK_W, K, KC, KB)
    o_w = tl.arange(0, BLOCK_W)
    rows_u = wrap(start + o_w, ring_len)
    b_old_u = tl.load(p_u[None, :] + (rows_u * s_u[2])[:, None], other=0.0,
                      mask=(o_w < committed)[:, None] & in_v[None, :]).to(tl.float32)
    b_after, b_total = _decay_history(p_g, s_g[2], s_g[3], start, committed, ring_len, GATE, BLOCK_W, GC, GB)
    b_old_k = b_old_k.to(tl.float32) * tl.exp(b_after)

    b_g = _log_decay(b_a.to(tl.float32), A_log, b_bias[:, None, :], lower_bound)
    b_g = tl.where(real[None, :, None], b_g, 0.0)
    b_beta = 1.0 / (1.0 + tl.exp(-b_b.to(tl.float32)))
    b_v = b_v.to(tl.float32)
    b_k = b_k.to(tl.float32)
    b_q = b_q.to(tl.float32)
    if L2NORM:
        b_k = _normalise(b_k)
        b_q = _normalise(b_q)
    b_q *= scale
    # keys and updates go through the ring's dtype first: what is replayed later must be what was used now
    stored_k = b_k.to(p_kr.dtype.element_ty)
    b_k = stored_k.to(tl.float32)

    # forward substitution; rows of b_u from t on are still 0 when token t reads
    b_u = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
    b_since = tl.zeros([GC, BLOCK_T, GB], tl.float32)  # log decay of new row j up to token t
    b_passed = tl.zeros([GC, GB], tl.float32)
    steps = 1 if T == 1 else count
    for t in range(steps):
        now = o_t == t
        b_step = _pick(b_g, now)
        b_passed += b_step
        b_since = tl.where((o_t < t)[None, :, None], b_since + b_step[:, None, :], 0.0)
        carried = tl.exp(b_total + b_passed)
        faded = tl.exp(b_passed)
        b_reach = b_k * tl.exp(b_since)
        key = _pick(b_k, now)
        known = _read(b_state, b_old_k, b_old_u, key, carried, faded)
        if T > 1:
            known += tl.sum(_sum_keys(b_reach * key[:, None, :])[:, None] * b_u, axis=0)
        value = tl.sum(tl.where(now[:, None], b_v, 0.0), axis=0)
        update = tl.sum(tl.where(now, b_beta, 0.0), axis=0) * (value - known)
        update = update.to(p_u.dtype.element_ty).to(tl.float32)
        b_u = tl.where(now[:, None], update[None, :], b_u)
        query = _pick(b_q, now)
        b_o = _read(b_state, b_old_k, b_old_u, query, carried, faded)
        b_o += tl.sum(_sum_keys(b_reach * query[:, None, :])[:, None] * b_u, axis=0)
        tl.store(p_out + t * (HV * V), b_o.to(p_out.dtype.element_ty), mask=in_v)

    fresh_u = wrap(start + committed + o_t, ring_len)
    tl.store(p_u[None, :] + (fresh_u * s_u[2])[:, None], b_u.to(p_u.dtype.element_ty), mask=values)
    if tile == 0:
        fresh_g = wrap(start + committed + o_gated, ring_len)
        tl.store(p_g + (fresh_g * s_g[2])[:, None] + o_part * s_g[3], tl.reshape(b_g, [GC * BLOCK_T, GB]),
                 mask=(o_gated < count)[:, None] & (o_part < GATE))
        if head % RATIO == 0:
            fresh_k = wrap(start + committed + o_token, ring_len)
            tl.store(p_kr + (fresh_k * s_kr[2])[:, None] + o_channel * s_kr[3],
                     tl.reshape(stored_k, [KC * BLOCK_T, KB]), mask=(o_token < count)[:, None] & (o_channel < K))

    # the new rows lie outside the live ones (R >= committed + T), so other programs may still be reading those
    if (committed > 0) & (committed + count > window):
        b_state *= tl.exp(b_total)[:, None, :]
        b_state, _ = add_rows(b_state, p_u, s_u[2], p_kr + o_k * s_kr[3], s_kr[2], p_g + o_gate * s_g[3], s_g[2], start,
                              committed, ring_len, in_v, in_k, in_gate)
        element = (head.to(tl.int32) * V + o_row)[:, None] * K + o_state
        store_tile(p_state, inside, p_scale, in_v, b_state, p_seed, 0, element, slot, KIND, ROUNDS)


@triton.jit
def _update_gdn_kernel(
    p_state, s_state, p_q, s_q, p_k, s_k, p_v, s_v, p_a, s_a, p_b, s_b, p_A, s_A, p_bias, s_bias, p_slots, s_slots,
    p_lens, s_lens, p_kept, s_kept, p_out, scale, lower_bound,
    HV: tl.constexpr, RATIO: tl.constexpr, V: tl.constexpr, K: tl.constexpr, T: tl.constexpr, GATE: tl.constexpr,
    L2NORM: tl.constexpr, KC: tl.constexpr, KB: tl.constexpr, GC: tl.constexpr, GB: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_T: tl.constexpr,
):
    """One program per (row, value head, V tile), which carries its tile of the state over the row's tokens."""
    TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    head = (tl.program_id(0) // TILES % HV).to(tl.int64)
    row = (tl.program_id(0) // (TILES * HV)).to(tl.int64)
    tile = tl.program_id(0) % TILES
    o_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    o_t = tl.arange(0, BLOCK_T)
    in_v = o_v < V

    slot = tl.load(p_slots + row * s_slots[0]).to(tl.int64)
    count = T
    if p_lens is not None:
        count = tl.load(p_lens + row * s_lens[0]).to(tl.int32)
    count = tl.where(slot > 0, count, 0)
    p_out += row * (T * HV * V) + head * V + o_v
    idle = (o_t >= count) & (o_t < T)
    nothing = tl.zeros([BLOCK_T, BLOCK_V], p_out.dtype.element_ty)
    tl.store(p_out[None, :] + (o_t * (HV * V))[:, None], nothing, mask=idle[:, None] & in_v[None, :])
    if count == 0:
        return

    o_k = channels(tl.arange(0, KC), KB)
    o_gate = channels(tl.arange(0, GC), GB)
    in_k = o_k < K
    in_gate = o_gate < GATE
    o_item, o_chunk = split_rows(BLOCK_V, KC)
    o_row = tile * BLOCK_V + o_item
    o_channel = channels(o_chunk, KB)
    inside = (o_row < V)[:, None] & (o_channel < K)
    p_state += head * s_state[1] + (o_row * s_state[2])[:, None] + o_channel * s_state[3]
    b_state = load_tile(p_state + slot * s_state[0], inside, None, in_v, 0, KC, BLOCK_V, KB)
    p_k += row * s_k[0] + head // RATIO * s_k[2] + o_k * s_k[3]
    p_q += row * s_q[0] + head // RATIO * s_q[2] + o_k * s_q[3]
    p_v += row * s_v[0] + head * s_v[2] + o_v * s_v[3]
    p_a += row * s_a[0] + head * s_a[2] + o_gate * s_a[3]
    p_b += row * s_b[0] + head * s_b[2]
    b_bias = tl.load(p_bias + head * s_bias[0] + o_gate * s_bias[1], mask=in_gate, other=0.0).to(tl.float32)
    A_log = tl.load(p_A + head * s_A[0]).to(tl.float32)
    steps = 1 if T == 1 else count
    for t in range(steps):
        b_k = tl.load(p_k + t * s_k[1], mask=in_k, other=0.0).to(tl.float32)[:, None, :]
        b_q = tl.load(p_q + t * s_q[1], mask=in_k, other=0.0).to(tl.float32)[:, None, :]
        b_v = tl.load(p_v + t * s_v[1], mask=in_v, other=0.0).to(tl.float32)
        b_a = tl.load(p_a + t * s_a[1], mask=in_gate, other=0.0).to(tl.float32)
        beta = 1.0 / (1.0 + tl.exp(-tl.load(p_b + t * s_b[1]).to(tl.float32)))
        if L2NORM:
            b_k = _normalise(b_k)
            b_q = _normalise(b_q)
        b_state *= tl.exp(_log_decay(b_a, A_log, b_bias, lower_bound))[:, None, :]
        b_u = beta * (b_v - _sum_keys(b_state * b_k))
        b_state += b_u[None, :, None] * b_k
        b_o = _sum_keys(b_state * b_q) * scale
        tl.store(p_out + t * (HV * V), b_o.to(p_out.dtype.element_ty), mask=in_v)
        if p_kept is not None:
            kept = tl.load(p_kept + row * s_kept[0] + t * s_kept[1]).to(tl.int64)
            if kept > 0:
                store_tile(p_state + kept * s_state[0], inside, None, in_v, b_state, None, 0, o_channel, kept, 0, 0)
    if p_kept is None:
        store_tile(p_state + slot * s_state[0], inside, None, in_v, b_state, None, 0, o_channel, slot, 0, 0)


def gdn_replay(
    state, u_ring, k_ring, g_ring, ring_start, ring_committed, q, k, v, a, b, A_log, dt_bias, slots, query_lens=None,
    state_scale=None, seed=None, *, window, scale, l2norm, lower_bound=None, philox_rounds=0, out,
) -> None:
    batch, tokens, heads = v.shape[:3]
    ring_len = u_ring.shape[2]
    gate_dim = a.shape[3] if a.dim() == 4 else 1
    history, block_t = triton.next_power_of_2(ring_len - tokens), triton.next_power_of_2(tokens)
    tiling = tiling_of(state, gate_dim, history, block_t)
    _replay_gdn_kernel[(programs_of(batch, heads, tiling),)](
        *strided(state, 4), *strided(state_scale, 3), *strided(u_ring, 4), *strided(k_ring, 4), *strided(g_ring, 4),
        *strided(ring_start, 1), *strided(ring_committed, 1), *strided(q, 4), *strided(k, 4), *strided(v, 4),
        *strided(a, 4), *strided(b, 3), *strided(A_log, 1), *strided(dt_bias, 2), *strided(slots, 1),
        *strided(query_lens, 1), seed, out, ring_len, window, scale, lower_bound, HV=heads, RATIO=heads // k.shape[2],
        T=tokens, L2NORM=l2norm, KIND=state_kind(state.dtype), ROUNDS=philox_rounds, BLOCK_W=history, BLOCK_T=block_t,
        **tiling)


def gdn_update(
    state, q, k, v, a, b, A_log, dt_bias, slots, query_lens=None, token_slots=None, *, scale, l2norm, lower_bound=None,
    out,
) -> None:
    batch, tokens, heads = v.shape[:3]
    tiling = tiling_of(state, a.shape[3] if a.dim() == 4 else 1)
    _update_gdn_kernel[(programs_of(batch, heads, tiling),)](
        *strided(state, 4), *strided(q, 4), *strided(k, 4), *strided(v, 4), *strided(a, 4), *strided(b, 3),
        *strided(A_log, 1), *strided(dt_bias, 2), *strided(slots, 1), *strided(query_lens, 1), *strided(token_slots, 2),
        out, scale, lower_bound, HV=heads, RATIO=heads // k.shape[2], T=tokens, L2NORM=l2norm,
        BLOCK_T=triton.next_power_of_2(tokens), **tiling)
