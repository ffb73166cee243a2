"""Arguments of a call in one memory: what is read keeps its values while the op writes; slices stay where they are."""

import random

import pytest
import torch
from harness import assert_refused, clone, named, raw
from triton_harness import DEVICE, GPU, requires_triton, triton_kernel

from torch_replay import ops
from torch_replay.ops.overlap import overlap
from torch_replay.ops.registry import OPS, inlining, override_kernel
from torch_replay.ops.samples import samples

# What an op writes without looking at it first, in memory that a caller might have read from.
OVERWRITTEN = {
    "gather_block_tables": ("block_tables",), "prepare_positions": ("positions", "seq_lens"),
    "compute_slot_mappings": ("slot_mappings",), "swa_indices": ("indices", "lens"), "engram_lookback": ("lookback",),
    "ring_commit": ("src_slots", "dst_slots", "plan_start", "plan_count"),
}
PAIRS = [(op, target, argument.name) for op, targets in OVERWRITTEN.items() for target in targets
         for argument in OPS[op].overload._schema.arguments
         if argument.name not in OPS[op].mutates and "Tensor" in str(argument.type)]


def elements(tensor: torch.Tensor) -> set[int]:
    """Addresses of its bytes."""
    at = {tensor.data_ptr()}
    for size, stride in zip(tensor.shape, tensor.stride()):
        at = {address + i * stride * tensor.element_size() for address in at for i in range(size)}
    return {address + byte for address in at for byte in range(tensor.element_size())}


