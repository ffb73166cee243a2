"""Reference kernels of the attention ops: vectorised torch on any device, float32 inside.

Gathered keys and values that a token must not see are set to zero, never weighted with zero: what lies in the null
block, in other requests' blocks or past a sequence's end may be NaN.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..tokens.naive import look_up_slots, real_lengths, token_rows

# Elements of the keys and values gathered at a time (32 MiB in float32), and of an attention mask.
GATHER_LIMIT = 1 << 23
MASK_LIMIT = 1 << 22


def swa_indices(
    indices, lens, seq_lens, query_start_loc, block_table, slot_mapping, replay_start=None, query_lens=None, *, window,
    block_size,
) -> None:
    row, index, real = token_rows(query_start_loc, query_lens, len(lens))
    position = (seq_lens.long() - real_lengths(query_start_loc, query_lens))[row] + index
    first = (position - window + 1).clamp(min=0)
    if replay_start is not None:
        first = torch.maximum(first, replay_start.long()[row])
    count = torch.where(real & (slot_mapping >= 0), (position - first + 1).clamp(min=0), 0)
    lens.copy_(count)
    place = torch.arange(window, device=row.device)
    slots = look_up_slots(block_table, row[:, None], first[:, None] + place, block_size)
    indices.copy_(torch.where(place < count[:, None], slots, -1))


def attend(q: Tensor, kv: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Softmax attention of T queries a row over S gathered rows, heads grouped; 0 where nothing is seen.

    q [n, T, QH, D], kv [n, S, 2, KVH, D] finite wherever no query of the row looks, seen bool [n, T, S] -> float32
    [n, T, QH, D].
    """
    n, tokens, heads, dim = q.shape
    span, kv_heads = kv.shape[1], kv.shape[3]
    ratio = heads // kv_heads
    # queries of one kv head side by side: the keys are neither repeated nor expanded
    grouped = q.float().unflatten(2, (kv_heads, ratio)).permute(0, 2, 3, 1, 4).reshape(n, kv_heads, ratio * tokens, dim)
    mask = seen[:, None, None].expand(n, 1, ratio, tokens, span).reshape(n, 1, ratio * tokens, span)
    key, value = kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2)
    out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scale)
    out = out.view(n, kv_heads, ratio, tokens, dim).permute(0, 3, 1, 2, 4).reshape(n, tokens, heads, dim)
    return torch.where(seen.any(-1)[..., None, None], out, 0.0)


def zero_rows(kv: Tensor, valid: Tensor) -> Tensor:
    """kv [n, S, 2, KVH, D] gathered, in float32, with the rows that are not valid [n, S] set to zero."""
    kv = kv.float()
    kv.flatten(0, 1).index_fill_(0, (~valid).flatten().nonzero().squeeze(1), 0.0)
    return kv


def gather_slots(cache: Tensor, slots: Tensor) -> Tensor:
    """cache [blocks, block_size, 2, KVH, D] at slots [...] -> a fresh [..., 2, KVH, D]."""
    if cache.stride(0) == cache.shape[1] * cache.stride(1):
        return cache.view(-1, *cache.shape[2:]).index_select(0, slots.flatten()).view(*slots.shape, *cache.shape[2:])
    return cache[torch.div(slots, cache.shape[1], rounding_mode="floor"), slots % cache.shape[1]]


