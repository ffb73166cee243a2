"""Commit and reset of leading rows, and a commit without plans: what the public functions add to the ops."""

import pytest
import torch
from harness import clone, named

from torch_replay import ops
from torch_replay.ops.samples import samples

CASES = [sample for op in ("ring_reset", "ring_commit") for sample in samples(op) if "one_row" not in sample.id]


def run(op: str, arguments: dict, compiled: bool = False) -> list[torch.Tensor]:
    arguments = {name: clone(value) for name, value in arguments.items()}
    function = getattr(ops, op)
    with torch.no_grad():
        (torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function)(**arguments)
    written = [arguments.get(name) for name in ("ring_start", "ring_committed", "plan_count")]
    return [value for value in written if value is not None]


def without_rows(op: str, arguments: dict, used: int) -> dict:
    """The same call whose rows from `used` on have no request, by a mapping."""
    rows = arguments["block_tables"].shape[1]
    mapping = arguments["idx_mapping"]
    mapping = torch.arange(rows, dtype=torch.int32) if mapping is None else mapping.clone()
    mapping[used:] = -1
    return {**arguments, "idx_mapping": mapping}


@pytest.mark.parametrize("sample", CASES, ids=str)
def test_leading_rows(sample):
    """Rows from num_reqs on move nothing and plan nothing, whatever they hold."""
    arguments, differ = named(sample.op, *sample.make()), False
    for used in (0, 2, arguments["block_tables"].shape[1]):
        want = run(sample.op, without_rows(sample.op, arguments, used))
        got = run(sample.op, {**arguments, "num_reqs": torch.tensor([used], dtype=torch.int32)})
        assert all(map(torch.equal, got, want)), used
        differ |= not all(map(torch.equal, got, run(sample.op, arguments)))
    assert differ or "all_empty" in sample.id  # negative control


@pytest.mark.parametrize("op", ["ring_reset", "ring_commit"])
def test_leading_rows_compiled(op):
    """In one graph."""
    arguments = named(op, *samples(op)[0].make()) | {"num_reqs": torch.tensor(2)}
    assert all(map(torch.equal, run(op, arguments, compiled=True), run(op, arguments)))


@pytest.mark.parametrize("compiled", [False, True])
def test_commit_without_plans(compiled):
    """With materialize=False no plan tensors are needed; with True they are."""
    arguments = named("ring_commit", *next(s for s in samples("ring_commit") if s.id == "mode_none").make())
    want = run("ring_commit", arguments)
    arguments |= dict.fromkeys(("src_slots", "dst_slots", "plan_start", "plan_count"))
    got = run("ring_commit", arguments, compiled)
    assert len(got) == 2 and all(map(torch.equal, got, want))
    with pytest.raises(Exception, match="src_slots is None"):
        run("ring_commit", arguments | {"materialize": True}, compiled)


def test_num_reqs_is_a_tensor():
    """A number is refused by name."""
    arguments = named("ring_reset", *samples("ring_reset")[0].make())
    with pytest.raises(TypeError, match="ring_reset: num_reqs is 2, expected a tensor"):
        run("ring_reset", arguments | {"num_reqs": 2})
