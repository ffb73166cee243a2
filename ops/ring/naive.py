"""Reference kernels of the ring lifecycle: vectorised torch on any device, without a host sync.

Rows that have nothing to do are not selected away, which would need their number on the host: they write to a spare
column behind the last slot, which is dropped before anything is stored. The null slot is never stored to.
"""

from typing import NamedTuple, Optional

import torch
from torch import Tensor


def row_requests(idx_mapping: Optional[Tensor], rows: int, device) -> tuple[Tensor, Tensor]:
    """Request of every row (0 for empty rows, so that it can index) and which rows have one; both [B]."""
    req = torch.arange(rows, device=device) if idx_mapping is None else idx_mapping.long()
    return req.clamp(min=0), req >= 0


def of_rows(values: Tensor, req: Tensor, mapped: Tensor, absent: int = 0) -> Tensor:
    """values [reqs] by row, int64 [B]; `absent` for rows without a request."""
    return torch.where(mapped, values[torch.where(mapped, req, 0)].long(), absent)


def table_slots(block_tables: Tensor, columns: Tensor) -> Tensor:
    """Slots int64 [G, B] in a column per row; 0, the null slot, where the column lies outside the table."""
    groups, rows, width = block_tables.shape
    index = columns.clamp(0, width - 1).expand(groups, rows).unsqueeze(2)
    slots = block_tables.gather(2, index).squeeze(2).long()
    return torch.where((columns >= 0) & (columns < width), slots, 0).clamp(min=0)


def scatter_slots(values: Tensor, slots: Tensor, chosen: Tensor, new: Tensor) -> Tensor:
    """Copy of values [G, S] with new [G, n] at the slots [G, n] that are chosen. The others go to a spare column."""
    spare = values.shape[1]
    padded = torch.nn.functional.pad(values, (0, 1))
    return padded.scatter(1, torch.where(chosen, slots, spare), new.to(values.dtype))[:, :spare]


def store_cursors(cursors: Tensor, new: Tensor) -> None:
    """Writes [G, S] cursors, all slots but the null slot."""
    cursors[:, 1:] = new[:, 1:]


def gather_block_tables(block_tables, request_tables, idx_mapping, num_reqs) -> None:
    rows = block_tables.shape[1]
    req, mapped = row_requests(idx_mapping, rows, block_tables.device)
    used = mapped & (torch.arange(rows, device=block_tables.device) < num_reqs.reshape(()))
    tables = request_tables[:, torch.where(used, req, 0)]
    block_tables.copy_(torch.where(used[:, None], tables, 0))


def reset_slots(block_tables, src_cols, dst_cols, idx_mapping) -> tuple[Tensor, Tensor]:
    """Source and destination slots of a reset, int64 [G, B], 0 = none."""
    req, mapped = row_requests(idx_mapping, block_tables.shape[1], block_tables.device)
    return tuple(table_slots(block_tables, of_rows(cols, req, mapped, absent=-1)) for cols in (src_cols, dst_cols))


def ring_reset(ring_start, ring_committed, block_tables, src_cols, dst_cols, idx_mapping=None) -> None:
    source, target = reset_slots(block_tables, src_cols, dst_cols, idx_mapping)
    moved = (target > 0) & (source != target)
    for cursors in (ring_start, ring_committed):
        # one gather, then one scatter: every read comes before every write
        new = torch.where(source > 0, cursors.gather(1, source), 0)
        store_cursors(cursors, scatter_slots(cursors, target, moved, new))


def advanced_rows(slots, query_lens, num_reqs) -> tuple[Tensor, Tensor]:
    """Slots whose cursors move, int64 [G, B], 0 where none does; tokens of each row, int64 [B]."""
    q = query_lens.long()
    if num_reqs is not None:
        q = torch.where(torch.arange(len(q), device=q.device) < num_reqs.reshape(()), q, 0)
    return torch.where(q > 0, slots.long().view(-1, len(q)), 0), q


def ring_advance(
    ring_start, ring_committed, slots, query_lens, num_accepted, is_prefilling=None, num_reqs=None, *, window, ring_len,
) -> None:
    at, q = advanced_rows(slots, query_lens, num_reqs)
    start, committed = ring_start.gather(1, at).long(), ring_committed.gather(1, at).long()
    flushed = committed + q > window
    start = torch.where(flushed, (start + committed) % ring_len, start)
    committed = torch.where(flushed, 0, committed) + torch.minimum(num_accepted.long().clamp(min=0), q)
    for cursors, new in ((ring_start, start), (ring_committed, committed)):
        if is_prefilling is not None:
            new = torch.where(is_prefilling != 0, 0, new)
        store_cursors(cursors, scatter_slots(cursors, at, at > 0, new))


