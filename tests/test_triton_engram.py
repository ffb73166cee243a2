"""Triton kernels of the engram ops, on the GPU or in the interpreter."""

import importlib

import pytest
import torch
import truth_engram
from harness import call, check_sample, named, raw
from triton_harness import DEVICE, DTYPES, GPU, on_device, triton_kernel

from torch_replay.ops.engram import samples as engram_samples
from torch_replay.ops.registry import OPS, override_kernel
from torch_replay.ops.samples import Sample

pytestmark = on_device
SAMPLES = engram_samples.SAMPLES
OP_NAMES = ("engram_lookback", "ngram_hash", "engram_lookup")


def check(sample, dtype=torch.float32, seed=0):
    with triton_kernel(sample.op):
        check_sample(sample, getattr(truth_engram, sample.op), DEVICE, dtype, seed=seed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_against_truth(sample, dtype):
    """Outputs and the lookback equal the truth, nothing else is written."""
    for seed in range(2):
        check(sample, dtype, seed)


def one(rng, low, high):
    return int(rng.integers(low, high, 1))


def random_lookback(rng):
    rows = one(rng, 1, 70)
    return engram_samples.histories(
        rng, rows=rows, tokens=one(rng, 1, 6), longest=one(rng, 1, 12), depth=one(rng, 1, 6),
        uniform=one(rng, 0, 2) > 0, num_reqs=one(rng, 0, rows + 1), spare=one(rng, 0, 40), tail=one(rng, 0, 4),
        empty=(one(rng, 0, rows),))


def random_hash(rng):
    return engram_samples.hashes(
        rng, rows=one(rng, 1, 12), tokens=one(rng, 1, 30), longest=one(rng, 1, 9), orders=one(rng, 2, 6),
        heads=one(rng, 1, 10), layers=one(rng, 1, 4), uniform=one(rng, 0, 2) > 0, tail=one(rng, 0, 5),
        large=one(rng, 0, 2) > 0, spare=one(rng, 0, 2), extra=one(rng, 0, 2))


def random_lookup(rng):
    coarse = one(rng, 0, 2) > 0
    return engram_samples.lookups(
        rng, tokens=one(rng, 1, 12), columns=one(rng, 1, 9), rows=one(rng, 1, 40), coarse=coarse,
        dim=32 * one(rng, 1, 5) if coarse else one(rng, 1, 90), packed=coarse and one(rng, 0, 2) > 0)


RANDOM = {"engram_lookback": (random_lookback, 30), "ngram_hash": (random_hash, 12),
          "engram_lookup": (random_lookup, 12)}


@pytest.mark.parametrize("op", RANDOM)
def test_random_cases(op):
    """Drawn sizes, larger than one block of a kernel in some dimension now and then."""
    build, cases = RANDOM[op]
    for case in range(cases):
        check(Sample(op, f"random{case}", build))


def test_strides():
    """Tensors with gaps give the bits of dense ones."""
    for op, (build, _) in RANDOM.items():
        for seed in range(2):
            arguments = named(op, *Sample(op, "x", build).make(DEVICE, seed=seed))
            gaps = {name: torch.stack([value] * 3, -1)[..., 1] if isinstance(value, torch.Tensor) and value.dim()
                    else value for name, value in arguments.items()}
            with triton_kernel(op):
                dense, strided = call(op, arguments), call(op, gaps)
            for got, want in zip(strided, dense):
                assert torch.equal(raw(got), raw(want))
            for name in OPS[op].mutates:
                assert torch.equal(raw(gaps[name]), raw(arguments[name])), (op, name)


def test_extreme_exponents():
    """The kernel decodes every byte and every exponent as the reference does."""
    table = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn).expand(256, 256)
    scales = torch.arange(256, dtype=torch.uint8, device=DEVICE)[:, None].expand(256, 8)
    arguments = {"table": table, "scales": scales, "rows": torch.arange(256, device=DEVICE)[None]}
    (want,) = call("engram_lookup", {name: value.cpu() for name, value in arguments.items()})
    with triton_kernel("engram_lookup"):
        (got,) = call("engram_lookup", arguments)
    assert torch.equal(got.cpu().isnan(), want.isnan())
    got, want = (value.cpu().nan_to_num(0.0) for value in (got, want))
    normal = want.abs() >= 2.0**-126  # below, the interpreter rounds to bfloat16 in a way of its own
    assert torch.equal(got[normal], want[normal]) and got[~normal].abs().max() <= 2.0**-126


