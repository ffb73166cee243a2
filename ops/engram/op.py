"""n-gram memory of a step: the ids before each chunk, the table rows that its n-grams hash to, and those rows.

Hash and lookback follow research notes on public implementations of "engram" layers (arXiv 2601.07372): a token's
n-grams of orders 2..n are hashed, several times each, to rows of a large table. Rows depend on token ids alone, so one
`ngram_hash` and one `engram_lookup` at the start of a step serve every engram layer of a model: the layers' hash
constants lie side by side, and their tables in one.

Sizes: B batch rows, as laid out over `tokens` by `query_start_loc` and `query_lens` (see ops/tokens/op.py), reqs
request slots, depth = n - 1 ids of lookback, L layers, n the largest order, H heads of each order; a token has
L * (n - 1) * H columns, layer by layer, in each layer order by order, in each order head by head.
"""

from typing import Optional

import torch
from torch import Tensor

from ..check import FLOAT, I32, INDEX, Shapes, fail, require, require_range
from ..registry import register
from ..tokens.op import check_layout, check_layout_values
from . import naive

I64 = (torch.int64,)
U8 = (torch.uint8,)
SCALED = 32  # values of a float8 row that share one exponent


def _lookback_values(lookback, token_ids, positions, query_start_loc, idx_mapping, num_reqs, query_lens=None) -> None:
    op = "engram_lookback"
    check_layout_values(op, query_start_loc, query_lens, positions.shape[0])
    require_range(op, "num_reqs", num_reqs, 0, idx_mapping.shape[0])
    req, used = naive.used_rows(query_start_loc, idx_mapping, num_reqs, query_lens)
    require_range(op, "idx_mapping", req[used], 0, token_ids.shape[0] - 1)
    first = positions[query_start_loc[:-1][used].long()]
    require_range(op, "positions", first, 0, token_ids.shape[1])


@register(mutates=("lookback",), cpu=naive.engram_lookback, cuda="torch_replay.ops.engram.kernels",
          check_values=_lookback_values)
def engram_lookback(
    lookback: Tensor,
    token_ids: Tensor,
    positions: Tensor,
    query_start_loc: Tensor,
    idx_mapping: Tensor,
    num_reqs: Tensor,
    query_lens: Optional[Tensor] = None,
) -> None:
    """The ids before each row's chunk, newest first: `lookback[r, j] = token_ids[req, chunk_start - 1 - j]`.

    Args:
        lookback: [rows, depth] int32, rows >= B. Mutated: all of it; -1 where `chunk_start - 1 - j` is negative, for
            rows without tokens, rows of a negative request, and rows from num_reqs on.
        token_ids: [reqs, length], the history of every request by position. Of a request's row only positions below
            its chunk_start are read. Offsets are 64-bit.
        positions: [tokens]; chunk_start is the position of a row's first token, `positions[query_start_loc[r]]`.
        query_start_loc: [B + 1]. query_lens: [B] or None. See ops/tokens/op.py.
        idx_mapping: [B], request of each row. num_reqs: one element, the rows in use.

    Raises:
        ValueError: shapes, dtypes; on a CPU also a bad layout, num_reqs beyond B, a request or a chunk_start outside
            token_ids.
    """
    shapes = Shapes("engram_lookback")
    shapes("lookback", lookback, "rows depth", I32)
    shapes("token_ids", token_ids, "reqs length", INDEX)
    shapes("positions", positions, "tokens", INDEX)
    shapes("idx_mapping", idx_mapping, "B", INDEX)
    check_layout(shapes, query_start_loc, query_lens)
    shapes.count("num_reqs", num_reqs)
    require(shapes.rows >= shapes.B, shapes.op, "lookback", f"of {shapes.rows} rows", f"B = {shapes.B} or more")
    require(shapes.depth >= 1, shapes.op, "lookback", f"of depth {shapes.depth}", "1 or more")


def _hash_values(ids, positions, query_start_loc, lookback, token_map, multipliers, primes, offsets, pad_id,
                 query_lens=None) -> None:
    op = "ngram_hash"
    check_layout_values(op, query_start_loc, query_lens, ids.shape[0])
    require_range(op, "pad_id", pad_id, 0, 2**62)
    require_range(op, "multipliers", multipliers, 1, 2**63 - 1)
    require_range(op, "primes", primes, 1, 2**63 - 1)
    require_range(op, "offsets", offsets, 0, 2**62)
    largest = max(int(token_map.max()) if token_map.numel() else 0, int(pad_id))
    product = largest * (int(multipliers.max()) if multipliers.numel() else 0)
    if product >= 2**63:
        fail(op, "multipliers", int(multipliers.max()), f"at most (2^63 - 1) / {largest}, the largest id")
    _, _, real = naive.token_rows(query_start_loc, query_lens, ids.shape[0])
    require_range(op, "positions", positions[real], 0, 2**63 - 1)


