"""Triton kernels of the engram ops. One launch each; 64-bit ids and offsets; counts stay unspecialised."""

import triton
import triton.language as tl

from ..check import fail
from ..ring.kernels import jit_once
from ..tokens.kernels import _find_rows, _layout
from ..triton_rounding import as_stored, decode_e4m3

TOKENS = 64  # tokens a program of the hash
VALUES = 4096  # table values a program of the lookup, about


@jit_once
def _gather_lookback_kernel(
    p_lookback, lookback_row, lookback_column, p_ids, ids_req, ids_position, p_positions, positions_stride, p_start,
    start_stride, p_idx_mapping, idx_stride, p_num_reqs, p_lens, lens_stride, rows, batch_rows, depth,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):
    row = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    inside = row < batch_rows
    listed = inside & (row < tl.load(p_num_reqs))
    req = tl.load(p_idx_mapping + row * idx_stride, mask=listed, other=-1).to(tl.int64)
    begin = tl.load(p_start + row * start_stride, mask=inside, other=0).to(tl.int64)
    if p_lens is None:
        length = tl.load(p_start + (row + 1) * start_stride, mask=inside, other=0) - begin
    else:
        length = tl.load(p_lens + row * lens_stride, mask=inside, other=0).to(tl.int64)
    used = (req >= 0) & (length > 0)
    first = tl.load(p_positions + begin * positions_stride, mask=used, other=0).to(tl.int64)
    j = tl.arange(0, BLOCK_D)[None, :]
    position = first[:, None] - 1 - j
    found = used[:, None] & (position >= 0) & (j < depth)
    ids = tl.load(p_ids + req[:, None] * ids_req + position * ids_position, mask=found, other=-1).to(tl.int32)
    p_to = p_lookback + row[:, None] * lookback_row + j * lookback_column
    tl.store(p_to, ids, mask=(row < rows)[:, None] & (j < depth))


def engram_lookback(
    lookback, token_ids, positions, query_start_loc, idx_mapping, num_reqs, query_lens=None
) -> None:
    """One program for each 32 rows."""
    rows, depth = lookback.shape
    start, lens = _layout(query_start_loc, query_lens)
    _gather_lookback_kernel[(triton.cdiv(rows, 32),)](
        lookback, *lookback.stride(), token_ids, *token_ids.stride(), positions, positions.stride(0), *start,
        idx_mapping, idx_mapping.stride(0), num_reqs, *lens, rows, idx_mapping.shape[0], depth, BLOCK_R=32,
        BLOCK_D=triton.next_power_of_2(depth), num_warps=1)


