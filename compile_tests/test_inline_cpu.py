"""Small ops on CPU tensors are traced as plain torch, which computes what the op computes, and nothing else is."""

from collections import Counter, defaultdict

import pytest
import torch
from fx_text import target, traced
from harness import call, clone, compare, named, poisoned_outputs, raw

from torch_replay.ops.registry import OPS, inlining, override_kernel
from torch_replay.ops.ring.samples import gather
from torch_replay.ops.samples import Rng, samples

INLINED = [name for name, op in OPS.items() if op.inline_on_cpu]
BY_OP = defaultdict(list)
for sample in samples():
    BY_OP[sample.op].append(sample)


def run_compiled(op: str, many: list[dict], backend: str) -> list[tuple]:
    """The op's wrapper on each of `many` named arguments, all in one graph; outputs as tuples."""
    wrapper = OPS[op].wrapper
    torch._dynamo.reset()
    compiled = torch.compile(lambda many: [wrapper(**arguments) for arguments in many], fullgraph=True, dynamic=False,
                             backend=backend)
    with poisoned_outputs(), torch.no_grad():
        outs = compiled(many)
    return [() if out is None else out if isinstance(out, tuple) else (out,) for out in outs]


def check(op: str, chosen: list, backend: str) -> None:
    """Traced as plain torch, the samples give the bytes that the op gives; with Inductor floats may be contracted."""
    got = [named(op, *sample.make()) for sample in chosen]
    want = [{name: clone(value) for name, value in arguments.items()} for arguments in got]
    outs = run_compiled(op, got, backend)
    for sample, arguments, eager, out in zip(chosen, got, want, outs, strict=True):
        for result, value in zip(out, call(op, eager), strict=True):
            same(f"{sample}: output", result, value, backend)
        for name, value in arguments.items():
            if isinstance(value, torch.Tensor):
                same(f"{sample}: {name}", value, eager[name], backend if name in OPS[op].mutates else "eager")


def same(name: str, got: torch.Tensor, want: torch.Tensor, backend: str) -> None:
    if backend == "inductor" and got.is_floating_point():
        compare(name, got, want)
    else:
        assert torch.equal(raw(got), raw(want)), name


def captured(function) -> Counter:
    """Nodes of Dynamo's graph of `function()` by target, those of this project by the op's name."""
    graph, _ = traced(function)
    return Counter(target(node).removeprefix("torch_replay.") for node in graph.nodes if node.op == "call_function")


@pytest.mark.parametrize("op", INLINED)
def test_all_samples_in_one_graph(op):
    """Every sample, dead rows with NaN among them: bit for bit what the op gives, whatever is mutated."""
    check(op, BY_OP[op], "aot_eager")


@pytest.mark.parametrize("op", INLINED)
def test_inductor(op):
    """What Inductor makes of one sample: integers exact, floats within rounding."""
    check(op, BY_OP[op][1:2], "inductor")


@pytest.mark.parametrize("op", INLINED)
def test_a_wrong_kernel_fails(op, monkeypatch):
    """Negative control: a reference that, where it is traced, leaves one element of what it writes wrong."""
    right = OPS[op].kernels["cpu"]

    def wrong(*args, out=None, **kwargs):
        right(*args, **kwargs, **({} if out is None else {"out": out}))
        if torch.compiler.is_compiling():
            written = kwargs[OPS[op].mutates[0]] if out is None else out
            written[(-1,) * written.dim()] = 3

    monkeypatch.setitem(OPS[op].kernels, "cpu", wrong)
    with pytest.raises(AssertionError):
        check(op, BY_OP[op][:1], "aot_eager")


@pytest.mark.parametrize("op", INLINED)
def test_no_op_in_the_graph(op):
    """Dynamo's graph holds torch alone; with the switch off, or another kernel in place, it holds the op."""
    wrapper = OPS[op].wrapper
    arguments = named(op, *BY_OP[op][0].make())
    assert op not in captured(lambda: wrapper(**arguments))
    with inlining(False):
        assert captured(lambda: wrapper(**arguments))[op] == 1
    with override_kernel(op, "cpu", OPS[op].kernels["cpu"]):
        assert captured(lambda: wrapper(**arguments))[op] == 1


def test_sizes_stay_dynamic():
    """No size is made a constant by the checks and their messages: one graph for all."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(OPS["gather_block_tables"].wrapper, fullgraph=True, dynamic=True, backend=backend)
    for groups, rows, reqs, columns in ((2, 5, 8, 3), (4, 6, 9, 7), (3, 7, 30, 4)):
        args, _ = gather(Rng(0, "cpu", torch.float32), groups, rows, reqs, columns)
        compiled(*args)
    assert len(graphs) == 1


def test_export_keeps_the_op():
    """An exported graph may run on another device."""

    class Lookup(torch.nn.Module):
        def forward(self, table, scales, rows):
            return OPS["engram_lookup"].wrapper(table, scales, rows)

    exported = torch.export.export(Lookup(), BY_OP["engram_lookup"][0].make()[0])
    assert any("engram_lookup" in str(node.target) for node in exported.graph.nodes)


def test_bad_shapes_raise_while_tracing():
    """The body's checks are traced along: the message names the argument."""
    arguments = named("gather_block_tables", *BY_OP["gather_block_tables"][0].make())
    arguments["idx_mapping"] = arguments["idx_mapping"][:-1]
    with pytest.raises(Exception, match="idx_mapping"):
        run_compiled("gather_block_tables", [arguments], "eager")
