"""Life of the rings around a decode step: block tables by row, cursors that follow their slots, commit, snapshots.

A slot's logical state is its checkpoint advanced by `committed` ring rows from row `start`. All layers of a cache group
share one pair of cursors per slot, so that the ops here run once per step, for all layers.

Sizes: G cache groups, S slots, B batch rows, C block-table columns, R ring rows, W ring window, reqs requests. Slot 0
is the null slot: nothing is stored to it, and it stands for "no slot". A row belongs to request idx_mapping[row] (no
mapping: the request of the same number; negative: none). Index tensors are int32 or int64.
"""

from typing import Optional

import torch
from torch import Tensor

from .. import check
from ..check import INDEX, Shapes, require
from ..registry import register
from . import naive
from .values import advance_values, commit_values, gather_values, reset_values

I32 = (torch.int32,)
FLAG = (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64)


def _check_requests(shapes: Shapes, idx_mapping: Optional[Tensor]) -> None:
    """idx_mapping [B], or at least as many requests as rows."""
    shapes("idx_mapping", idx_mapping, "B", INDEX)
    if idx_mapping is None:
        require(shapes.reqs >= shapes.B, shapes.op, "idx_mapping", f"None with {shapes.reqs} requests",
                f"a mapping, or a request for each of {shapes.B} rows")


@register(mutates=("block_tables",), cpu=naive.gather_block_tables,
          cuda="torch_replay.ops.ring.kernels", check_values=gather_values, inline_on_cpu=True)
def gather_block_tables(block_tables: Tensor, request_tables: Tensor, idx_mapping: Tensor, num_reqs: Tensor) -> None:
    """Block tables of the batch: row b gets the table of request idx_mapping[b].

    Args:
        block_tables: [G, B, C] int32 or int64. Mutated, every element: rows from num_reqs on and rows without a request
            become null (0).
        request_tables: [G, max_reqs, C] int32 or int64.
        idx_mapping: [B]. Negative: the row is empty. Not read from num_reqs on.
        num_reqs: one element, the number of leading rows in use.

    Raises:
        ValueError: shapes and dtypes; on a CPU also a request or num_reqs out of range.
    """
    shapes = Shapes("gather_block_tables")
    shapes("block_tables", block_tables, "G B C", INDEX)
    shapes("request_tables", request_tables, "G max_reqs C", INDEX)
    shapes("idx_mapping", idx_mapping, "B", INDEX)
    shapes.count("num_reqs", num_reqs)


@register(mutates=("ring_start", "ring_committed"), cpu=naive.ring_reset,
          cuda="torch_replay.ops.ring.kernels", check_values=reset_values, cursor_dims=2)
def _ring_reset(
    ring_start: Tensor,
    ring_committed: Tensor,
    block_tables: Tensor,
    src_cols: Tensor,
    dst_cols: Tensor,
    idx_mapping: Optional[Tensor] = None,
) -> None:
    """Cursors of slots that a step starts to use: copied from the slot they continue, or 0, 0.

    Per row and group, the destination is the slot in column dst_cols[req] of the row's table, the source likewise; a
    column outside the table, a null slot and a row without a request mean "none". A destination that is not its own
    source takes the source's cursors, or 0, 0 without a source. All reads come before all writes, so that chains
    (1 to 2 and 2 to 3) and swaps in one call work. Checkpoint and ring rows must be copied along (`copy_slots`).

    Args:
        ring_start, ring_committed: [G, S] int32, or [S] with one group. Mutated: destination slots.
        block_tables: [G, B, C].
        src_cols, dst_cols: [reqs].
        idx_mapping: [B] or None.

    Raises:
        ValueError: shapes and dtypes; on a CPU also a request or slot out of range and a destination named twice.
    """
    shapes = Shapes("ring_reset")
    shapes("ring_start", ring_start, "G S", I32)
    shapes("ring_committed", ring_committed, "G S", I32)
    shapes("block_tables", block_tables, "G B C", INDEX)
    shapes("src_cols", src_cols, "reqs", INDEX)
    shapes("dst_cols", dst_cols, "reqs", INDEX)
    _check_requests(shapes, idx_mapping)


