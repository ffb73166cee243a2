"""Where a step's tokens stand and where their keys and values go: positions, slot mappings, and the write itself.

A batch of B rows lies in one flat dimension of `tokens`. Row r owns tokens `query_start_loc[r]` up to, not including,
`query_start_loc[r + 1]`; of these the first q are real, `q = query_lens[r]` where given, else the row's width. Two
layouts use this:

    ragged    query_start_loc counts real tokens, query_lens is None
    uniform   query_start_loc[r] = r T, query_lens says how many of the T are real: one static shape for ragged drafts

Everything else (tokens i >= q of a row, tokens past the last row) is filler and gets the value that means "nothing".

After a prefix hit the window of keys before it is computed again, from `replay_start` on ("bounded replay"). What the
other groups hold there is shared, and exact where the new values are not: `pad_replayed_slots` keeps it.

Sizes: B batch rows, reqs request slots, G cache groups, C block-table columns, KVH key/value heads, D head dim. A slot
is `block * block_size + offset`; block 0 is the null block, which is never written; slot -1 (PAD_SLOT) means no slot.
"""

from typing import Optional

import torch
from torch import Tensor

from ..check import FLOAT, I32, INDEX, Shapes, fail, require, require_distinct_slots, require_range
from ..registry import register
from . import naive

I64 = (torch.int64,)
CACHE = "blocks block_size 2 KVH D"


def check_layout(shapes: Shapes, query_start_loc: Tensor, query_lens: Optional[Tensor]) -> None:
    """Shapes of the two tensors that lay rows out over tokens; B is bound already. Shared with the attention ops."""
    shapes("query_start_loc", query_start_loc, "B+1", INDEX)
    shapes("query_lens", query_lens, "B", INDEX)
    require(shapes.B >= 1, shapes.op, "query_start_loc", f"for {shapes.B} rows", "1 row or more")
    require(query_start_loc.shape[0] == shapes.B + 1, shapes.op, "query_start_loc",
            f"of shape {tuple(query_start_loc.shape)}", f"[B+1] with B = {shapes.B}")


def check_layout_values(op: str, query_start_loc: Tensor, query_lens: Optional[Tensor], tokens: int) -> None:
    """Rows lie within the tokens, in order, and none has more real tokens than its width. For CPU tensors only."""
    require_range(op, "query_start_loc", query_start_loc, 0, tokens)
    width = query_start_loc.diff()
    if (width < 0).any():
        fail(op, "query_start_loc", query_start_loc.tolist(), "values that never decrease")
    if query_lens is not None and ((query_lens < 0) | (query_lens > width)).any():
        fail(op, "query_lens", query_lens.tolist(), f"values in [0, width of the row], widths {width.tolist()}")


def check_cache_slots(op: str, argument: str, slots: Tensor, cache: Tensor) -> None:
    """Non-negative slots lie in the cache, outside the null block. For CPU tensors only."""
    block_size = cache.shape[1]
    require_range(op, argument, slots[slots >= 0], block_size, cache.shape[0] * block_size - 1)


def _positions_values(positions, seq_lens, idx_mapping, query_start_loc, num_computed, query_lens=None) -> None:
    op = "prepare_positions"
    check_layout_values(op, query_start_loc, query_lens, positions.shape[0])
    used = idx_mapping[idx_mapping >= 0]
    require_range(op, "idx_mapping", used, 0, num_computed.shape[0] - 1)
    require_range(op, "num_computed", num_computed[used], 0, 2**31 - 1)


@register(mutates=("positions", "seq_lens"), cpu=naive.prepare_positions,
          cuda="torch_replay.ops.tokens.kernels", check_values=_positions_values)
def prepare_positions(
    positions: Tensor,
    seq_lens: Tensor,
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    num_computed: Tensor,
    query_lens: Optional[Tensor] = None,
) -> None:
    """Positions and sequence lengths of a step: token i of a row stands at `num_computed[req] + i`.

    Args:
        positions: [tokens] int64. Mutated: all of it; 0 for filler tokens and for tokens of empty rows.
        seq_lens: [B] int32. Mutated: `num_computed[req] + q`; 0 for empty rows.
        idx_mapping: [B], request of each row; negative: the row is empty.
        query_start_loc: [B + 1]. query_lens: [B] or None. See the head of this file.
        num_computed: [reqs], tokens computed before this step, by request.

    Raises:
        ValueError: shapes, dtypes; on a CPU also query_start_loc that decreases or leaves the tokens, query_lens beyond
            a row's width, a request out of range, a negative num_computed.
    """
    shapes = Shapes("prepare_positions")
    shapes("positions", positions, "tokens", I64)
    shapes("seq_lens", seq_lens, "B", I32)
    shapes("idx_mapping", idx_mapping, "B", INDEX)
    check_layout(shapes, query_start_loc, query_lens)
    shapes("num_computed", num_computed, "reqs", INDEX)
    require(shapes.reqs >= 1, shapes.op, "num_computed", f"of {shapes.reqs} requests", "1 or more")


