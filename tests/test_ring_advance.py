"""The commit of a host without snapshots against the one of an engine with block tables."""

import pytest
import torch
from harness import assert_refused, call, named
from triton_harness import DEVICE, requires_triton, triton_kernel

from torch_replay import ops
from torch_replay.ops.registry import OPS, override_kernel
from torch_replay.ops.ring import naive
from torch_replay.ops.samples import Rng, samples

GROUPS, ROWS, SLOTS, TOKENS = 2, 5, 16, 4


def i32(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def traces_agree(seed: int, steps: int = 40) -> int:
    """Random steps of decodes, drafts, prompts and empty rows through both commits; returns how many rows flushed."""
    rng, flushed = Rng(seed, DEVICE, torch.float32), 0
    window, ring_len = ((16, 20), (5, 9), (5, 13))[seed % 3]
    cursors = torch.zeros(2, GROUPS, SLOTS, dtype=torch.int32, device=DEVICE)
    expected = cursors.clone()
    tables = i32([[[slot + 1] for slot in rng.permutation(SLOTS - 1)[:ROWS]] for _ in range(GROUPS)])
    tables[0, seed % ROWS] = 0
    plans = [i32([[0] * ROWS] * GROUPS) for _ in range(4)]
    for _ in range(steps):
        # an empty ring may also take the small-batch route, which flushes at every step
        width = 0 if int(rng.integers(0, 4, 1)) == 0 else window
        lens, accepted = rng.integers(0, TOKENS + 1, ROWS), rng.integers(-1, TOKENS + 2, ROWS)
        routes = rng.uniform(0, 1, ROWS) < 0.1
        used = int(rng.integers(0, ROWS + 1, 1))
        real = torch.where(torch.arange(ROWS, device=DEVICE) < used, lens, 0).int()
        before = expected.clone()
        ops.ring_commit(*expected, *plans, tables, None, real, lens * 0 + 99, accepted, routes, None, None,
                        block_size=4, window=width, ring_len=ring_len, post_step=False, materialize=False)
        ops.ring_advance(*cursors, tables[..., 0], lens, accepted, routes, i32([used]), window=width, ring_len=ring_len)
        assert torch.equal(cursors, expected)
        flushed += int((before[0] != expected[0]).sum())
    return flushed


def test_random_traces():
    """The same cursors after every step, stale rows, null slots and both routes among them."""
    assert sum(traces_agree(seed) for seed in range(12)) > 200


@requires_triton
def test_random_traces_in_the_kernel():
    """By the Triton kernel."""
    with triton_kernel("ring_advance"):
        assert traces_agree(1, steps=12) > 5


def test_negative_control():
    """A commit that forgets flushes, or that reads stale rows, fails."""
    def forgets(*args, window, ring_len):
        naive.ring_advance(*args, window=ring_len, ring_len=ring_len)

    def stale(start, committed, slots, lens, accepted, routes, num_reqs, **kwargs):
        naive.ring_advance(start, committed, slots, lens, accepted, routes, None, **kwargs)

    for kernel in (forgets, stale):
        with override_kernel("ring_advance", "cpu", kernel), pytest.raises(AssertionError):
            traces_agree(1)


REFUSED = [
    (dict(slots=i32([[13] * 6] * 2)), "slots is 13"),
    (dict(slots=i32([[3] * 6] * 2), query_lens=i32([1] * 6)), "slots .* at most once"),
    (dict(slots=i32([1] * 6)), "slots is of shape .*G = 2"),
    (dict(query_lens=i32([17] * 6), is_prefilling=i32([0] * 6)), "query_lens is 17"),
    (dict(query_lens=i32([-1] * 6)), "query_lens is -1"),
    (dict(num_reqs=i32([7])), "num_reqs is 7"),
    (dict(window=20), "ring_len is 20, expected more than window"),
    (dict(num_accepted=i32([1])), r"num_accepted is of shape \(1,\)"),
]


@pytest.mark.parametrize("change, message", REFUSED, ids=[message for _, message in REFUSED])
def test_refused(change, message):
    """Named, before anything is written."""
    arguments = named("ring_advance", *samples("ring_advance")[0].make(DEVICE)) | change
    assert_refused(OPS["ring_advance"].overload, arguments, f"ring_advance: {message}")


def test_cursors_of_one_group():
    """[S] cursors and [B] slots stand for one group."""
    start, committed = i32([0, 3, 4, 0]), i32([0, 5, 2, 0])
    call("ring_advance", dict(ring_start=start, ring_committed=committed, slots=i32([2, 1]), query_lens=i32([2, 1]),
                              num_accepted=i32([1, 1]), window=5, ring_len=7))
    assert start.tolist() == [0, 1, 4, 0] and committed.tolist() == [0, 1, 3, 0]
