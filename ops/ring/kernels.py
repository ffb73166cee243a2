"""Triton kernels of the ring lifecycle. One launch each, for any number of groups, rows and requests.

Every argument that a step may change stays unspecialised, so that one binary serves all batch sizes. The kernels read
positions, lengths and cursors on the device and nothing on the host, so that a CUDA graph can hold them. Index tensors
of either width are widened as they are loaded: slots and requests are multiplied by strides in 64 bits.
"""

import inspect

import triton
import triton.language as tl

ROWS = 1024  # rows that one program takes at least, where it must take them all


def jit_once(kernel):
    """`triton.jit` without specialisation on any value or alignment. Shared with the token ops."""
    parameters = inspect.signature(kernel).parameters.values()
    return triton.jit(kernel, do_not_specialize=[p.name for p in parameters if p.annotation is not tl.constexpr])


@triton.jit
def _load_i64(p_values, offset, mask, absent):
    """Index values as int64, `absent` where masked off."""
    return tl.load(p_values + offset, mask=mask, other=absent).to(tl.int64)


@triton.jit
def _load_requests(p_idx_mapping, stride, i_row, rows):
    """Request of each row, -1 for rows without one and beyond the batch. No mapping: the row's own number."""
    if p_idx_mapping is None:
        req = tl.where(i_row < rows, i_row, -1).to(tl.int64)
    else:
        req = _load_i64(p_idx_mapping, i_row.to(tl.int64) * stride, i_row < rows, -1)
    return req


@triton.jit
def _load_slots(p_tables, column, columns, stride_column, mask):
    """Slots in a column of each row's table; 0, the null slot, where the column lies outside the table."""
    inside = mask & (column >= 0) & (column < columns)
    return tl.maximum(_load_i64(p_tables, column * stride_column, inside, 0), 0)


@jit_once
def _gather_tables_kernel(
    p_out, out_group, out_row, out_column, p_tables, table_group, table_req, table_column, p_idx_mapping, idx_stride,
    p_num_reqs, rows, columns, BLOCK: tl.constexpr,
):
    i_group = tl.program_id(1).to(tl.int64)
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, column = (o // columns).to(tl.int64), (o % columns).to(tl.int64)
    inside = row < rows
    # behind num_reqs the mapping is stale
    listed = inside & (row < tl.load(p_num_reqs))
    req = _load_i64(p_idx_mapping, row * idx_stride, listed, -1)
    p_from = p_tables + i_group * table_group + req * table_req + column * table_column
    p_to = p_out + i_group * out_group + row * out_row + column * out_column
    tl.store(p_to, tl.load(p_from, mask=req >= 0, other=0), mask=inside)


def gather_block_tables(block_tables, request_tables, idx_mapping, num_reqs) -> None:
    """One program for each 512 elements of a group's tables."""
    groups, rows, columns = block_tables.shape
    _gather_tables_kernel[(triton.cdiv(rows * columns, 512), groups)](
        block_tables, *block_tables.stride(), request_tables, *request_tables.stride(), idx_mapping,
        idx_mapping.stride(0), num_reqs, rows, columns, BLOCK=512, num_warps=4)


@jit_once
def _reset_cursors_kernel(
    p_start, start_group, start_slot, p_committed, committed_group, committed_slot, p_tables, table_group, table_row,
    table_column, p_src_cols, src_stride, p_dst_cols, dst_stride, p_idx_mapping, idx_stride, rows, columns,
    BLOCK_B: tl.constexpr,
):
    i_group = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, BLOCK_B)
    req = _load_requests(p_idx_mapping, idx_stride, row, rows)
    used = req >= 0
    p_tables += i_group * table_group + row.to(tl.int64) * table_row
    source = _load_slots(p_tables, _load_i64(p_src_cols, req * src_stride, used, -1), columns, table_column, used)
    target = _load_slots(p_tables, _load_i64(p_dst_cols, req * dst_stride, used, -1), columns, table_column, used)
    moved = (target > 0) & (source != target)
    read = moved & (source > 0)
    p_start += i_group * start_group
    p_committed += i_group * committed_group
    start = tl.load(p_start + source * start_slot, mask=read, other=0)
    committed = tl.load(p_committed + source * committed_slot, mask=read, other=0)
    # the program holds all rows of its group: behind this point every source has been read, so chains and swaps work
    tl.debug_barrier()
    tl.store(p_start + target * start_slot, start, mask=moved)
    tl.store(p_committed + target * committed_slot, committed, mask=moved)