def swa_attention(q, cache, indices, lens, *, scale, out) -> None:
    tokens, window = indices.shape
    each = max(1, GATHER_LIMIT // max(1, window * cache[0, 0].numel()))
    for near in slices(tokens, max(32, min(window, 256))):
        width = min(window, max(0, int(lens[near].max())))
        slots = indices[near, :width]
        seen = (torch.arange(width, device=q.device) < lens[near, None]) & (slots >= 0)
        if _attend_shared(out[near], q[near], cache, slots, seen, scale):
            continue
        for part in slices(len(slots), each):
            kv = zero_rows(gather_slots(cache, torch.where(seen[part], slots[part], 0)), seen[part])
            out[near][part] = attend(q[near][part][:, None], kv, seen[part][:, None], scale).squeeze(1).to(out.dtype)


def _attend_shared(out, q, cache, slots, seen, scale) -> bool:
    """Fills out like `swa_attention` if the tokens share most of their slots, as neighbours of a prompt do.

    Their slots together are gathered once and every token attends over all of them under a mask. False, and nothing is
    done, where that pays not or is not exact: few tokens, a slot named twice by a token, a value that is not finite and
    would reach, times zero, the tokens that do not see it.
    """
    pool = cache.shape[0] * cache.shape[1]
    if len(slots) < 32 or pool > 32 * slots.numel():
        return False
    slots = torch.where(seen, slots, 0).long()
    used = torch.zeros(pool, dtype=torch.bool, device=q.device)
    used[slots[seen]] = True
    rows = used.nonzero().squeeze(1)
    if len(rows) > 4 * slots.shape[1]:
        return False
    place = torch.where(seen, used.cumsum(0)[slots] - 1, len(rows))
    mask = torch.zeros(len(q), len(rows) + 1, dtype=torch.bool, device=q.device).scatter_(1, place, True)[:, :-1]
    kv = gather_slots(cache, rows).float()
    if mask.sum() != seen.sum() or not kv.isfinite().all():
        return False
    out.copy_(attend(q[None], kv[None], mask[None], scale)[0])
    return True


def slices(total: int, step: int):
    """Slices of at most `step` that cover range(total)."""
    return (slice(begin, min(total, begin + step)) for begin in range(0, total, step))


def row_batches(lens: list[int], seq_lens: list[int], limit: int):
    """Lists of rows to be padded to a common length: at most `limit` positions, and not much padding, a list."""
    reading = [row for row, length in enumerate(lens) if length > 0 and seq_lens[row] > 0]
    batch, longest, work = [], 0, 0
    for row in sorted(reading, key=lambda row: (-lens[row], -seq_lens[row])):
        # gathering a position costs about as much as eight queries that look at it
        own, longer = seq_lens[row] * (lens[row] + 8), max(longest, seq_lens[row])
        padded = (len(batch) + 1) * longer
        if batch and (padded > limit or padded * (lens[batch[0]] + 8) > 2 * (work + own) + 65536):
            yield batch
            batch, longer, work = [], seq_lens[row], 0
        batch.append(row)
        longest, work = longer, work + own
    if batch:
        yield batch


def paged_attention(q, cache, block_table, seq_lens, query_start_loc, query_lens=None, *, scale, out) -> None:
    start, lens = query_start_loc[:-1].long(), real_lengths(query_start_loc, query_lens)
    seq_lens = seq_lens.long()
    out.zero_()
    limit = max(1, GATHER_LIMIT // max(1, cache[0, 0].numel()))
    for batch in row_batches(lens.tolist(), seq_lens.tolist(), limit):
        rows = torch.tensor(batch, dtype=torch.int64, device=q.device)
        _attend_rows(out, q, cache, block_table[rows], seq_lens[rows], start[rows], lens[rows], scale)


def _attend_rows(out, q, cache, table, seq_lens, start, lens, scale) -> None:
    """Fills out at tokens start .. start + lens of each row; table [n, C], the others int64 [n] and above 0."""
    block_size = cache.shape[1]
    tokens, columns = int(lens.max()), min(table.shape[1], -(-int(seq_lens.max()) // block_size))
    # behind a sequence's end the table may name anything
    held = torch.arange(columns, device=q.device) * block_size < seq_lens[:, None]
    table = torch.where(held, table[:, :columns], 0).clamp(min=0)
    kv = cache.index_select(0, table.flatten()).view(len(table), columns * block_size, *cache.shape[2:])
    place = torch.arange(columns * block_size, device=q.device)
    valid = (place < seq_lens[:, None]) & (table > 0).repeat_interleave(block_size, 1)
    kv = zero_rows(kv, valid)

    index = torch.arange(tokens, device=q.device)
    position = (seq_lens - lens)[:, None] + index
    real = (index < lens[:, None]) & (position >= 0)
    token = torch.where(real, start[:, None] + index, 0)
    # what only some queries of a row see are the new tokens' own rows; a NaN there must not reach the queries before
    new = kv[torch.arange(len(kv), device=q.device)[:, None], position.clamp(0, len(place) - 1)]
    if tokens > 1 and not new.isfinite().all():
        row, index = real.nonzero(as_tuple=True)
        for part in torch.arange(len(row), device=q.device).split(max(1, GATHER_LIMIT // kv[0].numel())):
            at = row[part], index[part]
            _attend_rows(out, q, cache, table[at[0]], position[at] + 1, token[at], torch.ones_like(at[0]), scale)
        return
    step = max(1, MASK_LIMIT // (q.shape[1] // cache.shape[3] * valid.numel()))
    for now in slices(tokens, step):
        reach = int(position[:, now].max()) + 1
        seen = valid[:, None, :reach] & (place[:reach] <= position[:, now, None])
        result = attend(q[token[:, now]], kv[:, :reach], seen, scale)
        out[token[:, now][real[:, now]]] = result[real[:, now]].to(out.dtype)
