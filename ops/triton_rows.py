"""Triton: where the tokens of a batch row are, for kernels that take padded rows and packed ones alike.

A kernel finds token t of a row at `place * stride 0 + t * stride 1`, where `place` is the row, or the first token of a
packed one. A launcher of packed rows passes the stride between tokens for both, and has zeroed the output before.
"""

import triton
import triton.language as tl


@triton.jit
def row_tokens(row, slot, p_starts, starts_b, p_lens, lens_b, TOKENS):
    """The place of a row (int64) and its number of real tokens, at most TOKENS: 0 if its slot is null."""
    if p_starts is None:
        place = row
        count = TOKENS
    else:
        place = tl.load(p_starts + row * starts_b).to(tl.int64)
        count = (tl.load(p_starts + (row + 1) * starts_b) - place).to(tl.int32)
    if p_lens is not None:
        count = tl.load(p_lens + row * lens_b).to(tl.int32)
    if p_starts is not None:
        count = tl.minimum(count, TOKENS)
    return place, tl.where(slot > 0, count, 0)


def row_strides(tensor, packed: bool, dims: int = 4) -> tuple[int, ...]:
    """`dims` strides of a tensor of tokens, which may be None: between places, between tokens, and within a token."""
    if tensor is None:
        return (0,) * dims
    return (tensor.stride(0), *tensor.stride()) if packed else tensor.stride()