def ring_reset(
    ring_start: Tensor,
    ring_committed: Tensor,
    block_tables: Tensor,
    src_cols: Tensor,
    dst_cols: Tensor,
    idx_mapping: Optional[Tensor] = None,
    num_reqs: Optional[Tensor] = None,
) -> None:
    idx_mapping = _used_rows("ring_reset", block_tables, idx_mapping, num_reqs)
    return _ring_reset(ring_start, ring_committed, block_tables, src_cols, dst_cols, idx_mapping)


NUM_REQS = """

    `num_reqs`, the last argument by position, is None or one element, the number of leading rows in use: rows from
    there on have no request. The op itself does not take it, see `_used_rows`.
"""
ring_reset.__doc__ = _ring_reset.__doc__ + NUM_REQS


def _used_rows(op: str, block_tables, idx_mapping: Optional[Tensor], num_reqs: Optional[Tensor]) -> Optional[Tensor]:
    """idx_mapping in which rows from num_reqs on have no request. One small kernel, which a compiled step fuses."""
    if num_reqs is None:
        return idx_mapping
    if not isinstance(num_reqs, Tensor) or num_reqs.numel() != 1:
        raise TypeError(f"{op}: num_reqs is {num_reqs}, expected a tensor of one element")
    rows = block_tables.shape[1]
    row = torch.arange(rows, dtype=torch.int32, device=block_tables.device)
    if idx_mapping is not None and idx_mapping.shape != row.shape:
        return idx_mapping  # which the op refuses
    return torch.where(row < num_reqs.reshape(()), row if idx_mapping is None else idx_mapping, -1)


@register(mutates=("ring_start", "ring_committed", "src_slots", "dst_slots", "plan_start", "plan_count"),
          cpu=naive.ring_commit, cuda="torch_replay.ops.ring.kernels", check_values=commit_values, cursor_dims=2)