def _mapping_values(slot_mappings, block_tables, query_start_loc, positions, block_sizes, query_lens=None) -> None:
    op, tokens = "compute_slot_mappings", positions.shape[0]
    check_layout_values(op, query_start_loc, query_lens, tokens)
    require_range(op, "block_sizes", block_sizes, 1, 2**31 - 1)
    _, _, real = naive.token_rows(query_start_loc, query_lens, tokens)
    require_range(op, "positions", positions[real], 0, 2**63 - 1)


@register(mutates=("slot_mappings",), cpu=naive.compute_slot_mappings,
          cuda="torch_replay.ops.tokens.kernels", check_values=_mapping_values)
def compute_slot_mappings(
    slot_mappings: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    block_sizes: Tensor,
    query_lens: Optional[Tensor] = None,
) -> None:
    """The slot of every token in every cache group: `table[pos // size] * size + pos % size`, in 64-bit arithmetic.

    Args:
        slot_mappings: [G, tokens] int64. Mutated: all of it; -1 for filler tokens, for positions beyond the table's C
            columns, and where the table names the null block (0, or a negative entry).
        block_tables: [G, B, C].
        query_start_loc: [B + 1]. query_lens: [B] or None. See the head of this file.
        positions: [tokens]. block_sizes: [G], tokens a block of each group.

    Raises:
        ValueError: shapes, dtypes; on a CPU also a bad layout, a block size below 1, a negative position of a real
            token.
    """
    shapes = Shapes("compute_slot_mappings")
    shapes("slot_mappings", slot_mappings, "G tokens", I64)
    shapes("block_tables", block_tables, "G B C", INDEX)
    check_layout(shapes, query_start_loc, query_lens)
    shapes("positions", positions, "tokens", INDEX)
    shapes("block_sizes", block_sizes, "G", INDEX)
    require(shapes.C >= 1, shapes.op, "block_tables", f"of {shapes.C} columns", "1 or more")


def _pad_values(slot_mappings, cacheable_groups, query_start_loc, positions, replay_start, query_lens=None, *,
                window) -> None:
    op = "pad_replayed_slots"
    require_range(op, "cacheable_groups", cacheable_groups, 0, slot_mappings.shape[0] - 1)
    check_layout_values(op, query_start_loc, query_lens, positions.shape[0])
    require_range(op, "replay_start", replay_start, 0, 2**31 - 1)


@register(mutates=("slot_mappings",), cpu=naive.pad_replayed_slots,
          cuda="torch_replay.ops.tokens.kernels", check_values=_pad_values)
def pad_replayed_slots(
    slot_mappings: Tensor,
    cacheable_groups: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    replay_start: Tensor,
    query_lens: Optional[Tensor] = None,
    *,
    window: int,
) -> None:
    """Takes the slots of replayed tokens away, so that nothing shared is overwritten; before any metadata is built.

    A token is replayed if its row has a `replay_start` above 0 and `replay_start <= position < replay_start + window`.
    Since positions decide, the chunks of a prompt may end anywhere.

    Args:
        slot_mappings: [G, tokens] int64. Mutated: -1 at replayed tokens, in the rows of `cacheable_groups` alone; the
            window groups' own slots stay.
        cacheable_groups: [n], groups whose blocks the prefix cache shares.
        query_start_loc: [B + 1]. query_lens: [B] or None. See the head of this file.
        positions: [tokens]. replay_start: [B], by row; 0: the row replays nothing.
        window: tokens replayed, the attention window.

    Raises:
        ValueError: shapes, dtypes, a window below 1; on a CPU also a group out of range, a bad layout, a negative
            start.
    """
    shapes = Shapes("pad_replayed_slots")
    require(window >= 1, shapes.op, "window", window, "1 or more")
    shapes("slot_mappings", slot_mappings, "G tokens", I64)
    shapes("cacheable_groups", cacheable_groups, "n", INDEX)
    shapes("replay_start", replay_start, "B", INDEX)
    check_layout(shapes, query_start_loc, query_lens)
    shapes("positions", positions, "tokens", INDEX)


def _gather_values(rows, kept_query_start_loc, kept_positions, kept_slot_mappings, kept_kv_start, query_start_loc,
                   dropped_before, seq_lens, replay_start, positions, slot_mappings, query_lens=None, *,
                   window) -> None:
    op = "gather_replay_rows"
    check_layout_values(op, query_start_loc, query_lens, positions.shape[0])
    kept = (query_start_loc - dropped_before).long()
    require_range(op, "dropped_before", kept, 0, rows.shape[0])
    each = kept.diff()
    if ((each < 0) | (each > naive.real_lengths(query_start_loc, query_lens))).any():
        fail(op, "dropped_before", dropped_before.tolist(), "values that leave every row 0 to q of its tokens")


