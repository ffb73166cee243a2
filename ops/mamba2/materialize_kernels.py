"""Triton kernel that writes Mamba-2 snapshots of all layers, and the tile functions that it shares with decoding."""

import functools

import torch
import triton
import triton.language as tl

from ..layers import dtype_of, shape_of
from ..triton_layers import layer_pointer, pool_arguments
from ..triton_rounding import decode_state, encode_state, row_scale, state_kind


def strides(tensor, dims: int) -> tuple[int, ...]:
    """Strides of a tensor that may be None."""
    return (0,) * dims if tensor is None else tensor.stride()


@triton.jit
def ring_rows(start, first, count, ring_len, BLOCK_W: tl.constexpr):
    """Physical ring rows [W] of logical rows first .. first + W - 1, and which of them are below `count`."""
    i = first + tl.arange(0, BLOCK_W)
    row = start + i
    return tl.where(row >= ring_len, row - ring_len, row), i < count


@triton.jit
def load_steps(p_dt, dt_r, start, first, count, ring_len, BLOCK_W: tl.constexpr):
    """dt of logical rows first .. first + W - 1 and, [W] too, dt of the row after each within this block; 0 if dead."""
    i = tl.arange(0, BLOCK_W)
    row, live = ring_rows(start, first, count, ring_len, BLOCK_W)
    dt = tl.load(p_dt + row * dt_r, mask=live, other=0.0)
    row, live = ring_rows(start, first + 1, count, ring_len, BLOCK_W)
    return dt, tl.load(p_dt + row * dt_r, mask=live & (i + 1 < BLOCK_W), other=0.0)


@triton.jit
def row_weights(dt, after, a):
    """How a block of rows advances a state: decay * state + sum_j weight_j x_j B_j^T; weight [W], decay scalar.

    weight_j = dt_j exp(A * time since row j), where time runs to the end of the block. That time is summed over the
    rows after j: the difference of two running sums would lose its digits after one huge step.
    """
    return tl.exp(a * tl.cumsum(after, 0, reverse=True)) * dt, tl.exp(a * tl.sum(dt, 0))


@triton.jit
def _advance_columns(
    state, p_x, x_r, p_b, b_r, p_dt, dt_r, start, count, ring_len, a, mask_p, mask_n, BLOCK_W: tl.constexpr,
):
    """state [P, n], some columns of a tile, advanced by `count` ring rows. p_x [1, P] and p_b [1, n] point to row 0."""
    for first in range(0, count, BLOCK_W):
        row, live = ring_rows(start, first, count, ring_len, BLOCK_W)
        x = tl.load(p_x + row[:, None] * x_r, mask=live[:, None] & mask_p[None, :], other=0.0).to(tl.float32)
        b = tl.load(p_b + row[:, None] * b_r, mask=live[:, None] & mask_n[None, :], other=0.0).to(tl.float32)
        dt, after = load_steps(p_dt, dt_r, start, first, count, ring_len, BLOCK_W)
        weight, decay = row_weights(dt, after, a)
        state = tl.dot(tl.trans(x * weight[:, None]), b, state * decay, input_precision="tf32x3")
    return state