def _ring_commit(
    ring_start: Tensor,
    ring_committed: Tensor,
    src_slots: Tensor,
    dst_slots: Tensor,
    plan_start: Tensor,
    plan_count: Tensor,
    block_tables: Tensor,
    query_start_loc: Optional[Tensor],
    query_lens: Optional[Tensor],
    num_computed: Tensor,
    num_accepted: Tensor,
    is_prefilling: Tensor,
    live_cols: Optional[Tensor],
    idx_mapping: Optional[Tensor],
    *,
    block_size: int,
    window: int,
    ring_len: int,
    post_step: bool,
    materialize: bool,
) -> None:
    """Once per step, after sampling: moves the cursors of every row and plans the snapshots that are due.

    With q the row's tokens in this step, `accepted` clamped to [0, q], and `after` the tokens computed by its end:

    * A row without a request or with q = 0 moves nothing.
    * Decode: the forward flushed iff committed + q > window. Flushed: start = (start + committed) % R and
      committed = accepted; else committed += accepted. So accepted = 0 commits nothing, but follows a flush.
    * Prefill (the forward wrote the checkpoint itself): cursors 0, 0 for the live slot and, if `materialize`, for every
      block column that the chunk touched, columns before // block_size .. (after - 1) // block_size.
    * Snapshot (`materialize` only): with edge = after // block_size * block_size and running = after for a prefill,
      else after - accepted + 1, one is due iff edge > 0 and edge >= running: only the last of several edges that one
      step crosses. It goes to the slot in column edge // block_size - 1, in each group that has a live slot and a slot
      there. A decode row folds edge - running + 1 ring rows, and those committed before unless they were flushed, from
      the start cursor as this op leaves it; a prefill copies (count 0) unless its live column is the destination.
    * Published slots end with cursors 0, 0, also the live slot when it is published in place. In place is right only
      with edge == after: past the edge there is no plan, and the live slot keeps its rows.

    Args:
        ring_start, ring_committed: [G, S] int32 cursors, or [S] with one group. Mutated: live, touched and published
            slots.
        src_slots, dst_slots, plan_start, plan_count: [G, B] int32, arguments of a materialise op. Mutated, every
            element; without a snapshot 0, 0, 0, -1.
        block_tables: [G, B, C] slots.
        query_start_loc: [B + 1], or query_lens: [B]; the other is None.
        num_computed: [reqs] tokens computed before this step, or after it with `post_step`.
        num_accepted: [reqs] tokens that stay, the sampled one included. Read for decode rows only.
        is_prefilling: [B] bool or integer, the route that this forward took: a last prompt chunk that ran as a decode
            row is False, with accepted = q.
        live_cols: [reqs] column of the slot that the request's state lives in; None: column 0.
        idx_mapping: [B] or None.
        block_size: tokens a block. window: W of this forward, 0 for the small-batch route. ring_len: R.
        post_step: num_computed already counts this step.
        materialize: False: no snapshots (mode none), every plan is empty.

    Raises:
        ValueError: shapes, dtypes, sizes; on a CPU also requests, slots, lengths and cursors out of range, a decode row
            longer than the window (when that is not 0), and a live slot that another row moves or publishes.
    """
    shapes = Shapes("ring_commit")
    op = shapes.op
    shapes("ring_start", ring_start, "G S", I32)
    shapes("ring_committed", ring_committed, "G S", I32)
    shapes("block_tables", block_tables, "G B C", INDEX)
    for name, plan in (("src_slots", src_slots), ("dst_slots", dst_slots), ("plan_start", plan_start),
                       ("plan_count", plan_count)):
        shapes(name, plan, "G B", I32)
    lens = query_lens
    require((query_start_loc is None) != (lens is None), op, "query_start_loc",
            f"{'None' if query_start_loc is None else 'given'}, query_lens {'None' if lens is None else 'given'}",
            "exactly one of the two")
    shapes("query_lens", query_lens, "B", INDEX)
    shapes("query_start_loc", query_start_loc, "B+1", INDEX)
    if query_start_loc is not None:
        require(query_start_loc.shape[0] == shapes.B + 1, op, "query_start_loc",
                f"of shape {tuple(query_start_loc.shape)}", f"[B+1] with B = {shapes.B}")
    shapes("num_computed", num_computed, "reqs", INDEX)
    shapes("num_accepted", num_accepted, "reqs", INDEX)
    shapes("is_prefilling", is_prefilling, "B", FLAG)
    shapes("live_cols", live_cols, "reqs", INDEX)
    _check_requests(shapes, idx_mapping)
    require(block_size >= 1, op, "block_size", block_size, "1 or more")
    require(window >= 0, op, "window", window, "0 or more")
    require(ring_len > window, op, "ring_len", ring_len, f"more than window = {window}")


def ring_commit(
    ring_start: Tensor,
    ring_committed: Tensor,
    src_slots: Optional[Tensor],
    dst_slots: Optional[Tensor],
    plan_start: Optional[Tensor],
    plan_count: Optional[Tensor],
    block_tables: Tensor,
    query_start_loc: Optional[Tensor] = None,
    query_lens: Optional[Tensor] = None,
    num_computed: Optional[Tensor] = None,
    num_accepted: Optional[Tensor] = None,
    is_prefilling: Optional[Tensor] = None,
    live_cols: Optional[Tensor] = None,
    idx_mapping: Optional[Tensor] = None,
    num_reqs: Optional[Tensor] = None,
    *,
    block_size: int,
    window: int,
    ring_len: int,
    post_step: bool,
    materialize: bool,
) -> None:
    # The op's order puts required arguments behind optional ones, which a schema allows only without defaults.
    required = {"num_computed": num_computed, "num_accepted": num_accepted, "is_prefilling": is_prefilling}
    for name, value in required.items():
        if value is None:
            raise TypeError(f"ring_commit: missing a required argument: '{name}'")
    plans = src_slots, dst_slots, plan_start, plan_count
    if not materialize and all(plan is None for plan in plans):  # written, and read by nobody
        plans = tuple(block_tables.new_empty(block_tables.shape[:2], dtype=torch.int32) for _ in plans)
    idx_mapping = _used_rows("ring_commit", block_tables, idx_mapping, num_reqs)
    return _ring_commit(
        ring_start, ring_committed, *plans, block_tables, query_start_loc,
        query_lens, num_computed, num_accepted, is_prefilling, live_cols, idx_mapping, block_size=block_size,
        window=window, ring_len=ring_len, post_step=post_step, materialize=materialize)


