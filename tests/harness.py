"""How the tests compare an op with the truth: one function for every op, family and device.

A truth is a function with the op's calling convention: it mutates what the op mutates and returns what the op returns,
computed token by token in float64. `check_sample` runs both on the same inputs and compares every output, every mutated
argument, and, bitwise, every argument that must not change.
"""

import contextlib
import itertools

import pytest
import torch

from torch_replay.ops.registry import OPS

# RMS error over RMS of the truth, by the dtype that a result is stored in.
RATIO = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float8_e4m3fn: 5e-2, torch.int8: 2e-2}


def rms_ratio(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.double().cpu(), want.double().cpu()
    if not want.numel():
        return 0.0
    return ((got - want).square().mean().sqrt() / want.square().mean().sqrt().clamp(min=1e-30)).item()


def assert_close(name: str, got: torch.Tensor, want: torch.Tensor, ratio: float) -> None:
    """NaN exactly where the truth has NaN (poison that nobody may touch), RMS ratio of the rest below `ratio`."""
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    assert torch.equal(got.isnan().cpu(), want.isnan().cpu()), f"{name}: NaN in other places than in the truth"
    error = rms_ratio(got.nan_to_num(0.0), want.nan_to_num(0.0))
    assert error <= ratio, f"{name}: RMS ratio {error:.3g}, expected at most {ratio:g}"


def stacked(value):
    """One tensor [L, ...] for a list of layers."""
    if not isinstance(value, list):
        return value
    # float8 cannot be stacked everywhere
    words = [layer.view(torch.uint8) if layer.dtype.itemsize == 1 else layer for layer in value]
    return torch.stack(words).view(value[0].dtype)


def clone(value, to64: bool = False):
    if isinstance(value, list):
        return [clone(layer, to64) for layer in value]
    if not isinstance(value, torch.Tensor):
        return value
    if to64 and value.is_floating_point():
        return value.double().cpu()
    copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    # expanded inputs share elements, so the copy has to be made of the storage, not through the view
    if 0 in value.stride() and value.numel():
        return value
    return copy.copy_(value)


def raw(value: torch.Tensor) -> torch.Tensor:
    """Bytes, so that NaN equals NaN and float8 can be compared. Of layers, all."""
    value = stacked(value)
    return value.contiguous().view(torch.uint8) if value.dim() else value.reshape(1).view(torch.uint8)


def named(op: str, args: tuple, kwargs: dict) -> dict:
    bound = OPS[op].signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


@contextlib.contextmanager
def poisoned_outputs():
    """Fresh memory holds NaN (or the largest integer), so that what an op does not write shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


def call(op: str, arguments: dict):
    """Runs the op on named arguments; returns its outputs as a tuple."""
    with poisoned_outputs():
        out = OPS[op].overload_of(arguments)(**arguments)
    return () if out is None else out if isinstance(out, tuple) else (out,)


def assert_refused(run, arguments: dict, message: str) -> None:
    """`run(**arguments)` raises a ValueError that matches `message`, and has written to no tensor."""
    before = {name: clone(value) for name, value in arguments.items() if isinstance(value, (torch.Tensor, list))}
    with pytest.raises(ValueError, match=message):
        run(**arguments)
    for name, value in before.items():
        now = arguments[name]
        for a, b in zip(now, value, strict=True) if isinstance(value, list) else ((now, value),):
            assert torch.equal(raw(a), raw(b)), name


def failing_kernel(op: str, after: int, error: type[Exception]):
    """The CPU kernel of `op`, whose call number `after` raises instead."""
    calls, kernel = itertools.count(1), OPS[op].kernels["cpu"]

    def failing(*args, **kwargs):
        if next(calls) == after:
            raise error
        return kernel(*args, **kwargs)

    return failing


def check_sample(sample, truth, device: str = "cpu", dtype: torch.dtype = torch.float32, skip: tuple = (),
                 seed: int = 0) -> None:
    """`truth(**arguments)` gets float64 copies. `skip` names mutated arguments that a test of its own compares."""
    arguments = named(sample.op, *sample.make(device, dtype, seed))
    before = {name: clone(value) for name, value in arguments.items()}
    want = {name: clone(stacked(value), to64=True) for name, value in arguments.items()}
    want = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in want.items()}
    expected = truth(**want)
    expected = () if expected is None else expected if isinstance(expected, tuple) else (expected,)
    got = call(sample.op, arguments)
    assert len(got) == len(expected)
    # a token is rounded to the ring's dtype before use, so that replaying it later gives the same state
    rings = [stacked(value) for name, value in arguments.items() if name.endswith("_ring")]
    floor = max([RATIO[ring.dtype] for ring in rings if ring.is_floating_point()] or [0])
    for index, (result, value) in enumerate(zip(got, expected)):
        compare(f"{sample}: output {index}", result, value, floor)
    for name, value in arguments.items():
        if not isinstance(value, (torch.Tensor, list)) or name in skip:
            continue
        if name in OPS[sample.op].mutates:
            compare(f"{sample}: {name}", stacked(value), want[name], floor)
        else:
            assert torch.equal(raw(value), raw(before[name])), f"{sample}: {name} was written"


def compare(name: str, got: torch.Tensor, want: torch.Tensor, floor: float = 0.0) -> None:
    if got.is_floating_point():
        assert_close(name, got, want, max(RATIO[got.dtype], floor))
    else:
        assert got.shape == want.shape and torch.equal(got.cpu().long(), want.cpu().long()), (
            f"{name}: {got.tolist()}, expected {want.tolist()}")
