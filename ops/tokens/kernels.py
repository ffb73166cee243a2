"""Triton kernels of the token ops. One launch each; 64-bit slots and offsets; counts stay unspecialised."""

import triton
import triton.language as tl

from ..ring.kernels import jit_once

TOKENS = 256  # tokens a program


@triton.jit
def _find_rows(p_start, start_stride, p_lens, lens_stride, token, tokens, rows, steps):
    """Row of each token, its index within the row, and whether it is real (index < q); int64.

    Of rows that start at the same token all but the last are empty, and the last one owns it: a binary search for the
    number of starts at or before the token, `steps` turns long. Rows of tokens that no row owns must not be used.
    """
    low = tl.zeros_like(token)
    high = low + rows + 1
    for _ in range(steps):
        middle = (low + high) // 2
        open_ = low < high
        above = open_ & (tl.load(p_start + middle * start_stride, mask=open_, other=0) <= token)
        high = tl.where(open_ & (above == 0), middle, high)
        low = tl.where(above, middle + 1, low)
    row = low - 1
    inside = (token < tokens) & (row >= 0) & (row < rows)
    index = token - tl.load(p_start + row * start_stride, mask=inside, other=0)
    if p_lens is not None:
        inside &= index < tl.load(p_lens + row * lens_stride, mask=inside, other=0)
    return row, index, inside