ring_commit.__doc__ = _ring_commit.__doc__ + NUM_REQS + """
    With materialize=False the four plan tensors may be None.
"""


@register(mutates=("ring_start", "ring_committed"), cpu=naive.ring_advance,
          cuda="torch_replay.ops.ring.kernels", check_values=advance_values, cursor_dims=2)
def ring_advance(
    ring_start: Tensor,
    ring_committed: Tensor,
    slots: Tensor,
    query_lens: Tensor,
    num_accepted: Tensor,
    is_prefilling: Optional[Tensor] = None,
    num_reqs: Optional[Tensor] = None,
    *,
    window: int,
    ring_len: int,
) -> None:
    """The commit of a host without snapshots: cursors move as by `ring_commit`, everything is given by row.

    With q = query_lens[b] and `accepted` clamped to [0, q], the cursors of the row's slot in each group:

    * a row with q = 0 and a null slot (0) move nothing;
    * decode: flushed iff committed + q > window, by the forward. Flushed: start = (start + committed) % R and
      committed = accepted; else committed += accepted;
    * prefill, whose forward wrote the checkpoint itself: 0, 0.

    Args:
        ring_start, ring_committed: [G, S] int32 cursors, or [S] with one group. Mutated: slots of rows with tokens.
        slots: [G, B] slots that the rows live in, or [B] with one group.
        query_lens: [B] tokens of each row in this step.
        num_accepted: [B] tokens that stay, the sampled one included. Read for decode rows only.
        is_prefilling: [B] bool or integer, the route that this forward took; None: all rows decoded.
        num_reqs: one element, the number of leading rows in use; None: all.
        window: W of this forward, 0 for the small-batch route. ring_len: R.

    Raises:
        ValueError: shapes, dtypes, sizes; on a CPU also slots, lengths and cursors out of range, a decode row longer
            than the window (when that is not 0), and a slot that two rows of a group live in.
    """
    shapes = Shapes("ring_advance")
    op = shapes.op
    shapes("ring_start", ring_start, "G S", I32)
    shapes("ring_committed", ring_committed, "G S", I32)
    shapes.require_tensor("slots", slots)
    shapes("slots", slots.unsqueeze(0) if slots.dim() == 1 else slots, "G B", INDEX)
    shapes("query_lens", query_lens, "B", INDEX)
    shapes("num_accepted", num_accepted, "B", INDEX)
    shapes("is_prefilling", is_prefilling, "B", FLAG)
    if num_reqs is not None:
        shapes.count("num_reqs", num_reqs)
    require(window >= 0, op, "window", window, "0 or more")
    require(ring_len > window, op, "ring_len", ring_len, f"more than window = {window}")


def _compact_values(plan_count, num_reqs) -> None:
    check.require_range("compact_active", "num_reqs", num_reqs, 0, plan_count.shape[1])


@register(cpu=naive.compact_active, cuda="torch_replay.ops.ring.kernels", check_values=_compact_values)
def compact_active(plan_count: Tensor, num_reqs: Tensor) -> tuple[Tensor, Tensor]:
    """Batch rows that have a plan in any group, compacted: the `active_rows` of the materialise ops.

    Args:
        plan_count: [G, B]; below 0 is no plan. Not read from num_reqs on.
        num_reqs: one element, the number of leading rows in use.

    Returns:
        active_rows: int32 [B], rows in ascending order, then -1.
        num_active: int32 [1], how many.

    Raises:
        ValueError: shapes and dtypes; on a CPU also num_reqs out of range.
    """
    shapes = Shapes("compact_active")
    shapes("plan_count", plan_count, "G B", INDEX)
    shapes.count("num_reqs", num_reqs)
    active_rows = plan_count.new_empty(plan_count.shape[1], dtype=torch.int32)
    return active_rows, plan_count.new_empty(1, dtype=torch.int32)
