"""Triton kernels of the attention ops. Signatures and semantics: `op.py`.

A grid depends on shapes alone and everything that varies between steps (lengths, starts, tables) is read on the device,
so a captured launch stays right. Attention runs one program per (piece of the token axis, kv head, split of the keys):
the query heads of a kv head lie side by side in the rows of one tile, keys come in tiles of BLOCK_N whatever the block
size is, every key finding its own physical row, and the softmax runs online in float32. Where the grid would leave the
device idle, the keys of a tile are split over programs and `_merge_splits_kernel` joins the parts; no atomics, so that
equal launches give equal bits.

Scores are in base 2, `score = scale log2(e) q.k`, since exp2 is what the hardware has. Rows of the cache that are not
to be read are masked at the load, and weights and values are selected, never multiplied by zero.
"""

import torch
import triton
import triton.language as tl

LOG2E = 1.4426950408889634
# Rows of query_start_loc compared at a time.
BLOCK_B = 128
# Programs below which keys are split (about the multiprocessors of one device), keys worth a program of their own, and
# the most parts that one merge handles.
SPLIT_PROGRAMS, SPLIT_KEYS, MAX_SPLITS = 128, 256, 32


@triton.jit
def _locate_tile(p_start, p_query_lens, p_seq_lens, num_rows, tokens, tile, TILE: tl.constexpr, BLOCK_B: tl.constexpr):
    """Which row a tile of TILE tokens belongs to: (row, its first token, one past its last, q, its first position).

    query_start_loc cuts the token axis into B + 2 segments: what precedes row 0 (nothing, as a rule), the rows, and the
    filler behind the last. Tiles never straddle segments: the one behind cut c starts with tile `start[c] // TILE + c +
    1`, which leaves each at least as many tiles as it needs. Tiles of one token need no such room. The segments that
    are no row have q = 0, and their row must not be used as an index.
    """
    segment = 0
    for base in range(0, num_rows + 1, BLOCK_B):
        o_cut = base + tl.arange(0, BLOCK_B)
        first = tl.load(p_start + o_cut, mask=o_cut <= num_rows, other=0).to(tl.int32)
        if TILE > 1:
            first = first // TILE + o_cut + 1
        segment += tl.sum(((first <= tile) & (o_cut <= num_rows)).to(tl.int32), 0)
    row = segment - 1
    owned = (segment > 0) & (segment <= num_rows)
    begin = tl.load(p_start + row, mask=segment > 0, other=0).to(tl.int32)
    end = tl.load(p_start + segment, mask=segment <= num_rows, other=0).to(tl.int32)
    end = tl.where(segment <= num_rows, end, tokens)
    if p_query_lens is not None:
        q = tl.load(p_query_lens + row, mask=owned, other=0).to(tl.int32)
    else:
        q = tl.where(owned, end - begin, 0)
    position = tl.load(p_seq_lens + row, mask=owned, other=0).to(tl.int64) - q
    if TILE > 1:
        cut = begin // TILE + segment
        begin_tile = tl.where(segment > 0, cut, 0)
        index = (tile - begin_tile) * TILE
    else:
        index = tile - begin
    return row, begin, end, q, position, index