@jit_once
def _hash_ngrams_kernel(
    p_out, out_token, out_column, p_ids, ids_stride, p_positions, positions_stride, p_start, start_stride, p_lookback,
    lookback_row, lookback_column, p_map, map_stride, p_multipliers, multipliers_layer, multipliers_shift, p_primes,
    primes_layer, primes_order, primes_head, p_offsets, offsets_layer, offsets_order, offsets_head, p_pad, p_lens,
    lens_stride, tokens, rows, steps, depth, vocab, heads, N: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    i_layer = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    row, index, real = _find_rows(p_start, start_stride, p_lens, lens_stride, token, tokens, rows, steps)
    position = tl.load(p_positions + token * positions_stride, mask=real, other=0).to(tl.int64)
    pad = tl.load(p_pad).to(tl.int64)
    head = tl.arange(0, BLOCK_H).to(tl.int64)
    inside = head < heads
    p_column = p_out + token * out_token + i_layer * (N - 1) * heads * out_column
    open_ = real  # no blocked id so far
    rolling = tl.zeros_like(token)
    for shift in tl.static_range(N):
        here = real & (index >= shift)
        behind = shift - 1 - index
        past = real & (index < shift) & (behind < depth)
        p_behind = p_lookback + row * lookback_row + behind * lookback_column
        source = tl.load(p_ids + (token - shift) * ids_stride, mask=here, other=-1).to(tl.int64)
        source = tl.where(here, source, tl.load(p_behind, mask=past, other=-1).to(tl.int64))
        known = (source >= 0) & (source < vocab) & (position >= shift)
        value = tl.load(p_map + source * map_stride, mask=known, other=-1).to(tl.int64)
        open_ = open_ & (value >= 0)
        multiplier = tl.load(p_multipliers + i_layer * multipliers_layer + shift * multipliers_shift)
        rolling = rolling ^ (tl.where(open_, value, pad) * multiplier)
        if shift > 0:
            o_prime = i_layer * primes_layer + (shift - 1) * primes_order + head * primes_head
            o_offset = i_layer * offsets_layer + (shift - 1) * offsets_order + head * offsets_head
            prime = tl.load(p_primes + o_prime, mask=inside, other=1)
            offset = tl.load(p_offsets + o_offset, mask=inside, other=0)
            hashed = tl.where(real[:, None], rolling[:, None] % prime[None, :] + offset[None, :], -1)
            p_to = p_column[:, None] + ((shift - 1) * heads + head)[None, :] * out_column
            tl.store(p_to, hashed, mask=(token < tokens)[:, None] & inside[None, :])


def ngram_hash(
    ids, positions, query_start_loc, lookback, token_map, multipliers, primes, offsets, pad_id, query_lens=None, *, out
) -> None:
    """One program for each 64 tokens of a layer."""
    tokens, rows = ids.shape[0], query_start_loc.shape[0] - 1
    layers, orders = multipliers.shape
    start, lens = _layout(query_start_loc, query_lens)
    if tokens and out.shape[1]:
        _hash_ngrams_kernel[(triton.cdiv(tokens, TOKENS), layers)](
            out, *out.stride(), ids, ids.stride(0), positions, positions.stride(0), *start, lookback,
            *lookback.stride(), token_map, token_map.stride(0), multipliers, *multipliers.stride(), primes,
            *primes.stride(), offsets, *offsets.stride(), pad_id, *lens, tokens, rows, (rows + 1).bit_length(),
            lookback.shape[1], token_map.shape[0], primes.shape[2], N=orders, BLOCK_T=TOKENS,
            BLOCK_H=triton.next_power_of_2(primes.shape[2]), num_warps=2)


@triton.jit(do_not_specialize=["p_rows", "rows_token", "rows_column", "count", "columns"])
def _look_up_rows_kernel(
    p_out, p_table, table_row, table_value, p_scales, scales_row, scales_group, p_rows, rows_token, rows_column, count,
    columns, table_rows, dim, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """Lookups are numbered token by token; `out` is dense. Strides of the table stay specialised, for wide reads."""
    i = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = i < count
    token = i // columns
    p_row = p_rows + token * rows_token + (i - token * columns) * rows_column
    row = tl.load(p_row, mask=inside, other=-1).to(tl.int64)
    kept = (row >= 0) & (row < table_rows)
    o = tl.arange(0, BLOCK_D)[None, :]
    mask = kept[:, None] & (o < dim)
    raw = tl.load(p_table + row[:, None] * table_row + o * table_value, mask=mask, other=0)
    if p_scales is None:
        values = raw
    else:
        exponent = tl.load(p_scales + row[:, None] * scales_row + (o // 32) * scales_group, mask=mask, other=127)
        bits = exponent.to(tl.int32) << 23
        bits = tl.where(exponent == 0, 1 << 22, bits)  # 2^-127 is a subnormal float32
        factor = tl.where(exponent == 255, float("nan"), bits.to(tl.float32, bitcast=True))
        values = tl.where(mask, decode_e4m3(raw) * factor, 0.0)
    tl.store(p_out + i[:, None] * dim + o, values.to(p_out.dtype.element_ty), mask=inside[:, None] & (o < dim))


def engram_lookup(table, scales, rows, *, out) -> None:
    """One program for about 4,096 values, 64 rows at most: many reads in flight, for a table across the bus."""
    for name, stored in (("table", table), ("scales", scales)):
        if stored is not None and rows.is_cuda and not (stored.is_cuda or stored.is_pinned()):
            fail("engram_lookup", name, "in pageable host memory", f"on {rows.device}, or in pinned host memory")
    dim = table.shape[1]
    block_d = triton.next_power_of_2(dim)
    block_r = max(1, min(64, VALUES // block_d))
    strides = (0, 0) if scales is None else scales.stride()
    if rows.numel() and dim:
        _look_up_rows_kernel[(triton.cdiv(rows.numel(), block_r),)](
            out, as_stored(table), *table.stride(), scales, *strides, rows, *rows.stride(), rows.numel(), rows.shape[1],
            table.shape[0], dim, BLOCK_R=block_r, BLOCK_D=block_d, num_warps=4)
