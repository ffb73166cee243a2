"""Token ops, one token at a time."""


def row_tokens(query_start_loc, query_lens, row):
    """The real tokens of a row, in order."""
    begin, end = int(query_start_loc[row]), int(query_start_loc[row + 1])
    return range(begin, end if query_lens is None else begin + int(query_lens[row]))


def slot_of(table_row, position, block_size):
    """Slot of a position, -1 where the row's table has no block for it."""
    column = position // block_size
    if column >= len(table_row) or int(table_row[column]) <= 0:
        return -1
    return int(table_row[column]) * block_size + position % block_size


def prepare_positions(positions, seq_lens, idx_mapping, query_start_loc, num_computed, query_lens):
    positions[:] = 0
    for row, req in enumerate(idx_mapping.tolist()):
        seq_lens[row] = 0
        if req < 0:
            continue
        tokens = row_tokens(query_start_loc, query_lens, row)
        seq_lens[row] = int(num_computed[req]) + len(tokens)
        for i, token in enumerate(tokens):
            positions[token] = int(num_computed[req]) + i


def compute_slot_mappings(slot_mappings, block_tables, query_start_loc, positions, block_sizes, query_lens):
    slot_mappings[:] = -1
    for group, size in enumerate(block_sizes.tolist()):
        for row in range(block_tables.shape[1]):
            for token in row_tokens(query_start_loc, query_lens, row):
                slot_mappings[group, token] = slot_of(block_tables[group, row], int(positions[token]), size)


def pad_replayed_slots(slot_mappings, cacheable_groups, query_start_loc, positions, replay_start, query_lens, *,
                       window):
    for row, start in enumerate(replay_start.tolist()):
        for token in row_tokens(query_start_loc, query_lens, row):
            if start > 0 and start <= int(positions[token]) < start + window:
                for group in cacheable_groups.tolist():
                    slot_mappings[group, token] = -1


def gather_replay_rows(rows, kept_query_start_loc, kept_positions, kept_slot_mappings, kept_kv_start, query_start_loc,
                       dropped_before, seq_lens, replay_start, positions, slot_mappings, query_lens, *, window):
    starts = [int(start) - int(dropped) for start, dropped in zip(query_start_loc, dropped_before)]
    kept_query_start_loc[:] = kept_query_start_loc.new_tensor(starts)
    for row in range(len(seq_lens)):
        tokens = list(row_tokens(query_start_loc, query_lens, row))
        kept = tokens[len(tokens) - (starts[row + 1] - starts[row]) :]
        for place, token in enumerate(kept, starts[row]):
            rows[place], kept_positions[place] = token, positions[token]
            kept_slot_mappings[:, place] = slot_mappings[:, token]
        low = int(seq_lens[row]) - window if len(kept) < len(tokens) else 0
        kept_kv_start[row] = max(int(replay_start[row]), low)


def write_kv(cache, k, v, slot_mapping):
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, cache.shape[1])
            cache[block, offset, 0], cache[block, offset, 1] = k[token], v[token]