class CommitRows(NamedTuple):
    """What a commit step does, by row [B], by group and row [G, B], by row and column [B, C]. All bool or int64."""

    active: Tensor  # [B] rows that took part in the step
    prefilling: Tensor  # [B] active rows of the prefill route
    q: Tensor  # [B]
    accepted: Tensor  # [B]
    after: Tensor  # [B] computed tokens after the step
    edge: Tensor  # [B] last block edge at or before `after`
    touched: Tensor  # [B, C] columns whose cursors a prefill resets
    live: Tensor  # [G, B] slot, 0 = none
    dst: Tensor  # [G, B] slot of the snapshot, 0 = none
    decoding: Tensor  # [G, B] rows of the decode route with a live slot
    planned: Tensor  # [G, B] snapshots


def commit_rows(block_tables, query_start_loc, query_lens, num_computed, num_accepted, is_prefilling, live_cols,
                idx_mapping, block_size, post_step, materialize) -> CommitRows:
    rows, width = block_tables.shape[1:]
    req, mapped = row_requests(idx_mapping, rows, block_tables.device)
    q = (query_start_loc.diff() if query_lens is None else query_lens).long()
    active = mapped & (q > 0)
    prefilling, decode = active & (is_prefilling != 0), active & (is_prefilling == 0)
    accepted = torch.minimum(of_rows(num_accepted, req, mapped).clamp(min=0), q)
    computed = of_rows(num_computed, req, mapped)
    after = computed if post_step else computed + torch.where(prefilling, q, accepted)
    edge = after // block_size * block_size
    running = torch.where(prefilling, after, after - accepted + 1)

    live_col = torch.zeros_like(req) if live_cols is None else of_rows(live_cols, req, mapped, absent=-1)
    dst_col = edge // block_size - 1
    live, dst = table_slots(block_tables, live_col), table_slots(block_tables, dst_col)
    # in place is right only at the edge itself: past it, the rows beyond the edge would be lost
    in_place = torch.where(prefilling, live_col == dst_col, (live == dst) & (edge < after))
    due = active & (edge > 0) & (edge >= running)
    planned = due & (live > 0) & (dst > 0) & ~in_place

    column = torch.arange(width, device=block_tables.device)
    touched = column == live_col[:, None]
    if materialize:
        first, last = (after - q) // block_size, (after - 1) // block_size
        touched = touched | ((column >= first[:, None]) & (column <= last[:, None]))
    else:
        planned = torch.zeros_like(planned)
    touched = touched & prefilling[:, None]
    return CommitRows(active, prefilling, q, accepted, after, edge, touched, live, dst, decode & (live > 0), planned)


def ring_commit(
    ring_start, ring_committed, src_slots, dst_slots, plan_start, plan_count, block_tables, query_start_loc, query_lens,
    num_computed, num_accepted, is_prefilling, live_cols, idx_mapping, *, block_size, window, ring_len, post_step,
    materialize,
) -> None:
    rows = commit_rows(block_tables, query_start_loc, query_lens, num_computed, num_accepted, is_prefilling, live_cols,
                       idx_mapping, block_size, post_step, materialize)
    groups, slots = ring_start.shape
    q, accepted, live = rows.q, rows.accepted, rows.live
    start, committed = ring_start.gather(1, live).long(), ring_committed.gather(1, live).long()
    flushed = committed + q > window
    new_start = torch.where(flushed, (start + committed) % ring_len, start)
    new_committed = torch.where(flushed, 0, committed) + accepted

    touched = torch.where(rows.touched, block_tables, 0).flatten(1).long().clamp(min=0)
    nothing = torch.zeros(groups, slots, dtype=torch.bool, device=ring_start.device)
    cleared = scatter_slots(nothing, touched, touched > 0, torch.ones_like(touched))
    # published slots end at 0, 0 even when the live update above them wrote the same slot
    cleared = cleared | scatter_slots(nothing, rows.dst, rows.planned, torch.ones_like(rows.dst))
    for cursors, new in ((ring_start, new_start), (ring_committed, new_committed)):
        store_cursors(cursors, torch.where(cleared, 0, scatter_slots(cursors, live, rows.decoding, new)))

    running = rows.after - accepted + 1
    replayed = rows.edge - running + 1 + torch.where(flushed, 0, committed)
    count = torch.where(rows.prefilling, 0, replayed)
    src_slots.copy_(torch.where(rows.planned, live, 0))
    dst_slots.copy_(torch.where(rows.planned, rows.dst, 0))
    plan_start.copy_(torch.where(rows.planned & ~rows.prefilling, new_start, 0))
    plan_count.copy_(torch.where(rows.planned, count, -1))


def compact_active(plan_count, num_reqs, *, out) -> None:
    active_rows, num_active = out
    rows = plan_count.shape[1]
    row = torch.arange(rows, device=plan_count.device)
    planned = (plan_count >= 0).any(0) & (row < num_reqs.reshape(()))
    place = torch.where(planned, planned.cumsum(0) - 1, rows)
    listed = torch.full((rows + 1,), -1, dtype=torch.int64, device=plan_count.device).scatter(0, place, row)
    active_rows.copy_(listed[:rows])
    num_active.copy_(planned.sum(0, keepdim=True))
