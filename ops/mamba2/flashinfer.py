"""Mamba-2 decode and snapshots by FlashInfer (0.7: `checkpointing_ssu`, `replayssm_materialize`) behind the same ops.

What `backends` requires of this module: for each op the kernel, `<op>_limits`, `<op>_key` and `<op>_scratch`.
FlashInfer is imported by the first call. Its conventions, and how they are met:

    window implied by R - T, at most 16     refused unless it equals `window`: window 0 would flush otherwise
    padded rows are left unwritten          slot 0 is the pad slot, and the output is zeroed before
    dead ring rows may be read              see DEAD_ROWS_ARE_FINITE
    snapshots by tables of addresses        built on the device, kept by what they hold: addresses and strides
    one plan per launch                     one launch per group; layers of other groups get the pad slot
    skipped rows (count -1) unknown         they get the pad slot too

The checks and the launches need no value from the device, so nothing here stops the host.
"""

import functools
import importlib
from typing import Optional

import torch
from torch import Tensor

from ..backends import own_kernel
from ..check import EIGHT_BIT, FLOAT
from ..layers import dtype_of, shape_of

MAX_WINDOW = 16
SCRATCH_SLOTS = 64  # of the pools that a replay is timed on, at most

# Ring rows that are not live may hold anything: a request may inherit a slot whose last owner left NaN there. The
# one-kernel variant of checkpointing_ssu multiplies such rows with zero, and so does every flush of fewer than W rows,
# which takes T > 1; NaN would spread. False: only calls that cannot read dead rows are served (T = 1, states of 16 or
# 32 bits, two-kernel variant). True: all that FlashInfer can do, for benchmarks on rings known to be finite.
DEAD_ROWS_ARE_FINITE = False


@functools.cache
def _mamba():
    return importlib.import_module("flashinfer.mamba")


def _dense(tensor: Tensor, inner: int) -> bool:
    """Whether the last `inner` dimensions are packed."""
    expected = 1
    for size, stride in zip(tensor.shape[: -inner - 1 : -1], tensor.stride()[: -inner - 1 : -1]):
        if stride != expected:
            return False
        expected *= size
    return True


def _aligned(tensor: Tensor, inner: int) -> bool:
    """Whether each block of the last `inner` dimensions starts at a multiple of 16 bytes (for asynchronous copies)."""
    steps = [stride for size, stride in zip(tensor.shape[:-inner], tensor.stride()[:-inner]) if size > 1]
    return all(at % 16 == 0 for at in (tensor.data_ptr(), *(step * tensor.element_size() for step in steps)))


def _layout(tensors: dict[str, tuple[Optional[Tensor], int]]) -> Optional[str]:
    """Complaint about the first tensor whose inner dimensions are not packed or not aligned."""
    for name, (tensor, inner) in tensors.items():
        if tensor is not None and not _dense(tensor, inner):
            return f"{name} is not packed in its last {inner} dimensions"
        if tensor is not None and not _aligned(tensor, inner):
            return f"{name} is not aligned to 16 bytes"
    return None


def _dtypes(state: Tensor, bf16: dict[str, Optional[Tensor]]) -> Optional[str]:
    for name, tensor in bf16.items():
        if tensor is not None and tensor.dtype != torch.bfloat16:
            return f"{name} is {tensor.dtype}, expected torch.bfloat16"
    if state.dtype not in FLOAT + EIGHT_BIT:
        return f"state is {state.dtype}"
    return None


def _sizes(state: Tensor, only_64: bool) -> Optional[str]:
    dim, state_dim = state.shape[-2:]
    if state.element_size() == 1 and (dim, state_dim) != (64, 128):
        return f"8-bit state of {dim} x {state_dim}, expected 64 x 128"
    if dim % 64 or state_dim % 64 or (only_64 and dim != 64):
        return f"heads of {dim} x {state_dim}, expected {'64' if only_64 else 'multiples of 64'} x multiples of 64"
    return None


