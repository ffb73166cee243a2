"""The Triton arithmetic of stored precision equals rounding.py bit for bit."""

import pytest
import torch
from triton_harness import DEVICE, requires_triton

from torch_replay.ops import rounding

pytestmark = requires_triton

CASES = [(dtype, rounds) for dtype in (torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn)
         for rounds in (0, 1, 10)]


@pytest.mark.parametrize("dtype, rounds", CASES, ids=str)
def test_encode_equals_reference(dtype, rounds):
    """Every magnitude from subnormal to saturation, both signs, nearest and stochastic; decoding gives it back."""
    from triton_rounding_kernels import round_tensor

    torch.manual_seed(rounds)
    largest = rounding.LARGEST.get(dtype, 3e38)
    spread = torch.exp2(torch.empty(4096).uniform_(-20, 9)) * torch.randn(4096).sign()
    values = torch.cat([spread, torch.tensor([0.0, -0.0, largest, -largest, largest * 1.5, 0.5, 1.5, 2.5, 448.0])])
    seed = torch.tensor([0x1234567890ABCD], dtype=torch.int64)
    element = torch.arange(len(values))
    slot = torch.tensor(77)
    if rounds:
        draws = rounding.uniform(seed[0], element, slot, rounds)
        want = rounding.round_stochastic(values, dtype, draws)
    else:
        want = rounding.round_nearest(values, dtype)
    got, decoded = round_tensor(values.to(DEVICE), seed.to(DEVICE), 77, dtype, rounds)
    same = got.cpu().view(torch.uint8) == want.view(torch.uint8)
    zero = want.float().repeat_interleave(dtype.itemsize) == 0  # the sign of a zero does not matter
    assert (same | zero).all()
    assert torch.equal(decoded.cpu(), want.float())


def test_philox_golden_values():
    """Known answers of Philox-4x32-10 (Random123's test vectors) from the reference."""
    zero = torch.zeros((), dtype=torch.int64)
    assert rounding.philox(zero, zero, zero, 10).item() == 0x6627E8D5


def test_stochastic_rounding_is_unbiased():
    """The mean error of 4,096 draws goes to zero where rounding to nearest keeps its bias."""
    value = torch.full((4096,), 1.0 + 2**-10)  # a quarter of a bfloat16 step would be lost
    for dtype, step in ((torch.bfloat16, 2**-7), (torch.float8_e4m3fn, 2**-3)):
        draws = rounding.uniform(torch.tensor(5), torch.arange(4096), torch.tensor(1))
        rounded = rounding.round_stochastic(value, dtype, draws).float()
        assert set(rounded.unique().tolist()) <= {1.0, 1.0 + step}
        assert abs(rounded.mean().item() - value[0].item()) < 4 * step * (2**-10 / step) ** 0.5 / 64
