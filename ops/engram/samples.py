"""Sample inputs of the engram ops."""

import torch

from ..samples import Rng, table
from ..tokens.samples import GARBAGE, layout


def chunks(rng: Rng, rows, tokens, longest, index_dtype=torch.int32, **shape):
    """query_start_loc, query_lens, q and the positions of rows that start anywhere below `longest`."""
    start, lens, q, count = layout(rng, rows, tokens, dtype=index_dtype, **shape)
    first = rng.integers(0, longest + 1, rows)
    for row, value in zip(range(rows), (longest, 0, 1, 2)):
        first[row] = value
    positions = rng.tensor([GARBAGE] * count, index_dtype)
    for row, begin in enumerate(start[:-1].tolist()):
        for index in range(int(q[row])):
            positions[begin + index] = int(first[row]) + index
    return start, lens, positions


def histories(rng: Rng, rows=5, tokens=4, longest=20, depth=3, num_reqs=None, spare=0, empty=(), vocab=300,
              index_dtype=torch.int32, **shape):
    """spare: rows of the lookback beyond the batch. empty: rows of no request."""
    start, lens, positions = chunks(rng, rows, tokens, longest, index_dtype, **shape)
    reqs = rows + 3
    requests = rng.tensor(rng.permutation(reqs)[:rows], index_dtype)
    if rows > 1 and requests.tolist() == list(range(rows)):
        requests = requests.flip(0)
    for row in empty:
        requests[row] = -1
    used = rows if num_reqs is None else num_reqs
    requests[used:] = GARBAGE  # stale behind num_reqs
    token_ids = rng.integers(0, vocab, reqs, longest + tokens + 2, dtype=index_dtype)
    lookback = rng.tensor([[GARBAGE] * depth] * (rows + spare))
    return (lookback, token_ids, positions, start, requests, rng.tensor([used], index_dtype), lens), {}


# distinct primes; rows of a column need not be prime for the arithmetic, but they are
PRIMES = (101, 103, 107, 109, 113, 127, 131, 137, 139, 149, 151, 157, 163, 167, 173, 179, 181, 191, 193, 197, 199, 211)