def test_overlap_of_views():
    """Against a count of bytes: no overlap is missed, and views that lie between each other are told apart."""
    rng, told_apart = random.Random(0), 0
    buffer = torch.zeros(400, dtype=torch.uint8)
    for _ in range(1000):
        views, inner = [], rng.choice([6, 8, 12])
        for _ in range(2):
            dtype = rng.choice([torch.uint8, torch.int16, torch.int32])
            shape = (rng.randint(0, 4), rng.randint(1, 3), rng.randint(1, max(1, inner // dtype.itemsize)))
            strides = [step // dtype.itemsize for step in (48, rng.choice([inner, 12]), dtype.itemsize)]
            views.append(buffer.view(dtype).as_strided(shape, strides, rng.randint(0, 10)))
        held = [elements(view) if view.numel() else set() for view in views]
        if held[0] & held[1]:
            assert overlap(*views)
        elif all(held) and not overlap(*views):
            told_apart += min(held[0]) < max(held[1]) and min(held[1]) < max(held[0])
    assert told_apart > 20


SLICES = {
    "rows": lambda n: torch.zeros(2, n).unbind(),
    "columns": lambda n: torch.zeros(n, 2).unbind(1),
    "fields of a record": lambda n: torch.zeros(n, 3, 5).split([2, 3], 2),
    "rings of a slot": lambda n: (r := torch.zeros(n, 20), (r[:, :12].view(n, 3, 4), r[:, 12:18].view(n, 3, 2)))[1],
    "groups of trackers": lambda n: torch.zeros(3, 2, n, dtype=torch.int32).unbind(1),
    "an empty one": lambda n: (t := torch.zeros(n), (t, t[:0]))[1],
}


@pytest.mark.parametrize("make", SLICES.values(), ids=SLICES)
def test_slices_are_apart(make):
    """What a host may keep in one tensor needs no copy."""
    views = make(4)
    assert len({view.untyped_storage().data_ptr() for view in views}) == 1
    assert not any(overlap(a, b) for a in views for b in views if a is not b) and overlap(views[0], views[0])


def joined(target: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense tensors like the two at one address, with the values of source."""
    target, source = target.contiguous(), source.contiguous()
    buffer = torch.zeros(max(value.numel() * value.element_size() for value in (target, source)),
                         dtype=torch.uint8, device=source.device)
    views = [buffer[: value.numel() * value.element_size()].view(value.dtype).view(value.shape)
             for value in (target, source)]
    views[1].copy_(source)
    return tuple(views)


def run_joined(op: str, target: str, source: str, run, device: str = "cpu") -> None:
    """Every sample with `source` in the memory of `target` leaves in what is written what it leaves elsewhere."""
    for sample in samples(op):
        want = named(op, *sample.make(device))
        if want[source] is None or not want[target].numel():
            continue
        got = {name: clone(value) for name, value in want.items()}
        got[target], got[source] = joined(got[target], got[source])
        OPS[op].overload(**want)
        run(**got)
        for name in OPS[op].mutates:
            assert torch.equal(raw(got[name]), raw(want[name].contiguous())), (sample.id, name)


@pytest.mark.parametrize("op, target, source", PAIRS)
def test_reads_come_first(op, target, source):
    """By the reference."""
    run_joined(op, target, source, OPS[op].overload)


@requires_triton
def test_reads_come_first_in_kernels():
    """By a Triton kernel too."""
    with triton_kernel("gather_block_tables"):
        run_joined("gather_block_tables", "block_tables", "request_tables", OPS["gather_block_tables"].overload, DEVICE)


@pytest.mark.skipif(GPU, reason="programs that run at once may read first")
@requires_triton
def test_a_kernel_alone_reads_what_it_wrote():
    """Negative control."""
    with triton_kernel("gather_block_tables"), pytest.raises(AssertionError):
        run_joined("gather_block_tables", "block_tables", "request_tables", OPS["gather_block_tables"].kernel(DEVICE))


def test_both_written():
    """Two outputs in one memory are refused, whatever the strides, before anything is written."""
    arguments = named("ring_reset", *samples("ring_reset")[0].make())
    arguments["ring_committed"] = arguments["ring_start"]
    assert_refused(ops.ring_reset, arguments, "ring_reset: ring_committed is in the memory of ring_start, expected")
    arguments = named("prepare_positions", *samples("prepare_positions")[0].make())
    arguments["seq_lens"] = arguments["positions"].view(torch.int32)[1::2][: len(arguments["seq_lens"])]
    assert_refused(ops.prepare_positions, arguments, "prepare_positions: seq_lens is in the memory of positions")


def test_trackers_and_plans_of_one_tensor():
    """Cursors that are columns of one tensor and plans that are rows of another are written where they lie."""
    for sample in samples("ring_commit"):
        want = named("ring_commit", *sample.make())
        got = {name: clone(value) for name, value in want.items()}
        trackers = torch.stack([got["ring_start"], got["ring_committed"]], 2)
        plan = torch.stack([got[name] for name in ("src_slots", "dst_slots", "plan_start", "plan_count")])
        got.update(zip(("ring_start", "ring_committed"), trackers.unbind(2), strict=True))
        got.update(zip(("src_slots", "dst_slots", "plan_start", "plan_count"), plan.unbind(), strict=True))
        OPS["ring_commit"].overload(**want)
        OPS["ring_commit"].overload(**got)
        assert all(torch.equal(got[name], want[name]) for name in OPS["ring_commit"].mutates)


@pytest.mark.slow
@requires_triton
@torch.no_grad()
def test_a_clone_that_inductor_drops():
    """A caller that reads from a clone of what the op writes gets eager's values when Inductor passes one buffer."""
    arguments = named("gather_block_tables", *samples("gather_block_tables")[0].make(DEVICE))
    tables, mapping, reqs = (arguments[name] for name in ("request_tables", "idx_mapping", "num_reqs"))
    mapping = torch.flip(torch.arange(tables.shape[1], dtype=torch.int32, device=DEVICE), [0])
    reqs = torch.full_like(reqs, len(mapping))
    seen = []

    def step(tables):
        old = tables.clone()
        ops.gather_block_tables(tables, old, mapping, reqs)

    with triton_kernel("gather_block_tables"), inlining(False):
        kernel = OPS["gather_block_tables"].kernels[DEVICE]

        def noting(tables, old, *others):
            seen.append(tables.data_ptr() == old.data_ptr())
            kernel(tables, old, *others)

        want, got = tables.clone(), tables.clone()
        step(want)
        assert torch.equal(want, tables.flip(1)) and not torch.equal(want, tables)
        with override_kernel("gather_block_tables", DEVICE, noting):
            torch._dynamo.reset()
            torch.compile(step, fullgraph=True)(got)
    assert torch.equal(got, want) and seen == [False]