@triton.jit(do_not_specialize=["num_rows", "tokens", "columns", "window"])
def _list_window_kernel(
    p_indices, p_lens, p_seq_lens, p_start, p_table, p_slots, p_replay_start, p_query_lens,
    num_rows, tokens, columns, window,
    stride_indices, stride_place, stride_lens, stride_row, stride_column,
    BLOCK_SIZE: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """One program a token. indices [tokens, window], lens and slots [tokens], table [rows, columns]."""
    token = tl.program_id(0)
    row, _, _, q, position, index = _locate_tile(
        p_start, p_query_lens, p_seq_lens, num_rows, tokens, token, 1, BLOCK_B)
    real = (index < q) & (tl.load(p_slots + token) >= 0)
    position += index
    first = tl.maximum(position - window + 1, 0)
    if p_replay_start is not None:
        first = tl.maximum(first, tl.load(p_replay_start + row, mask=real, other=0).to(tl.int64))
    count = tl.where(real, tl.maximum(position - first + 1, 0), 0)
    token = token.to(tl.int64)
    row = row.to(tl.int64)
    tl.store(p_lens + token * stride_lens, count.to(tl.int32))
    for base in range(0, window, BLOCK_W):
        o_place = base + tl.arange(0, BLOCK_W)
        o_position = first + o_place
        o_column = o_position // BLOCK_SIZE
        # a position without a column is in no block, like one whose block is null
        named = (o_place < count) & (o_column < columns)
        b_block = tl.load(p_table + row * stride_row + o_column * stride_column, mask=named, other=0).to(tl.int64)
        b_slot = tl.where(b_block > 0, b_block * BLOCK_SIZE + (o_position - o_column * BLOCK_SIZE), -1)
        o_store = token * stride_indices + o_place.to(tl.int64) * stride_place
        tl.store(p_indices + o_store, b_slot.to(p_indices.dtype.element_ty), mask=o_place < window)


def swa_indices(
    indices, lens, seq_lens, query_start_loc, block_table, slot_mapping, replay_start=None, query_lens=None, *, window,
    block_size,
) -> None:
    tokens = lens.shape[0]
    if tokens == 0:
        return
    _list_window_kernel[(tokens,)](
        indices, lens, seq_lens.contiguous(), query_start_loc.contiguous(), block_table, slot_mapping.contiguous(),
        _contiguous(replay_start), _contiguous(query_lens),
        block_table.shape[0], tokens, block_table.shape[1], window,
        *indices.stride(), lens.stride(0), *block_table.stride(),
        BLOCK_SIZE=block_size, BLOCK_W=min(1024, triton.next_power_of_2(window)), BLOCK_B=BLOCK_B,
    )  # fmt: skip


def _contiguous(tensor):
    """Vectors of one element a row are not worth a stride in every kernel."""
    return None if tensor is None else tensor.contiguous()


@triton.jit
def _load_rows(p_cache, o_rows, b_seen, o_dim, stride_dim, DIM: tl.constexpr, COMPUTE: tl.constexpr):
    """[BLOCK_N, BLOCK_D] rows of keys or values, 0 where not seen; o_rows int64 [BLOCK_N]."""
    o_load = o_rows[:, None] + o_dim.to(tl.int64)[None, :] * stride_dim
    return tl.load(p_cache + o_load, mask=b_seen[:, None] & (o_dim < DIM)[None, :], other=0.0).to(COMPUTE)


@triton.jit
def _weigh_keys(b_q, b_k, b_seen, b_peak, b_total, scale):
    """One step of the online softmax: weights of this tile, factor of what was summed before, new peak and total.

    b_q [M, D], b_k [N, D], b_seen [M, N], b_peak and b_total [M].
    """
    b_score = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale
    b_score = tl.where(b_seen, b_score, float("-inf"))
    b_new = tl.maximum(b_peak, tl.max(b_score, 1))
    # -inf minus -inf is no number: rows that saw nothing yet are measured from 0
    b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_weight = tl.exp2(b_score - b_base[:, None])
    b_factor = tl.exp2(b_peak - b_base)
    return b_weight, b_factor, b_new, b_total * b_factor + tl.sum(b_weight, 1)


@triton.jit
def _store_rows(p_out, p_lse, o_out, o_lse, o_dim, b_kept, b_acc, b_peak, b_total, DIM: tl.constexpr):
    """Divides by the totals; 0 for rows that saw nothing, whatever their sum holds. p_lse: only for splits."""
    b_empty = b_total == 0.0
    b_result = tl.where(b_empty[:, None], 0.0, b_acc / tl.where(b_empty, 1.0, b_total)[:, None])
    kept = b_kept[:, None] & (o_dim < DIM)[None, :]
    tl.store(p_out + o_out[:, None] + o_dim[None, :], b_result.to(p_out.dtype.element_ty), mask=kept)
    if p_lse is not None:
        b_lse = b_peak + tl.log2(tl.where(b_empty, 1.0, b_total))
        tl.store(p_lse + o_lse, b_lse, mask=b_kept)


@triton.jit
def _attend_window_kernel(
    p_out, p_lse, p_q, p_cache, p_indices, p_lens, scale, window,
    stride_out_token, stride_out_head, stride_out_split,
    stride_q_token, stride_q_head, stride_q_dim,
    stride_block, stride_slot, stride_kv, stride_head, stride_dim,
    stride_indices, stride_place, stride_lens,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program a token, kv head and split; GROUP query heads in the first of BLOCK_M rows."""
    token, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    splits = tl.num_programs(2)
    o_row, o_dim = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    o_head = kv_head * GROUP + o_row
    b_kept = o_row < GROUP
    o_q = token * stride_q_token + o_head[:, None] * stride_q_head + o_dim.to(tl.int64)[None, :] * stride_q_dim
    b_q = tl.load(p_q + o_q, mask=b_kept[:, None] & (o_dim < DIM)[None, :], other=0.0).to(COMPUTE)

    count = tl.minimum(tl.load(p_lens + token * stride_lens).to(tl.int32), window)
    share = tl.cdiv(tl.cdiv(count, BLOCK_N), splits) * BLOCK_N
    b_peak, b_total = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    p_key = p_cache + kv_head * stride_head
    for base in range(split * share, tl.minimum((split + 1) * share, count), BLOCK_N):
        o_place = base + tl.arange(0, BLOCK_N)
        o_index = token * stride_indices + o_place.to(tl.int64) * stride_place
        b_slot = tl.load(p_indices + o_index, mask=o_place < count, other=-1).to(tl.int64)
        b_seen = b_slot >= 0
        b_block = b_slot // BLOCK_SIZE
        o_rows = b_block * stride_block + (b_slot - b_block * BLOCK_SIZE) * stride_slot
        b_k = _load_rows(p_key, o_rows, b_seen, o_dim, stride_dim, DIM, COMPUTE)
        b_v = _load_rows(p_key + stride_kv, o_rows, b_seen, o_dim, stride_dim, DIM, COMPUTE)
        b_weight, b_factor, b_peak, b_total = _weigh_keys(b_q, b_k, b_seen[None, :], b_peak, b_total, scale)
        b_acc = tl.dot(b_weight.to(COMPUTE), b_v, b_acc * b_factor[:, None], input_precision="ieee")

    o_out = token * stride_out_token + o_head * stride_out_head + split.to(tl.int64) * stride_out_split
    o_lse = (token * tl.num_programs(1) * GROUP + o_head) * splits + split
    _store_rows(p_out, p_lse, o_out, o_lse, o_dim, b_kept, b_acc, b_peak, b_total, DIM)


def swa_attention(q, cache, indices, lens, *, scale, out) -> None:
    tokens, kv_heads = q.shape[0], cache.shape[3]
    if q.numel() == 0:
        return
    group = q.shape[1] // kv_heads
    plan = _plan(q, cache, max(16, triton.next_power_of_2(group)))
    splits = _count_splits(tokens * kv_heads, indices.shape[1])
    part, lse, strides = _scratch(out, splits)
    _attend_window_kernel[(tokens, kv_heads, splits)](
        part, lse, q, cache, indices, lens, float(scale) * LOG2E, indices.shape[1],
        *strides, *q.stride(), *cache.stride(), *indices.stride(), lens.stride(0),
        GROUP=group, DIM=q.shape[2], BLOCK_SIZE=cache.shape[1], **plan,
    )  # fmt: skip
    _merge_splits(out, part, lse, splits)


@triton.jit(do_not_specialize=["num_rows", "tokens", "columns"])
def _attend_pages_kernel(
    p_out, p_lse, p_q, p_cache, p_table, p_seq_lens, p_start, p_query_lens, scale,
    num_rows, tokens, columns,
    stride_out_token, stride_out_head, stride_out_split,
    stride_q_token, stride_q_head, stride_q_dim,
    stride_block, stride_slot, stride_kv, stride_head, stride_dim,
    stride_row, stride_column,
    GROUP: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program for TILE tokens of one row, a kv head and a split; row m of the tile is head m % GROUP of token
    m // GROUP."""
    tile, kv_head, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    splits = tl.num_programs(2)
    row, begin, end, q, computed, index = _locate_tile(
        p_start, p_query_lens, p_seq_lens, num_rows, tokens, tile, TILE, BLOCK_B)
    if begin + index >= end:
        return
    o_row, o_dim = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    o_index = index + o_row // GROUP
    b_kept = (o_row < TILE * GROUP) & (begin + o_index < end)
    b_real = (o_row < TILE * GROUP) & (o_index < q)
    o_token = (begin + o_index).to(tl.int64)
    o_head = kv_head * GROUP + o_row % GROUP
    o_line = o_token * stride_q_token + o_head * stride_q_head
    o_q = o_line[:, None] + o_dim.to(tl.int64)[None, :] * stride_q_dim
    b_q = tl.load(p_q + o_q, mask=b_real[:, None] & (o_dim < DIM)[None, :], other=0.0).to(COMPUTE)

    # keys that every real token of the tile sees, shared by the splits, and one past those that its last one sees
    computed = computed.to(tl.int32)
    some = index < q
    common = tl.where(some, tl.maximum(computed + index + 1, 0), 0)
    last = tl.where(some, tl.maximum(computed + tl.minimum(index + TILE, q), 0), 0)
    share = tl.cdiv(tl.cdiv(common, BLOCK_N), splits) * BLOCK_N
    b_peak, b_total = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    p_key = p_cache + kv_head * stride_head
    p_blocks = p_table + row.to(tl.int64) * stride_row
    for base in range(split * share, tl.minimum((split + 1) * share, common), BLOCK_N):
        o_key = base + tl.arange(0, BLOCK_N)
        b_held, o_rows = _find_rows(
            p_blocks, o_key, common, columns, stride_column, stride_block, stride_slot, BLOCK_SIZE)
        b_k = _load_rows(p_key, o_rows, b_held, o_dim, stride_dim, DIM, COMPUTE)
        b_v = _load_rows(p_key + stride_kv, o_rows, b_held, o_dim, stride_dim, DIM, COMPUTE)
        b_seen = b_real[:, None] & b_held[None, :]
        b_weight, b_factor, b_peak, b_total = _weigh_keys(b_q, b_k, b_seen, b_peak, b_total, scale)
        b_acc = tl.dot(b_weight.to(COMPUTE), b_v, b_acc * b_factor[:, None], input_precision="ieee")
    if TILE > 1:
        # Keys of the tile's own tokens, which only the later ones see; split 0 takes them all. A value there that is
        # not finite would reach, times a weight of zero, the tokens before it: such values go by a way of their own.
        for base in range(common, tl.where(split == 0, last, 0), BLOCK_N):
            o_key = base + tl.arange(0, BLOCK_N)
            b_held, o_rows = _find_rows(
                p_blocks, o_key, last, columns, stride_column, stride_block, stride_slot, BLOCK_SIZE)
            b_k = _load_rows(p_key, o_rows, b_held, o_dim, stride_dim, DIM, COMPUTE)
            b_v = _load_rows(p_key + stride_kv, o_rows, b_held, o_dim, stride_dim, DIM, COMPUTE)
            b_seen = b_real[:, None] & b_held[None, :] & (o_key[None, :] <= computed + o_index[:, None])
            b_weight, b_factor, b_peak, b_total = _weigh_keys(b_q, b_k, b_seen, b_peak, b_total, scale)
            b_wild = (b_v - b_v) != 0.0
            b_tame = tl.where(b_wild, 0.0, b_v).to(COMPUTE)
            b_acc = tl.dot(b_weight.to(COMPUTE), b_tame, b_acc * b_factor[:, None], input_precision="ieee")
            if tl.max(tl.max(b_wild.to(tl.int32), 1), 0) > 0:
                for key in range(base, tl.minimum(base + BLOCK_N, last)):
                    o_one = key + tl.arange(0, 1)
                    b_named, o_place = _find_rows(
                        p_blocks, o_one, last, columns, stride_column, stride_block, stride_slot, BLOCK_SIZE)
                    b_value = _load_rows(p_key + stride_kv, o_place, b_named, o_dim, stride_dim, DIM, tl.float32)
                    b_share = tl.sum(tl.where(o_key[None, :] == key, b_weight, 0.0), 1)
                    b_hit = (b_real & (key <= computed + o_index))[:, None] & ((b_value - b_value) != 0.0)
                    b_acc += tl.where(b_hit, b_share[:, None] * b_value, 0.0)

    o_out = o_token * stride_out_token + o_head * stride_out_head + split.to(tl.int64) * stride_out_split
    o_lse = (o_token * tl.num_programs(1) * GROUP + o_head) * splits + split
    _store_rows(p_out, p_lse, o_out, o_lse, o_dim, b_kept, b_acc, b_peak, b_total, DIM)


@triton.jit
def _find_rows(p_blocks, o_key, end, columns, stride_column, stride_block, stride_slot, BLOCK_SIZE: tl.constexpr):
    """Which positions o_key below `end` a block holds, and the offset of each one's row in the cache (int64)."""
    o_column = o_key // BLOCK_SIZE
    named = (o_key < end) & (o_column < columns)
    b_block = tl.load(p_blocks + o_column.to(tl.int64) * stride_column, mask=named, other=0).to(tl.int64)
    return b_block > 0, b_block * stride_block + (o_key - o_column * BLOCK_SIZE).to(tl.int64) * stride_slot


def paged_attention(q, cache, block_table, seq_lens, query_start_loc, query_lens=None, *, scale, out) -> None:
    tokens, heads, dim = q.shape
    if q.numel() == 0:
        return
    (rows, columns), block_size, kv_heads = block_table.shape, cache.shape[1], cache.shape[3]
    group = heads // kv_heads
    # as many tokens a tile as the rows have on average; decode steps get a program a token
    each = -(-tokens // rows)
    largest = 64 // (2 if _compute_dtype(q, cache) == tl.float32 else 1) // (2 if dim > 128 else 1)
    block_m = max(16, min(largest, triton.next_power_of_2(each * group)), triton.next_power_of_2(group))
    tile = 1 if each == 1 else block_m // group
    tiles = tokens if tile == 1 else tokens // tile + rows + 2
    splits = _count_splits(tiles * kv_heads, columns * block_size)
    part, lse, strides = _scratch(out, splits)
    _attend_pages_kernel[(tiles, kv_heads, splits)](
        part, lse, q, cache, block_table, seq_lens.contiguous(), query_start_loc.contiguous(), _contiguous(query_lens),
        float(scale) * LOG2E, rows, tokens, columns,
        *strides, *q.stride(), *cache.stride(), *block_table.stride(),
        GROUP=group, TILE=tile, DIM=dim, BLOCK_SIZE=block_size, BLOCK_B=BLOCK_B, **_plan(q, cache, block_m),
    )  # fmt: skip
    _merge_splits(out, part, lse, splits)


def _compute_dtype(q, cache):
    """What the products take: the common dtype if both have 16 bits, else float32 with all its digits."""
    if q.dtype == cache.dtype and q.dtype in (torch.bfloat16, torch.float16):
        return tl.bfloat16 if q.dtype == torch.bfloat16 else tl.float16
    return tl.float32


def _plan(q, cache, block_m: int) -> dict:
    """Tile sizes and warps that neither spill registers nor need 100 KB of shared memory at any head dim up to 256.

    float32 products run outside the tensor cores and hold their operands in registers: smaller tiles, more warps. Rows
    of odd length load element by element, each with an offset of its own: more warps. Where nothing bounds them, ptxas
    spills a few words to reach the next step of occupancy; any bound, the hardware's own too, turns that off.
    """
    compute, block_d = _compute_dtype(q, cache), max(16, triton.next_power_of_2(q.shape[2]))
    wide = compute == tl.float32
    block_n = max(16, 2048 // block_d) if wide else max(32, 4096 // block_d)
    many = wide or block_m * max(128, block_d) >= 64 * 128 or q.shape[2] % 16
    return dict(COMPUTE=compute, BLOCK_M=block_m, BLOCK_N=min(64, block_n), BLOCK_D=block_d,
                num_warps=8 if many else 4, num_stages=3, maxnreg=255)


def _count_splits(programs: int, keys: int) -> int:
    """Parts of the keys, a power of two: enough to fill a device, none with less than SPLIT_KEYS of the longest."""
    splits = 1
    while 2 * splits <= MAX_SPLITS and programs * splits < SPLIT_PROGRAMS and keys >= 2 * splits * SPLIT_KEYS:
        splits *= 2
    return splits


def _scratch(out, splits: int):
    """Where the programs write, the log-sums beside it, and its strides of token, head and split."""
    if splits == 1:
        return out, None, (out.stride(0), out.stride(1), 0)
    tokens, heads, dim = out.shape
    part = torch.empty(tokens, heads, splits, dim, dtype=torch.float32, device=out.device)
    return part, torch.empty(tokens, heads, splits, dtype=torch.float32, device=out.device), part.stride()[:3]


@triton.jit
def _merge_splits_kernel(p_out, p_part, p_lse, SPLITS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """One program a token and head, all contiguous: parts weighted by the share of the softmax that each holds."""
    line = tl.program_id(0).to(tl.int64)
    o_split, o_dim = tl.arange(0, SPLITS), tl.arange(0, BLOCK_D)
    b_lse = tl.load(p_lse + line * SPLITS + o_split)
    peak = tl.max(b_lse, 0)
    b_weight = tl.exp2(b_lse - tl.where(peak == float("-inf"), 0.0, peak))
    o_part = (line * SPLITS + o_split[:, None]) * DIM + o_dim[None, :]
    b_part = tl.load(p_part + o_part, mask=(o_dim < DIM)[None, :], other=0.0)
    total = tl.sum(b_weight, 0)
    b_out = tl.sum(b_weight[:, None] * b_part, 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(p_out + line * DIM + o_dim, b_out.to(p_out.dtype.element_ty), mask=o_dim < DIM)


def _merge_splits(out, part, lse, splits: int) -> None:
    if splits > 1:
        tokens, heads, dim = out.shape
        _merge_splits_kernel[(tokens * heads,)](
            out, part, lse, SPLITS=splits, DIM=dim, BLOCK_D=triton.next_power_of_2(dim))