def test_rows_beyond_the_table():
    """A GPU cannot raise on values: such rows read nothing and give zeros."""
    rows = torch.tensor([[0, 5, 2**40, -(2**40)]], device=DEVICE)
    out = torch.full((1, 4, 3), float("nan"), device=DEVICE)
    kernel = importlib.import_module("torch_replay.ops.engram.kernels").engram_lookup
    kernel(torch.ones(5, 3, device=DEVICE), None, rows, out=out)
    assert out[0].tolist() == [[1.0] * 3] + [[0.0] * 3] * 3


@pytest.mark.skipif(not GPU, reason="needs pinned memory")
@pytest.mark.parametrize("sample", [s for s in SAMPLES if s.op == "engram_lookup"], ids=str)
def test_pinned_table(sample):
    """A table in pinned host memory gives the bytes that it gives on the device; a pageable one is refused by name."""
    arguments = named(sample.op, *sample.make("cuda"))
    (want,) = call(sample.op, arguments)
    host = {name: value if name == "rows" or value is None else value.cpu() for name, value in arguments.items()}
    with pytest.raises(ValueError, match="engram_lookup: table is in pageable host memory, expected"):
        call(sample.op, host | {"rows": arguments["rows"].new_zeros(1, 1)})
    pinned = {name: value.pin_memory() if isinstance(value, torch.Tensor) and not value.is_cuda else value
              for name, value in host.items()}
    (got,) = call(sample.op, pinned)
    assert got.is_cuda and torch.equal(raw(got), raw(want))


@pytest.mark.parametrize("op", OP_NAMES)
def test_one_launch(op, monkeypatch):
    """Every op is one kernel launch, whatever the rows, layers and columns."""
    runs = []
    kernels = importlib.import_module("torch_replay.ops.engram.kernels")
    jitted = type(kernels._look_up_rows_kernel)
    launch = jitted.run
    monkeypatch.setattr(jitted, "run", lambda self, *args, **kwargs: (runs.append(1), launch(self, *args, **kwargs)))
    samples = [s for s in SAMPLES if s.op == op and s.id != "no_tokens"]
    for sample in samples:
        check(sample)
    assert len(runs) == len(samples)


def changed(op, **change):
    """The kernel of an op with some of its arguments replaced: {name: function of the value}."""
    def kernel(*args, out=None, **kwargs):
        arguments = named(op, args, kwargs)
        arguments.update({name: value(arguments[name]) for name, value in change.items()})
        extra = {} if out is None else {"out": out}
        getattr(importlib.import_module("torch_replay.ops.engram.kernels"), op)(**arguments, **extra)
    return kernel


@pytest.mark.parametrize("op, kernel", [
    ("engram_lookback", changed("engram_lookback", positions=lambda p: p + 1)),
    ("ngram_hash", changed("ngram_hash", lookback=lambda ids: ids.flip(1))),
    ("ngram_hash", changed("ngram_hash", token_map=lambda ids: ids.clamp(min=0))),
    ("engram_lookup", changed("engram_lookup", rows=lambda rows: rows.clamp(min=0))),
])
def test_negative_control(op, kernel):
    """A kernel broken on purpose fails the suite."""
    with override_kernel(op, DEVICE, kernel), pytest.raises(AssertionError):
        for sample in [s for s in SAMPLES if s.op == op]:
            check_sample(sample, getattr(truth_engram, op), DEVICE)