def ring_reset(ring_start, ring_committed, block_tables, src_cols, dst_cols, idx_mapping=None) -> None:
    """One program per group."""
    groups, rows, columns = block_tables.shape
    block = max(ROWS, triton.next_power_of_2(rows))
    _reset_cursors_kernel[(groups,)](
        ring_start, *ring_start.stride(), ring_committed, *ring_committed.stride(), block_tables,
        *block_tables.stride(), src_cols, src_cols.stride(0), dst_cols, dst_cols.stride(0), idx_mapping,
        0 if idx_mapping is None else idx_mapping.stride(0), rows, columns, BLOCK_B=block, num_warps=8)


@jit_once
def _commit_rows_kernel(
    p_start, start_group, start_slot, p_committed, committed_group, committed_slot, p_src, src_group, src_row,
    p_dst, dst_group, dst_row, p_plan_start, plan_start_group, plan_start_row, p_plan_count, plan_count_group,
    plan_count_row, p_tables, table_group, table_row, table_column, p_query_start, query_start_stride, p_query_lens,
    query_lens_stride, p_computed, computed_stride, p_accepted, accepted_stride, p_prefilling, prefilling_stride,
    p_live_cols, live_cols_stride, p_idx_mapping, idx_stride, rows, columns, block_size, window, ring_len,
    POST_STEP: tl.constexpr, MATERIALIZE: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_C: tl.constexpr,
):
    """Rows of one group, a lane each. The op's contract makes rows independent of each other: no row reads or moves
    the live slot of another, and what two rows may both write is a zero."""
    i_group = tl.program_id(1).to(tl.int64)
    i_row = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    row, inside = i_row.to(tl.int64), i_row < rows
    p_start += i_group * start_group
    p_committed += i_group * committed_group
    p_tables += i_group * table_group + row * table_row

    # what each row did in this step
    req = _load_requests(p_idx_mapping, idx_stride, i_row, rows)
    mapped = req >= 0
    if p_query_lens is None:
        q = _load_i64(p_query_start, (row + 1) * query_start_stride, mapped, 0)
        q -= _load_i64(p_query_start, row * query_start_stride, mapped, 0)
    else:
        q = _load_i64(p_query_lens, row * query_lens_stride, mapped, 0)
    active = mapped & (q > 0)
    prefill = active & (tl.load(p_prefilling + row * prefilling_stride, mask=active, other=0).to(tl.int32) != 0)
    accepted = tl.minimum(tl.maximum(_load_i64(p_accepted, req * accepted_stride, active, 0), 0), q)
    after = _load_i64(p_computed, req * computed_stride, active, 0)
    if not POST_STEP:
        after += tl.where(prefill, q, accepted)

    # the live slot moves
    if p_live_cols is None:
        live_col = tl.zeros_like(row)
    else:
        live_col = _load_i64(p_live_cols, req * live_cols_stride, active, -1)
    live = _load_slots(p_tables, live_col, columns, table_column, active)
    decode = active & (live > 0) & (prefill == 0)
    start = _load_i64(p_start, live * start_slot, decode, 0)
    committed = _load_i64(p_committed, live * committed_slot, decode, 0)
    flushed = committed + q > window
    start = tl.where(flushed, (start + committed) % ring_len, start)
    kept = tl.where(flushed, 0, committed)

    # the snapshot that is due
    if MATERIALIZE:
        edge = after // block_size * block_size
        begin = tl.where(prefill, after, after - accepted + 1)  # `running` of SPEC 3.3
        dst_col = edge // block_size - 1
        due = active & (live > 0) & (edge > 0) & (edge >= begin)
        dst = _load_slots(p_tables, dst_col, columns, table_column, due)
        # in place is right only at the edge itself: past it, the rows beyond the edge would be lost
        lost = (prefill & (live_col == dst_col)) | (decode & (live == dst) & (edge < after))
        planned = due & (dst > 0) & (lost == 0)
        count = tl.where(prefill, 0, edge - begin + 1 + kept)
        in_place = planned & decode & (live == dst)
    else:
        planned = tl.zeros([BLOCK_B], tl.int1)
        dst, count, in_place = tl.zeros_like(row), tl.zeros_like(row), planned

    # a slot published in place ends canonical: its one store here is the last word
    to_start = tl.where(in_place, 0, start).to(tl.int32)
    to_committed = tl.where(in_place, 0, kept + accepted).to(tl.int32)
    tl.store(p_start + live * start_slot, to_start, mask=decode)
    tl.store(p_committed + live * committed_slot, to_committed, mask=decode)
    zero = tl.zeros([BLOCK_B], tl.int32)
    clear = prefill & (live > 0)
    tl.store(p_start + live * start_slot, zero, mask=clear)
    tl.store(p_committed + live * committed_slot, zero, mask=clear)
    if MATERIALIZE:
        publish = planned & (in_place == 0)
        tl.store(p_start + dst * start_slot, zero, mask=publish)
        tl.store(p_committed + dst * committed_slot, zero, mask=publish)
        # a prefill clears every column that its chunk touched; without prefills the loop has no turn
        first = tl.maximum(after - q, 0) // block_size
        last = tl.minimum((after - 1) // block_size, columns - 1)
        low = tl.min(tl.where(prefill, first, columns), 0).to(tl.int32)
        high = tl.max(tl.where(prefill, last, -1), 0).to(tl.int32)
        for begin_col in range(low, high + 1, BLOCK_C):
            column = (begin_col + tl.arange(0, BLOCK_C)).to(tl.int64)[None, :]
            touched = prefill[:, None] & (column >= first[:, None]) & (column <= last[:, None])
            slot = _load_slots(p_tables[:, None], column, columns, table_column, touched)
            nothing = tl.zeros([BLOCK_B, BLOCK_C], tl.int32)
            tl.store(p_start + slot * start_slot, nothing, mask=slot > 0)
            tl.store(p_committed + slot * committed_slot, nothing, mask=slot > 0)

    folded = planned & decode
    tl.store(p_src + i_group * src_group + row * src_row, tl.where(planned, live, 0).to(tl.int32), mask=inside)
    tl.store(p_dst + i_group * dst_group + row * dst_row, tl.where(planned, dst, 0).to(tl.int32), mask=inside)
    tl.store(p_plan_start + i_group * plan_start_group + row * plan_start_row,
             tl.where(folded, start, 0).to(tl.int32), mask=inside)
    tl.store(p_plan_count + i_group * plan_count_group + row * plan_count_row,
             tl.where(planned, count, -1).to(tl.int32), mask=inside)


def ring_commit(
    ring_start, ring_committed, src_slots, dst_slots, plan_start, plan_count, block_tables, query_start_loc, query_lens,
    num_computed, num_accepted, is_prefilling, live_cols, idx_mapping, *, block_size, window, ring_len, post_step,
    materialize,
) -> None:
    """One program for each 32 rows of a group."""
    groups, rows, columns = block_tables.shape
    cursors = [part for tensor in (ring_start, ring_committed) for part in (tensor, *tensor.stride())]
    plans = [part for tensor in (src_slots, dst_slots, plan_start, plan_count) for part in (tensor, *tensor.stride())]
    vectors = (query_start_loc, query_lens, num_computed, num_accepted, is_prefilling, live_cols, idx_mapping)
    by_row = [part for tensor in vectors for part in (tensor, 0 if tensor is None else tensor.stride(0))]
    _commit_rows_kernel[(triton.cdiv(rows, 32), groups)](
        *cursors, *plans, block_tables, *block_tables.stride(), *by_row, rows, columns, block_size, window, ring_len,
        POST_STEP=post_step, MATERIALIZE=materialize, BLOCK_B=32, BLOCK_C=4, num_warps=1)


@jit_once
def _compact_rows_kernel(
    p_rows, rows_stride, p_num_active, p_count, count_group, count_row, p_num_reqs, groups, rows, BLOCK_B: tl.constexpr,
):
    row = tl.arange(0, BLOCK_B)
    listed = (row < rows) & (row < tl.load(p_num_reqs))
    p_count += row.to(tl.int64) * count_row
    planned = tl.zeros([BLOCK_B], tl.int32)
    for _ in range(groups):
        planned |= (tl.load(p_count, mask=listed, other=-1) >= 0).to(tl.int32)
        p_count += count_group
    total = tl.sum(planned, 0)
    place = tl.cumsum(planned, 0) - 1
    # the list takes places below `total`, the filler those from there on: no place is written twice
    tl.store(p_rows + place * rows_stride, row, mask=planned != 0)
    tl.store(p_rows + row * rows_stride, tl.full([BLOCK_B], -1, tl.int32), mask=(row < rows) & (row >= total))
    tl.store(p_num_active, total)


def compact_active(plan_count, num_reqs, *, out) -> None:
    """One program."""
    active_rows, num_active = out
    groups, rows = plan_count.shape
    _compact_rows_kernel[(1,)](
        active_rows, active_rows.stride(0), num_active, plan_count, *plan_count.stride(), num_reqs, groups, rows,
        BLOCK_B=max(ROWS, triton.next_power_of_2(rows)), num_warps=8)


@jit_once
def _advance_cursors_kernel(
    p_start, start_group, start_slot, p_committed, committed_group, committed_slot, p_slots, slots_group, slots_row,
    p_lens, lens_stride, p_accepted, accepted_stride, p_prefilling, prefilling_stride, p_num_reqs, rows, window,
    ring_len, BLOCK: tl.constexpr,
):
    """Rows of one group, a lane each: no two of them have one slot."""
    i_group = tl.program_id(1).to(tl.int64)
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    used = row < rows
    if p_num_reqs is not None:
        used = used & (row < tl.load(p_num_reqs))
    q = _load_i64(p_lens, row * lens_stride, used, 0)
    slot = _load_i64(p_slots, i_group * slots_group + row * slots_row, used, 0)
    moved = (q > 0) & (slot > 0)
    accepted = tl.minimum(tl.maximum(_load_i64(p_accepted, row * accepted_stride, moved, 0), 0), q)
    p_start += i_group * start_group + slot * start_slot
    p_committed += i_group * committed_group + slot * committed_slot
    start = tl.load(p_start, mask=moved, other=0)
    committed = tl.load(p_committed, mask=moved, other=0)
    flushed = committed + q > window
    start = tl.where(flushed, (start + committed) % ring_len, start)
    committed = tl.where(flushed, 0, committed) + accepted
    if p_prefilling is not None:
        prefill = tl.load(p_prefilling + row * prefilling_stride, mask=moved, other=0).to(tl.int32) != 0
        start = tl.where(prefill, 0, start)
        committed = tl.where(prefill, 0, committed)
    tl.store(p_start, start.to(tl.int32), mask=moved)
    tl.store(p_committed, committed.to(tl.int32), mask=moved)


def ring_advance(
    ring_start, ring_committed, slots, query_lens, num_accepted, is_prefilling=None, num_reqs=None, *, window, ring_len,
) -> None:
    rows, groups = len(query_lens), len(ring_start)
    if rows == 0:
        return
    of_groups = slots if slots.dim() == 2 else slots.unsqueeze(0)
    _advance_cursors_kernel[(triton.cdiv(rows, 32), groups)](
        ring_start, *ring_start.stride(), ring_committed, *ring_committed.stride(), of_groups, *of_groups.stride(),
        query_lens, query_lens.stride(0), num_accepted, num_accepted.stride(0), is_prefilling,
        0 if is_prefilling is None else is_prefilling.stride(0), num_reqs, rows, window, ring_len, BLOCK=32,
        num_warps=1)
