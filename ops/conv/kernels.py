"""Triton kernels of the short convolution and of copying and zeroing slots. One launch each."""

import functools
import math
import operator
from typing import Iterable

import torch
import triton
import triton.language as tl

from ..layers import Layers, dtype_of, shape_of, strides_of, tensors_of
from ..triton_layers import layer_pointer
from ..triton_rows import row_strides, row_tokens
from .naive import as_integers

WORD_TYPES = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
FEW = 8  # rows of a copy that move together in long chunks
WORDS = 4096  # words that a program of a copy holds at once
DIMS = 3  # dimensions of a slot that a copy can step through


@triton.jit(do_not_specialize=["rows", "p_positions", "positions_stride", "p_slots", "slots_stride", "p_lens",
                               "lens_stride", "p_starts", "starts_stride", "tokens"])
def _convolve_rows_kernel(
    p_ring, ring_slot, ring_dim, ring_column, p_x, x_row, x_token, x_dim, p_weight, weight_dim, weight_tap, p_bias,
    bias_dim, p_positions, positions_stride, p_slots, slots_stride, p_lens, lens_stride, p_starts, starts_stride,
    p_out, out_row, out_token, out_dim, tokens, dim, ring_len, WIDTH: tl.constexpr, SILU: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """BLOCK_T tokens and BLOCK_D channels of one row. Columns written, those of the row's tokens, are never among the
    width - 1 columns before them that any program reads: the ring is at least width - 1 + T long."""
    i_row = tl.program_id(0).to(tl.int64)
    channel = (tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)).to(tl.int64)[None, :]
    token = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    slot = tl.load(p_slots + i_row * slots_stride).to(tl.int64)
    place, q = row_tokens(i_row, slot, p_starts, starts_stride, p_lens, lens_stride, tokens)
    q = tl.minimum(q, tokens)
    # padded rows may have any position
    position = tl.where(slot > 0, tl.load(p_positions + i_row * positions_stride).to(tl.int64), 0)
    column = (position % ring_len).to(tl.int32)
    known = tl.minimum(position, WIDTH).to(tl.int32)  # inputs before the chunk, as far as they matter

    c_mask = channel < dim
    RING: tl.constexpr = p_ring.dtype.element_ty
    p_ring += slot * ring_slot + channel * ring_dim
    p_x += place * x_row + channel * x_dim
    p_weight += channel * weight_dim
    acc = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    if p_bias is not None:
        acc += tl.load(p_bias + channel * bias_dim, mask=c_mask, other=0.0).to(tl.float32)
    for tap in tl.static_range(WIDTH):
        i = (token + (tap - (WIDTH - 1)))[:, None]  # the input's token, below 0 in the ring
        live = (token < q)[:, None] & c_mask
        new = tl.load(p_x + i.to(tl.int64) * x_token, mask=live & (i >= 0), other=0.0)
        # what later steps read from the ring must be what is used now, so round first
        new = new.to(RING)
        if tap == WIDTH - 1:
            at = (column + token) % ring_len
            tl.store(p_ring + at[:, None].to(tl.int64) * ring_column, new, mask=live)
            value = new.to(tl.float32)
        else:
            at = (column + ring_len + i) % ring_len
            past = tl.load(p_ring + at.to(tl.int64) * ring_column, mask=live & (i < 0) & (i + known >= 0), other=0.0)
            value = tl.where(i < 0, past, new).to(tl.float32)
        acc += value * tl.load(p_weight + tap * weight_tap, mask=c_mask, other=0.0).to(tl.float32)
    if SILU:
        acc = acc * tl.sigmoid(acc)
    p_out += place * out_row + token[:, None].to(tl.int64) * out_token + channel * out_dim
    acc = tl.where((token < q)[:, None], acc, 0.0)
    written = tokens if p_starts is None else q
    tl.store(p_out, acc.to(p_out.dtype.element_ty), mask=(token < written)[:, None] & c_mask)