@jit_once
def _prepare_positions_kernel(
    p_positions, positions_stride, p_seq_lens, seq_stride, p_idx_mapping, idx_stride, p_start, start_stride, p_computed,
    computed_stride, p_lens, lens_stride, tokens, rows, steps, BLOCK: tl.constexpr,
):
    """Tokens and rows of equal numbers: positions of the one, lengths of the other."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, index, real = _find_rows(p_start, start_stride, p_lens, lens_stride, o, tokens, rows, steps)
    req = tl.load(p_idx_mapping + row * idx_stride, mask=real, other=-1).to(tl.int64)
    computed = tl.load(p_computed + req * computed_stride, mask=req >= 0, other=0)
    tl.store(p_positions + o * positions_stride, tl.where(req >= 0, computed + index, 0), mask=o < tokens)

    inside = o < rows
    req = tl.load(p_idx_mapping + o * idx_stride, mask=inside, other=-1).to(tl.int64)
    used = req >= 0
    length = tl.load(p_computed + req * computed_stride, mask=used, other=0).to(tl.int64)
    if p_lens is None:
        length += tl.load(p_start + (o + 1) * start_stride, mask=used, other=0)
        length -= tl.load(p_start + o * start_stride, mask=used, other=0)
    else:
        length += tl.load(p_lens + o * lens_stride, mask=used, other=0)
    tl.store(p_seq_lens + o * seq_stride, length.to(tl.int32), mask=inside)


def _layout(query_start_loc, query_lens) -> tuple:
    return (query_start_loc, query_start_loc.stride(0)), (query_lens, 0 if query_lens is None else query_lens.stride(0))


def prepare_positions(positions, seq_lens, idx_mapping, query_start_loc, num_computed, query_lens=None) -> None:
    """One program for each 256 tokens or rows."""
    tokens, rows = positions.shape[0], seq_lens.shape[0]
    start, lens = _layout(query_start_loc, query_lens)
    _prepare_positions_kernel[(triton.cdiv(max(tokens, rows), TOKENS),)](
        positions, positions.stride(0), seq_lens, seq_lens.stride(0), idx_mapping, idx_mapping.stride(0), *start,
        num_computed, num_computed.stride(0), *lens, tokens, rows, (rows + 1).bit_length(), BLOCK=TOKENS, num_warps=4)


@jit_once
def _map_slots_kernel(
    p_slots, slots_group, slots_token, p_tables, table_group, table_row, table_column, p_start, start_stride,
    p_positions, positions_stride, p_sizes, sizes_stride, p_lens, lens_stride, tokens, rows, columns, steps,
    BLOCK: tl.constexpr,
):
    i_group = tl.program_id(1).to(tl.int64)
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, index, real = _find_rows(p_start, start_stride, p_lens, lens_stride, o, tokens, rows, steps)
    position = tl.load(p_positions + o * positions_stride, mask=real, other=-1).to(tl.int64)
    size = tl.load(p_sizes + i_group * sizes_stride).to(tl.int64)
    column = position // size
    inside = (position >= 0) & (column < columns)
    p_block = p_tables + i_group * table_group + row * table_row + column * table_column
    block = tl.load(p_block, mask=inside, other=0).to(tl.int64)
    slot = tl.where(block > 0, block * size + (position - column * size), -1)
    tl.store(p_slots + i_group * slots_group + o * slots_token, slot, mask=o < tokens)


def compute_slot_mappings(
    slot_mappings, block_tables, query_start_loc, positions, block_sizes, query_lens=None
) -> None:
    """One program for each 256 tokens of a group."""
    groups, tokens = slot_mappings.shape
    _, rows, columns = block_tables.shape
    start, lens = _layout(query_start_loc, query_lens)
    if tokens:
        _map_slots_kernel[(triton.cdiv(tokens, TOKENS), groups)](
            slot_mappings, *slot_mappings.stride(), block_tables, *block_tables.stride(), *start, positions,
            positions.stride(0), block_sizes, block_sizes.stride(0), *lens, tokens, rows, columns,
            (rows + 1).bit_length(), BLOCK=TOKENS, num_warps=4)


@jit_once
def _pad_replayed_kernel(
    p_slots, slots_group, slots_token, p_groups, groups_stride, p_start, start_stride, p_positions, positions_stride,
    p_replay, replay_stride, p_lens, lens_stride, tokens, rows, window, steps, BLOCK: tl.constexpr,
):
    i_group = tl.load(p_groups + tl.program_id(1) * groups_stride).to(tl.int64)
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, index, real = _find_rows(p_start, start_stride, p_lens, lens_stride, o, tokens, rows, steps)
    position = tl.load(p_positions + o * positions_stride, mask=real, other=-1).to(tl.int64)
    start = tl.load(p_replay + row * replay_stride, mask=real, other=0).to(tl.int64)
    replayed = real & (start > 0) & (position >= start) & (position < start + window)
    none = tl.zeros_like(o) - 1
    tl.store(p_slots + i_group * slots_group + o * slots_token, none, mask=replayed)


def pad_replayed_slots(
    slot_mappings, cacheable_groups, query_start_loc, positions, replay_start, query_lens=None, *, window
) -> None:
    """One program for each 256 tokens of a cacheable group."""
    tokens, rows, groups = positions.shape[0], replay_start.shape[0], cacheable_groups.shape[0]
    start, lens = _layout(query_start_loc, query_lens)
    if tokens and groups:
        _pad_replayed_kernel[(triton.cdiv(tokens, TOKENS), groups)](
            slot_mappings, *slot_mappings.stride(), cacheable_groups, cacheable_groups.stride(0), *start, positions,
            positions.stride(0), replay_start, replay_start.stride(0), *lens, tokens, rows, window,
            (rows + 1).bit_length(), BLOCK=TOKENS, num_warps=4)


@jit_once
def _gather_rows_kernel(
    p_rows, rows_stride, p_kept_start, kept_start_stride, p_kept_positions, kept_positions_stride, p_kept_slots,
    kept_slots_group, kept_slots_token, p_kv_start, kv_start_stride, p_start, start_stride, p_dropped, dropped_stride,
    p_seq_lens, seq_stride, p_replay, replay_stride, p_positions, positions_stride, p_slots, slots_group, slots_token,
    p_lens, lens_stride, kept, batch, groups, window, steps, BLOCK: tl.constexpr,
):
    """Kept tokens and rows of equal numbers, side by side."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # the row of a kept token: as in _find_rows, over starts that are a difference
    low = tl.zeros_like(o)
    high = low + batch + 1
    for _ in range(steps):
        middle = (low + high) // 2
        open_ = low < high
        begin = tl.load(p_start + middle * start_stride, mask=open_, other=0).to(tl.int64)
        begin -= tl.load(p_dropped + middle * dropped_stride, mask=open_, other=0)
        above = open_ & (begin <= o)
        high = tl.where(open_ & (above == 0), middle, high)
        low = tl.where(above, middle + 1, low)
    row = low - 1
    real = (o < kept) & (row >= 0) & (row < batch)
    first = tl.load(p_start + row * start_stride, mask=real, other=0).to(tl.int64)
    after = tl.load(p_start + (row + 1) * start_stride, mask=real, other=0).to(tl.int64)
    kept_after = after - tl.load(p_dropped + (row + 1) * dropped_stride, mask=real, other=0)
    end = after
    if p_lens is not None:
        end = first + tl.load(p_lens + row * lens_stride, mask=real, other=0)
    source = end - (kept_after - o)
    tl.store(p_rows + o * rows_stride, source, mask=real)
    position = tl.load(p_positions + source * positions_stride, mask=real, other=0).to(tl.int64)
    tl.store(p_kept_positions + o * kept_positions_stride, position, mask=real)
    for group in range(groups):
        slot = tl.load(p_slots + group * slots_group + source * slots_token, mask=real, other=0)
        tl.store(p_kept_slots + group * kept_slots_group + o * kept_slots_token, slot, mask=real)

    inside = o <= batch
    begin = tl.load(p_start + o * start_stride, mask=inside, other=0).to(tl.int64)
    before = tl.load(p_dropped + o * dropped_stride, mask=inside, other=0).to(tl.int64)
    tl.store(p_kept_start + o * kept_start_stride, (begin - before).to(tl.int32), mask=inside)
    inside = o < batch
    after = tl.load(p_start + (o + 1) * start_stride, mask=inside, other=0).to(tl.int64)
    count = after - tl.load(p_dropped + (o + 1) * dropped_stride, mask=inside, other=0) - (begin - before)
    length = after - begin
    if p_lens is not None:
        length = tl.load(p_lens + o * lens_stride, mask=inside, other=0).to(tl.int64)
    replay = tl.load(p_replay + o * replay_stride, mask=inside, other=0).to(tl.int64)
    near = tl.load(p_seq_lens + o * seq_stride, mask=inside, other=0).to(tl.int64) - window
    lowest = tl.where(count < length, tl.maximum(replay, near), replay)
    tl.store(p_kv_start + o * kv_start_stride, lowest.to(tl.int32), mask=inside)


