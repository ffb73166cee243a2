"""What registration promises, op by op: lint, pinned schemas, opcheck and one fullgraph Inductor run for each
kind of arguments that the samples have."""

import dataclasses

import pytest
import torch
from harness import clone, named, poisoned_outputs, raw

from torch_replay.ops.registry import OPS, lint
from torch_replay.ops.samples import samples


def kind(value):
    """What of an argument registration, fakes and graphs go by: not its sizes, and not the values in a tensor."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.dim(), value.is_contiguous()
    if isinstance(value, (list, tuple)):
        return frozenset(map(kind, value)), len(value) > 1
    return value if isinstance(value, (bool, type(None))) else type(value)


def one_of_each_kind(every: list) -> list:
    """The first sample of each op and kinds of its arguments."""
    first = {}
    for sample in every:
        kinds = tuple(kind(value) for value in named(sample.op, *sample.make()).values())
        first.setdefault((sample.op, kinds), sample)
    return list(first.values())


SAMPLES = samples()
DISTINCT = one_of_each_kind(SAMPLES)
FLOAT8 = [sample for sample in SAMPLES if "fp8" in sample.id]


def test_every_op_has_samples():
    """Each registered op stands in the sample table, and nothing else does."""
    assert {sample.op for sample in SAMPLES} == {sample.op for sample in DISTINCT} == set(OPS)


@pytest.mark.parametrize("op", OPS)
def test_lint(op):
    """Fake present, SymInt for counts, no string, no Tensor[] from a mutating op, a docstring."""
    assert lint(OPS[op]) == []


def test_lint_finds_faults():
    """Negative control: a string argument, a count that is not a SymInt, no docstring: each draws its complaint."""
    library = torch.library.Library("torch_replay_lint_control", "DEF")
    library.define("control(Tensor(a!) x, str layer, int count) -> Tensor[]")
    overload = torch.ops.torch_replay_lint_control.control.default
    op = dataclasses.replace(OPS["mamba2_update"], name="control", body=lambda: None, mutates=(), overload=overload)
    complaints = " | ".join(lint(op))
    faults = ("layer is a string", "count is int", "no docstring", "no fake", "no CPU kernel", "disagree", "Tensor[]")
    for fault in faults:
        assert fault in complaints


@pytest.mark.parametrize("sample", DISTINCT, ids=str)
def test_opcheck(sample):
    """Schema (except for float8, which test_schema cannot compare), fake, and AOT dispatch with dynamic shapes."""
    utils = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    args, kwargs = sample.make()
    overload = OPS[sample.op].overload_of(named(sample.op, args, kwargs))
    torch.library.opcheck(overload, args, kwargs, test_utils=utils[1:] if sample in FLOAT8 else utils)


@pytest.mark.parametrize("sample", DISTINCT, ids=str)
def test_inductor_equals_eager(sample):
    """One graph, and every output and argument bitwise as in eager: the op is opaque to Inductor."""
    arguments = named(sample.op, *sample.make())
    eager = {name: clone(value) for name, value in arguments.items()}
    op = OPS[sample.op].overload_of(arguments)
    torch._dynamo.reset()
    compiled = torch.compile(lambda tensors: op(**tensors), fullgraph=True, backend="inductor")
    with poisoned_outputs(), torch.no_grad():
        got, want = compiled(arguments), op(**eager)
    for result, value in zip(as_tuple(got), as_tuple(want), strict=True):
        assert torch.equal(raw(result), raw(value))
    for name, value in arguments.items():
        if isinstance(value, (torch.Tensor, list)):
            assert torch.equal(raw(value), raw(eager[name])), name


def as_tuple(out):
    return () if out is None else out if isinstance(out, tuple) else (out,)