def conv_replay(
    conv_ring, x, weight, bias, positions, slots, query_lens=None, query_start_loc=None, *, silu, max_query_len=None,
    out,
) -> None:
    """One program for each row and 512 elements of it."""
    rows, dim, packed = slots.shape[0], x.shape[-1], query_start_loc is not None
    tokens = max_query_len if packed else x.shape[1]
    if packed:
        out.zero_()
    block_t = min(16, triton.next_power_of_2(tokens))
    block_d = min(max(512 // block_t, 32), 128, triton.next_power_of_2(dim))
    _convolve_rows_kernel[(rows, triton.cdiv(dim, block_d), triton.cdiv(tokens, block_t))](
        conv_ring, *conv_ring.stride(), x, *row_strides(x, packed), weight, *weight.stride(), bias,
        0 if bias is None else bias.stride(0), positions, positions.stride(0), slots, slots.stride(0), query_lens,
        0 if query_lens is None else query_lens.stride(0), query_start_loc, *row_strides(query_start_loc, False, 1),
        out, *row_strides(out, packed), tokens, dim, conv_ring.shape[2],
        WIDTH=weight.shape[1], SILU=silu, BLOCK_T=block_t, BLOCK_D=block_d,
        num_warps=max(1, min(4, block_t * block_d // 64)))


@triton.jit
def _word_offsets(o, size_0, size_1, stride_0, stride_1, stride_2, SLOT_DIMS: tl.constexpr):
    """Offsets of words o of a slot, counted in the order of dimensions 2, 1, 0 (the innermost)."""
    if SLOT_DIMS == 1:
        offset = o.to(tl.int64) * stride_0
    else:
        outer = o // size_0
        offset = (o - outer * size_0).to(tl.int64) * stride_0
        if SLOT_DIMS == 2:
            offset += outer.to(tl.int64) * stride_1
        else:
            last = outer // size_1
            offset += (outer - last * size_1).to(tl.int64) * stride_1 + last.to(tl.int64) * stride_2
    return offset


@triton.jit
def _move_chunks(
    p_pool, pool_slot, source, target, moved, words, size_0, size_1, stride_0, stride_1, stride_2,
    SLOT_DIMS: tl.constexpr, CHUNK: tl.constexpr,
):
    """The words of all rows, chunk by chunk, the programs of a layer taking turns."""
    p_from, p_to = p_pool + source[:, None] * pool_slot, p_pool + target[:, None] * pool_slot
    for i_chunk in range(tl.program_id(0), tl.cdiv(words, CHUNK), tl.num_programs(0)):
        o = i_chunk * CHUNK + tl.arange(0, CHUNK)[None, :]
        mask = moved[:, None] & (o < words)
        offset = _word_offsets(o, size_0, size_1, stride_0, stride_1, stride_2, SLOT_DIMS)
        b_words = tl.load(p_from + offset, mask=mask)
        # a program moves a chunk of all rows at once and no other program touches these words: behind this point
        # every source has been read, so chains and swaps work
        tl.debug_barrier()
        tl.store(p_to + offset, b_words, mask=mask)


@triton.jit(do_not_specialize=["p_src", "src_group", "src_row", "p_dst", "dst_group", "dst_row", "p_active",
                               "active_stride", "p_layer_group", "layer_group_stride", "rows"])
def _copy_slots_kernel(
    p_pool, pool_layer, pool_slot, p_src, src_group, src_row, p_dst, dst_group, dst_row, p_layer_group,
    layer_group_stride, p_active, active_stride, rows, words, size_0, size_1, stride_0, stride_1, stride_2,
    SLOT_DIMS: tl.constexpr, WORD: tl.constexpr, ROWS: tl.constexpr, FEW: tl.constexpr, WORDS: tl.constexpr,
):
    """Programs (i, layer). All programs of a layer come to the same list of rows, and so to the same chunks."""
    i_layer = tl.program_id(1).to(tl.int64)
    place = tl.arange(0, ROWS)
    row = tl.load(p_active + place * active_stride, mask=place < rows, other=-1).to(tl.int64)
    listed = tl.cumsum((row < 0).to(tl.int32), 0) == 0
    i_group = tl.load(p_layer_group + i_layer * layer_group_stride).to(tl.int64)
    source = tl.load(p_src + i_group * src_group + row * src_row, mask=listed, other=0).to(tl.int64)
    target = tl.load(p_dst + i_group * dst_group + row * dst_row, mask=listed, other=0).to(tl.int64)
    moved = (source > 0) & (target > 0) & (source != target)
    count = tl.sum(moved.to(tl.int32), 0)
    p_pool = layer_pointer(p_pool, i_layer, pool_layer, WORD)
    if count > FEW:
        _move_chunks(p_pool, pool_slot, source, target, moved, words, size_0, size_1, stride_0, stride_1, stride_2,
                     SLOT_DIMS, WORDS // ROWS if WORDS > 8 * ROWS else 8)
    elif count > 0:
        # few rows of many: gathered into a short list, so that the chunks are long
        rank = tl.cumsum(moved.to(tl.int32), 0) - 1
        picked = moved[None, :] & (rank[None, :] == tl.arange(0, FEW)[:, None])
        few_source = tl.sum(tl.where(picked, source[None, :], 0), 1)
        few_target = tl.sum(tl.where(picked, target[None, :], 0), 1)
        _move_chunks(p_pool, pool_slot, few_source, few_target, tl.arange(0, FEW) < count, words, size_0, size_1,
                     stride_0, stride_1, stride_2, SLOT_DIMS, WORDS // FEW)


@functools.lru_cache(maxsize=256)
def _slot_layout(shape: tuple, strides: tuple, itemsize: int, misaligned: int) -> tuple:
    """(word bytes, layer stride, slot stride, dims) of a pool [L, S, ...] seen as the widest words it allows.

    dims are (size, stride) in words, the innermost first, adjacent ones merged. `misaligned`: address modulo 8.
    """
    body = sorted((stride, size) for size, stride in zip(shape[2:], strides[2:]) if size > 1 and stride > 0)
    dims = []
    for stride, size in body:
        if dims and dims[-1][0] * dims[-1][1] == stride:
            dims[-1][0] *= size
        else:
            dims.append([size, stride])
    dims = dims or [[1, 1]]
    outer = [strides[0], strides[1]]
    word = itemsize
    while word < 8 and dims[0][1] == 1 and misaligned % (2 * word) == 0:
        if dims[0][0] % 2 or any(s % 2 for s in outer) or any(stride % 2 for _, stride in dims[1:]):
            break
        dims = [[dims[0][0] // 2, 1]] + [[size, stride // 2] for size, stride in dims[1:]]
        outer = [s // 2 for s in outer]
        word *= 2
    return word, *outer, tuple(map(tuple, dims))


@functools.lru_cache(maxsize=None)
def _programs(device) -> int:
    """Programs that fill a device a few times over; a handful for the interpreter."""
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 6


def _layout(pool: Layers) -> tuple:
    misaligned = functools.reduce(operator.or_, (tensor.data_ptr() % 8 for tensor in tensors_of(pool)))
    return _slot_layout(shape_of(pool), strides_of(pool), dtype_of(pool).itemsize, misaligned)


def _words_of(pool: Layers) -> tuple:
    """The tensors of a pool as a kernel takes them."""
    return tuple(map(as_integers, tensors_of(pool)))


def _parts(pool: Layers) -> Iterable[Layers]:
    """A pool of too many dimensions, cut along the outermost one of a slot."""
    shape, strides = shape_of(pool), strides_of(pool)
    outermost = max(range(2, len(shape)), key=lambda d: (shape[d] > 1) * strides[d])
    if isinstance(pool, torch.Tensor):
        return pool.unbind(outermost)
    return map(list, zip(*(layer.unbind(outermost - 1) for layer in pool)))


def copy_slots(pool, src_slots, dst_slots, layer_group, active_rows) -> None:
    """Programs enough to fill the device, divided among the layers; each takes the same range of words of every row.

    One launch for every slot of at most three dimensions that do not merge; a launch per index of the outermost
    dimension beyond that, which keeps the guarantee, for the words of different launches are different ones.
    """
    if 0 in shape_of(pool):
        return
    layers, rows = len(layer_group), len(active_rows)
    word, pool_layer, pool_slot, dims = _layout(pool)
    if len(dims) > DIMS:
        for part in _parts(pool):
            copy_slots(part, src_slots, dst_slots, layer_group, active_rows)
        return
    words = math.prod(size for size, _ in dims)
    (size_0, stride_0), (size_1, stride_1), (_, stride_2) = (*dims, (1, 0), (1, 0))[:DIMS]
    capacity = next((size for size in (64, 256, 1024) if rows <= size), triton.next_power_of_2(rows))
    programs = min(triton.cdiv(_programs(layer_group.device), layers), triton.cdiv(words, max(8, WORDS // capacity)))
    _copy_slots_kernel[(programs, layers)](
        _words_of(pool), pool_layer, pool_slot, src_slots, *src_slots.stride(), dst_slots, *dst_slots.stride(),
        layer_group, layer_group.stride(0), active_rows, active_rows.stride(0), rows, words, size_0, size_1, stride_0,
        stride_1, stride_2, SLOT_DIMS=len(dims), WORD=WORD_TYPES[word], ROWS=capacity, FEW=FEW, WORDS=WORDS,
        num_warps=8)


@triton.jit(do_not_specialize=["p_slots", "slots_group", "slots_row", "p_layer_group", "layer_group_stride"])
def _zero_slots_kernel(
    p_pool, pool_layer, pool_slot, p_slots, slots_group, slots_row, p_layer_group, layer_group_stride, words, programs,
    size_0, size_1, stride_0, stride_1, stride_2, SLOT_DIMS: tl.constexpr, WORD: tl.constexpr, WORDS: tl.constexpr,
):
    """Programs (row * programs + i, layer): `programs` for each row, which take its chunks in turn."""
    i_layer, i_row = tl.program_id(1).to(tl.int64), (tl.program_id(0) // programs).to(tl.int64)
    i_group = tl.load(p_layer_group + i_layer * layer_group_stride).to(tl.int64)
    slot = tl.load(p_slots + i_group * slots_group + i_row * slots_row).to(tl.int64)
    if slot > 0:
        p_slot = layer_pointer(p_pool, i_layer, pool_layer, WORD) + slot * pool_slot
        for i_chunk in range(tl.program_id(0) % programs, tl.cdiv(words, WORDS), programs):
            o = i_chunk * WORDS + tl.arange(0, WORDS)
            offset = _word_offsets(o, size_0, size_1, stride_0, stride_1, stride_2, SLOT_DIMS)
            tl.store(p_slot + offset, tl.zeros([WORDS], WORD), mask=o < words)


def zero_slots(pool, slots, layer_group) -> None:
    """One launch, as for `copy_slots`; rows without a slot end at once."""
    layers, rows = len(layer_group), slots.shape[1]
    if 0 in shape_of(pool) or not rows:
        return
    word, pool_layer, pool_slot, dims = _layout(pool)
    if len(dims) > DIMS:
        for part in _parts(pool):
            zero_slots(part, slots, layer_group)
        return
    words = math.prod(size for size, _ in dims)
    (size_0, stride_0), (size_1, stride_1), (_, stride_2) = (*dims, (1, 0), (1, 0))[:DIMS]
    programs = min(8, triton.cdiv(words, WORDS))
    _zero_slots_kernel[(rows * programs, layers)](
        _words_of(pool), pool_layer, pool_slot, slots, *slots.stride(), layer_group, layer_group.stride(0), words,
        programs, size_0, size_1, stride_0, stride_1, stride_2, SLOT_DIMS=len(dims), WORD=WORD_TYPES[word], WORDS=WORDS,
        num_warps=8)
