"""Ops on a GPU that is not the current one, and on tensors of several devices."""

import contextlib
import importlib

import pytest
import torch
from harness import check_sample, named
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_replay.ops import registry
from torch_replay.ops.registry import OPS, override_kernel
from torch_replay.ops.samples import FAMILIES, samples

FAMILY = {op: OPS[op].body.__module__.split(".")[-2] for op in OPS}
FIRST = {sample.op: sample for sample in reversed(samples())}  # an op's first sample
# samples between which every argument of an op is given
FULL = [sample for sample in samples() if any(name in sample.id for name in (
    "typical", "ragged", "padded", "stochastic", "kept", "replay", "mode_none", "state_int8", "fp8_rows"))]


def fakes(arguments: dict, **elsewhere: str) -> dict:
    """The tensors as fake ones on cuda:0, or where `elsewhere` puts them. To be called in a FakeTensorMode."""
    def fake(key, value):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=elsewhere.get(key, "cuda:0"))

    return {key: fake(key, value) if isinstance(value, torch.Tensor) else
            [fake(key, layer) for layer in value] if isinstance(value, list) else value
            for key, value in arguments.items()}


@pytest.mark.parametrize("sample", FULL, ids=str)
def test_two_devices(sample):
    """A tensor on another GPU than the first argument's is named in a ValueError, whichever it is."""
    arguments = named(sample.op, *sample.make())
    _, *others = [key for key, value in arguments.items() if isinstance(value, (torch.Tensor, list))]
    with FakeTensorMode():
        OPS[sample.op].body(**fakes(arguments))
        for key in others:
            with pytest.raises(ValueError, match=rf"{sample.op}: {key}(\[0\])? is on cuda:1, expected on cuda:0"):
                OPS[sample.op].body(**fakes(arguments, **{key: "cuda:1"}))


def test_every_tensor_was_moved():
    """The samples of test_two_devices give each tensor argument of each op at least once."""
    given = {(sample.op, key) for sample in FULL for key, value in named(sample.op, *sample.make()).items()
             if isinstance(value, torch.Tensor)}
    tensors = {(op.name, argument.name) for op in OPS.values() for argument in op.overload._schema.arguments
               if "Tensor" in str(argument.type)}
    assert given == tensors


@pytest.mark.parametrize("op", ["mamba2_replay", "ring_reset", "engram_lookup"])
def test_launches_on_the_tensors_device(monkeypatch, op):
    """The kernel runs with its tensors' device as the current one, and a device that is current is not set again."""
    current, entered = [0], []

    @contextlib.contextmanager
    def device(where):
        entered.append(where.index)
        before, current[0] = current[0], where.index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    seen = []
    arguments = named(op, *FIRST[op].make())
    run = registry._implementation(OPS[op], "cuda")
    with override_kernel(op, "cuda", lambda *args, **kwargs: seen.append(current[0])), FakeTensorMode():
        for index in (1, 0):
            places = dict.fromkeys(arguments, f"cuda:{index}")
            if op == "engram_lookup":
                places["table"] = "cpu"  # in pinned memory, which the kernel reads from there
            moved = fakes(arguments, **places)
            kinds = {key: parameter.kind for key, parameter in OPS[op].signature.parameters.items()}
            run(*(value for key, value in moved.items() if kinds[key] != kinds[key].KEYWORD_ONLY),
                **{key: value for key, value in moved.items() if kinds[key] == kinds[key].KEYWORD_ONLY})
    assert seen == [1, 0] and entered == [1] and current == [0]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("family", FAMILIES)
def test_second_gpu(family):
    """An op of each family on cuda:1, while cuda:0 is current, gives the truth, and cuda:0 stays current."""
    sample = next(sample for sample in samples() if FAMILY[sample.op] == family)
    truth = getattr(importlib.import_module(f"truth_{family}"), sample.op)
    torch.cuda.set_device(0)
    check_sample(sample, truth, "cuda:1")
    assert torch.cuda.current_device() == 0
