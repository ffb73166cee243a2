"""Attention over a paged cache, one token and one head at a time, in float64."""

import torch
from truth_tokens import row_tokens, slot_of


def swa_indices(indices, lens, seq_lens, query_start_loc, block_table, slot_mapping, replay_start, query_lens, window,
                block_size):
    indices[:], lens[:] = -1, 0
    for row in range(len(seq_lens)):
        tokens = row_tokens(query_start_loc, query_lens, row)
        for i, token in enumerate(tokens):
            if slot_mapping[token] < 0:
                continue
            position = int(seq_lens[row]) - len(tokens) + i
            first = max(position - window + 1, 0, 0 if replay_start is None else int(replay_start[row]))
            lens[token] = position - first + 1
            for k in range(int(lens[token])):
                indices[token, k] = slot_of(block_table[row], first + k, block_size)


def attend(q, cache, slots, scale):
    """q [QH, D] over the slots listed -> [QH, D]."""
    slots = torch.tensor([slot for slot in slots if slot >= 0], dtype=torch.int64)
    out = torch.zeros_like(q)
    if not len(slots):
        return out
    ratio = len(q) // cache.shape[3]
    rows = cache[slots // cache.shape[1], slots % cache.shape[1]]  # [n, 2, KVH, D]
    for head in range(len(q)):
        keys, values = rows[:, 0, head // ratio], rows[:, 1, head // ratio]
        out[head] = torch.softmax(scale * keys @ q[head], 0) @ values
    return out


def swa_attention(q, cache, indices, lens, scale):
    return torch.stack([
        attend(q[token], cache, indices[token, : int(lens[token])].tolist(), scale) for token in range(len(q))
    ]) if len(q) else torch.zeros_like(q)


def paged_attention(q, cache, block_table, seq_lens, query_start_loc, query_lens, scale):
    out = torch.zeros_like(q)
    for row in range(len(seq_lens)):
        tokens = row_tokens(query_start_loc, query_lens, row)
        for i, token in enumerate(tokens):
            position = int(seq_lens[row]) - len(tokens) + i
            slots = [slot_of(block_table[row], p, cache.shape[1]) for p in range(position + 1)]
            out[token] = attend(q[token], cache, slots, scale)
    return out
