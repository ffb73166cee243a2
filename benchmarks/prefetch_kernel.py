"""Brings rows of a table into the L2 cache without reading them; for `benchmarks.engram` alone."""

import triton
import triton.language as tl
from torch import Tensor

LINE = 128  # bytes
BLOCK = 256


@triton.jit
def _prefetch_rows_kernel(table, rows, count, stride, LINES: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count * LINES
    row = tl.load(rows + index // LINES, mask=inside, other=0)
    address = (table + row * stride + (index % LINES) * 128).to(tl.int64)
    address = tl.where(inside, address, table.to(tl.int64))
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32,
                              is_pure=False, pack=1)


def prefetch_rows(table: Tensor, rows: Tensor) -> None:
    """Starts to fetch `table[rows]`; table [R, D] of bytes, rows of any shape, int64."""
    lines = -(-table.shape[1] // LINE)
    grid = (triton.cdiv(rows.numel() * lines, BLOCK),)
    _prefetch_rows_kernel[grid](table, rows, rows.numel(), table.stride(0), lines, BLOCK)