def hashes(rng: Rng, rows=5, tokens=4, longest=20, orders=4, heads=3, layers=2, vocab=40, masked=0.2, strange=True,
           large=False, spare=0, extra=0, index_dtype=torch.int32, **shape):
    """masked: share of the vocabulary that is masked. strange: ids outside the vocabulary. large: products near 2^63.
    extra: lookback columns that no order reads."""
    start, lens, positions = chunks(rng, rows, tokens, longest, index_dtype, **shape)
    count = len(positions)
    ids = rng.integers(0, vocab, count, dtype=index_dtype)
    lookback = rng.integers(0, vocab, rows + spare, orders - 1 + extra, dtype=index_dtype)
    if strange and count > 3:
        for place, value in zip(rng.permutation(count), (-1, vocab, vocab + 9, -(2**30))):
            ids[place] = value
        lookback[0, 0], lookback[-1, -1] = -1, vocab
    token_map = rng.integers(0, vocab // 2, vocab, dtype=index_dtype)
    token_map[rng.uniform(0, 1, vocab) < masked] = -1
    bound = (2**63 - 1) // vocab // 2 if large else 10**6
    multipliers = rng.integers(0, bound, layers, orders, dtype=torch.int64) * 2 + 1
    columns = layers * (orders - 1) * heads
    primes = rng.tensor([PRIMES[c % len(PRIMES)] for c in range(columns)], torch.int64)
    offsets = primes.cumsum(0) - primes + (2**40 if large else 0)
    primes, offsets = (t.view(layers, orders - 1, heads) for t in (primes, offsets))
    return (ids, positions, start, lookback, token_map, multipliers, primes, offsets, rng.tensor([3], index_dtype),
            lens), {}


def lookups(rng: Rng, tokens=5, columns=6, rows=50, dim=64, dtype=None, coarse=False, packed=False, missing=0.2,
            strided=False, index_dtype=torch.int64):
    """coarse: float8 rows. packed: rows and exponents in one buffer. missing: share of -1. Rows not read hold NaN."""
    asked = rng.integers(0, rows, tokens, columns, dtype=index_dtype)
    asked[rng.uniform(0, 1, tokens, columns) < missing] = -1
    if strided:
        asked = torch.stack([torch.full_like(asked, GARBAGE), asked], -1)[..., 1]
    unread = torch.ones(rows, dtype=torch.bool)
    unread[asked[asked >= 0].long().cpu()] = False
    if not coarse:
        values = rng.normal(rows, dim, dtype=dtype)
        values[unread.to(values.device)] = float("nan")
        return (values, None, asked), {}
    width = dim + dim // 32 if packed else dim
    buffer = rng.integers(0, 127, rows, width, dtype=torch.uint8)
    buffer += rng.integers(0, 2, rows, width, dtype=torch.uint8) * 128  # either sign, no NaN
    exponents = rng.integers(117, 137, rows, dim // 32, dtype=torch.uint8)
    buffer[unread.to(buffer.device)] = 0x7F
    if packed:
        buffer[:, dim:] = exponents
        exponents = buffer[:, dim:]
    return (buffer[:, :dim].view(torch.float8_e4m3fn), exponents, asked), {}


SAMPLES = table("engram_lookback", histories, {
    "typical": dict(rows=6, tokens=1, ragged=False),
    "ragged_tail": dict(rows=5, tokens=7, tail=4, num_reqs=4, empty=(2,)),
    "uniform_ragged_padded": dict(rows=5, tokens=4, uniform=True, padded=2, num_reqs=3),
    "more_rows_than_the_batch": dict(rows=3, tokens=2, spare=4, empty=(1,)),
    "depth_one_int64": dict(rows=4, tokens=3, depth=1, index_dtype=torch.int64),
    "deeper_than_the_history": dict(rows=4, tokens=2, longest=3, depth=7),
    "one_row": dict(rows=1, tokens=5, ragged=False),
    "no_request": dict(rows=3, tokens=2, num_reqs=0),
    "no_tokens": dict(rows=2, tokens=3, padded=2),
}) + table("ngram_hash", hashes, {
    "typical": dict(rows=6, tokens=1, ragged=False, strange=False, masked=0.0),
    "ragged_tail": dict(rows=5, tokens=9, tail=4),
    "uniform_ragged_padded": dict(rows=5, tokens=4, uniform=True, padded=2),
    "near_the_largest_product": dict(rows=4, tokens=6, large=True),
    "bigrams_one_head_int64": dict(rows=3, tokens=5, orders=2, heads=1, layers=1, index_dtype=torch.int64),
    "one_token": dict(rows=1, tokens=1, ragged=False, longest=1),
    "wider_lookback": dict(rows=4, tokens=2, spare=2, extra=2, orders=3),
    "nearly_all_masked": dict(rows=4, tokens=8, masked=0.9),
    "long_chunk": dict(rows=2, tokens=90, orders=5, heads=2, layers=1, masked=0.05),
    "no_tokens": dict(rows=2, tokens=3, padded=2),
}) + table("engram_lookup", lookups, {
    "typical": dict(),
    "fp8": dict(coarse=True),
    "fp8_rows_of_264_bytes": dict(coarse=True, packed=True, dim=256, columns=24, rows=600, tokens=3),
    "bf16": dict(dtype=torch.bfloat16, dim=33, index_dtype=torch.int32),
    "fp16_one_row": dict(dtype=torch.float16, tokens=1, columns=1, missing=0.0, dim=1),
    "strided_rows": dict(strided=True, dim=20),
    "all_missing": dict(missing=1.1),
    "no_tokens": dict(tokens=0),
})
