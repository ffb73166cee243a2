"""`out=`, a tensor of the caller's, gets what the op would return, wherever it lies; nothing beside it changes."""

import inspect

import pytest
import torch
from harness import assert_refused, clone, named, raw
from triton_harness import DEVICE, GPU, on_device, triton_kernel

from torch_replay import ops
from torch_replay.ops.backends import set_backend
from torch_replay.ops.registry import OPS
from torch_replay.ops.samples import samples

TAKING = [name for name, op in OPS.items() if op.out_overload is not None]


def sample_of(op: str, kind: str):
    return next(s for s in samples(op) if s.id.startswith("packed_padded" if kind == "packed" else "typical"))


def columns(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A buffer of NaN, and every other of its columns from 3 on, in the shape of y."""
    lead = 1 if y.dim() == 1 else y.dim() - (2 if y.dim() > 2 else 1)
    shape, rest = y.shape[:lead], y.shape[lead:]
    wide = y.new_full((*shape, 2 * rest.numel() + 6), float("nan"))
    return wide, wide[..., 3 : 3 + 2 * rest.numel() : 2].unflatten(-1, rest)


def check_strided(op: str, arguments: dict) -> None:
    want = {name: clone(value) for name, value in arguments.items()}
    y = OPS[op].overload(**want)
    wide, out = columns(y)
    assert not out.is_contiguous()
    assert getattr(ops, op)(**arguments, out=out) is out
    assert torch.equal(raw(out), raw(y)) and not y.isnan().any()
    assert wide.isnan().sum() == wide.numel() - y.numel()
    for name in OPS[op].mutates:
        if want[name] is not None:
            assert torch.equal(raw(arguments[name]), raw(want[name])), name


def test_which_ops():
    """All that compute the outputs of tokens from states, and their public signatures say so."""
    families = ("mamba2", "gdn", "kda")
    assert {*TAKING} >= {f"{family}_{kind}" for family in families for kind in ("replay", "update", "prefill")} | {
        "conv_replay", "conv_prefill"}
    for op in TAKING:
        assert inspect.signature(getattr(ops, op)).parameters["out"].default is None
        assert "out: a tensor" in getattr(ops, op).__doc__


@pytest.mark.parametrize("kind", ["padded", "packed"])
@pytest.mark.parametrize("backend", ["auto", "naive"])
@pytest.mark.parametrize("op", TAKING)
def test_strided(op, backend, kind):
    """Columns of a wider tensor, with columns between them that nobody may write."""
    with set_backend(backend):
        check_strided(op, named(op, *sample_of(op, kind).make()))


@pytest.mark.parametrize("op", TAKING if GPU else ["mamba2_replay", "mamba2_update", "gdn_replay", "gdn_update",
                                                   "conv_replay"])
def test_strided_in_kernels(op):
    """By the Triton kernels: one token and several, padded and packed."""
    for sample in samples(op):
        if sample.id in ("packed_padded", "packed_token_1", "spec_in_place_ragged_padded", "spec_ragged_padded"):
            with triton_kernel(op):
                check_strided(op, named(op, *sample.make(DEVICE)))


test_strided_in_kernels.pytestmark += on_device


@pytest.mark.parametrize("op", TAKING)
def test_in_the_memory_of_an_input(op):
    """The tensor of tokens that the output is laid out like may be what is overwritten."""
    arguments = named(op, *sample_of(op, "packed").make())
    name = next(name for name in ("x", "v") if name in arguments)
    want = OPS[op].overload(**{key: clone(value) for key, value in arguments.items()})
    getattr(ops, op)(**arguments, out=arguments[name])
    assert torch.equal(raw(arguments[name]), raw(want))


def make(op):
    arguments = named(op, *sample_of(op, "packed").make())
    return arguments, torch.empty_like(OPS[op].body(**arguments))


REFUSED = {
    "shape": (lambda a, out: out[1:], "out is of shape"),
    "dtype": (lambda a, out: out.double(), "out is of dtype torch.float64, expected torch.float32"),
    "expanded": (lambda a, out: out[:1].expand_as(out), "out is of strides"),
    "gradient": (lambda a, out: out.requires_grad_(), "out requires a gradient"),
    "of a pool": (lambda a, out: next(iter(a.values())).view(-1)[: out.numel()].view(out.shape),
                  "out is in the memory of (state|conv_ring), expected memory of its own"),
}


@pytest.mark.parametrize("edit, message", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("op", ["mamba2_replay", "gdn_update", "kda_prefill", "conv_replay"])
def test_refused(op, edit, message):
    """What cannot take the result is named, and nothing is written."""
    arguments, out = make(op)
    with torch.enable_grad():
        assert_refused(OPS[op].out_overload, arguments | dict(output=edit(arguments, out)), f"{op}: {message}")


def test_device():
    arguments, out = make("conv_replay")
    with pytest.raises(ValueError, match="conv_replay: out is of device meta, expected cpu"):
        OPS["conv_replay"].out_overload(**arguments, output=out.to("meta"))


def test_types():
    """A list is no tensor; ops without the keyword do not take it; None is nothing."""
    arguments, out = make("conv_replay")
    with pytest.raises(TypeError, match="conv_replay: out is list, expected Tensor or None"):
        ops.conv_replay(**arguments, out=[out])
    with pytest.raises(TypeError, match="compact_active: .*out"):
        ops.compact_active(torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, dtype=torch.int32), out=out)
    assert ops.conv_replay(**arguments, out=None).shape == out.shape