@register(cpu=naive.ngram_hash, cuda="torch_replay.ops.engram.kernels", check_values=_hash_values)
def ngram_hash(
    ids: Tensor,
    positions: Tensor,
    query_start_loc: Tensor,
    lookback: Tensor,
    token_map: Tensor,
    multipliers: Tensor,
    primes: Tensor,
    offsets: Tensor,
    pad_id: Tensor,
    query_lens: Optional[Tensor] = None,
) -> Tensor:
    """Table rows of each token's n-grams.

    For shift s = 0..n-1 the id at `position - s` is taken through `token_map`. It is *blocked* if it lies before the
    sequence, is not in the lookback, is no index of token_map, or maps to a negative value (a masked id); once an id is
    blocked all deeper ones are. `rolling ^= v * multipliers[l, s]` with v the mapped id, or pad_id when blocked. From
    s = 1 on, head h gets row `rolling % primes[l, s - 1, h] + offsets[l, s - 1, h]`. The id at `position - s` comes
    from `ids` within the row's chunk and from `lookback` before it.

    Args:
        ids: [tokens], positions: [tokens].
        query_start_loc: [B + 1]. query_lens: [B] or None. See ops/tokens/op.py.
        lookback: [rows, depth] with rows >= B, as `engram_lookback` fills it; a negative entry is blocked.
        token_map: [V], compressed id of each token; negative: masked. Ids outside [0, V) never index it.
        multipliers: [L, n] int64, positive and so small that no product with an id or pad_id reaches 2^63.
        primes, offsets: [L, n - 1, H] int64, the rows that a column has, and the first of them.
        pad_id: one element, in the space of compressed ids.

    Returns:
        [tokens, L * (n - 1) * H] int64; -1 for tokens that no row owns.

    Raises:
        ValueError: shapes, dtypes; on a CPU also a bad layout, a negative position, pad_id or offset, a multiplier or a
            prime below 1, products that overflow.
    """
    shapes = Shapes("ngram_hash")
    shapes("ids", ids, "tokens", INDEX)
    shapes("positions", positions, "tokens", INDEX)
    shapes("lookback", lookback, "rows depth", INDEX)
    shapes("token_map", token_map, "V", INDEX)
    shapes("multipliers", multipliers, "L n", I64)
    shapes("primes", primes, "L n-1 H", I64)
    shapes("offsets", offsets, "L n-1 H", I64)
    shapes.count("pad_id", pad_id)
    shapes("query_start_loc", query_start_loc, "B+1", INDEX)
    shapes.sizes["B"] = query_start_loc.shape[0] - 1  # nothing else has B elements
    check_layout(shapes, query_start_loc, query_lens)
    require(shapes.n >= 2, shapes.op, "multipliers", f"for orders up to {shapes.n}", "2 or more")
    require(primes.shape[1] == shapes.n - 1, shapes.op, "primes", f"of shape {tuple(primes.shape)}",
            f"[L, n-1, H] with n = {shapes.n}")
    require(shapes.rows >= shapes.B, shapes.op, "lookback", f"of {shapes.rows} rows", f"B = {shapes.B} or more")
    require(shapes.depth >= shapes.n - 1, shapes.op, "lookback", f"of depth {shapes.depth}",
            f"n - 1 = {shapes.n - 1} or more")
    columns = primes.shape[0] * primes.shape[1] * primes.shape[2]
    return torch.empty(ids.shape[0], columns, dtype=torch.int64, device=ids.device)


def _lookup_values(table, scales, rows) -> None:
    require_range("engram_lookup", "rows", rows.clamp(min=-1), -1, table.shape[0] - 1)


@register(cpu=naive.engram_lookup, cuda="torch_replay.ops.engram.kernels",
          check_values=_lookup_values, inline_on_cpu=True)
def engram_lookup(table: Tensor, scales: Optional[Tensor], rows: Tensor) -> Tensor:
    """Rows of a table: `table[rows]`, float8 rows times their shared exponents.

    Args:
        table: [R, D] float32, bfloat16 or float16; or float8_e4m3fn with D a multiple of 32. Any row stride (rows and
            scales may share one buffer). For CUDA `rows` it may be a pinned CPU tensor, which the kernel reads over
            the bus: only the rows asked for travel.
        scales: [R, D / 32] uint8 exactly for float8 tables, where `table` is: exponents e (ue8m0), each the factor
            2^(e - 127) of 32 values; 255 is NaN.
        rows: [tokens, columns]; a negative row gives zeros and reads nothing. Nor does one beyond the table on a GPU;
            on a CPU that raises.

    Returns:
        [tokens, columns, D] in the table's dtype, bfloat16 for float8.

    Raises:
        ValueError: shapes, dtypes, devices; on a CPU also a row beyond the table.
    """
    shapes = Shapes("engram_lookup")
    shapes("rows", rows, "tokens columns", INDEX)
    stored = Shapes("engram_lookup")  # the table may live elsewhere than the rows
    stored("table", table, "R D", (*FLOAT, torch.float8_e4m3fn))
    coarse = table.dtype == torch.float8_e4m3fn
    require((scales is not None) == coarse, "engram_lookup", "scales", "None" if scales is None else "given",
            f"exponents exactly for float8 tables, not for {table.dtype}")
    if coarse:
        if stored.D % SCALED:
            fail("engram_lookup", "table", f"of rows of {stored.D} values", f"a multiple of {SCALED} in float8")
        stored("scales", scales, f"R {stored.D // SCALED}", U8)
    require(table.device == rows.device or table.device.type == "cpu", "engram_lookup", "rows", f"on {rows.device}",
            f"on {table.device} like table, which does not lie in host memory")
    dtype = torch.bfloat16 if coarse else table.dtype
    return torch.empty(shapes.tokens, shapes.columns, stored.D, dtype=dtype, device=rows.device)
