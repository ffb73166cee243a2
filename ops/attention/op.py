"""Attention over a paged key/value cache: the slots of a sliding window, attention over them, and full attention.

    out = softmax(scale q K^T) V        over the positions that a token sees; query head h reads kv head h // (QH / KVH)

A token of a row stands at position `seq_len - q + i`, rows laid out over tokens as `ops/tokens/op.py` tells. Full
attention sees positions 0 .. pos; a sliding window sees `max(pos - window + 1, 0, replay_start) .. pos`. The last bound
belongs to bounded replay: after a prefix hit the window's keys are recomputed from replay_start on, and below it the
window group holds nothing.

Sizes: B batch rows, C block-table columns, QH query heads, KVH key/value heads, D head dim. A slot is
`block * block_size + offset`. Block 0 is the null block: it may hold anything, NaN included, and is never read.
"""

from typing import Optional

import torch
from torch import Tensor

from ..check import FLOAT, I32, INDEX, Shapes, fail, require, require_range
from ..registry import register
from ..tokens.naive import real_lengths
from ..tokens.op import CACHE, check_cache_slots, check_layout, check_layout_values
from . import naive


def _check_sequence_values(op: str, seq_lens, query_start_loc, query_lens, tokens: int) -> Tensor:
    """Layout and sequence lengths: a row with q tokens is at least q long, or 0 (an empty row). Returns q [B]."""
    check_layout_values(op, query_start_loc, query_lens, tokens)
    q = real_lengths(query_start_loc, query_lens)
    if ((seq_lens < q) & (seq_lens != 0)).any():
        fail(op, "seq_lens", seq_lens.tolist(), f"0 or at least the row's real tokens {q.tolist()}")
    return q


