"""Stored precision of checkpoints inside Triton kernels: the arithmetic of rounding.py, bit for bit.

float8_e4m3fn is handled as bytes, with integer arithmetic alone: the conversion instructions exist on some
architectures only. Imported by kernels, so on first CUDA dispatch.
"""

import torch
import triton
import triton.language as tl

FLOAT, INT8, FP8 = 0, 1, 2  # KIND of a state: native float, int8 with row scales, float8_e4m3fn bytes with row scales


def state_kind(dtype: torch.dtype) -> int:
    return {torch.int8: INT8, torch.float8_e4m3fn: FP8}.get(dtype, FLOAT)


def as_stored(state: torch.Tensor) -> torch.Tensor:
    """The tensor that a kernel gets for a state: float8 as bytes."""
    return state.view(torch.uint8) if state.dtype == torch.float8_e4m3fn else state


@triton.jit
def philox_word(seed, c0, c1, ROUNDS: tl.constexpr):
    """First word of Philox-4x32 as uint32; seed int64, counters (c0, c1, 0, 0) of one shape."""
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    c0 = c0.to(tl.uint32)
    c1 = c1.to(tl.uint32) + tl.zeros_like(c0)
    c2 = tl.zeros_like(c0)
    c3 = tl.zeros_like(c0)
    for _ in tl.static_range(ROUNDS):
        high0, low0 = tl.umulhi(c0, tl.full(c0.shape, 0xD2511F53, tl.uint32)), c0 * 0xD2511F53
        high1, low1 = tl.umulhi(c2, tl.full(c0.shape, 0xCD9E8D57, tl.uint32)), c2 * 0xCD9E8D57
        c0 = high1 ^ c1 ^ k0
        c2 = high0 ^ c3 ^ k1
        c1 = low1
        c3 = low0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0


@triton.jit
def uniform_draw(seed, c0, c1, ROUNDS: tl.constexpr):
    """float32 in [0, 1) of 24 bits."""
    return (philox_word(seed, c0, c1, ROUNDS) >> 8).to(tl.float32) * 5.960464477539063e-08


@triton.jit
def decode_e4m3(byte):
    """uint8 -> float32; 0x7f and 0xff are NaN."""
    bits = byte.to(tl.int32)
    exponent = (bits >> 3) & 15
    mantissa = bits & 7
    normal = (((exponent + 120) << 23) | (mantissa << 20)).to(tl.float32, bitcast=True)
    magnitude = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.001953125, normal)
    magnitude = tl.where((bits & 127) == 127, float("nan"), magnitude)
    return tl.where(bits >= 128, -magnitude, magnitude)


@triton.jit
def encode_e4m3(magnitude):
    """float32 in [0, 448] -> its nearest e4m3 bits as int32, ties to even."""
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    # adding 2^14 leaves the multiple of 2^-9, the step of subnormals, in the low bits of the sum
    subnormal = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return tl.where(magnitude < 0.015625, subnormal, normal)


@triton.jit
def decode_state(raw, KIND: tl.constexpr):
    """A loaded tile of any state dtype -> float32, before row scales."""
    if KIND == 2:
        decoded = decode_e4m3(raw)
    else:
        decoded = raw.to(tl.float32)
    return decoded


@triton.jit
def _below(magnitude, nearest, decoded):
    return nearest - (decoded > magnitude).to(nearest.dtype)


@triton.jit
def _encode_int8(values, seed, element, slot, ROUNDS: tl.constexpr):
    if ROUNDS > 0:
        rounded = tl.floor(values + uniform_draw(seed, element, slot, ROUNDS))
    else:
        clamped = tl.minimum(tl.maximum(values, -127.0), 127.0)
        rounded = (clamped + 12582912.0) - 12582912.0  # 1.5 * 2^23: the sum has no fraction bits
    return tl.minimum(tl.maximum(rounded, -127.0), 127.0).to(tl.int8)


@triton.jit
def _encode_fp8(values, seed, element, slot, ROUNDS: tl.constexpr):
    magnitude = tl.minimum(tl.abs(values), 448.0)
    nearest = encode_e4m3(magnitude)
    if ROUNDS > 0:
        below = _below(magnitude, nearest, decode_e4m3(nearest))
        low = decode_e4m3(below)
        high = decode_e4m3(below + 1)
        draw = uniform_draw(seed, element, slot, ROUNDS)
        up = (low < magnitude) & (draw * (high - low) < magnitude - low)
        nearest = below + up.to(tl.int32)
    return (nearest | tl.where(values < 0, 128, 0)).to(tl.uint8)


@triton.jit
def _encode_16_bit(values, seed, element, slot, DTYPE: tl.constexpr, ROUNDS: tl.constexpr):
    magnitude = tl.abs(values)
    if DTYPE == tl.bfloat16:  # to nearest here, since the interpreter's conversion truncates
        bits = magnitude.to(tl.int32, bitcast=True)
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        magnitude = tl.minimum(magnitude, 65504.0)
        nearest = magnitude.to(DTYPE)
    if ROUNDS > 0:
        below = _below(magnitude, nearest.to(tl.int16, bitcast=True), nearest.to(tl.float32))
        low = below.to(DTYPE, bitcast=True).to(tl.float32)
        high = (below + 1).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        draw = uniform_draw(seed, element, slot, ROUNDS)
        up = (low < magnitude) & (draw * (high - low) < magnitude - low)
        nearest = (below + up.to(tl.int16)).to(tl.int16).to(DTYPE, bitcast=True)
    sign = tl.where(values < 0, -32768, 0).to(tl.int16)
    return (nearest.to(tl.int16, bitcast=True) | sign).to(DTYPE, bitcast=True)


@triton.jit
def encode_state(values, seed, element, slot, KIND: tl.constexpr, DTYPE: tl.constexpr, ROUNDS: tl.constexpr):
    """float32 tile (divided by its row scales where KIND has them) -> tile to store in a state of DTYPE.

    ROUNDS 0 rounds to nearest, else stochastically with the draw of counter (element, slot); float32 is stored as is.
    Older Triton compiles what follows a return of constant condition, hence one branch a kind.
    """
    if KIND == 1:
        stored = _encode_int8(values, seed, element, slot, ROUNDS)
    elif KIND == 2:
        stored = _encode_fp8(values, seed, element, slot, ROUNDS)
    elif DTYPE == tl.float32:
        stored = values
    else:
        stored = _encode_16_bit(values, seed, element, slot, DTYPE, ROUNDS)
    return stored


@triton.jit
def row_scale(amax, KIND: tl.constexpr):
    """Decode scale of rows of an 8-bit state from their largest magnitude: amax / 127 or 448, 1 for an empty row."""
    LARGEST: tl.constexpr = 127.0 if KIND == 1 else 448.0
    return tl.where(amax > 0, tl.div_rn(amax, tl.full(amax.shape, LARGEST, tl.float32)), 1.0)