def mamba2_replay_limits(
    *, state, x_ring, B_ring, dt_ring, ring_start, ring_committed, x, dt, A, B, C, D, z, dt_bias, query_lens,
    state_scale, window, dt_softplus, dt_min, dt_max, philox_rounds, query_start_loc=None,
    out=None, **_,
) -> Optional[str]:
    if query_start_loc is not None:
        return "packed rows"
    tokens, implied = x.shape[1], x_ring.shape[2] - x.shape[1]
    if window != implied or window > MAX_WINDOW:
        return f"window {window} with R - T = {implied}, expected equal and at most {MAX_WINDOW}"
    if tokens > 1 and query_lens is not None:
        return "rows of several tokens with query_lens"
    if philox_rounds:
        return "stochastic rounding, whose draws differ"
    if not dt_softplus or dt_min > 0.0 or dt_max is not None:
        return "dt processing other than softplus"
    if not DEAD_ROWS_ARE_FINITE and (tokens > 1 or state.element_size() == 1):
        return "several tokens or an 8-bit state, where dead ring rows are read"
    if D is not None and dt_bias is not None and D.dtype != dt_bias.dtype:
        return f"D is {D.dtype} and dt_bias {dt_bias.dtype}, expected one dtype"
    for name, tensor in {"dt": dt, "A": A, "D": D, "dt_bias": dt_bias, "dt_ring": dt_ring}.items():
        if tensor is not None and tensor.stride(-1) != 1:
            return f"{name} is not packed in its last dimension"
    if min(ring_start.stride(0), ring_committed.stride(0)) < 1:
        return "expanded cursors"
    operands = {"x": x, "B": B, "C": C, "z": z, "x_ring": x_ring, "B_ring": B_ring}
    packed = {name: (tensor, 2) for name, tensor in operands.items()}
    packed |= {"state": (state, 3), "state_scale": (state_scale, 2), "out": (out, 2)}
    return _dtypes(state, operands) or _sizes(state, only_64=True) or _layout(packed)


def mamba2_replay_key(
    *, state, x_ring, x, dt, B, D, dt_bias, slots, query_lens, query_start_loc=None, **_,
) -> tuple:
    if query_start_loc is not None:
        return (), ()  # never measured, see the limits
    rows, tokens, heads, dim = x.shape
    weight = next((tensor.dtype for tensor in (D, dt_bias) if tensor is not None), None)
    index = (slots.dtype, None if query_lens is None else query_lens.dtype)
    build = (state.dtype, dt.dtype, weight, index, dim, state.shape[3], tokens, x_ring.shape[2], heads, B.shape[2])
    return (rows,), build


def _small_pool(pool: Optional[Tensor], dim: int, slots: int) -> Optional[Tensor]:
    """Zeros with a pool's strides and `slots` slots, which dimension `dim` counts."""
    if pool is None:
        return None
    shape = (*pool.shape[:dim], slots, *pool.shape[dim + 1 :])
    strides = list(pool.stride())
    if dim == 1 and strides[0] > strides[1]:  # layer after layer: else the gaps between layers are as large as the pool
        strides[0] = slots * strides[1]
    return torch.empty_strided(shape, strides, dtype=pool.dtype, device=pool.device).zero_()


def mamba2_replay_scratch(
    *, state, x_ring, B_ring, dt_ring, state_scale, ring_start, ring_committed, slots, query_lens, x, window, **others,
) -> dict:
    """Rings filled from 0 to `window` rows, as in steady state: one row in W + 1 flushes.

    Beyond `SCRATCH_SLOTS` rows share slots: their results are nobody's, and their states do not fit a cache either.
    """
    pools = dict(state=state, x_ring=x_ring, B_ring=B_ring, dt_ring=dt_ring, state_scale=state_scale)
    rows = slots.shape[0]
    slot = torch.arange(min(rows, SCRATCH_SLOTS) + 1, device=slots.device)
    return dict(
        others, x=x, window=window, **{name: _small_pool(pool, 0, len(slot)) for name, pool in pools.items()},
        ring_start=torch.zeros_like(slot).to(ring_start.dtype),
        ring_committed=(slot % (window + 1)).to(ring_committed.dtype),
        slots=(torch.arange(rows, device=slots.device) % SCRATCH_SLOTS + 1).to(slots.dtype),
        query_lens=None if query_lens is None else torch.full_like(query_lens, x.shape[1]))


