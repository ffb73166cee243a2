"""Stored precision of checkpoints: row scales for 8-bit states and stochastic rounding from Philox draws.

Everything here is plain torch on any device. The Triton kernels repeat the same arithmetic bit for bit.
"""

from typing import Optional

import torch
from torch import Tensor

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0, torch.float16: 65504.0}
_MASK32 = 0xFFFFFFFF


def philox(seed: Tensor, counter0: Tensor, counter1: Tensor, rounds: int) -> Tensor:
    """First word of Philox-4x32 (Salmon et al., 2011) as int64 in [0, 2^32).

    seed: int64, its low and high words are the key. counter0, counter1: int64 in [0, 2^32), broadcast against each
    other and the seed; the other two counter words are 0. rounds: at least 1 (10 is the published choice).
    """
    c0, c1 = torch.broadcast_tensors(counter0, counter1)
    c2 = c3 = torch.zeros_like(c0)
    k0, k1 = seed & _MASK32, (seed >> 32) & _MASK32
    for _ in range(rounds):
        high0, low0 = _multiply_words(c0, 0xD2511F53)
        high1, low1 = _multiply_words(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return c0


def _multiply_words(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low word of a 32 x 32 bit product, in int64 without overflow."""
    low = a * (b & 0xFFFF)
    high = a * (b >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def uniform(seed: Tensor, counter0: Tensor, counter1: Tensor, rounds: int = 10) -> Tensor:
    """float32 draws in [0, 1), 24 bits each; arguments as for `philox`."""
    return (philox(seed, counter0, counter1, rounds) >> 8).to(torch.float32) * 2.0**-24


def load_state(state: Tensor, slots: Tensor, scale: Optional[Tensor]) -> Tensor:
    """state [S, ...], slots [n] -> float32 [n, ...], decoded with scale [S, H, P] where given."""
    values = state[slots].float()
    return values if scale is None else values * scale[slots].unsqueeze(-1)


def store_state(
    state: Tensor, slots: Tensor, values: Tensor, scale: Optional[Tensor], seed: Optional[Tensor], rounds: int
) -> None:
    """Writes float32 values [n, H, P, N] to state[slots], in place, rounded to the state's dtype.

    With `scale`, each row over N is stored relative to its largest magnitude and scale[slots] is rewritten.
    rounds > 0 rounds stochastically: element e (flat within its slot) of slot s draws from counter (e, s).
    """
    rounded, row_scale = round_state(state.dtype, slots, values, scale is not None, seed, rounds)
    if scale is not None:
        scale[slots] = row_scale
    state.view(bits(state.dtype))[slots] = rounded.view(bits(state.dtype))


def round_state(
    dtype: torch.dtype, slots: Tensor, values: Tensor, scaled: bool, seed: Optional[Tensor], rounds: int
) -> tuple[Tensor, Optional[Tensor]]:
    """What `store_state` writes: the rounded values [n, H, P, N] in `dtype` and, if `scaled`, row scales [n, H, P]."""
    row_scale = None
    if scaled:
        amax = values.abs().amax(-1)
        row_scale = torch.where(amax > 0, amax / LARGEST[dtype], 1.0)
        values = values / row_scale.unsqueeze(-1)
    if rounds and dtype != torch.float32:
        element = torch.arange(values.shape[1:].numel(), device=values.device).view(values.shape[1:])
        draws = uniform(seed.reshape(()), element, slots.long().view(-1, *[1] * (values.dim() - 1)), rounds)
        return round_stochastic(values, dtype, draws), row_scale
    return round_nearest(values, dtype), row_scale


def bits(dtype: torch.dtype) -> torch.dtype:
    """Integer dtype of the same width: float8 lacks most indexing kernels, and bytes copy exactly."""
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]


def round_nearest(values: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 -> dtype, to nearest, ties to even; 8-bit and float16 targets saturate."""
    if dtype in LARGEST:
        values = values.clamp(-LARGEST[dtype], LARGEST[dtype])
    return values.round().to(dtype) if dtype == torch.int8 else values.to(dtype)


def round_stochastic(values: Tensor, dtype: torch.dtype, draws: Tensor) -> Tensor:
    """float32 -> dtype: up or down with probability proportional to the distance, so that the mean is exact.

    draws: uniform in [0, 1), same shape. Works on magnitudes, whose bit patterns are ordered as integers.
    """
    if dtype == torch.int8:
        return (values + draws).floor().clamp(-127, 127).to(dtype)
    magnitude = values.abs()
    if dtype in LARGEST:
        magnitude = magnitude.clamp(max=LARGEST[dtype])
    integer = bits(dtype)
    nearest = magnitude.to(dtype)
    below = nearest.view(integer) - (nearest.float() > magnitude).to(integer)
    low, high = below.view(dtype).float(), (below + 1).view(dtype).float()
    inside = low < magnitude  # an exact value stays: `high` may be the NaN above the largest float8
    up = inside & (draws * (high - low) < magnitude - low)
    rounded = (below + up.to(integer)).view(dtype)
    return torch.where(values < 0, -rounded.float(), rounded.float()).to(dtype)