def _indices_values(indices, lens, seq_lens, query_start_loc, block_table, slot_mapping, replay_start=None,
                    query_lens=None, *, window, block_size) -> None:
    _check_sequence_values("swa_indices", seq_lens, query_start_loc, query_lens, len(lens))
    if indices.dtype == torch.int32:
        require_range("swa_indices", "block_table", block_table.clamp(min=0), 0, 2**31 // block_size - 1)


@register(mutates=("indices", "lens"), cpu=naive.swa_indices, cuda="torch_replay.ops.attention.kernels",
          check_values=_indices_values)
def swa_indices(
    indices: Tensor,
    lens: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    replay_start: Optional[Tensor] = None,
    query_lens: Optional[Tensor] = None,
    *,
    window: int,
    block_size: int,
) -> None:
    """The slots that each token's sliding window covers, oldest first; once a step for all layers of a window group.

    With `first = max(pos - window + 1, 0, replay_start)`: `lens = pos - first + 1` and `indices[k]` is the slot of
    position first + k for k < lens, -1 behind. Where the table names no block for such a position (null block, a column
    beyond C) the index is -1 too, and lens keeps counting it: `swa_attention` passes over negative indices.

    Args:
        indices: [tokens, window] int32 or int64. Mutated: all of it.
        lens: [tokens] int32. Mutated: all of it. 0, with a row of -1, for filler tokens and for tokens without a slot.
        seq_lens: [B], tokens of each row's sequence, the row's q new ones included; 0: the row reads nothing.
        query_start_loc: [B + 1]. query_lens: [B] or None. See `ops/tokens/op.py`.
        block_table: [B, C] of the window group. slot_mapping: [tokens], the window group's own slots, for those of
            prefix-cacheable groups are -1 at replayed tokens, which must stay valid here.
        replay_start: [B], first position that the row may look at; 0 or None: all.
        window: positions a token sees, itself included. block_size: tokens a block.

    Raises:
        ValueError: shapes, dtypes; on a CPU also a bad layout, sequences shorter than their new tokens, and blocks
            whose slots int32 indices cannot hold.
    """
    shapes = Shapes("swa_indices")
    require(window >= 1, shapes.op, "window", window, "1 or more")
    require(block_size >= 1, shapes.op, "block_size", block_size, "1 or more")
    shapes("indices", indices, "tokens window", INDEX)
    shapes("lens", lens, "tokens", I32)
    require(indices.shape[1] == window, shapes.op, "indices", f"of shape {tuple(indices.shape)}",
            f"[tokens, window] with window = {window}")
    shapes("seq_lens", seq_lens, "B", INDEX)
    check_layout(shapes, query_start_loc, query_lens)
    shapes("block_table", block_table, "B C", INDEX)
    require(shapes.C >= 1, shapes.op, "block_table", f"of {shapes.C} columns", "1 or more")
    shapes("slot_mapping", slot_mapping, "tokens", INDEX)
    shapes("replay_start", replay_start, "B", INDEX)


def _check_heads(shapes: Shapes, q: Tensor, cache: Tensor) -> None:
    shapes("q", q, "tokens QH D", FLOAT)
    shapes("cache", cache, CACHE, FLOAT)
    require(shapes.QH % shapes.KVH == 0, shapes.op, "q", f"of {shapes.QH} heads",
            f"a multiple of the cache's {shapes.KVH} heads")


def _swa_values(q, cache, indices, lens, *, scale) -> None:
    window = indices.shape[1]
    require_range("swa_attention", "lens", lens, 0, window)
    check_cache_slots("swa_attention", "indices", indices[torch.arange(window) < lens[:, None]], cache)


@register(cpu=naive.swa_attention, cuda="torch_replay.ops.attention.kernels", check_values=_swa_values)
def swa_attention(q: Tensor, cache: Tensor, indices: Tensor, lens: Tensor, *, scale: float) -> Tensor:
    """Attention of each token over the slots that `swa_indices` named for it.

    Args:
        q: [tokens, QH, D], any strides.
        cache: [blocks, block_size, 2, KVH, D], as `write_kv` fills it; QH a multiple of KVH.
        indices: [tokens, window], slots; a negative one is passed over, those from lens on are not looked at.
        lens: [tokens], indices in use.
        scale: factor of the scores, usually D ** -0.5.

    Returns:
        out: [tokens, QH, D] in q's dtype, computed in float32; 0 for tokens without a slot to read.

    Raises:
        ValueError: shapes, dtypes, heads; on a CPU also lens beyond the window and slots in use that lie outside the
            cache or in the null block.
    """
    shapes = Shapes("swa_attention")
    _check_heads(shapes, q, cache)
    shapes("indices", indices, "tokens window", INDEX)
    shapes("lens", lens, "tokens", INDEX)
    return q.new_empty(q.shape)


def _paged_values(q, cache, block_table, seq_lens, query_start_loc, query_lens=None, *, scale) -> None:
    op, (blocks, block_size) = "paged_attention", cache.shape[:2]
    new = _check_sequence_values(op, seq_lens, query_start_loc, query_lens, q.shape[0])
    length = torch.where(new > 0, seq_lens, 0)
    require_range(op, "seq_lens", length, 0, block_table.shape[1] * block_size)
    used = torch.arange(block_table.shape[1]) * block_size < length[:, None]
    require_range(op, "block_table", block_table[used].clamp(min=0), 0, blocks - 1)


@register(cpu=naive.paged_attention, cuda="torch_replay.ops.attention.kernels", check_values=_paged_values)
def paged_attention(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    query_lens: Optional[Tensor] = None,
    *,
    scale: float,
) -> Tensor:
    """Causal attention of each token over positions 0 .. pos of its sequence, through the block table.

    The keys and values of the step's own tokens are read from the cache as well: `write_kv` comes first.

    Args:
        q: [tokens, QH, D], any strides.
        cache: [blocks, block_size, 2, KVH, D], as `write_kv` fills it; QH a multiple of KVH.
        block_table: [B, C]. Only columns that hold positions below seq_len are read; positions in a null block there
            (dummy batches) are passed over.
        seq_lens: [B], tokens of each row's sequence, the row's q new ones included; 0: the row reads nothing.
        query_start_loc: [B + 1]. query_lens: [B] or None. See `ops/tokens/op.py`.
        scale: factor of the scores, usually D ** -0.5.

    Returns:
        out: [tokens, QH, D] in q's dtype, computed in float32; 0 for filler tokens and tokens that see nothing.

    Raises:
        ValueError: shapes, dtypes, heads; on a CPU also a bad layout, sequences shorter than their new tokens or longer
            than the table, and blocks outside the cache.
    """
    shapes = Shapes("paged_attention")
    _check_heads(shapes, q, cache)
    shapes("block_table", block_table, "B C", INDEX)
    shapes("seq_lens", seq_lens, "B", INDEX)
    check_layout(shapes, query_start_loc, query_lens)
    require(shapes.C >= 1, shapes.op, "block_table", f"of {shapes.C} columns", "1 or more")
    return q.new_empty(q.shape)