def mamba2_replay(
    state, x_ring, B_ring, dt_ring, ring_start, ring_committed, x, dt, A, B, C, D, z, dt_bias, slots, query_lens=None,
    state_scale=None, seed=None, query_start_loc=None, *, window, max_query_len=None, dt_softplus=True, dt_min=0.0,
    dt_max=None, philox_rounds=0, out,
) -> None:
    rows, tokens, heads, dim = x.shape
    if not rows:
        return
    # one token a row, or no lengths: a row without its token is a padded row
    slots = slots.contiguous() if query_lens is None else slots * query_lens
    out.zero_()

    def over_dim(per_head: Optional[Tensor]) -> Optional[Tensor]:
        return None if per_head is None else per_head.unsqueeze(-1).expand(*per_head.shape, dim)

    algorithm, scratch = "auto", (None, None, None)
    if state.element_size() > 1:
        algorithm = "auto" if DEAD_ROWS_ARE_FINITE else "two-kernel"
        # fresh at every call: a buffer kept here might come from the private pool of one CUDA graph
        scratch = _mamba().allocate_checkpointing_ssu_scratch(rows, heads, tokens, window, x.dtype, x.device)
    _mamba().checkpointing_ssu(
        state, x_ring, B_ring, dt_ring, ring_start, ring_committed, x, over_dim(dt),
        A[:, None, None].expand(heads, dim, state.shape[3]), B, C, out, D=over_dim(D), z=z, dt_bias=over_dim(dt_bias),
        dt_softplus=True, state_batch_indices=slots, pad_slot_id=0, state_scale=state_scale, cb_scaled=scratch[0],
        cumAdt_vec=scratch[1], cb_old=scratch[2], algorithm=algorithm)


def mamba2_materialize_limits(
    *, state, x_ring, B_ring, dt_ring, A, state_scale, philox_rounds, **_,
) -> Optional[str]:
    if not isinstance(state, Tensor):
        return "separate tensors of layers, whose addresses only the host knows"
    if philox_rounds:
        return "stochastic rounding, whose draws differ"
    if A.stride(-1) != 1:
        return "A is not packed in its last dimension"
    if not _dense(dt_ring, 2):
        return "dt_ring is not packed in its last 2 dimensions"
    return _dtypes(state, {"x_ring": x_ring, "B_ring": B_ring}) or _sizes(state, only_64=False) or _layout({
        "state": (state, 3), "x_ring": (x_ring, 3), "B_ring": (B_ring, 3), "state_scale": (state_scale, 2)})


