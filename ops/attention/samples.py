"""Sample inputs of the attention ops. Whatever a token may not see holds NaN, or an index beyond the cache."""

import torch

from ..samples import Rng, table
from ..tokens.naive import look_up_slots
from ..tokens.samples import GARBAGE, layout, poisoned_cache, tables, wide_heads


def sequences(rng: Rng, q: torch.Tensor, longest: int, padded: int, contexts=None) -> list[int]:
    """Tokens computed before the step, by row: none at all and the longest among them; 0 for the padded rows."""
    computed = rng.integers(0, longest + 1, len(q)).tolist()
    computed[0] = longest
    if len(q) > 2:
        computed[2] = 0
    computed = list(contexts or computed)
    return computed[: len(q) - padded] + [0] * padded


def indices(rng: Rng, rows=4, tokens=1, window=8, block_size=4, longest=40, uniform=False, ragged=True, padded=0,
            tail=0, replay=None, slid=True, skipped=0, hole=False, contexts=None, dtype=torch.int32,
            index_dtype=torch.int32):
    """slid: blocks below the window of a row's first token are null. skipped: real tokens without a slot. hole: a null
    block inside a window. replay: True draws starts, a list gives them."""
    start, lens, q, count = layout(rng, rows, tokens, uniform, ragged, padded, tail, index_dtype)
    computed = sequences(rng, q, longest, padded, contexts)
    lengths = [before + new for before, new in zip(computed, q.tolist())]
    if replay is True:
        replay = [int(rng.integers(0, before + 1, 1)) if row % 2 else before for row, before in enumerate(computed)]
    first = [max(before - window + 1, replay[row] if replay else 0, 0) for row, before in enumerate(computed)]
    columns = -(-(longest + tokens) // block_size) + 1
    block_table, _ = tables(rng, lengths, block_size, columns, first if slid else None)
    slots = torch.full((count,), GARBAGE, dtype=torch.int64, device=rng.device)
    for row, begin in enumerate(start[:-1].tolist()):
        new = torch.arange(computed[row], lengths[row], device=rng.device)
        slots[begin : begin + len(new)] = look_up_slots(block_table, torch.full_like(new, row), new, block_size)
    for token in rng.permutation(count)[:skipped]:
        slots[token] = -1
    if hole:
        block_table[0, (lengths[0] - 1) // block_size - 1] = 0
    out = rng.tensor([[GARBAGE] * window] * count, dtype).view(count, window), rng.tensor([GARBAGE] * count)
    starts = rng.tensor(replay, index_dtype) if replay else None
    return (*out, rng.tensor(lengths, index_dtype), start, block_table, slots.to(index_dtype), starts, lens), dict(
        window=window, block_size=block_size)


def window_attention(rng: Rng, tokens=5, window=8, heads=4, kv_heads=2, dim=64, block_size=16, blocks=9, strided=False,
                     layered=False, unread=0, prompt=False, cache_dtype=None, index_dtype=torch.int32):
    """unread: tokens with len 0. Some indices in use are negative (a null block in the window). prompt: the tokens are
    the first ones of a sequence, so that their windows overlap; otherwise slots are drawn, and may come twice."""
    lens = rng.integers(1, window + 1, tokens)
    lens[rng.permutation(tokens)[: max(1, tokens // 3)]] = window
    lens[rng.permutation(tokens)[:unread]] = 0
    slots = rng.integers(block_size, blocks * block_size, tokens, window)
    place = torch.arange(window, device=rng.device)
    if prompt:
        lens = torch.where(lens > 0, (torch.arange(tokens, device=rng.device) + 1).clamp(max=window), 0)
        first = (torch.arange(tokens, device=rng.device) - window + 1).clamp(min=0)
        slots = block_size + rng.tensor(rng.permutation((blocks - 1) * block_size))[first[:, None] + place]
    if window > 2:
        slots[place == rng.integers(0, window, tokens, 1)] = -1
    slots = torch.where(place < lens[:, None], slots, GARBAGE)
    pool = rng.normal(blocks, 3 if layered else 1, block_size, 2, kv_heads, dim, dtype=cache_dtype)
    unused = torch.ones(blocks * block_size, dtype=torch.bool, device=rng.device)
    unused[slots[(place < lens[:, None]) & (slots >= 0)].long()] = False
    pool[unused.view(blocks, block_size)[:, None].expand(-1, pool.shape[1], -1)] = float("nan")
    q = wide_heads(rng, tokens, [heads, kv_heads, kv_heads], dim, strided)[0]
    return (q, pool[:, pool.shape[1] // 2], slots.to(index_dtype), lens.to(index_dtype)), dict(scale=dim**-0.5)


def paged(rng: Rng, rows=4, tokens=1, heads=4, kv_heads=2, dim=64, block_size=16, longest=70, uniform=False,
          ragged=True, padded=0, tail=0, hole=False, strided=False, contexts=None, cache_dtype=None,
          index_dtype=torch.int32):
    """hole: row 0's first block is null (a dummy batch). q of filler tokens is NaN."""
    start, lens, new, count = layout(rng, rows, tokens, uniform, ragged, padded, tail, index_dtype)
    computed = sequences(rng, new, longest, padded, contexts)
    lengths = [before + added for before, added in zip(computed, new.tolist())]
    block_table, blocks = tables(rng, lengths, block_size, -(-(max(computed) + tokens) // block_size) + 1)
    if hole:
        block_table[0, 0] = 0
    cache = poisoned_cache(rng, block_table, lengths, blocks, block_size, kv_heads, dim, cache_dtype)
    q = wide_heads(rng, count, [heads, kv_heads, kv_heads], dim, strided)[0]
    filler = torch.ones(count, dtype=torch.bool, device=rng.device)
    for begin, added in zip(start[:-1].tolist(), new.tolist()):
        filler[begin : begin + added] = False
    q[filler] = float("nan")
    # columns behind the sequence may name anything, as stale tables do
    behind = torch.arange(block_table.shape[1], device=rng.device) * block_size >= rng.tensor(lengths)[:, None]
    block_table = torch.where(behind, GARBAGE, block_table).to(index_dtype)
    return (q, cache, block_table, rng.tensor(lengths, index_dtype), start, lens), dict(scale=dim**-0.5)


SAMPLES = table("swa_indices", indices, {
    "typical": dict(rows=6, window=16, block_size=16, ragged=False),
    "ragged_tail_replay": dict(rows=5, tokens=9, padded=1, tail=4, replay=True, skipped=3),
    "uniform_ragged_padded": dict(rows=5, tokens=4, uniform=True, padded=1, tail=2, dtype=torch.int64),
    "uniform_ragged_replay": dict(rows=4, tokens=3, uniform=True, replay=True, skipped=2, block_size=5),
    "replay_clamp": dict(rows=1, tokens=6, window=4, block_size=4, contexts=[16], replay=[16]),
    "window_1": dict(rows=3, tokens=3, window=1, block_size=3),
    "window_1_above_a_block": dict(rows=4, tokens=5, window=17, block_size=16, longest=64),
    "window_above_the_sequence": dict(rows=4, tokens=5, window=33, block_size=8, longest=20),
    "block_1_all_blocks_kept": dict(rows=3, tokens=2, window=5, block_size=1, slid=False, index_dtype=torch.int64),
    "null_block_in_the_window": dict(rows=2, tokens=3, window=12, hole=True),
    "one_row": dict(rows=1, window=7, block_size=3, replay=True),
    "no_tokens": dict(rows=2, padded=2),
}) + table("swa_attention", window_attention, {
    "typical": dict(tokens=8, window=64),
    "strided_unread": dict(tokens=9, window=16, strided=True, unread=3),
    "window_1": dict(tokens=4, window=1, kv_heads=1),
    "one_head_each": dict(tokens=5, window=7, heads=3, kv_heads=3, unread=1),
    "odd_sizes_int64": dict(tokens=7, window=13, heads=6, kv_heads=2, dim=33, block_size=5, index_dtype=torch.int64),
    "one_token": dict(tokens=1, window=17, heads=1, kv_heads=1, dim=8),
    "one_layer_of_a_pool": dict(tokens=5, window=9, layered=True, strided=True),
    "cache_bf16": dict(tokens=6, window=16, cache_dtype=torch.bfloat16),
    "prompt": dict(tokens=70, window=33, blocks=8, prompt=True, unread=2),
    "prompt_bf16_odd_sizes": dict(tokens=67, window=20, heads=3, kv_heads=1, dim=9, block_size=7, blocks=14,
                                  prompt=True, cache_dtype=torch.bfloat16),
    "slots_named_twice": dict(tokens=35, window=40, heads=2, kv_heads=1, dim=16, blocks=3),
    "many_rows": dict(tokens=40, window=6, heads=2, kv_heads=1, dim=16, blocks=12),
    "nothing_to_read": dict(tokens=3, unread=3),
}) + table("paged_attention", paged, {
    "typical": dict(rows=6, ragged=False),
    "ragged_tail_strided": dict(rows=5, tokens=9, padded=1, tail=4, strided=True),
    "uniform_ragged_padded": dict(rows=5, tokens=4, uniform=True, padded=1, tail=2, index_dtype=torch.int64),
    "uniform_all_real": dict(rows=3, tokens=3, uniform=True, ragged=False),
    "one_row_prefill": dict(rows=1, tokens=50, contexts=[0]),
    "one_row_chunk": dict(rows=1, tokens=17, contexts=[37], block_size=5),
    "first_token": dict(rows=2, ragged=False, contexts=[0, 0]),
    "one_head_each_odd_sizes": dict(rows=4, tokens=3, heads=3, kv_heads=3, dim=33, block_size=7),
    "mixed_prefill_and_decode": dict(rows=4, tokens=60, heads=2, kv_heads=1, dim=16, contexts=[3, 500, 0, 90]),
    "null_block": dict(rows=3, tokens=2, ragged=False, hole=True, contexts=[40, 12, 0]),
    "cache_bf16": dict(rows=3, tokens=2, cache_dtype=torch.bfloat16),
    "all_padded": dict(rows=2, tokens=2, uniform=True, padded=2),
})
