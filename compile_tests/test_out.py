"""Ops that write a tensor of the caller's under torch.compile: one graph, in place, without a clone."""

import pytest
import torch
from harness import clone, named, raw
from torch._dynamo.utils import ReinplaceCounters
from torch._inductor.utils import run_and_get_code

from torch_replay import ops
from torch_replay.ops.registry import OPS, lint
from torch_replay.ops.samples import samples
from torch_replay.testing import assert_one_graph

TAKING = [name for name, op in OPS.items() if op.out_overload is not None]
COMPILED = ["mamba2_replay", "gdn_update", "kda_prefill", "conv_replay"]  # one of each kind


def packed(op: str):
    return named(op, *next(s for s in samples(op) if s.id.startswith("packed_padded")).make())


@pytest.mark.parametrize("op", TAKING)
def test_registration(op):
    """The schema is the op's own and the output, mutated, with nothing returned; opcheck passes."""
    arguments, own = packed(op), str(OPS[op].overload._schema).removesuffix(") -> Tensor")
    schema = str(OPS[op].out_overload._schema)
    assert schema.replace("_out(", "(", 1).startswith(own) and schema.endswith("!) output) -> ()")
    assert lint(OPS[op]) == []
    out = torch.empty_like(OPS[op].body(**arguments))
    utils = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(OPS[op].out_overload, (), arguments | dict(output=out), test_utils=utils)


@pytest.mark.parametrize("op", COMPILED)
@torch.no_grad()
def test_written_in_place(op):
    """Columns of the caller's buffer: the generated code allocates nothing, torch misses no chance, and bits are those
    of eager, in the buffer and in the pools."""
    arguments = packed(op)
    y = OPS[op].body(**arguments)
    buffer = torch.full((len(y), y[0].numel() + 7), float("nan"))
    eager, expected = {name: clone(value) for name, value in arguments.items()}, buffer.clone()

    def step(arguments, buffer):
        out = buffer[:, 5 : 5 + y[0].numel()].view(y.shape)
        return getattr(ops, op)(**arguments, out=out) is out

    torch._dynamo.reset()
    with (torch._inductor.config.patch(fx_graph_cache=False),
          torch._functorch.config.patch(enable_autograd_cache=False)):
        ReinplaceCounters.clear()
        same, codes = run_and_get_code(torch.compile(step, fullgraph=True), arguments, buffer)
    assert same and len(codes) == 1 and ReinplaceCounters.get_total_missed_bytes() == 0
    assert not [line for line in codes[0].splitlines() if "= empty_strided" in line]
    assert step(eager, expected)
    assert torch.equal(raw(buffer), raw(expected)) and not torch.equal(raw(buffer[:, :6]), raw(buffer[:, :1]))
    for name in OPS[op].mutates:
        if eager[name] is not None:
            assert torch.equal(raw(arguments[name]), raw(eager[name])), name


@torch.no_grad()
def test_audit_and_autocast():
    """The audit knows the variant as a registered op; autocast changes nothing."""
    arguments = packed("conv_replay")
    out = torch.empty_like(arguments["x"])
    want = ops.conv_replay(**{name: clone(value) for name, value in arguments.items()})
    with torch.autocast("cpu", torch.bfloat16):
        ops.conv_replay(**arguments, out=out)
    assert torch.equal(out, want)
    assert_one_graph(lambda ring, x, out: ops.conv_replay(**arguments | dict(conv_ring=ring, x=x), out=out).sum(),
                     arguments["conv_ring"], arguments["x"], out)
