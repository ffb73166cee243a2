"""The engram ops one id at a time, in Python integers and float64, from the formulas and none of the code."""

import torch
from truth_tokens import row_tokens


def engram_lookback(lookback, token_ids, positions, query_start_loc, idx_mapping, num_reqs, query_lens):
    lookback[:] = -1
    for row in range(int(num_reqs)):
        req, tokens = int(idx_mapping[row]), row_tokens(query_start_loc, query_lens, row)
        if req < 0 or not len(tokens):
            continue
        chunk_start = int(positions[tokens[0]])
        for j in range(min(lookback.shape[1], chunk_start)):
            lookback[row, j] = token_ids[req, chunk_start - 1 - j]


def history_id(ids, positions, tokens, i, shift, lookback_row):
    """The id `shift` places before token i of a row; None where there is none."""
    if int(positions[tokens[i]]) - shift < 0:
        return None
    if i >= shift:
        return int(ids[tokens[i - shift]])
    column = shift - 1 - i
    return int(lookback_row[column]) if column < len(lookback_row) else None


def compress(token, token_map):
    """Compressed id of a token; None for a masked id and for one outside the vocabulary."""
    if token is None or not 0 <= token < len(token_map) or int(token_map[token]) < 0:
        return None
    return int(token_map[token])


def token_hash(sources, multipliers, primes, offsets, pad):
    """Rows of one token for one layer: sources are its compressed ids, newest first, None where blocked."""
    rolling, blocked, rows = 0, False, []
    for shift, source in enumerate(sources):
        blocked = blocked or source is None
        rolling ^= (pad if blocked else source) * int(multipliers[shift])
        assert 0 <= rolling < 2**63
        if shift:
            rows += [rolling % int(prime) + int(offset) for prime, offset in zip(primes[shift - 1], offsets[shift - 1])]
    return rows


def ngram_hash(ids, positions, query_start_loc, lookback, token_map, multipliers, primes, offsets, pad_id, query_lens):
    layers, orders = multipliers.shape
    out = torch.full((len(ids), layers * primes[0].numel()), -1, dtype=torch.int64)
    for row in range(len(query_start_loc) - 1):
        tokens = row_tokens(query_start_loc, query_lens, row)
        for i, token in enumerate(tokens):
            sources = [compress(history_id(ids, positions, tokens, i, shift, lookback[row]), token_map)
                       for shift in range(orders)]
            rows = sum((token_hash(sources, multipliers[layer], primes[layer], offsets[layer], int(pad_id))
                        for layer in range(layers)), [])
            out[token] = torch.tensor(rows, dtype=torch.int64)
    return out


def engram_lookup(table, scales, rows):
    out = torch.zeros(*rows.shape, table.shape[1], dtype=torch.float64)
    for token, column in (rows >= 0).nonzero().tolist():
        row = int(rows[token, column])
        for i in range(table.shape[1]):
            factor = 1.0 if scales is None else 2.0 ** (int(scales[row, i // 32]) - 127)
            out[token, column, i] = table[row, i] * factor
    return out
