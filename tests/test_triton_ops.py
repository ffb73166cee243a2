"""Every sample of every op through its Triton kernel on a GPU, in every dtype.

Under the interpreter, which is slow, this file runs the delta-rule families in float32; the files of the others
(test_triton_*.py) run their own samples.
"""

import importlib

import pytest
import torch
from harness import RATIO, assert_close, call, check_sample, clone, named, raw, stacked
from triton_harness import DEVICE, DTYPES, GPU, on_device, triton_kernel

from torch_replay.ops.registry import OPS
from torch_replay.ops.samples import FAMILIES, samples

pytestmark = on_device
FAMILY = {op: OPS[op].body.__module__.split(".")[-2] for op in OPS}
SAMPLES = [sample for sample in samples() if FAMILY[sample.op] in (FAMILIES if GPU else ("gdn", "kda"))]
CASES = [(sample, dtype) for sample in SAMPLES for dtype in DTYPES]
COARSE = ("int8", "fp8")


def truth(op: str):
    return getattr(importlib.import_module(f"truth_{FAMILY[op]}"), op)


def is_coarse(sample) -> bool:
    return any(name in sample.id for name in COARSE)


@pytest.mark.parametrize("sample, dtype", CASES, ids=lambda value: str(value).removeprefix("torch."))
def test_against_truth(sample, dtype):
    """Outputs and mutated tensors equal the float64 truth, and nothing else is written."""
    if sample.op in ("copy_slots", "zero_slots") and "fp8" in sample.id:
        equal_bytes(sample, dtype)
        return
    with triton_kernel(sample.op):
        check_sample(sample, truth(sample.op), DEVICE, dtype, ("state", "state_scale") if is_coarse(sample) else ())


@pytest.mark.parametrize("sample", [s for s in SAMPLES if is_coarse(s) and "state" in OPS[s.op].mutates], ids=str)
def test_eight_bit_states(sample):
    """8-bit states decode to what the reference stores, and rows that do not flush keep their bytes."""
    results = run(sample, torch.float32), reference(sample, torch.float32), named(sample.op, *sample.make())
    got, want, before = ({name: stacked(value) for name, value in result.items()} for result in results)
    same = raw_rows(want["state"], before["state"])
    assert same.any()
    assert torch.equal(bytes_of(got["state"])[same], bytes_of(before["state"])[same])
    decode = [t["state"].cpu().float() * t["state_scale"].cpu().unsqueeze(-1) for t in (got, want)]
    assert_close("state", decode[0], decode[1], RATIO[before["state"].dtype])


@pytest.mark.skipif(not GPU, reason="the interpreter runs its programs one after the other")
@pytest.mark.parametrize("sample", SAMPLES if GPU else [], ids=str)
def test_five_identical_launches(sample):
    """The same inputs give the same bytes, five times: no race."""
    first = run(sample, torch.bfloat16)
    for _ in range(4):
        again = run(sample, torch.bfloat16)
        for name, value in first.items():
            if isinstance(value, (torch.Tensor, list)):
                assert torch.equal(raw(value), raw(again[name])), name


def run(sample, dtype) -> dict:
    """Arguments after a launch, with the outputs under "out0", "out1"."""
    arguments = named(sample.op, *sample.make(DEVICE, dtype))
    with triton_kernel(sample.op):
        out = call(sample.op, arguments)
    return arguments | {f"out{i}": value for i, value in enumerate(out)}


def reference(sample, dtype) -> dict:
    arguments = named(sample.op, *sample.make("cpu", dtype))
    call(sample.op, arguments)
    return arguments


def equal_bytes(sample, dtype) -> None:
    got, want = run(sample, dtype), reference(sample, dtype)
    for name in OPS[sample.op].mutates:
        assert torch.equal(bytes_of(stacked(got[name])), bytes_of(stacked(want[name])))


def bytes_of(value: torch.Tensor) -> torch.Tensor:
    return clone(value).cpu().view(torch.uint8)


def raw_rows(after, before) -> torch.Tensor:
    return (bytes_of(after) == bytes_of(before)).flatten(-3).all(-1)
