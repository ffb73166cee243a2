"""Rings in use: an engine in miniature over many steps with snapshots, and slots that move between pools."""

import copy
from types import SimpleNamespace

import pytest
import torch
from harness import raw
from truth_ring import REQS, MiniEngine

from torch_replay.ops.registry import override_kernel
from torch_replay.ops.ring import naive
from torch_replay.ops.ring.transfer import ring_export, ring_import


@pytest.mark.parametrize("moving, uniform, post_step, alternate", [
    (True, True, False, False), (False, False, True, False), (True, False, True, True), (False, True, False, True)],
    ids=["moving", "fixed", "moving_alternating_windows", "fixed_alternating_windows"])
def test_cycle(moving, uniform, post_step, alternate):
    """120 steps of ragged drafts: outputs follow the truth, each published slot is the state at exactly its edge and
    stays so, live requests go on undisturbed, also in recycled slots and after moves between pools."""
    engine = MiniEngine(moving, uniform, post_step, alternate)
    for step in range(120):
        engine.step()
        if step % 3 == 0:
            engine.relocate(step // 3 % REQS)
    assert engine.snapshots > 60 and engine.flushes > 60 and engine.retired > 1
    assert len(engine.exports) > 15 and any(wrapped for _, wrapped in engine.exports)


def broken_commit_folds_one_row_less(*args, **kwargs):
    naive.ring_commit(*args, **kwargs)
    args[5].copy_(torch.where(args[5] > 1, args[5] - 1, args[5]))


def broken_commit_keeps_published_cursors(start, committed, *args, **kwargs):
    before = start.clone(), committed.clone()
    naive.ring_commit(start, committed, *args, **kwargs)
    for group, row in (args[1] > 0).nonzero().tolist():
        for cursors, old in zip((start, committed), before):
            cursors[group, args[1][group, row]] = old[group, args[1][group, row]]


@pytest.mark.parametrize("kernel", [broken_commit_folds_one_row_less, broken_commit_keeps_published_cursors])
def test_cycle_negative_control(kernel):
    """A commit broken on purpose fails the cycle."""
    with override_kernel("ring_commit", "cpu", kernel), pytest.raises(AssertionError):
        test_cycle(True, True, False, False)


# Transfer between pools


def random_pool(family, dtype=torch.float32, ring_len=20, groups=2, start=18, committed=5, columns=9):
    """Random bytes everywhere, so that a misplaced element shows."""
    layers, slots = 3, 4

    def bytes_of(kind, *shape):
        size = torch.empty((), dtype=kind).element_size()
        return torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8).view(kind)

    if family == "mamba2":
        rings = dict(x=bytes_of(torch.bfloat16, layers, slots, 4, ring_len, 6), B=bytes_of(
            torch.bfloat16, layers, slots, 2, ring_len, 3), dt=bytes_of(torch.float32, layers, slots, 4, ring_len))
    else:
        rings = dict(u=bytes_of(torch.float32, layers, slots, 4, ring_len, 6), k=bytes_of(
            torch.float32, layers, slots, 2, ring_len, 3), g=bytes_of(torch.float32, layers, slots, 4, ring_len))
    eight_bit = dtype == torch.float8_e4m3fn
    return SimpleNamespace(
        family=family, state=bytes_of(dtype, layers, slots, 4, 6, 3), rings=rings,
        state_scale=bytes_of(torch.float32, layers, slots, 4, 6) if eight_bit else None,
        conv_ring=bytes_of(torch.bfloat16, layers, slots, 7, columns), layer_group=torch.arange(layers) % groups,
        ring_start=torch.full((groups, slots), start, dtype=torch.int32),
        ring_committed=torch.full((groups, slots), committed, dtype=torch.int32))


def tensors_of(pool):
    return [value for value in (pool.state, pool.state_scale, pool.conv_ring, *pool.rings.values(), pool.ring_start,
                                pool.ring_committed) if value is not None]


@pytest.mark.parametrize("committed, start", [(5, 18), (5, 2), (0, 7), (16, 19)])
@pytest.mark.parametrize("family, dtype", [("mamba2", torch.float32), ("mamba2", torch.float8_e4m3fn),
                                           ("gdn", torch.bfloat16)])
def test_transfer(family, dtype, committed, start):
    """Export, import into another slot, ring length, start and grouping: every live element keeps its bits."""
    source = random_pool(family, dtype, committed=committed, start=start)
    target = random_pool(family, dtype, 17 if committed == 16 else 13, groups=1, start=4, committed=3, columns=6)
    before, untouched = copy.deepcopy(source), copy.deepcopy(target)
    exported = ring_export(source, 2, position=50, conv_history=3)
    assert all(torch.equal(raw(a), raw(b)) for a, b in zip(tensors_of(source), tensors_of(before))), "export wrote"
    ring_import(target, [3], exported)
    assert (target.ring_start[0, 3], target.ring_committed[0, 3]) == (0, committed)
    for layer in range(3):
        assert torch.equal(raw(target.state[layer, 3]), raw(source.state[layer, 2]))
        if source.state_scale is not None:
            assert torch.equal(raw(target.state_scale[layer, 3]), raw(source.state_scale[layer, 2]))
        for name, ring in source.rings.items():
            for j in range(committed):
                assert torch.equal(raw(target.rings[name][layer, 3, :, j]), raw(ring[layer, 2, :, (start + j) % 20]))
        for position in (47, 48, 49):
            assert torch.equal(raw(target.conv_ring[layer, 3, :, position % 6]),
                               raw(source.conv_ring[layer, 2, :, position % 9]))
    for a, b in zip(tensors_of(target), tensors_of(untouched)):
        assert torch.equal(raw(a[:, :3]), raw(b[:, :3])), "another slot was written"