@register(mutates=("rows", "kept_query_start_loc", "kept_positions", "kept_slot_mappings", "kept_kv_start"),
          cpu=naive.gather_replay_rows, cuda="torch_replay.ops.tokens.kernels", check_values=_gather_values)
def gather_replay_rows(
    rows: Tensor,
    kept_query_start_loc: Tensor,
    kept_positions: Tensor,
    kept_slot_mappings: Tensor,
    kept_kv_start: Tensor,
    query_start_loc: Tensor,
    dropped_before: Tensor,
    seq_lens: Tensor,
    replay_start: Tensor,
    positions: Tensor,
    slot_mappings: Tensor,
    query_lens: Optional[Tensor] = None,
    *,
    window: int,
) -> None:
    """The last tokens of each row, packed one row after the other: the sub-batch that decoder-side replay runs on.

    Row r keeps tokens `query_start_loc[r] - dropped_before[r]` up to `query_start_loc[r + 1] - dropped_before[r + 1]`
    of the sub-batch; they are its last real ones. Only their number comes from the host, so that a row whose length the
    device alone knows keeps its end.

    Args:
        rows: [n] int64. Mutated: the token that each kept one is.
        kept_query_start_loc: [B + 1] int32. Mutated: all of it, `query_start_loc - dropped_before`.
        kept_positions: [n] int64, kept_slot_mappings: [G, n] int64. Mutated: those of the kept tokens.
        kept_kv_start: [B] int32. Mutated: all of it, the first position that a row's windows may look at: replay_start,
            and not below `seq_len - window` if tokens were dropped, for then nothing has been written there.
        query_start_loc: [B + 1]. query_lens: [B] or None. See the head of this file.
        dropped_before: [B + 1], tokens (filler of the uniform layout included) that the rows before r lose.
        seq_lens: [B]. replay_start: [B], 0: the row replays nothing. positions: [tokens]. slot_mappings: [G, tokens].
        window: most tokens that a row keeps when it loses some.

    Entries of rows, kept_positions and kept_slot_mappings past the kept tokens are left as they are.

    Raises:
        ValueError: shapes, dtypes, a window below 1; on a CPU also a bad layout, and rows that would keep less than 0
            or more than q tokens, or more than n in all.
    """
    shapes = Shapes("gather_replay_rows")
    require(window >= 1, shapes.op, "window", window, "1 or more")
    shapes("rows", rows, "n", I64)
    shapes("kept_positions", kept_positions, "n", I64)
    shapes("kept_slot_mappings", kept_slot_mappings, "G n", I64)
    shapes("kept_kv_start", kept_kv_start, "B", I32)
    check_layout(shapes, query_start_loc, query_lens)
    for name, value, dtypes in (("kept_query_start_loc", kept_query_start_loc, I32),
                                ("dropped_before", dropped_before, INDEX)):
        shapes(name, value, "B+1", dtypes)
        require(value.shape[0] == shapes.B + 1, shapes.op, name, f"of shape {tuple(value.shape)}",
                f"[B+1] with B = {shapes.B}")
    shapes("seq_lens", seq_lens, "B", INDEX)
    shapes("replay_start", replay_start, "B", INDEX)
    shapes("positions", positions, "tokens", INDEX)
    shapes("slot_mappings", slot_mappings, "G tokens", I64)


def _write_values(cache, k, v, slot_mapping) -> None:
    check_cache_slots("write_kv", "slot_mapping", slot_mapping, cache)
    require_distinct_slots("write_kv", "slot_mapping", slot_mapping)


@register(mutates=("cache",), cpu=naive.write_kv, cuda="torch_replay.ops.tokens.kernels", check_values=_write_values)
def write_kv(cache: Tensor, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """Keys and values of a step's tokens into their slots of a paged cache.

    Args:
        cache: [blocks, block_size, 2, KVH, D], keys at index 0 of the third dimension and values at 1. Mutated: the
            slots named, nothing else. Any strides.
        k, v: [tokens, KVH, D], any strides (slices of one wide projection), converted to the cache's dtype.
        slot_mapping: [tokens]; a negative slot writes nothing. Nor does one of the null block, which raises on a CPU.

    Raises:
        ValueError: shapes, dtypes; on a CPU also a slot outside the cache or in the null block, and a slot named twice.
    """
    shapes = Shapes("write_kv")
    shapes("cache", cache, CACHE, FLOAT)
    shapes("k", k, "tokens KVH D", FLOAT)
    shapes("v", v, "tokens KVH D", FLOAT)
    shapes("slot_mapping", slot_mapping, "tokens", INDEX)
