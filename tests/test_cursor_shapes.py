"""Ops take cursors as [S] or as [G, S], so that one pair of tensors serves a layer's ops and those of its group."""

import pytest
import torch
from harness import assert_refused, clone, named, raw

from torch_replay.ops.registry import OPS
from torch_replay.ops.samples import samples

CURSORS = ("ring_start", "ring_committed")
TAKING = [op for op, entry in OPS.items() if {*CURSORS} <= {*entry.signature.parameters}]
GROUPED = ("ring_start", "ring_committed", "block_tables", "src_slots", "dst_slots", "plan_start", "plan_count",
           "slots")


def one_group(sample) -> dict:
    """The sample's arguments; of an op over groups those of the first group."""
    arguments = named(sample.op, *sample.make())
    if OPS[sample.op].cursor_dims == 2:
        arguments.update({name: arguments[name][:1] for name in GROUPED
                          if name in arguments and arguments[name].dim() > 1})
    return arguments


def reshaped(op: str, arguments: dict) -> dict:
    """The same in memory of their own, with cursors of the other shape."""
    arguments = {name: clone(value) for name, value in arguments.items()}
    change = torch.Tensor.unsqueeze if OPS[op].cursor_dims == 1 else torch.Tensor.squeeze
    return {**arguments, **{name: change(arguments[name], 0) for name in CURSORS}}


def results(out, arguments: dict) -> list[torch.Tensor]:
    tensors = [*(out if isinstance(out, tuple) else (out,)), *arguments.values()]
    return [raw(value).flatten() for value in tensors if isinstance(value, torch.Tensor)]


def test_ops_with_cursors():
    """All of them know how many dimensions theirs have."""
    assert len(TAKING) >= 8 and all(OPS[op].cursor_dims for op in TAKING)


@pytest.mark.parametrize("op", TAKING)
def test_both_shapes(op):
    """The same bits are returned and written, eagerly and compiled."""
    torch._dynamo.reset()  # the ops share one code object, whose graphs are counted together
    compiled = torch.compile(OPS[op].overload, backend="aot_eager", fullgraph=True)
    for number, sample in enumerate(samples(op)):
        want, got = one_group(sample), reshaped(op, one_group(sample))
        traced = clone_all(got)
        out = results(OPS[op].overload(**want), want)
        assert all(map(torch.equal, results(OPS[op].wrapper(**got), got), out)), sample
        if number == 0:
            with torch.no_grad():
                assert all(map(torch.equal, results(compiled(**traced), traced), out)), sample


def clone_all(arguments: dict) -> dict:
    return {name: clone(value) for name, value in arguments.items()}


@pytest.mark.parametrize("op", TAKING)
def test_other_shapes(op):
    """Two groups for a layer's op, [S] beside tables of two groups, a third dimension: each is refused by name."""
    arguments = named(op, *samples(op)[0].make())
    start = arguments["ring_start"]
    two = start.expand(2, -1) if OPS[op].cursor_dims == 1 else start[0]
    for wrong in (two, start.reshape(1, 1, -1)):
        assert_refused(OPS[op].wrapper, {**arguments, "ring_start": wrong}, f"{op}: (ring_start|ring_committed) is of ")
