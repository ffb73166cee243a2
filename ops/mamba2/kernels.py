"""Triton kernels of the Mamba-2 ops: decode from checkpoint and ring, and the plain update.

A program owns a tile [BLOCK_P, N] of one head's state of one row. Everything that a tile needs beside itself (ring
rows, new tokens) is small and shared, and is read again by every tile from the cache.

Strides are named after tensor and dimension: x_ring_r is the stride of x_ring between ring rows. Slots, rows, tokens
and heads are 64-bit before they meet a stride: a pool may pass 2^31 elements in any of those dimensions.
"""

import triton
import triton.language as tl

from ..triton_rounding import as_stored, decode_state, encode_state, state_kind
from ..triton_rows import row_strides, row_tokens
from .materialize_kernels import (
    fold_columns,
    fold_tile,
    load_steps,
    mamba2_materialize,
    ring_rows,
    row_weights,
    strides,
)

__all__ = ["mamba2_materialize", "mamba2_replay", "mamba2_update"]


@triton.jit
def _process_dt(dt, p_bias, dt_min, dt_max, SOFTPLUS: tl.constexpr):
    """Raw dt -> step sizes: bias, softplus (identity above 20), clamp."""
    dt = dt.to(tl.float32)
    if p_bias is not None:
        dt += tl.load(p_bias).to(tl.float32)
    if SOFTPLUS:
        # log1p(u) = 2 atanh(u / (2 + u)) as a series: log(1 + u) would lose the digits of a small step
        u = tl.exp(-tl.abs(dt))
        s = u / (2.0 + u)
        s2 = s * s
        series = 1 / 11 + s2 * (1 / 13 + s2 * (1 / 15 + s2 * (1 / 17)))
        series = 1.0 + s2 * (1 / 3 + s2 * (1 / 5 + s2 * (1 / 7 + s2 * (1 / 9 + s2 * series))))
        dt = tl.where(dt > 20.0, dt, tl.maximum(dt, 0.0) + 2.0 * s * series)
    return tl.minimum(tl.maximum(dt, dt_min), dt_max)


@triton.jit
def _load_segments(p_rows, rows_n, mask_rows, N: tl.constexpr, SEGMENTS: tl.constexpr, SIZE: tl.constexpr):
    """Rows [M, N] behind pointers [M, 1] to their column 0, as a tuple of tiles [M, SIZE].

    With 128 bytes a segment, eight threads share a row and a sum over it takes three exchanges. Loaded as [M, N], a row
    would lie across the warp, and five exchanges for every row would cost more than the arithmetic.
    """
    o_n = tl.arange(0, SIZE)[None, :]
    mask = mask_rows[:, None] & ((o_n < N) | (N % SIZE == 0))
    tiles = (tl.load(p_rows + o_n * rows_n, mask=mask, other=0),)
    for segment in tl.static_range(1, SEGMENTS):
        o_n = segment * SIZE + tl.arange(0, SIZE)[None, :]
        mask = mask_rows[:, None] & ((o_n < N) | (N % SIZE == 0))
        tiles = tiles + (tl.load(p_rows + o_n * rows_n, mask=mask, other=0),)
    return tiles


@triton.jit
def _sum_segments(c, rows, DTYPE: tl.constexpr, KIND: tl.constexpr, SEGMENTS: tl.constexpr):
    """Segments c [1, SIZE] and rows [M, SIZE] -> inner products [M]; rows are rounded to DTYPE, 8-bit ones unscaled."""
    total = decode_state(rows[0].to(DTYPE), KIND) * c[0].to(tl.float32)
    for segment in tl.static_range(1, SEGMENTS):
        total += decode_state(rows[segment].to(DTYPE), KIND) * c[segment].to(tl.float32)
    return tl.sum(total, 1)