def mamba2_materialize_key(*, state, x_ring, B_ring, src_slots, **_) -> tuple:
    layers, _, heads, ring_len, dim = shape_of(x_ring)
    build = (dtype_of(state), dim, shape_of(state)[-1], heads // shape_of(B_ring)[2])
    return (layers, heads, ring_len, *src_slots.shape), build


def mamba2_materialize_scratch(
    *, state, x_ring, B_ring, dt_ring, state_scale, src_slots, dst_slots, ring_start, count, active_rows, **others,
) -> dict:
    """Four snapshots of half a window, since few rows of a step are at the edge of a block."""
    pools = dict(state=state, x_ring=x_ring, B_ring=B_ring, dt_ring=dt_ring, state_scale=state_scale)
    row = torch.arange(active_rows.shape[0], device=active_rows.device)
    listed = min(4, len(row))
    source = torch.where(row < listed, row + 1, 0)
    target = torch.where(row < listed, row + 1 + listed, 0)
    return dict(
        others, **{name: _small_pool(pool, 1, 2 * listed + 1) for name, pool in pools.items()},
        src_slots=source.to(src_slots.dtype).expand_as(src_slots).contiguous(),
        dst_slots=target.to(dst_slots.dtype).expand_as(dst_slots).contiguous(),
        ring_start=torch.zeros_like(ring_start), count=torch.full_like(count, min(MAX_WINDOW, x_ring.shape[3]) // 2),
        active_rows=torch.where(row < listed, row, -1).to(active_rows.dtype))


def mamba2_materialize(
    state, x_ring, B_ring, dt_ring, A, src_slots, dst_slots, ring_start, count, layer_group, active_rows,
    state_scale=None, seed=None, *, philox_rounds=0,
) -> None:
    (groups, rows), (layers, _, heads, ring_len, dim) = src_slots.shape, x_ring.shape
    if not rows:
        return
    tables = _tables(state, x_ring, B_ring, dt_ring, A, state_scale)
    own = layer_group == torch.arange(groups, device=layer_group.device)[:, None]  # [G, L]
    served = own[:, :, None] & ((count >= 0) & (count <= MAX_WINDOW))[:, None]
    src = torch.where(served, src_slots[:, None], 0).int().contiguous()  # [G, L, B]
    dst = dst_slots[:, None].expand(groups, layers, rows).int().contiguous()
    start, length = ring_start.int().contiguous(), count.clamp(0, MAX_WINDOW).int().contiguous()
    active = active_rows.int().contiguous()
    for group in range(groups):
        _mamba().replayssm_materialize(
            *tables, src[group], dst[group], start[group], length[group], active, state_dtype=state.dtype,
            input_dtype=x_ring.dtype, matrixA_dtype=A.dtype, dim=dim, dstate=state.shape[-1], num_heads=heads,
            heads_per_group=heads // B_ring.shape[2], max_window=MAX_WINDOW, ring_buffer_len=ring_len, pad_slot_id=0)
    if ring_len > MAX_WINDOW + 1:  # W may exceed 16 in such a ring; what folds more rows goes to our own kernel
        own_kernel("mamba2_materialize")(
            state, x_ring, B_ring, dt_ring, A, src_slots, dst_slots, ring_start,
            torch.where(count > MAX_WINDOW, count, -1), layer_group, active_rows, state_scale, seed)


# Tables of pools by what they hold, so that a pool that moved gets new ones, and a recycled address with the same
# strides may keep the old ones. Never evicted (10 x L integers each): a recorded CUDA graph holds their addresses.
_known_tables: dict[tuple, tuple[Tensor, ...]] = {}


def _tables(state, x_ring, B_ring, dt_ring, A, state_scale) -> tuple[Tensor, ...]:
    """By layer: address and slot stride (in elements) of state, x, B and dt; address of A; the first two of scales."""
    layers, device = state.shape[0], state.device
    held = [(0, 0, 0) if tensor is None else
            (tensor.data_ptr(), tensor.stride(0) * tensor.element_size(), tensor.stride(1))
            for tensor in (state, x_ring, B_ring, dt_ring, state_scale)]
    key = (device, layers, *held)
    layer = torch.arange(layers, device=device)  # computed there: a copy from the host would wait for the device
    columns = _known_tables.get(key)
    if columns is None:
        columns = tuple(column for base, step, slot in held
                        for column in (layer * step + base, torch.full_like(layer, slot)))
        # what a capture allocates belongs to its graph
        if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            _known_tables[key] = columns
    # A is a step's own, a tensor anew each time
    return *columns[:8], layer * (A.stride(0) * A.element_size()) + A.data_ptr(), *columns[8:]
