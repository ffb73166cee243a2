"""Reference kernels of the engram ops: vectorised torch on any device."""

import torch
from torch import Tensor

from ..tokens.naive import real_lengths, token_rows

ONE_EXPONENT = 127  # of a scale byte that means 2^0


def used_rows(query_start_loc, idx_mapping, num_reqs, query_lens) -> tuple[Tensor, Tensor]:
    """Request of each batch row, int64 [B], and which rows have one and have tokens."""
    row = torch.arange(idx_mapping.shape[0], device=idx_mapping.device)
    used = (row < num_reqs) & (idx_mapping >= 0) & (real_lengths(query_start_loc, query_lens) > 0)
    return idx_mapping.long(), used


def engram_lookback(
    lookback, token_ids, positions, query_start_loc, idx_mapping, num_reqs, query_lens=None
) -> None:
    req, used = used_rows(query_start_loc, idx_mapping, num_reqs, query_lens)
    # without tokens no row is used
    first = positions[torch.where(used, query_start_loc[:-1].long(), 0)] if len(positions) else torch.zeros_like(req)
    position = first.long()[:, None] - 1 - torch.arange(lookback.shape[1], device=lookback.device)
    found = used[:, None] & (position >= 0)
    ids = token_ids[torch.where(used, req, 0)[:, None], torch.where(found, position, 0)]
    lookback.fill_(-1)
    lookback[: len(req)] = torch.where(found, ids, -1).int()


def ngram_hash(
    ids, positions, query_start_loc, lookback, token_map, multipliers, primes, offsets, pad_id, query_lens=None, *, out
) -> None:
    tokens, depth, vocab = ids.shape[0], lookback.shape[1], token_map.shape[0]
    row, index, real = token_rows(query_start_loc, query_lens, tokens)
    token = torch.arange(tokens, device=ids.device)
    pad = pad_id.reshape(()).long()
    # one entry more than the vocabulary: what lies outside it reads as masked
    mapped = torch.cat([token_map.long(), token_map.new_full((1,), -1).long()])
    blocked = torch.zeros(tokens, dtype=torch.bool, device=ids.device)
    rolling = torch.zeros(tokens, multipliers.shape[0], dtype=torch.int64, device=ids.device)
    view = out.view(tokens, *primes.shape)
    for shift in range(multipliers.shape[1]):
        inside = index >= shift
        before = (shift - 1 - index).clamp(0, depth - 1)
        source = torch.where(inside, ids[torch.where(inside, token - shift, token)], lookback[row, before]).long()
        known = (source >= 0) & (source < vocab) & (positions >= shift)
        value = mapped[torch.where(known, source, vocab)]
        blocked = blocked | (value < 0)
        rolling = rolling ^ (torch.where(blocked, pad, value)[:, None] * multipliers[:, shift])
        if shift:
            view[:, :, shift - 1] = rolling[..., None] % primes[:, shift - 1] + offsets[:, shift - 1]
    out.masked_fill_(~real[:, None], -1)


def decode_rows(rows: Tensor, exponents: Tensor) -> Tensor:
    """float8 [..., D] and exponents [..., D / 32] -> float32 [..., D]."""
    bits = exponents.int() << 23
    bits = torch.where(exponents == 0, 1 << 22, bits)  # 2^-127 is a subnormal float32
    factors = torch.where(exponents == 255, torch.nan, bits.view(torch.float32))
    return (rows.float().unflatten(-1, (exponents.shape[-1], -1)) * factors[..., None]).flatten(-2)


def engram_lookup(table, scales, rows, *, out) -> None:
    # a table in host memory is read there
    kept = (rows >= 0).to(table.device)
    row = torch.where(kept, rows.to(table.device), 0).long()
    if not table.shape[0]:
        out.zero_()
        return
    if scales is None:
        found = table[row]
    else:
        found = decode_rows(table.view(torch.uint8)[row].view(torch.float8_e4m3fn), scales[row])
    out.copy_(torch.where(kept[..., None], found, 0.0))
