"""Sample inputs of the token ops, and the draws of layouts and caches that the attention ops share."""

import torch
from torch import Tensor

from ..samples import Rng, query_lengths, table

GARBAGE = 77777  # what integer outputs hold before the op: it must overwrite all of them


def layout(rng: Rng, rows, tokens, uniform=False, ragged=True, padded=0, tail=0, dtype=torch.int32):
    """query_start_loc [B+1], query_lens [B] or None, q [B] and the number of tokens in all, `tail` filler included.

    uniform: rows of width `tokens`; else rows one after the other. The last `padded` rows have no real tokens.
    """
    lens = query_lengths(rng, rows, tokens) if ragged else rng.tensor([tokens] * rows)
    lens[rows - padded :] = 0
    width = torch.full_like(lens, tokens) if uniform else lens
    start = torch.cat([width.new_zeros(1), width.cumsum(0)]).to(dtype)
    return start, lens.to(dtype) if uniform else None, lens, int(start[-1]) + tail


def tables(rng: Rng, lengths: list[int], block_size: int, columns: int, first: list[int] = None, spare: int = 3):
    """Block table [B, C] of distinct blocks in random order, and how many blocks the pool needs.

    Row r owns the blocks of positions first[r] (default 0) up to lengths[r]; its other columns are null.
    """
    first = first or [0] * len(lengths)
    spans = [(low // block_size, -(-length // block_size)) for low, length in zip(first, lengths)]
    blocks = sum(max(0, end - begin) for begin, end in spans) + spare + 1
    order = iter(block + 1 for block in rng.permutation(blocks - 1))
    rows = [[next(order) if begin <= column < end else 0 for column in range(columns)] for begin, end in spans]
    return rng.tensor(rows), blocks


def poisoned_cache(rng: Rng, table: Tensor, lengths: list[int], blocks: int, block_size, kv_heads, dim, dtype=None):
    """Cache [blocks, block_size, 2, KVH, D]: NaN but in the slots of positions below each row's length."""
    shape = (blocks, block_size, 2, kv_heads, dim)
    cache = rng.normal(*shape, dtype=dtype)
    used = torch.zeros(blocks, block_size, dtype=torch.bool)
    for row, length in enumerate(lengths):
        for position in range(length):
            used[int(table[row, position // block_size]), position % block_size] = True
    used[0] = False
    cache[~used.to(cache.device)] = float("nan")
    return cache


def wide_heads(rng: Rng, tokens: int, heads: list[int], dim: int, strided=False):
    """One [tokens, h, D] for each h of heads; strided: column slices of one wide projection."""
    if not strided:
        return tuple(rng.normal(tokens, count, dim) for count in heads)
    wide = rng.normal(tokens, sum(heads) * dim + 3)[:, : sum(heads) * dim]
    return wide.unflatten(1, (-1, dim)).split(heads, 1)


def positions_of(rng: Rng, rows=4, tokens=1, longest=40, empty=(), index_dtype=torch.int32, **shape):
    start, lens, _, count = layout(rng, rows, tokens, dtype=index_dtype, **shape)
    reqs = rows + 3
    requests = rng.tensor(rng.permutation(reqs)[:rows], index_dtype)
    if rows > 1 and requests.tolist() == list(range(rows)):
        requests = requests.flip(0)
    for row in empty:
        requests[row] = -1
    computed = rng.integers(0, longest + 1, reqs, dtype=index_dtype)
    positions = rng.tensor([GARBAGE] * count, torch.int64)
    return (positions, rng.tensor([GARBAGE] * rows), requests, start, computed, lens), {}


def mappings(rng: Rng, rows=4, tokens=1, sizes=(16,), longest=40, beyond=False, huge=False, index_dtype=torch.int32,
             **shape):
    start, lens, q, count = layout(rng, rows, tokens, dtype=index_dtype, **shape)
    computed = rng.integers(0, longest + 1, rows)
    columns = -(-(longest + tokens) // min(sizes)) + 1
    group_tables = [tables(rng, (computed + q).tolist(), size, columns)[0] for size in sizes]
    block_tables = torch.stack(group_tables)
    if huge:  # slots beyond 2^31
        block_tables = torch.where(block_tables > 0, 2**31 - 1 - block_tables, 0)
    block_tables[0, 0, int(computed[0]) // sizes[0]] = 0  # a null block at a real token
    positions = rng.integers(0, longest, count, dtype=index_dtype)
    for row, begin in enumerate(start[:-1].tolist()):
        for index in range(int(q[row])):
            positions[begin + index] = int(computed[row]) + index
    if beyond:
        positions[0], positions[1] = columns * max(sizes), columns * max(sizes) - 1
    slots = rng.tensor([[GARBAGE] * count] * len(sizes), torch.int64)
    return (slots, block_tables, start, positions, rng.tensor(sizes, index_dtype), lens), {}


def padding(rng: Rng, rows=4, tokens=6, window=4, groups=3, cacheable=(0, 2), none=False, index_dtype=torch.int32,
            **shape):
    """Rows that replay, some from their first token on, some from a later chunk's middle, and rows that do not."""
    start, lens, q, count = layout(rng, rows, tokens, dtype=index_dtype, **shape)
    computed = rng.integers(0, 3 * window, rows, dtype=index_dtype)
    replay = (computed - rng.integers(-2, window + 2, rows, dtype=index_dtype)).clamp(min=0)
    if none:
        replay.zero_()
    elif rows > 2:
        replay[2] = 0
    positions = rng.integers(0, 3 * window, count, dtype=torch.int64)  # of filler: anything
    for row, begin in enumerate(start[:-1].tolist()):
        for index in range(int(q[row])):
            positions[begin + index] = int(computed[row]) + index
    slots = rng.integers(-1, 99, groups, count, dtype=torch.int64)
    return (slots, rng.tensor(cacheable, index_dtype), start, positions, replay, lens), {"window": window}


def gathering(rng: Rng, rows=4, tokens=6, window=3, groups=2, spare=2, keeps=(1,), index_dtype=torch.int32, **shape):
    """Rows that lose tokens, rows that are short enough, and those in `keeps`, which keep all."""
    start, lens, q, count = layout(rng, rows, tokens, dtype=index_dtype, **shape)
    kept = [int(n) if row in keeps else min(int(n), window) for row, n in enumerate(q)]
    kept = torch.tensor(kept, dtype=torch.int64)
    kept_start = torch.cat([kept.new_zeros(1), kept.cumsum(0)])
    dropped = (start.cpu() - kept_start).to(start.device, index_dtype)
    n = int(kept_start[-1]) + spare
    computed = rng.integers(0, 50, rows)
    positions = rng.integers(0, 50, count, dtype=torch.int64)
    for row, begin in enumerate(start[:-1].tolist()):
        for index in range(int(q[row])):
            positions[begin + index] = int(computed[row]) + index
    replay = (computed - rng.integers(-2, 9, rows)).clamp(min=0)
    outputs = (rng.tensor([GARBAGE] * n, torch.int64), rng.tensor([GARBAGE] * (rows + 1)),
               rng.tensor([GARBAGE] * n, torch.int64), rng.tensor([[GARBAGE] * n] * groups, torch.int64),
               rng.tensor([GARBAGE] * rows))
    slots = rng.integers(-1, 99, groups, count, dtype=torch.int64)
    return (*outputs, start, dropped, computed + q, replay, positions, slots, lens), {"window": window}


def write(rng: Rng, tokens=5, block_size=16, kv_heads=2, dim=64, blocks=4, skipped=2, strided=False, layered=False,
          cache_dtype=None, index_dtype=torch.int64):
    """skipped: tokens without a slot. layered: the cache is one layer of a pool whose blocks hold all layers."""
    pool = rng.normal(blocks, 3 if layered else 1, block_size, 2, kv_heads, dim, dtype=cache_dtype)
    pool[0] = float("nan")
    slots = rng.tensor([slot + block_size for slot in rng.permutation((blocks - 1) * block_size)[:tokens]], index_dtype)
    for token, value in zip(rng.permutation(tokens)[:skipped], (-1, -7, -1, -1)):
        slots[token] = value
    k, v = wide_heads(rng, tokens, [kv_heads, kv_heads], dim, strided)
    k[slots < 0], v[slots < 0] = float("nan"), float("nan")
    return (pool[:, pool.shape[1] // 2], k, v, slots), {}


SAMPLES = table("prepare_positions", positions_of, {
    "typical": dict(rows=6, ragged=False),
    "ragged_tail": dict(rows=5, tokens=7, tail=6, padded=1, empty=(4,)),
    "uniform_ragged_padded": dict(rows=5, tokens=4, uniform=True, padded=2, tail=3, empty=(3, 4)),
    "empty_rows_with_width": dict(rows=4, tokens=3, ragged=False, empty=(0, 2)),
    "one_row": dict(rows=1, ragged=False),
    "one_row_int64": dict(rows=1, tokens=33, tail=1, index_dtype=torch.int64),
    "all_empty": dict(rows=3, tokens=2, uniform=True, padded=3, empty=(0, 1, 2)),
    "no_tokens": dict(rows=2, padded=2),
    "long_sequences_int64": dict(rows=3, tokens=2, longest=2**31 - 3, index_dtype=torch.int64),
}) + table("compute_slot_mappings", mappings, {
    "typical": dict(rows=6, ragged=False),
    "groups_ragged_tail": dict(rows=5, tokens=7, sizes=(16, 5, 64), tail=6, padded=1),
    "groups_uniform_ragged_padded": dict(rows=5, tokens=4, sizes=(8, 3), uniform=True, padded=2, tail=3),
    "uniform_all_real": dict(rows=3, tokens=3, uniform=True, ragged=False),
    "one_row_block_1_int64": dict(rows=1, tokens=5, sizes=(1,), index_dtype=torch.int64),
    "beyond_the_table": dict(rows=3, tokens=6, sizes=(4, 8), beyond=True, tail=1),
    "slots_beyond_32_bits": dict(rows=3, tokens=4, sizes=(16, 100), huge=True),
    "no_tokens": dict(rows=2, padded=2),
}) + table("pad_replayed_slots", padding, {
    "typical": dict(rows=4, tokens=9),
    "ragged_tail": dict(rows=5, tokens=7, tail=6, padded=1, groups=4, cacheable=(3, 0)),
    "uniform_ragged_padded": dict(rows=5, tokens=4, uniform=True, padded=2, tail=3),
    "one_token_window_1_int64": dict(rows=1, tokens=1, window=1, groups=1, cacheable=(0,), index_dtype=torch.int64),
    "several_blocks_of_tokens": dict(rows=3, tokens=300, window=100),
    "nothing_replays": dict(rows=3, none=True),
    "no_cacheable_group": dict(rows=3, cacheable=()),
    "no_tokens": dict(rows=2, padded=2),
}) + table("gather_replay_rows", gathering, {
    "typical": dict(rows=4, tokens=9),
    "ragged_tail": dict(rows=5, tokens=7, tail=6, padded=1, groups=3),
    "uniform_ragged_padded": dict(rows=5, tokens=6, uniform=True, padded=2, tail=3),
    "one_row_int64": dict(rows=1, tokens=33, window=8, ragged=False, keeps=(), groups=1, index_dtype=torch.int64),
    "several_blocks_of_tokens": dict(rows=3, tokens=400, window=150),
    "nothing_dropped": dict(rows=3, tokens=3, window=8, spare=0),
    "many_rows": dict(rows=300, tokens=2, window=1, uniform=True),
    "no_tokens": dict(rows=2, padded=2, spare=0),
}) + table("write_kv", write, {
    "typical": dict(tokens=8),
    "strided": dict(tokens=7, strided=True),
    "one_token": dict(tokens=1, skipped=0, block_size=1, kv_heads=1, dim=3, index_dtype=torch.int32),
    "odd_sizes_strided": dict(tokens=13, block_size=5, kv_heads=3, dim=33, blocks=7, strided=True),
    "one_layer_of_a_pool": dict(tokens=9, layered=True, strided=True),
    "cache_bf16": dict(tokens=6, cache_dtype=torch.bfloat16),
    "nothing_to_write": dict(tokens=2),
    "no_tokens": dict(tokens=0, skipped=0),
    "full": dict(tokens=24, block_size=8, blocks=4, skipped=0),
})
