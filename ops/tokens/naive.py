"""Reference kernels of the token ops: vectorised torch on any device."""

import torch
from torch import Tensor


def real_lengths(query_start_loc: Tensor, query_lens) -> Tensor:
    """Real tokens q of each row, int64 [B]."""
    return query_start_loc.long().diff() if query_lens is None else query_lens.long()


def token_rows(query_start_loc: Tensor, query_lens, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Row of each token, its index i within the row, and whether it is real (i < q); all [tokens].

    The row of a token that no row owns is clamped into [0, B), so that it may be used as an index.
    """
    start = query_start_loc.long()
    token = torch.arange(tokens, device=start.device)
    # of rows that start at the same token, all but the last are empty: the last one owns it
    row = torch.searchsorted(start, token, right=True) - 1
    inside = (row >= 0) & (row < len(start) - 1)
    row = row.clamp(0, len(start) - 2)
    index = token - start[row]
    return row, index, inside & (index < real_lengths(start, query_lens)[row])


def prepare_positions(positions, seq_lens, idx_mapping, query_start_loc, num_computed, query_lens=None) -> None:
    used = idx_mapping >= 0
    computed = num_computed[idx_mapping.clamp(min=0)].long()
    row, index, real = token_rows(query_start_loc, query_lens, positions.shape[0])
    positions.copy_(torch.where(real & used[row], computed[row] + index, 0))
    seq_lens.copy_(torch.where(used, computed + real_lengths(query_start_loc, query_lens), 0))


def look_up_slots(block_table: Tensor, row: Tensor, position: Tensor, block_size) -> Tensor:
    """Slot of each position of each row, int64; -1 for a position outside the table or in a null block.

    block_table [B, C]; row, position and block_size broadcast to one shape.
    """
    column = torch.div(position, block_size, rounding_mode="floor")
    inside = (column >= 0) & (column < block_table.shape[-1])
    block = block_table[row, torch.where(inside, column, 0)].long()
    return torch.where(inside & (block > 0), block * block_size + (position - column * block_size), -1)


def compute_slot_mappings(
    slot_mappings, block_tables, query_start_loc, positions, block_sizes, query_lens=None
) -> None:
    groups, rows, columns = block_tables.shape
    row, _, real = token_rows(query_start_loc, query_lens, positions.shape[0])
    group = torch.arange(groups, device=row.device)[:, None]
    table = block_tables.reshape(groups * rows, columns)
    slots = look_up_slots(table, group * rows + row, positions.long(), block_sizes.long()[:, None])
    slot_mappings.copy_(torch.where(real, slots, -1))


def pad_replayed_slots(
    slot_mappings, cacheable_groups, query_start_loc, positions, replay_start, query_lens=None, *, window
) -> None:
    row, _, real = token_rows(query_start_loc, query_lens, positions.shape[0])
    start = replay_start.long()[row]
    replayed = real & (start > 0) & (positions >= start) & (positions < start + window)
    group = torch.arange(slot_mappings.shape[0], device=row.device)
    cacheable = (group[:, None] == cacheable_groups).any(1)
    slot_mappings.masked_fill_(cacheable[:, None] & replayed, -1)


def gather_replay_rows(
    rows, kept_query_start_loc, kept_positions, kept_slot_mappings, kept_kv_start, query_start_loc, dropped_before,
    seq_lens, replay_start, positions, slot_mappings, query_lens=None, *, window
) -> None:
    start = (query_start_loc - dropped_before).long()
    q, kept = real_lengths(query_start_loc, query_lens), start.diff()
    row, index, real = token_rows(start, None, rows.shape[0])
    source = torch.where(real, query_start_loc.long()[row] + (q - kept)[row] + index, 0)
    kept_query_start_loc.copy_(start)
    kept_kv_start.copy_(torch.where(kept < q, torch.maximum(replay_start, seq_lens - window), replay_start))
    if positions.shape[0]:
        rows.copy_(torch.where(real, source, rows))
        kept_positions.copy_(torch.where(real, positions[source], kept_positions))
        kept_slot_mappings.copy_(torch.where(real, slot_mappings[:, source], kept_slot_mappings))


def write_kv(cache, k, v, slot_mapping) -> None:
    block_size = cache.shape[1]
    kept = (slot_mapping >= block_size).nonzero().squeeze(1)
    slot = slot_mapping[kept].long()
    block, offset = torch.div(slot, block_size, rounding_mode="floor"), slot % block_size
    # advanced indices straight into the base, so that any strides work without a copy of the cache
    cache[block, offset, 0] = k[kept].to(cache.dtype)
    cache[block, offset, 1] = v[kept].to(cache.dtype)