def test_export_is_position_independent():
    """The same logical state from another slot, start and ring gives the same tensors, dead rows notwithstanding."""
    source, other = random_pool("gdn"), random_pool("gdn", ring_len=31, start=1, committed=1, columns=12)
    exported = ring_export(source, 1, position=2, conv_history=3)
    assert exported["conv"].shape == (3, 7, 2)
    ring_import(other, 2, exported)
    again = ring_export(other, 2, position=2, conv_history=3)
    assert exported.keys() == again.keys()
    for name, value in exported.items():
        assert torch.equal(raw(value), raw(again[name])), name


def test_transfer_without_a_conv_ring_and_of_unequal_groups():
    """Groups may hold different numbers of rows and sit in different slots; without convolution, no position."""
    source, target = random_pool("mamba2"), random_pool("mamba2", groups=3)
    source.conv_ring = target.conv_ring = None
    source.ring_committed[1] = 2
    ring_import(target, (1, 2, 3), ring_export(source, (1, 3)))
    assert [int(target.ring_committed[g, g + 1]) for g in range(3)] == [5, 2, 5]
    assert torch.equal(raw(target.rings["x"][1, 2, :, :2]), raw(source.rings["x"][1, 3, :, [18, 19]]))
    with pytest.raises(ValueError, match=r"committed is \[5, 2, 5\], expected equal in all layers of group 0"):
        ring_import(random_pool("mamba2", groups=1), 1, dict(ring_export(random_pool("mamba2"), 1, position=9,
                    conv_history=3), committed=torch.tensor([5, 2, 5])))


MISFITS = {
    "family": (lambda pool, data: data.update(family=torch.tensor(list(b"gdn"), dtype=torch.uint8)), "family is gdn"),
    "format": (lambda pool, data: data.update(format=torch.tensor([2])), r"format is \[2\], expected \[1\]"),
    "no format": (lambda pool, data: data.pop("format"), "format is missing"),
    "lost ring": (lambda pool, data: data.pop("ring.x"), "the set of names is"),
    "no scale": (lambda pool, data: setattr(pool, "state_scale", pool.state[..., 0].clone()), "the set of names is"),
    "ring too short": (lambda pool, data: pool.rings.update(x=pool.rings["x"][:, :, :, :5]), r"committed is \[5, 5, 5"),
    "window too short": (lambda pool, data: setattr(pool, "window", 4), "expected 0 to 4 live rows"),
    "layers": (lambda pool, data: data.update(committed=torch.tensor([5])), r"committed is of shape \(1,\)"),
    "state shape": (lambda pool, data: data.update(state=data["state"][:, :1]), r"state is of shape \[3, 1, 6, 3\]"),
    "state dtype": (lambda pool, data: data.update(state=data["state"].half()), "state is of dtype torch.float16"),
    "ring heads": (lambda pool, data: data.update({"ring.B": data["ring.x"]}), "ring.B is of shape"),
    "ring dtype": (lambda pool, data: data.update({"ring.x": data["ring.x"].float()}), "ring.x is of dtype"),
    "conv channels": (lambda pool, data: data.update(conv=data["conv"][:, :2]), "conv is of shape"),
    "conv scalar": (lambda pool, data: data.update(conv=torch.tensor(1.0)), "conv is of 0 inputs|conv is of shape"),
    "short history": (lambda pool, data: data.update(conv=data["conv"][:, :, :2]), "conv is of 2 inputs, expected 3"),
    "history before 0": (lambda pool, data: data.update(position=torch.tensor([2])), "conv is of 3 inputs, expected 2"),
}


@pytest.mark.parametrize("change, message", MISFITS.values(), ids=MISFITS)
def test_import_refuses(change, message):
    """What does not fit is refused with a message that names it, before anything is written."""
    pool, exported = random_pool("mamba2"), ring_export(random_pool("mamba2"), 2, position=50, conv_history=3)
    change(pool, exported)
    before = copy.deepcopy(pool)
    with pytest.raises(ValueError, match=f"ring_import: .*({message})"):
        ring_import(pool, 1, exported, conv_history=3)
    assert all(torch.equal(raw(a), raw(b)) for a, b in zip(tensors_of(pool), tensors_of(before)))


@pytest.mark.parametrize("slot, sizes, message", [
    (0, dict(position=5, conv_history=3), "slot is 0, expected one number, or one for each of 2 groups, in .1, 3"),
    (4, dict(position=5, conv_history=3), "slot is 4"),
    ([1], dict(position=5, conv_history=3), "slot is .1., expected"),
    ([1, 0], dict(position=5, conv_history=3), "slot is .1, 0., expected"),
    (1, dict(conv_history=3), "position is None, expected a number from 0"),
    (1, dict(position=-1, conv_history=3), "position is -1"),
    (1, dict(position=5), "conv_history is None, expected a number from 0 to 9"),
    (1, dict(position=5, conv_history=10), "conv_history is 10"),
])
def test_export_refuses(slot, sizes, message):
    """A null or unknown slot, a missing position and more history than the ring holds."""
    with pytest.raises(ValueError, match=f"ring_export: {message}"):
        ring_export(random_pool("mamba2"), slot, **sizes)


def test_export_refuses_broken_cursors():
    """Cursors outside the ring are not exported as if they were live rows."""
    with pytest.raises(ValueError, match="cursors of layer 0 are start 20, committed 5"):
        ring_export(random_pool("mamba2", start=20), 1, position=5, conv_history=3)
