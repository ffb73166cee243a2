"""Triton kernels that decode the gated delta rule from checkpoint and ring: one for one token, one for several.

Both read the state once, to multiply it with keys and queries, and only a row that flushes reads it again and writes
it. Programs of one batch row need each other's keys and compute them again, all to the same bits.
"""

import triton
import triton.language as tl

from ..triton_rounding import decode_state, state_kind
from ..triton_rows import row_tokens
from .tiles import (
    add_rows,
    channels,
    load_tile,
    log_decay,
    normalise,
    programs_of,
    rows_of,
    split_rows,
    store_tile,
    strided,
    sum_keys,
    tiling_of,
    wrap,
)


@triton.jit
def _decays(p_g, row_stride, start, committed, ring_len, W: tl.constexpr):
    """Log decay of live row j up to the newest one, [W], by the decays of the rows after it, and the sum of all."""
    o_w = tl.arange(0, W)
    b_g = tl.load(p_g + wrap(start + o_w, ring_len) * row_stride, mask=o_w < committed, other=0.0)
    return tl.sum(tl.where(o_w[None, :] > o_w[:, None], b_g[None, :], 0.0), axis=1), tl.sum(b_g, axis=0)


@triton.jit
def _vector_decays(p_g, row_stride, in_gate, start, committed, ring_len, W: tl.constexpr):
    """The same for gates of key channels: [W, n] and [n]. p_g [n]: pointers to ring row 0."""
    o_w = tl.arange(0, W)
    first = tl.load(p_g + start * row_stride, mask=tl.where(in_gate, committed, 0) > 0, other=0.0)
    rows = wrap(wrap(start + o_w, ring_len) + 1, ring_len)
    b_g = tl.load(p_g[None, :] + (rows * row_stride)[:, None], other=0.0,
                  mask=(o_w + 1 < committed)[:, None] & in_gate[None, :])
    return tl.cumsum(b_g, axis=0, reverse=True), first + tl.sum(b_g, axis=0)


@triton.jit
def _fold_rows(p_state, s_state, p_scale, s_scale, p_u, s_u, p_kr, s_kr, p_g, s_g, p_seed, start, committed, ring_len,
               tile, head, slot, V: tl.constexpr, K: tl.constexpr, GATE: tl.constexpr, KIND: tl.constexpr,
               ROUNDS: tl.constexpr, KC: tl.constexpr, KB: tl.constexpr, GC: tl.constexpr, GB: tl.constexpr,
               BLOCK_V: tl.constexpr):
    """Writes a tile of the state advanced by the live rows. Pointers are those of the slot's and head's first element.

    The rows that this launch adds lie outside the live ones (R >= committed + T): other programs may still read those.
    """
    PART: tl.constexpr = 16 if BLOCK_V > 16 else BLOCK_V  # rows at a time, so that registers do not grow with BLOCK_V
    o_k = channels(tl.arange(0, KC), KB)
    o_gate = channels(tl.arange(0, GC), GB)
    o_item, o_chunk = split_rows(PART, KC)
    o_channel = channels(o_chunk, KB)
    tl.debug_barrier()  # warps share the tile: none may still have to read it
    for part in range(0, BLOCK_V, PART):
        o_v = tile * BLOCK_V + part + tl.arange(0, PART)
        o_row = tile * BLOCK_V + part + o_item
        in_v = o_v < V
        inside = (o_row < V)[:, None] & (o_channel < K)
        p_tile = p_state + (o_row * s_state[2])[:, None] + o_channel * s_state[3]
        p_scales = p_scale
        if KIND > 0:
            p_scales += o_v * s_scale[2]
        b_rows, b_passed = add_rows(
            tl.zeros([KC, PART, KB], tl.float32), p_u + o_v * s_u[3], s_u[2], p_kr + o_k * s_kr[3], s_kr[2],
            p_g + o_gate * s_g[3], s_g[2], start, committed, ring_len, in_v, o_k < K, o_gate < GATE)
        b_state = load_tile(p_tile, inside, p_scales, in_v, KIND, KC, PART, KB)
        b_state = b_state * tl.exp(b_passed)[:, None, :] + b_rows
        if KIND > 0:
            tl.debug_barrier()  # nor the old scales
        element = (head.to(tl.int32) * V + o_row)[:, None] * K + o_channel
        store_tile(p_tile, inside, p_scales, in_v, b_state, p_seed, 0, element, slot, KIND, ROUNDS)