@triton.jit
def fold_tile(
    p_from, p_to, state_n, p_scale_from, p_scale_to, p_x, x_r, p_b, b_r, b_n, p_dt, dt_r, start, count, ring_len, a,
    mask_p, seed, element, slot, N: tl.constexpr, KIND: tl.constexpr, ROUNDS: tl.constexpr, BLOCK_W: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Writes the state at p_from, advanced by `count` ring rows, to p_to; the program owns both, which may be the same.

    p_from, p_to: [P, 1] pointers to column 0; p_scale_from, p_scale_to: [P], for 8-bit states. p_x: [1, P] pointers to
    ring row 0; p_b, p_dt: its scalar pointers. element: [P, 1] flat index of column 0 in its slot, for the draws of
    `slot`, the destination. BLOCK_K columns are treated at a time, so that registers do not grow with N.
    """
    DTYPE: tl.constexpr = p_to.dtype.element_ty
    o_k = tl.arange(0, BLOCK_K)
    if KIND > 0:
        # The scale of a row needs all its columns: a first pass over them finds the largest magnitude.
        old_scale = tl.load(p_scale_from, mask=mask_p, other=0.0)
        largest = tl.zeros_like(old_scale)
        for column in range(0, N, BLOCK_K):
            o_n = column + o_k
            mask_n = (o_n < N) | (N % BLOCK_K == 0)
            raw = tl.load(p_from + o_n[None, :] * state_n, mask=mask_p[:, None] & mask_n[None, :], other=0)
            state = _advance_columns(
                decode_state(raw, KIND) * old_scale[:, None], p_x, x_r, p_b + o_n[None, :] * b_n, b_r, p_dt, dt_r,
                start, count, ring_len, a, mask_p, mask_n, BLOCK_W)
            largest = tl.maximum(largest, tl.max(tl.abs(state), 1))
        scale = row_scale(largest, KIND)
        tl.debug_barrier()  # warps share rows: none may still have to read the old scale
        tl.store(p_scale_to, scale, mask=mask_p)
    for column in range(0, N, BLOCK_K):
        o_n = column + o_k
        mask_n = (o_n < N) | (N % BLOCK_K == 0)
        mask = mask_p[:, None] & mask_n[None, :]
        state = decode_state(tl.load(p_from + o_n[None, :] * state_n, mask=mask, other=0), KIND)
        if KIND > 0:
            state *= old_scale[:, None]
        state = _advance_columns(
            state, p_x, x_r, p_b + o_n[None, :] * b_n, b_r, p_dt, dt_r, start, count, ring_len, a, mask_p, mask_n,
            BLOCK_W)
        if KIND > 0:
            state = tl.div_rn(state, tl.broadcast_to(scale[:, None], state.shape))
        stored = encode_state(state, seed, element + o_n[None, :], slot, KIND, DTYPE, ROUNDS)
        tl.store(p_to + o_n[None, :] * state_n, stored, mask=mask)


@triton.jit
def _count_listed(p_active, active_b, rows, BLOCK: tl.constexpr):
    """Entries before the first -1."""
    listed = rows
    for base in range(0, rows, BLOCK):
        i = base + tl.arange(0, BLOCK)
        ended = tl.load(p_active + i * active_b, mask=i < rows, other=0) < 0
        listed = tl.minimum(listed, tl.min(tl.where(ended, i, rows), 0))
    return listed


@triton.jit(do_not_specialize=["rows", "layers", "src_g", "dst_g", "start_g", "count_g"])  # they follow the batch
def _materialize_states_kernel(
    p_state, s_state, p_x_ring, s_x_ring, p_b_ring, s_b_ring, p_dt_ring, s_dt_ring,
    p_a, a_l, a_h, p_src, src_g, src_b, p_dst, dst_g, dst_b, p_start, start_g, start_b, p_count, count_g, count_b,
    p_layer_group, layer_group_l, p_active, active_b, p_scale, s_scale, p_seed, rows, layers, ring_len,
    H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, HEADS_PER_GROUP: tl.constexpr, KIND: tl.constexpr,
    ROUNDS: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr,
):
    P_TILES: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    # Work is what the list holds, which only the device knows: an idle launch reads the list and ends.
    work = _count_listed(p_active, active_b, rows, 256) * layers * (H * P_TILES)
    for index in range(tl.program_id(0), work, tl.num_programs(0)):
        item = tl.cast(index, tl.int32)  # the interpreter counts in Python integers
        o_p = item % P_TILES * BLOCK_P + tl.arange(0, BLOCK_P)
        mask_p = (o_p < P) | (P % BLOCK_P == 0)
        head = (item // P_TILES % H).to(tl.int64)
        layer = (item // (P_TILES * H) % layers).to(tl.int64)
        row = tl.load(p_active + item // (P_TILES * H) // layers * active_b).to(tl.int64)
        group = tl.load(p_layer_group + layer * layer_group_l).to(tl.int64)
        source = tl.load(p_src + group * src_g + row * src_b).to(tl.int64)
        target = tl.load(p_dst + group * dst_g + row * dst_b).to(tl.int64)
        count = tl.load(p_count + group * count_g + row * count_b).to(tl.int32)
        if (count >= 0) & (source > 0) & (target > 0):
            p_head = layer_pointer(p_state, layer, s_state[0]) + head * s_state[2]
            p_head += o_p.to(tl.int64)[:, None] * s_state[3]
            p_from = p_head + source * s_state[1]
            p_to = p_head + target * s_state[1]
            if KIND > 0:
                p_scales = layer_pointer(p_scale, layer, s_scale[0]) + head * s_scale[2] + o_p * s_scale[3]
                p_scale_from = p_scales + source * s_scale[1]
                p_scale_to = p_scales + target * s_scale[1]
            else:
                p_scale_from = None
                p_scale_to = None
            if count == 0:
                for column in range(0, N, BLOCK_K):
                    o_n = column + tl.arange(0, BLOCK_K)[None, :]
                    mask = mask_p[:, None] & ((o_n < N) | (N % BLOCK_K == 0))
                    tl.store(p_to + o_n * s_state[4], tl.load(p_from + o_n * s_state[4], mask=mask), mask=mask)
                if KIND > 0:
                    tl.store(p_scale_to, tl.load(p_scale_from, mask=mask_p), mask=mask_p)
            else:
                p_x = layer_pointer(p_x_ring, layer, s_x_ring[0]) + source * s_x_ring[1] + head * s_x_ring[2]
                p_b = layer_pointer(p_b_ring, layer, s_b_ring[0]) + source * s_b_ring[1]
                p_dt = layer_pointer(p_dt_ring, layer, s_dt_ring[0]) + source * s_dt_ring[1] + head * s_dt_ring[2]
                # layers draw from seeds of their own, so that they round independently
                fold_tile(
                    p_from, p_to, s_state[4], p_scale_from, p_scale_to, p_x + o_p[None, :] * s_x_ring[4], s_x_ring[3],
                    p_b + head // HEADS_PER_GROUP * s_b_ring[2], s_b_ring[3], s_b_ring[4], p_dt, s_dt_ring[3],
                    tl.load(p_start + group * start_g + row * start_b).to(tl.int32), count, ring_len,
                    tl.load(p_a + layer * a_l + head * a_h), mask_p, tl.load(p_seed) + layer if ROUNDS > 0 else 0,
                    (head.to(tl.int32) * P + o_p[:, None]) * N, target, N, KIND, ROUNDS, BLOCK_W, BLOCK_K)


@functools.cache
def _resident_programs(device: torch.device) -> int:
    """Programs of a persistent launch: four a multiprocessor, a few where the interpreter runs them in turn."""
    if device.type != "cuda":
        return 3
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count


def fold_columns(state_dim: int) -> int:
    """Columns of a tile that are folded at a time."""
    return max(16, min(32, triton.next_power_of_2(state_dim)))


def mamba2_materialize(
    state, x_ring, B_ring, dt_ring, A, src_slots, dst_slots, ring_start, count, layer_group, active_rows,
    state_scale=None, seed=None, *, philox_rounds=0,
) -> None:
    layers, _, heads, dim, state_dim = shape_of(state)
    rows, block_p = src_slots.shape[1], max(16, min(64, triton.next_power_of_2(dim)))
    items = rows * layers * heads * triton.cdiv(dim, block_p)
    if items == 0:
        return
    _materialize_states_kernel[(min(items, _resident_programs(active_rows.device)),)](
        *pool_arguments(state, 5), *pool_arguments(x_ring, 5), *pool_arguments(B_ring, 5), *pool_arguments(dt_ring, 4),
        A, *A.stride(), src_slots, *src_slots.stride(), dst_slots, *dst_slots.stride(), ring_start,
        *ring_start.stride(), count, *count.stride(), layer_group, *layer_group.stride(), active_rows,
        *active_rows.stride(), *pool_arguments(state_scale, 4), seed, rows, layers, shape_of(x_ring)[3], H=heads,
        P=dim, N=state_dim, HEADS_PER_GROUP=heads // shape_of(B_ring)[2], KIND=state_kind(dtype_of(state)),
        ROUNDS=philox_rounds, BLOCK_W=16, BLOCK_P=block_p, BLOCK_K=fold_columns(state_dim), num_warps=block_p // 16)
