"""What the caller of the ring ops must guarantee, checked on a CPU before anything is written.

On a GPU the same mistakes are not seen: looking at values would need a host sync.
"""

import torch

from ..check import fail, require_distinct_slots, require_range
from . import naive


def _check_requests(op: str, block_tables, idx_mapping, reqs: int) -> None:
    if idx_mapping is not None:
        require_range(op, "idx_mapping", idx_mapping.clamp(min=-1), -1, reqs - 1)


def gather_values(block_tables, request_tables, idx_mapping, num_reqs) -> None:
    op = "gather_block_tables"
    require_range(op, "num_reqs", num_reqs, 0, block_tables.shape[1])
    _check_requests(op, block_tables, idx_mapping[: int(num_reqs)], request_tables.shape[1])


def reset_values(ring_start, ring_committed, block_tables, src_cols, dst_cols, idx_mapping=None) -> None:
    op, slots = "ring_reset", ring_start.shape[1]
    _check_requests(op, block_tables, idx_mapping, src_cols.shape[0])
    source, target = naive.reset_slots(block_tables, src_cols, dst_cols, idx_mapping)
    require_range(op, "block_tables", source, 0, slots - 1)
    require_range(op, "block_tables", target, 0, slots - 1)
    for group, named in enumerate(target):
        named = named[named > 0]
        if named.unique().numel() != named.numel():
            fail(op, "dst_cols", f"naming slots {named.tolist()} of group {group}", "every slot at most once")


def advance_values(
    ring_start, ring_committed, slots, query_lens, num_accepted, is_prefilling=None, num_reqs=None, *, window, ring_len,
) -> None:
    op, rows = "ring_advance", len(query_lens)
    if num_reqs is not None:
        require_range(op, "num_reqs", num_reqs, 0, rows)
    moving, q = naive.advanced_rows(slots, query_lens, num_reqs)
    require_range(op, "query_lens", q, 0, ring_len if is_prefilling is None else 2**31 - 1)
    require_range(op, "slots", moving, 0, ring_start.shape[1] - 1)
    decoding = torch.ones_like(q, dtype=torch.bool) if is_prefilling is None else is_prefilling == 0
    if window > 0:
        require_range(op, "query_lens", q[decoding], 0, window)
    for group, named in enumerate(moving):
        require_distinct_slots(op, "slots", named)
        row = ((named > 0) & decoding).nonzero().squeeze(1)
        committed = ring_committed[group, named[row]]
        require_range(op, "ring_start", ring_start[group, named[row]], 0, ring_len - 1)
        require_range(op, "ring_committed", committed, 0, window or ring_len)
        if (committed + q[row] > ring_len).any():
            fail(op, "ring_len", ring_len, f"room for committed + q = {int((committed + q[row]).max())} rows")


def commit_values(
    ring_start, ring_committed, src_slots, dst_slots, plan_start, plan_count, block_tables, query_start_loc, query_lens,
    num_computed, num_accepted, is_prefilling, live_cols, idx_mapping, *, block_size, window, ring_len, post_step,
    materialize,
) -> None:
    op, slots = "ring_commit", ring_start.shape[1]
    _check_requests(op, block_tables, idx_mapping, num_computed.shape[0])
    rows = naive.commit_rows(block_tables, query_start_loc, query_lens, num_computed, num_accepted, is_prefilling,
                             live_cols, idx_mapping, block_size, post_step, materialize)
    lengths = "query_start_loc" if query_lens is None else "query_lens"
    _, mapped = naive.row_requests(idx_mapping, block_tables.shape[1], block_tables.device)
    if (rows.q[mapped] < 0).any():
        fail(op, lengths, f"{rows.q.tolist()} tokens by row", "0 or more")
    decode = rows.active & ~rows.prefilling
    too_long = decode & (rows.q > window)
    if window > 0 and too_long.any():
        fail(op, lengths, f"{int(rows.q[too_long][0])} tokens in decode row {int(too_long.nonzero()[0])}",
             f"at most window = {window}")
    before = torch.where(rows.prefilling, rows.after - rows.q, rows.after - rows.accepted)[rows.active]
    if (before < 0).any():
        fail(op, "num_computed", f"{num_computed.tolist()} ({'after' if post_step else 'before'} the step)",
             "no row to have begun before token 0")
    require_range(op, "block_tables", block_tables[:, rows.active], 0, slots - 1)
    for group in range(len(ring_start)):
        moving = rows.decoding[group]
        live, q = rows.live[group, moving], rows.q[moving]
        committed = ring_committed[group, live]
        require_range(op, "ring_start", ring_start[group, live], 0, ring_len - 1)
        require_range(op, "ring_committed", committed, 0, window or ring_len)
        if (committed + q > ring_len).any():
            fail(op, "ring_len", ring_len, f"room for committed + q = {int((committed + q).max())} rows")
        _check_conflicts(op, group, rows, block_tables[group].long())


def _check_conflicts(op: str, group: int, rows, table) -> None:
    """A live slot belongs to one row; no other row resets or publishes it, and no two rows publish to one slot."""
    live = torch.where(rows.active, rows.live[group], 0)
    published = torch.where(rows.planned[group], rows.dst[group], 0)
    for named, what in ((live, "live"), (published, "published")):
        named = named[named > 0]
        if named.unique().numel() != named.numel():
            fail(op, "block_tables", f"making slots {named.tolist()} {what} in group {group}", "each in one row only")
    written = torch.cat([published[:, None], torch.where(rows.touched, table, 0)], 1)
    taken = (written[:, :, None] == live) & (live > 0)  # row, written slot, row whose live slot it is
    taken &= ~torch.eye(len(live), dtype=torch.bool)[:, None]
    if taken.any():
        row, _, other = taken.nonzero()[0].tolist()
        fail(op, "block_tables", f"letting row {row} write slot {int(live[other])} of group {group}",
             f"no slot that row {other} lives in")