@triton.jit(do_not_specialize=["ring_len", "window"])
def _replay_token_kernel(
    p_state, s_state, p_scale, s_scale, p_u, s_u, p_kr, s_kr, p_g, s_g, p_start, s_start, p_committed, s_committed,
    p_q, s_q, p_k, s_k, p_v, s_v, p_a, s_a, p_b, s_b, p_A, s_A, p_bias, s_bias, p_slots, s_slots, p_lens, s_lens,
    p_starts, s_starts, p_seed, p_out, s_out, ring_len, window, scale, lower_bound,
    HV: tl.constexpr, RATIO: tl.constexpr, V: tl.constexpr, K: tl.constexpr, T: tl.constexpr, GATE: tl.constexpr,
    L2NORM: tl.constexpr, KIND: tl.constexpr, ROUNDS: tl.constexpr, KC: tl.constexpr, KB: tl.constexpr,
    GC: tl.constexpr, GB: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_W: tl.constexpr,
):
    """One program per (row, value head, V tile): one token, all sums in registers."""
    TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    tile = tl.program_id(0) % TILES
    head = (tl.program_id(0) // TILES % HV).to(tl.int64)
    row = (tl.program_id(0) // (TILES * HV)).to(tl.int64)
    key_head = head // RATIO
    o_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    in_v = o_v < V

    slot = tl.load(p_slots + row * s_slots[0]).to(tl.int64)
    place, count = row_tokens(row, slot, p_starts, s_starts[0] if p_starts is not None else 0, p_lens,
                              s_lens[0] if p_lens is not None else 0, T)
    p_out += place * s_out[0] + head * s_out[2] + o_v * s_out[3]
    if count == 0:
        if p_starts is None:
            tl.store(p_out, tl.zeros([BLOCK_V], p_out.dtype.element_ty), mask=in_v)
        return

    o_k = channels(tl.arange(0, KC), KB)
    o_gate = channels(tl.arange(0, GC), GB)
    in_k = o_k < K
    in_gate = o_gate < GATE
    start = tl.load(p_start + slot * s_start[0])
    committed = tl.load(p_committed + slot * s_committed[0])
    b_k = tl.load(p_k + place * s_k[0] + key_head * s_k[2] + o_k * s_k[3], mask=in_k, other=0.0)
    b_q = tl.load(p_q + place * s_q[0] + key_head * s_q[2] + o_k * s_q[3], mask=in_k, other=0.0)
    b_v = tl.load(p_v + place * s_v[0] + head * s_v[2] + o_v * s_v[3], mask=in_v, other=0.0)
    b_a = tl.load(p_a + place * s_a[0] + head * s_a[2] + o_gate * s_a[3], mask=in_gate, other=0.0)
    b_bias = tl.load(p_bias + head * s_bias[0] + o_gate * s_bias[1], mask=in_gate, other=0.0).to(tl.float32)
    b_b = tl.load(p_b + place * s_b[0] + head * s_b[2])
    A_log = tl.load(p_A + head * s_A[0]).to(tl.float32)

    # The state is loaded last: Triton would else lay it out as it does keys and queries, and with the history in
    # registers at the same time they would run out.
    o_item, o_chunk = split_rows(BLOCK_V, KC)
    o_row = tile * BLOCK_V + o_item
    o_channel = channels(o_chunk, KB)
    inside = (o_row < V)[:, None] & (o_channel < K)
    p_state += slot * s_state[0] + head * s_state[1]
    p_tile = p_state + (o_row * s_state[2])[:, None] + o_channel * s_state[3]
    if KIND > 0:
        p_scale += slot * s_scale[0] + head * s_scale[1]

    # the live rows: only they are loaded, the others may hold NaN
    p_u += slot * s_u[0] + head * s_u[1]
    p_kr += slot * s_kr[0] + key_head * s_kr[1]
    p_g += slot * s_g[0] + head * s_g[1]
    o_past, o_chunk = split_rows(BLOCK_W, KC)
    o_old = channels(o_chunk, KB)
    b_old_k = tl.load(p_kr + (wrap(start + o_past, ring_len) * s_kr[2])[:, None] + o_old * s_kr[3],
                      mask=(o_past < committed)[:, None] & (o_old < K), other=0.0)
    b_old_k = tl.reshape(b_old_k, [KC, BLOCK_W, KB]).to(tl.float32)
    o_w = tl.arange(0, BLOCK_W)
    b_old_u = tl.load(p_u + (wrap(start + o_w, ring_len) * s_u[2])[:, None] + (o_v * s_u[3])[None, :],
                      mask=(o_w < committed)[:, None] & in_v[None, :], other=0.0).to(tl.float32)

    b_g = tl.where(in_gate, log_decay(b_a.to(tl.float32), A_log, b_bias, lower_bound), 0.0)
    b_k = b_k.to(tl.float32)
    b_q = b_q.to(tl.float32)
    if L2NORM:
        b_k = tl.reshape(normalise(b_k[:, None, :]), [KC, KB])
        b_q = tl.reshape(normalise(b_q[:, None, :]), [KC, KB])
    b_q *= scale
    # keys and updates go through the ring's dtype first: what is replayed later must be what was used now
    stored_k = b_k.to(p_kr.dtype.element_ty)
    b_k = stored_k.to(tl.float32)
    if GATE == 1:  # a decay that all channels share is applied to the sums
        b_after, b_total = _decays(p_g, s_g[2], start, committed, ring_len, BLOCK_W)
        g = tl.sum(tl.sum(b_g, axis=0), axis=0)
        b_past_k = tl.exp(b_after + g) * sum_keys(b_old_k * b_k[:, None, :])
        b_past_q = tl.exp(b_after + g) * sum_keys(b_old_k * b_q[:, None, :])
        b_state = tl.reshape(decode_state(tl.load(p_tile, mask=inside, other=0), KIND), [KC, BLOCK_V, KB])
        known = tl.exp(b_total + g) * sum_keys(b_state * b_k[:, None, :])
        b_o = tl.exp(b_total + g) * sum_keys(b_state * b_q[:, None, :])
    else:
        o_flat = tl.arange(0, GC * GB)
        b_after, b_total = _vector_decays(p_g + o_flat * s_g[3], s_g[2], o_flat < GATE, start, committed, ring_len,
                                          BLOCK_W)
        b_old_k *= tl.exp(tl.permute(tl.reshape(b_after, [BLOCK_W, GC, GB]), (1, 0, 2)))
        b_past_k = sum_keys(b_old_k * (b_k * tl.exp(b_g))[:, None, :])
        b_past_q = sum_keys(b_old_k * (b_q * tl.exp(b_g))[:, None, :])
        b_state = tl.reshape(decode_state(tl.load(p_tile, mask=inside, other=0), KIND), [KC, BLOCK_V, KB])
        carried = tl.exp(tl.reshape(b_total, [GC, GB]) + b_g)
        known = sum_keys(b_state * (b_k * carried)[:, None, :])
        b_o = sum_keys(b_state * (b_q * carried)[:, None, :])
    if KIND > 0:
        b_scale = tl.load(p_scale + o_v * s_scale[2], mask=in_v, other=0.0)
        known *= b_scale
        b_o *= b_scale
    known += tl.sum(b_past_k[:, None] * b_old_u, axis=0)
    b_o += tl.sum(b_past_q[:, None] * b_old_u, axis=0)
    beta = 1.0 / (1.0 + tl.exp(-b_b.to(tl.float32)))
    stored_u = (beta * (b_v.to(tl.float32) - known)).to(p_u.dtype.element_ty)
    b_o += tl.sum(tl.sum(b_k * b_q, axis=0), axis=0) * stored_u.to(tl.float32)
    tl.store(p_out, b_o.to(p_out.dtype.element_ty), mask=in_v)

    fresh = wrap(start + committed, ring_len)
    tl.store(p_u + fresh * s_u[2] + o_v * s_u[3], stored_u, mask=in_v)
    if tile == 0:
        tl.store(p_g + fresh * s_g[2] + o_gate * s_g[3], b_g, mask=in_gate)
        if head % RATIO == 0:
            tl.store(p_kr + fresh * s_kr[2] + o_k * s_kr[3], stored_k, mask=in_k)
    if (committed > 0) & (committed + 1 > window):
        _fold_rows(p_state, s_state, p_scale, s_scale, p_u, s_u, p_kr, s_kr, p_g, s_g, p_seed, start, committed,
                   ring_len, tile, head, slot, V, K, GATE, KIND, ROUNDS, KC, KB, GC, GB, BLOCK_V)


@triton.jit
def _load_rows(p_k, p_q, asks, real, in_k, b_norm, DTYPE: tl.constexpr):
    """Rows [n, BLOCK_K] of keys, rounded to DTYPE, or where `asks` of queries, times b_norm."""
    mask = real[:, None] & in_k[None, :]
    b_k = tl.load(p_k, mask=mask & ~asks[:, None], other=0.0).to(tl.float32)
    b_q = tl.load(p_q, mask=mask & asks[:, None], other=0.0).to(tl.float32)
    return tl.where(asks[:, None], b_q * b_norm[:, None], (b_k * b_norm[:, None]).to(DTYPE).to(tl.float32))


@triton.jit(do_not_specialize=["ring_len", "window"])
def _replay_tokens_kernel(
    p_state, s_state, p_scale, s_scale, p_u, s_u, p_kr, s_kr, p_g, s_g, p_start, s_start, p_committed, s_committed,
    p_q, s_q, p_k, s_k, p_v, s_v, p_a, s_a, p_b, s_b, p_A, s_A, p_bias, s_bias, p_slots, s_slots, p_lens, s_lens,
    p_starts, s_starts, p_seed, p_out, s_out, ring_len, window, scale, lower_bound,
    HV: tl.constexpr, RATIO: tl.constexpr, V: tl.constexpr, K: tl.constexpr, T: tl.constexpr, GATE: tl.constexpr,
    L2NORM: tl.constexpr, KIND: tl.constexpr, ROUNDS: tl.constexpr, KC: tl.constexpr, KB: tl.constexpr,
    GC: tl.constexpr, GB: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program per (row, value head, V tile): matrix products with the keys and queries of all tokens at once.

    Row i < BLOCK_T of a product belongs to the key of token i, row BLOCK_T + i to its query. What the products leave is
    a triangular system over the tokens; each solved update goes into all rows that follow it.
    """
    TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    ROWS: tl.constexpr = 2 * BLOCK_T
    K_DTYPE: tl.constexpr = p_kr.dtype.element_ty
    tile = tl.program_id(0) % TILES
    head = (tl.program_id(0) // TILES % HV).to(tl.int64)
    row = (tl.program_id(0) // (TILES * HV)).to(tl.int64)
    key_head = head // RATIO
    o_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    in_v = o_v < V
    i_row = tl.arange(0, ROWS)
    asks = i_row >= BLOCK_T
    is_key = i_row < BLOCK_T
    o_t = i_row % BLOCK_T

    slot = tl.load(p_slots + row * s_slots[0]).to(tl.int64)
    place, count = row_tokens(row, slot, p_starts, s_starts[0] if p_starts is not None else 0, p_lens,
                              s_lens[0] if p_lens is not None else 0, T)
    p_out += place * s_out[0] + head * s_out[2] + (o_v * s_out[3])[None, :] + (o_t * s_out[1])[:, None]
    if p_starts is None:
        nothing = tl.zeros([ROWS, BLOCK_V], p_out.dtype.element_ty)
        tl.store(p_out, nothing, mask=(asks & (o_t >= count) & (o_t < T))[:, None] & in_v[None, :])
    if count == 0:
        return

    real = o_t < count
    start = tl.load(p_start + slot * s_start[0])
    committed = tl.load(p_committed + slot * s_committed[0])
    p_k += place * s_k[0] + key_head * s_k[2] + (o_t * s_k[1])[:, None]
    p_q += place * s_q[0] + key_head * s_q[2] + (o_t * s_q[1])[:, None]
    p_a += place * s_a[0] + head * s_a[2]
    p_bias += head * s_bias[0]
    A_log = tl.load(p_A + head * s_A[0]).to(tl.float32)
    p_state += slot * s_state[0] + head * s_state[1]
    p_u += slot * s_u[0] + head * s_u[1]
    p_kr += slot * s_kr[0] + key_head * s_kr[1]
    p_g += slot * s_g[0] + head * s_g[1]
    o_w = tl.arange(0, BLOCK_W)
    live = o_w < committed
    past = wrap(start + o_w, ring_len)
    fresh = wrap(start + committed + o_t, ring_len)
    b_v = tl.load(p_v + place * s_v[0] + head * s_v[2] + (o_t * s_v[1])[:, None] + (o_v * s_v[3])[None, :],
                  mask=(real & is_key)[:, None] & in_v[None, :], other=0.0).to(tl.float32)
    b_b = tl.load(p_b + place * s_b[0] + o_t * s_b[1] + head * s_b[2], mask=real, other=0.0)
    b_beta = 1.0 / (1.0 + tl.exp(-b_b.to(tl.float32)))

    b_norm = tl.where(asks, scale, 1.0)
    if L2NORM:
        b_squares = tl.zeros([ROWS], tl.float32)
        for column in range(0, K, BLOCK_K):
            o_k = column + tl.arange(0, BLOCK_K)
            b_x = _load_rows(p_k + (o_k * s_k[3])[None, :], p_q + (o_k * s_q[3])[None, :], asks, real, o_k < K,
                             tl.full([ROWS], 1.0, tl.float32), tl.float32)
            b_squares += tl.sum(b_x * b_x, axis=1)
        b_norm *= tl.rsqrt(b_squares + 1e-6)
    if GATE == 1:
        b_a = tl.load(p_a + o_t * s_a[1], mask=real, other=0.0).to(tl.float32)
        b_g = log_decay(b_a, A_log, tl.load(p_bias).to(tl.float32), lower_bound)
        b_g = tl.where(real & is_key, b_g, 0.0)  # once a token
        b_passed = tl.sum(tl.where(i_row[None, :] <= o_t[:, None], b_g[None, :], 0.0), axis=1)
        b_after, b_total = _decays(p_g, s_g[2], start, committed, ring_len, BLOCK_W)
        if tile == 0:
            tl.store(p_g + fresh * s_g[2], b_g, mask=real & is_key)

    b_held = tl.zeros([ROWS, BLOCK_V], tl.float32)  # rows times the checkpoint, the live rows, and the new keys
    b_past = tl.zeros([ROWS, BLOCK_W], tl.float32)
    b_near = tl.zeros([ROWS, ROWS], tl.float32)
    for column in range(0, K, BLOCK_K):
        o_k = column + tl.arange(0, BLOCK_K)
        in_k = o_k < K
        p_tile = p_state + (o_v * s_state[2])[:, None] + (o_k * s_state[3])[None, :]
        b_state = decode_state(tl.load(p_tile, mask=in_v[:, None] & in_k[None, :], other=0), KIND)
        b_old_k = tl.load(p_kr + (past * s_kr[2])[:, None] + (o_k * s_kr[3])[None, :],
                          mask=live[:, None] & in_k[None, :], other=0.0).to(tl.float32)
        b_x = _load_rows(p_k + (o_k * s_k[3])[None, :], p_q + (o_k * s_q[3])[None, :], asks, real, in_k, b_norm,
                         K_DTYPE)
        if (tile == 0) & (head % RATIO == 0):
            tl.store(p_kr + (fresh * s_kr[2])[:, None] + (o_k * s_kr[3])[None, :], b_x.to(K_DTYPE),
                     mask=(real & is_key)[:, None] & in_k[None, :])
        if GATE == 1:
            b_near = tl.dot(b_x, tl.trans(b_x), b_near, input_precision="tf32x3")
            b_from = b_x  # a decay that all channels share is applied to the products
            b_to = b_x
        else:
            b_bias = tl.load(p_bias + o_k * s_bias[1], mask=in_k, other=0.0).to(tl.float32)
            b_since = tl.zeros([ROWS, BLOCK_K], tl.float32)  # log decay from token s to the row's
            for back in range(count):
                s = count - 1 - back
                key = tl.sum(tl.where((i_row == s)[:, None], b_x, 0.0), axis=0)
                reach = tl.sum(b_x * key[None, :] * tl.exp(b_since), axis=1)
                b_near = tl.where((i_row == s)[None, :], b_near + reach[:, None], b_near)
                b_a = tl.load(p_a + s * s_a[1] + o_k * s_a[3], mask=in_k, other=0.0).to(tl.float32)
                b_g = tl.where(in_k, log_decay(b_a, A_log, b_bias, lower_bound), 0.0)
                b_since = tl.where((o_t >= s)[:, None], b_since + b_g[None, :], 0.0)
                if tile == 0:
                    at = wrap(start + committed + s, ring_len)
                    tl.store(p_g + at * s_g[2] + o_k * s_g[3], b_g, mask=in_k)
            b_after, b_total = _vector_decays(p_g + o_k * s_g[3], s_g[2], in_k, start, committed, ring_len, BLOCK_W)
            b_old_k *= tl.exp(b_after)
            b_from = b_x * tl.exp(b_since)
            b_to = b_x * tl.exp(b_since + b_total[None, :])
        b_past = tl.dot(b_from, tl.trans(b_old_k), b_past, input_precision="tf32x3")
        b_held = tl.dot(b_to, tl.trans(b_state), b_held, input_precision="tf32x3")

    if KIND > 0:
        p_scale += slot * s_scale[0] + head * s_scale[1]
        b_held *= tl.load(p_scale + o_v * s_scale[2], mask=in_v, other=0.0)[None, :]
    if GATE == 1:
        b_held *= tl.exp(b_total + b_passed)[:, None]
        b_past *= tl.exp(b_passed[:, None] + b_after[None, :])
    b_old_u = tl.load(p_u + (past * s_u[2])[:, None] + (o_v * s_u[3])[None, :], mask=live[:, None] & in_v[None, :],
                      other=0.0).to(tl.float32)
    b_held = tl.dot(b_past, b_old_u, b_held, input_precision="tf32x3")

    b_u = tl.zeros([ROWS, BLOCK_V], tl.float32)
    for t in range(count):
        now = i_row == t
        update = tl.sum(tl.where(now, b_beta, 0.0), axis=0) * tl.sum(tl.where(now[:, None], b_v - b_held, 0.0), axis=0)
        update = update.to(p_u.dtype.element_ty).to(tl.float32)
        b_u = tl.where(now[:, None], update[None, :], b_u)
        reach = tl.sum(tl.where((i_row == t)[None, :], b_near, 0.0), axis=1)
        if GATE == 1:
            between = (i_row[None, :] > t) & (i_row[None, :] <= o_t[:, None])
            reach *= tl.exp(tl.sum(tl.where(between, b_g[None, :], 0.0), axis=1))
        reach = tl.where((o_t > t) | (asks & (o_t == t)), reach, 0.0)
        b_held += reach[:, None] * update[None, :]
    tl.store(p_out, b_held.to(p_out.dtype.element_ty), mask=(asks & real)[:, None] & in_v[None, :])
    tl.store(p_u + (fresh * s_u[2])[:, None] + (o_v * s_u[3])[None, :], b_u.to(p_u.dtype.element_ty),
             mask=(real & is_key)[:, None] & in_v[None, :])

    if (committed > 0) & (committed + count > window):
        _fold_rows(p_state, s_state, p_scale, s_scale, p_u, s_u, p_kr, s_kr, p_g, s_g, p_seed, start, committed,
                   ring_len, tile, head, slot, V, K, GATE, KIND, ROUNDS, KC, KB, GC, GB, BLOCK_V)


def replay_tiling(state, gate_dim: int, history: int, tokens: int, batch: int) -> dict:
    """Tiles of a replay program: small ones where the batch has few programs to offer.

    One token holds its tile of the state in registers, in a warp that needs no barriers, or two where keys, gates or
    history take more registers. Several stream it by BLOCK_K columns, three blocks ahead, and treat all rows of a head
    at once if registers allow, for keys and queries are prepared in each program.
    """
    few = batch * state.shape[1] * triton.cdiv(state.shape[2], 32) <= 256
    if tokens == 1:
        per_warp = 2048 if gate_dim > 1 or history > 16 or state.shape[3] > 128 else 4096
        return dict(tiling_of(state, gate_dim, 16 if few else 32, history, per_warp), BLOCK_W=history)
    crowded = tokens > 8 or state.element_size() == 1
    tiling = tiling_of(state, gate_dim, 32 if few else 64 if crowded else 128)
    rows = 8 if tokens > 8 else 16 if few or crowded else 32  # a warp
    # a limit of all registers keeps ptxas from spilling a few bytes to get below 168
    return dict(tiling, BLOCK_W=max(16, history), BLOCK_T=max(8, tokens), num_stages=3, maxnreg=255,
                BLOCK_K=min(32, tiling["KC"] * tiling["KB"]), num_warps=max(1, tiling["BLOCK_V"] // rows))


def gdn_replay(
    state, u_ring, k_ring, g_ring, ring_start, ring_committed, q, k, v, a, b, A_log, dt_bias, slots, query_lens=None,
    state_scale=None, seed=None, query_start_loc=None, *, window, scale, l2norm, max_query_len=None, lower_bound=None,
    philox_rounds=0, out,
) -> None:
    batch, tokens, heads, packed = rows_of(slots, v, query_start_loc, max_query_len, out)
    ring_len = u_ring.shape[2]
    gate_dim = a.shape[-1] if a.dim() > b.dim() else 1
    history, block_t = triton.next_power_of_2(ring_len - tokens), triton.next_power_of_2(tokens)
    tiling = replay_tiling(state, gate_dim, history, block_t, batch)
    kernel = _replay_token_kernel if tokens == 1 else _replay_tokens_kernel
    kernel[(programs_of(batch, heads, tiling),)](
        *strided(state, 4), *strided(state_scale, 3), *strided(u_ring, 4), *strided(k_ring, 4), *strided(g_ring, 4),
        *strided(ring_start, 1), *strided(ring_committed, 1), *strided(q, 4, packed), *strided(k, 4, packed),
        *strided(v, 4, packed), *strided(a, 4, packed), *strided(b, 3, packed), *strided(A_log, 1),
        *strided(dt_bias, 2), *strided(slots, 1), *strided(query_lens, 1), *strided(query_start_loc, 1), seed,
        *strided(out, 4, packed), ring_len, window, scale, lower_bound, HV=heads, RATIO=heads // k.shape[-2], T=tokens,
        L2NORM=l2norm, KIND=state_kind(state.dtype), ROUNDS=philox_rounds, **tiling)