@triton.jit
def _multiply_rows(
    p_c, c_n, mask_t, p_rows, rows_n, mask_rows, KIND: tl.constexpr, DTYPE: tl.constexpr, N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """C [T, N] times rows [M, N] as a matrix product -> [T, M] float32, without the scale of 8-bit rows.

    p_c: [T, 1] pointers to column 0, p_rows: [M, 1]. Rows are rounded to DTYPE first. Operands keep a dtype that they
    share (8-bit values are exact in any), else the product is as precise as float32's.
    """
    C_DTYPE: tl.constexpr = p_c.dtype.element_ty
    OPERAND: tl.constexpr = C_DTYPE if KIND > 0 or C_DTYPE == DTYPE else tl.float32
    products = tl.zeros([p_c.shape[0], p_rows.shape[0]], tl.float32)
    for column in range(0, N, BLOCK_K):
        o_n = column + tl.arange(0, BLOCK_K)[None, :]
        mask_n = (o_n < N) | (N % BLOCK_K == 0)
        rows = tl.load(p_rows + o_n * rows_n, mask=mask_rows[:, None] & mask_n, other=0).to(DTYPE)
        if KIND > 0:
            rows = decode_state(rows, KIND)
        c = tl.load(p_c + o_n * c_n, mask=mask_t[:, None] & mask_n, other=0.0)
        products = tl.dot(c.to(OPERAND), tl.trans(rows.to(OPERAND)), products, input_precision="tf32x3")
    return products


@triton.jit
def _gated(y, x, p_d, p_z, mask):
    """Adds D x and multiplies with silu(z), where given. y, x [T, P]; p_z a tile of pointers of that shape."""
    if p_d is not None:
        y += tl.load(p_d).to(tl.float32) * x.to(tl.float32)
    if p_z is not None:
        z = tl.load(p_z, mask=mask, other=0.0).to(tl.float32)
        y *= z / (1.0 + tl.exp(-z))
    return y


@triton.jit(do_not_specialize=["window"])
def _replay_tokens_kernel(
    p_state, state_s, state_h, state_p, state_n, p_x_ring, x_ring_s, x_ring_h, x_ring_r, x_ring_p,
    p_b_ring, b_ring_s, b_ring_g, b_ring_r, b_ring_n, p_dt_ring, dt_ring_s, dt_ring_h, dt_ring_r,
    p_start, start_s, p_committed, committed_s, p_x, x_b, x_t, x_h, x_p, p_dt, dt_b, dt_t, dt_h, p_a, a_h,
    p_b, b_b, b_t, b_g, b_n, p_c, c_b, c_t, c_g, c_n, p_d, d_h, p_z, z_b, z_t, z_h, z_p, p_bias, bias_h,
    p_slots, slots_b, p_lens, lens_b, p_starts, starts_b, p_scale, scale_s, scale_h, scale_p, p_seed,
    p_y, y_b, y_t, y_h, y_p, window, ring_len, dt_min, dt_max,
    TOKENS: tl.constexpr, H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, HEADS_PER_GROUP: tl.constexpr,
    KIND: tl.constexpr, ROUNDS: tl.constexpr, SOFTPLUS: tl.constexpr, ONE_BLOCK: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_F: tl.constexpr, SIZE_S: tl.constexpr, SIZE_B: tl.constexpr,
):
    P_TILES: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    tile = tl.program_id(0) % P_TILES
    head = (tl.program_id(0) // P_TILES % H).to(tl.int64)
    row = (tl.program_id(0) // (P_TILES * H)).to(tl.int64)
    group = head // HEADS_PER_GROUP
    slot = tl.load(p_slots + row * slots_b).to(tl.int64)
    place, q = row_tokens(row, slot, p_starts, starts_b, p_lens, lens_b, TOKENS)

    o_p = tile * BLOCK_P + tl.arange(0, BLOCK_P)
    i_t = tl.arange(0, BLOCK_T)
    o_t = i_t.to(tl.int64)
    mask_p = (o_p < P) | (P % BLOCK_P == 0)  # constant where nothing is cut off: the loads then need no predicate
    real = i_t < q
    new_p = real[:, None] & mask_p[None, :]
    p_y += place * y_b + head * y_h + o_t[:, None] * y_t + o_p[None, :] * y_p
    written = new_p if p_starts is not None else (i_t[:, None] < TOKENS) & mask_p[None, :]

    if q == 0:
        tl.store(p_y, tl.zeros([BLOCK_T, BLOCK_P], p_y.dtype.element_ty), mask=written)
    else:
        start = tl.load(p_start + slot * start_s)
        committed = tl.load(p_committed + slot * committed_s)
        a = tl.load(p_a + head * a_h)
        p_tile = p_state + slot * state_s + head * state_h + o_p.to(tl.int64)[:, None] * state_p
        p_old_x = p_x_ring + slot * x_ring_s + head * x_ring_h + o_p[None, :] * x_ring_p
        p_old_b = p_b_ring + slot * b_ring_s + group * b_ring_g
        p_old_dt = p_dt_ring + slot * dt_ring_s + head * dt_ring_h
        p_new_b = p_b + place * b_b + group * b_g + o_t[:, None] * b_t
        p_new_c = p_c + place * c_b + group * c_g + o_t[:, None] * c_t
        p_row_scale = p_scale + slot * scale_s + head * scale_h + o_p * scale_p if KIND > 0 else None
        X_DTYPE: tl.constexpr = p_x_ring.dtype.element_ty
        B_DTYPE: tl.constexpr = p_b_ring.dtype.element_ty
        S_DTYPE: tl.constexpr = p_state.dtype.element_ty

        # Logical state times C, without the logical state: both are linear in checkpoint and rows, so the product is
        # advanced by the same recurrence. With one token everything is asked for at once, the checkpoint first. C comes
        # before the rows that it multiplies: the compiler gives a product the layout of the operand that is loaded
        # last, and must not rearrange the larger one.
        if BLOCK_T == 1:
            c_for_b = _load_segments(p_new_c, c_n, real, N, BLOCK_N // SIZE_B, SIZE_B)
            c_for_state = _load_segments(p_new_c, c_n, real, N, BLOCK_N // SIZE_S, SIZE_S)
            checkpoint = _load_segments(p_tile, state_n, mask_p, N, BLOCK_N // SIZE_S, SIZE_S)
            new_b = _load_segments(p_new_b, b_n, real, N, BLOCK_N // SIZE_B, SIZE_B)
        x = tl.load(p_x + place * x_b + head * x_h + o_t[:, None] * x_t + o_p[None, :] * x_p, mask=new_p, other=0.0)
        dt = tl.load(p_dt + place * dt_b + head * dt_h + o_t * dt_t, mask=real, other=0.0)

        before = tl.zeros([BLOCK_T, BLOCK_P], tl.float32)
        passed = 1.0
        for first in range(0, 1 if ONE_BLOCK else committed, BLOCK_W):
            at, live = ring_rows(start, first, committed, ring_len, BLOCK_W)
            p_rows = p_old_b + at[:, None] * b_ring_r
            old_dt, after = load_steps(p_old_dt, dt_ring_r, start, first, committed, ring_len, BLOCK_W)
            old_x = tl.load(p_old_x + at[:, None] * x_ring_r, mask=live[:, None] & mask_p[None, :], other=0.0)
            if BLOCK_T == 1:
                old_b = _load_segments(p_rows, b_ring_n, live, N, BLOCK_N // SIZE_B, SIZE_B)
                weight, decay = row_weights(old_dt, after, a)
                weight *= _sum_segments(c_for_b, old_b, B_DTYPE, 0, BLOCK_N // SIZE_B)
                fresh = tl.sum(weight[:, None] * old_x.to(tl.float32), 0)[None, :]
            else:
                weight, decay = row_weights(old_dt, after, a)
                overlap = _multiply_rows(p_new_c, c_n, real, p_rows, b_ring_n, live, 0, B_DTYPE, N, BLOCK_K)
                fresh = tl.dot(overlap * weight[None, :], old_x.to(tl.float32), input_precision="tf32x3")
            before = before * decay + fresh
            passed *= decay

        # new tokens go through the ring's dtype first: what is replayed later must be what was used now
        new_x = x.to(X_DTYPE).to(tl.float32)
        dt = _process_dt(dt, p_bias + head * bias_h if p_bias is not None else None, dt_min, dt_max, SOFTPLUS)
        dt = tl.where(real, dt, 0.0)
        if BLOCK_T == 1:
            elapsed = dt
            y = (_sum_segments(c_for_b, new_b, B_DTYPE, 0, BLOCK_N // SIZE_B) * dt)[:, None] * new_x
        else:
            elapsed = tl.cumsum(dt, 0)
            # Time from token s (columns) to token t (rows), summed over what lies between, see row_weights.
            between = tl.cumsum(tl.where(i_t[:, None] > i_t[None, :], dt[:, None], 0.0), 0)
            overlap = _multiply_rows(p_new_c, c_n, real, p_new_b, b_n, real, 0, B_DTYPE, N, BLOCK_K)
            overlap = tl.where(i_t[:, None] >= i_t[None, :], overlap * dt[None, :] * tl.exp(a * between), 0.0)
            y = tl.dot(overlap, new_x, input_precision="tf32x3")
        if BLOCK_T == 1:
            product = _sum_segments(c_for_state, checkpoint, S_DTYPE, KIND, BLOCK_N // SIZE_S)[None, :]
        else:
            product = _multiply_rows(p_new_c, c_n, real, p_tile, state_n, mask_p, KIND, S_DTYPE, N, BLOCK_K)
        if KIND > 0:
            product *= tl.load(p_row_scale, mask=mask_p, other=0.0)[None, :]
        y += (before + product * passed) * tl.exp(a * elapsed)[:, None]
        y = _gated(
            y, x, p_d + head * d_h if p_d is not None else None,
            p_z + place * z_b + head * z_h + o_t[:, None] * z_t + o_p[None, :] * z_p if p_z is not None else None,
            new_p)
        tl.store(p_y, tl.where(real[:, None], y, 0.0).to(p_y.dtype.element_ty), mask=written)

        # The new rows go to positions that are dead for every program of this launch, so no order is needed. Rows
        # that programs share are written by one of them.
        at = start + committed + i_t
        at = tl.where(at >= ring_len, at - ring_len, at)
        tl.store(p_old_x + at[:, None] * x_ring_r, x.to(X_DTYPE), mask=new_p)
        if tile == 0:
            tl.store(p_old_dt + at * dt_ring_r, dt, mask=real)
            if head % HEADS_PER_GROUP == 0:
                o_n = tl.arange(0, BLOCK_N)[None, :]
                new_n = real[:, None] & ((o_n < N) | (N == BLOCK_N))
                b = tl.load(p_new_b + o_n * b_n, mask=new_n, other=0.0)
                tl.store(p_old_b + at[:, None] * b_ring_r + o_n * b_ring_n, b.to(B_DTYPE), mask=new_n)

        if (committed > 0) & (committed + q > window):
            fold_tile(
                p_tile, p_tile, state_n, p_row_scale, p_row_scale, p_old_x, x_ring_r, p_old_b, b_ring_r, b_ring_n,
                p_old_dt, dt_ring_r, start, committed, ring_len, a, mask_p, tl.load(p_seed) if ROUNDS > 0 else 0,
                (head.to(tl.int32) * P + o_p[:, None]) * N, slot, N, KIND, ROUNDS, 16, BLOCK_F)


def row_tile(dim: int, state_dim: int, warp_elements: int) -> dict:
    """Tile of a program that has its state in registers, all of it in flight at once."""
    block_n = max(16, triton.next_power_of_2(state_dim))
    block_p = max(16, min(64, triton.next_power_of_2(dim)))
    return dict(BLOCK_P=block_p, BLOCK_N=block_n, num_warps=min(16, max(1, block_p * block_n // warp_elements)))


def replay_tile(state, x_ring, B_ring, tokens: int) -> dict:
    """Tile of a replay program.

    One token holds the state in registers, 128 of a thread (64 where decoding needs more), by segments of 128 bytes.
    Several tokens stream it through a matrix product, 32 rows a warp, BLOCK_K columns at a time, three blocks ahead.
    """
    dim, state_dim = state.shape[2:]
    window_rows = x_ring.shape[2] - tokens  # the most that may be live
    tile = row_tile(dim, state_dim, 2048 if state.element_size() == 1 else 4096)
    tile.update(BLOCK_T=1, BLOCK_W=16, BLOCK_K=16, BLOCK_F=fold_columns(state_dim),
                SIZE_S=min(tile["BLOCK_N"], 128 // state.element_size()),
                SIZE_B=min(tile["BLOCK_N"], 128 // B_ring.element_size()))
    if tokens > 1:
        tile.update(BLOCK_T=max(16, triton.next_power_of_2(tokens)), num_stages=3,
                    num_warps=max(1, tile["BLOCK_P"] // 32), BLOCK_K=min(32, tile["BLOCK_N"]),
                    BLOCK_W=max(16, min(64, triton.next_power_of_2(window_rows))))
    return dict(tile, ONE_BLOCK=window_rows <= tile["BLOCK_W"])


def _sizes(x, slots, query_start_loc, max_query_len, out) -> tuple:
    """Rows, tokens of a row, heads, head dim, and whether rows are packed; the output of packed rows is then 0."""
    packed = query_start_loc is not None
    if packed:
        out.zero_()
    return slots.shape[0], max_query_len if packed else x.shape[1], *x.shape[-2:], packed


def mamba2_replay(
    state, x_ring, B_ring, dt_ring, ring_start, ring_committed, x, dt, A, B, C, D, z, dt_bias, slots, query_lens=None,
    state_scale=None, seed=None, query_start_loc=None, *, window, max_query_len=None, dt_softplus=True, dt_min=0.0,
    dt_max=None, philox_rounds=0, out,
) -> None:
    rows, tokens, heads, dim, packed = _sizes(x, slots, query_start_loc, max_query_len, out)
    state_dim, ring_len = state.shape[3], x_ring.shape[2]
    tile = replay_tile(state, x_ring, B_ring, tokens)
    if rows == 0:
        return
    # one axis, for the others end at 65,535 programs; the tiles of a row are neighbours and share its B and C
    grid = (rows * heads * triton.cdiv(dim, tile["BLOCK_P"]),)
    _replay_tokens_kernel[grid](
        as_stored(state), *state.stride(), x_ring, *x_ring.stride(), B_ring, *B_ring.stride(), dt_ring,
        *dt_ring.stride(), ring_start, *ring_start.stride(), ring_committed, *ring_committed.stride(), x,
        *row_strides(x, packed), dt, *row_strides(dt, packed, 3), A, *A.stride(), B, *row_strides(B, packed), C,
        *row_strides(C, packed), D, *strides(D, 1), z, *row_strides(z, packed), dt_bias, *strides(dt_bias, 1), slots,
        *slots.stride(), query_lens, *strides(query_lens, 1), query_start_loc, *strides(query_start_loc, 1),
        state_scale, *strides(state_scale, 3), seed, out, *row_strides(out, packed), window, ring_len, float(dt_min),
        float("inf") if dt_max is None else float(dt_max), TOKENS=tokens, H=heads, P=dim, N=state_dim,
        HEADS_PER_GROUP=heads // B.shape[-2], KIND=state_kind(state.dtype), ROUNDS=philox_rounds, SOFTPLUS=dt_softplus,
        **tile)


@triton.jit
def _update_state_kernel(
    p_state, state_s, state_h, state_p, state_n, p_x, x_b, x_t, x_h, x_p, p_dt, dt_b, dt_t, dt_h, p_a, a_h,
    p_b, b_b, b_t, b_g, b_n, p_c, c_b, c_t, c_g, c_n, p_d, d_h, p_z, z_b, z_t, z_h, z_p, p_bias, bias_h,
    p_slots, slots_b, p_lens, lens_b, p_starts, starts_b, p_token_slots, token_slots_b, token_slots_t,
    p_y, y_b, y_t, y_h, y_p, dt_min, dt_max,
    TOKENS: tl.constexpr, H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, HEADS_PER_GROUP: tl.constexpr,
    SOFTPLUS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):
    P_TILES: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    tile = tl.program_id(0) % P_TILES
    head = (tl.program_id(0) // P_TILES % H).to(tl.int64)
    row = (tl.program_id(0) // (P_TILES * H)).to(tl.int64)
    group = head // HEADS_PER_GROUP
    slot = tl.load(p_slots + row * slots_b).to(tl.int64)
    place, q = row_tokens(row, slot, p_starts, starts_b, p_lens, lens_b, TOKENS)
    o_p = tile * BLOCK_P + tl.arange(0, BLOCK_P)
    o_n = tl.arange(0, BLOCK_N)
    mask_p = (o_p < P) | (P % BLOCK_P == 0)
    mask_n = (o_n < N) | (N == BLOCK_N)
    p_state += head * state_h + o_p.to(tl.int64)[:, None] * state_p + o_n[None, :] * state_n
    mask = mask_p[:, None] & mask_n[None, :]
    DTYPE: tl.constexpr = p_state.dtype.element_ty
    p_x += place * x_b + head * x_h + o_p * x_p
    p_dt += place * dt_b + head * dt_h
    p_b += place * b_b + group * b_g + o_n * b_n
    p_c += place * c_b + group * c_g + o_n * c_n
    p_y += place * y_b + head * y_h + o_p * y_p
    if p_d is not None:
        p_d += head * d_h
    if p_z is not None:
        p_z += place * z_b + head * z_h + o_p * z_p
    if p_bias is not None:
        p_bias += head * bias_h

    if q > 0:
        state = tl.load(p_state + slot * state_s, mask=mask, other=0.0).to(tl.float32)
        a = tl.load(p_a + head * a_h)
        for t in range(q):
            o_t = tl.cast(t, tl.int64)
            x = tl.load(p_x + o_t * x_t, mask=mask_p, other=0.0)
            b = tl.load(p_b + o_t * b_t, mask=mask_n, other=0.0).to(tl.float32)
            c = tl.load(p_c + o_t * c_t, mask=mask_n, other=0.0).to(tl.float32)
            dt = _process_dt(tl.load(p_dt + o_t * dt_t), p_bias, dt_min, dt_max, SOFTPLUS)
            state = tl.exp(a * dt) * state + (dt * x.to(tl.float32))[:, None] * b[None, :]
            y = tl.sum(state * c[None, :], 1)
            y = _gated(y, x, p_d, p_z + o_t * z_t if p_z is not None else None, mask_p)
            tl.store(p_y + o_t * y_t, y.to(p_y.dtype.element_ty), mask=mask_p)
            if p_token_slots is not None:
                kept = tl.load(p_token_slots + place * token_slots_b + o_t * token_slots_t).to(tl.int64)
                if kept > 0:
                    tl.store(p_state + kept * state_s, encode_state(state, 0, 0, 0, 0, DTYPE, 0), mask=mask)
        if p_token_slots is None:
            tl.store(p_state + slot * state_s, encode_state(state, 0, 0, 0, 0, DTYPE, 0), mask=mask)
    if p_starts is None:
        for t in range(q, TOKENS):
            tl.store(p_y + tl.cast(t, tl.int64) * y_t, tl.zeros([BLOCK_P], p_y.dtype.element_ty), mask=mask_p)


def mamba2_update(
    state, x, dt, A, B, C, D, z, dt_bias, slots, query_lens=None, token_slots=None, query_start_loc=None, *,
    max_query_len=None, dt_softplus=True, dt_min=0.0, dt_max=None, out,
) -> None:
    rows, tokens, heads, dim, packed = _sizes(x, slots, query_start_loc, max_query_len, out)
    tile = row_tile(dim, state.shape[3], 2048)
    if rows == 0:
        return
    grid = (rows * heads * triton.cdiv(dim, tile["BLOCK_P"]),)
    _update_state_kernel[grid](
        state, *state.stride(), x, *row_strides(x, packed), dt, *row_strides(dt, packed, 3), A, *A.stride(), B,
        *row_strides(B, packed), C, *row_strides(C, packed), D, *strides(D, 1), z, *row_strides(z, packed), dt_bias,
        *strides(dt_bias, 1), slots, *slots.stride(), query_lens, *strides(query_lens, 1), query_start_loc,
        *strides(query_start_loc, 1), token_slots, *row_strides(token_slots, packed, 2), out, *row_strides(out, packed),
        float(dt_min), float("inf") if dt_max is None else float(dt_max), TOKENS=tokens, H=heads, P=dim,
        N=state.shape[3], HEADS_PER_GROUP=heads // B.shape[-2], SOFTPLUS=dt_softplus, **tile)