def gather_replay_rows(
    rows, kept_query_start_loc, kept_positions, kept_slot_mappings, kept_kv_start, query_start_loc, dropped_before,
    seq_lens, replay_start, positions, slot_mappings, query_lens=None, *, window
) -> None:
    """One program for each 256 kept tokens or rows."""
    kept, batch = rows.shape[0], seq_lens.shape[0]
    start, lens = _layout(query_start_loc, query_lens)
    _gather_rows_kernel[(triton.cdiv(max(kept, batch + 1), TOKENS),)](
        rows, rows.stride(0), kept_query_start_loc, kept_query_start_loc.stride(0), kept_positions,
        kept_positions.stride(0), kept_slot_mappings, *kept_slot_mappings.stride(), kept_kv_start,
        kept_kv_start.stride(0), *start, dropped_before, dropped_before.stride(0), seq_lens, seq_lens.stride(0),
        replay_start, replay_start.stride(0), positions, positions.stride(0), slot_mappings, *slot_mappings.stride(),
        *lens, kept, batch, slot_mappings.shape[0], window, (batch + 1).bit_length(), BLOCK=TOKENS, num_warps=4)


@triton.jit(do_not_specialize=["p_slots", "slots_stride"])
def _write_kv_kernel(
    p_cache, cache_block, cache_offset, cache_side, cache_head, cache_dim, p_k, k_token, k_head, k_dim, p_v, v_token,
    v_head, v_dim, p_slots, slots_stride, block_size, heads, dim, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    slot = tl.load(p_slots + i_token * slots_stride).to(tl.int64)
    if slot >= block_size:  # neither "no slot" nor the null block
        head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)[:, None]
        o = tl.arange(0, BLOCK_D).to(tl.int64)[None, :]
        inside = (head < heads) & (o < dim)
        block = slot // block_size
        p_to = p_cache + block * cache_block + (slot - block * block_size) * cache_offset
        p_to += head * cache_head + o * cache_dim
        b_k = tl.load(p_k + i_token * k_token + head * k_head + o * k_dim, mask=inside)
        b_v = tl.load(p_v + i_token * v_token + head * v_head + o * v_dim, mask=inside)
        tl.store(p_to, b_k.to(p_cache.dtype.element_ty), mask=inside)
        tl.store(p_to + cache_side, b_v.to(p_cache.dtype.element_ty), mask=inside)


def write_kv(cache, k, v, slot_mapping) -> None:
    """One program per token and about 1,024 elements of its keys."""
    tokens, heads, dim = k.shape
    block_d = triton.next_power_of_2(dim)
    block_h = min(triton.next_power_of_2(heads), max(1, 1024 // block_d))
    if tokens:
        _write_kv_kernel[(tokens, triton.cdiv(heads, block_h))](
            cache, *cache.stride(), k, *k.stride(), v, *v.stride(), slot_mapping, slot_mapping.stride(0),
            cache.shape[1], heads, dim, BLOCK_H=block_h, BLOCK_D=block_d, num_warps=4)
