"""Mamba-2 ops against the token-by-token float64 truth."""

import pytest
import torch
import truth_mamba2
from harness import assert_close, assert_refused, call, check_sample, clone, named, stacked

from torch_replay.ops import mamba2_replay
from torch_replay.ops.mamba2 import naive
from torch_replay.ops.registry import OPS, override_kernel
from torch_replay.ops.samples import samples

OP_NAMES = ("mamba2_replay", "mamba2_update", "mamba2_materialize")
SAMPLES = [sample for op in OP_NAMES for sample in samples(op)]


def run(sample, dtype=torch.float32, seed=0):
    coarse = "int8" in sample.id or "fp8" in sample.id  # compared decoded, in a test of their own
    skip = ("state", "state_scale") if coarse else ()
    check_sample(sample, getattr(truth_mamba2, sample.op), dtype=dtype, skip=skip, seed=seed)


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_against_truth(sample):
    """Outputs and every mutated tensor equal the truth; NaN in dead ring rows and fresh memory reaches nothing."""
    run(sample)


@pytest.mark.parametrize("sample", samples("mamba2_replay")[:3], ids=str)
def test_bf16_against_truth(sample):
    """bfloat16 activations and rings stay within 1e-2 of the truth."""
    run(sample, torch.bfloat16)


@pytest.mark.parametrize("sample", [s for s in SAMPLES if "int8" in s.id or "fp8" in s.id], ids=str)
def test_eight_bit_state(sample):
    """An 8-bit state decodes to the truth within its precision, and rows that do not flush keep their bytes."""
    arguments = named(sample.op, *sample.make())
    before = {name: stacked(clone(value)) for name, value in arguments.items()}
    state, scale = before["state"], before["state_scale"]
    want = dict(before, state=truth_mamba2.decoded(state, scale), state_scale=None)
    want = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in want.items()}
    untouched = want["state"].clone()
    getattr(truth_mamba2, sample.op)(**want)
    call(sample.op, arguments)
    arguments = {name: stacked(value) for name, value in arguments.items()}
    same = (want["state"] == untouched).flatten(-3).all(-1)
    assert same.any() and not same.all()
    assert torch.equal(arguments["state"].view(torch.uint8)[same], state.view(torch.uint8)[same])
    got = truth_mamba2.decoded(arguments["state"], arguments["state_scale"])
    assert_close("state", got[~same], want["state"][~same], 5e-2 if state.dtype == torch.float8_e4m3fn else 2e-2)


@pytest.mark.parametrize("sample", samples("mamba2_update"), ids=str)
def test_update_never_writes_the_null_slot(sample):
    """Padded rows and tokens that are not kept leave slot 0 as it was (a NaN there would hide a write)."""
    arguments = named(sample.op, *sample.make())
    arguments["state"][0] = 7.0
    call(sample.op, arguments)
    assert (arguments["state"][0] == 7.0).all()


def broken_forgets_the_ring(*args, **kwargs):
    args = list(args)
    args[5] = torch.zeros_like(args[5])
    return naive.mamba2_replay(*args, **kwargs)


def broken_folds_new_rows_only(*args, **kwargs):
    args = list(args)
    args[8] = (args[8] - 1).clamp(min=0)  # count
    return naive.mamba2_materialize(*args, **kwargs)


def broken_keeps_old_state(state, *args, **kwargs):
    return naive.mamba2_update(state.clone(), *args, **kwargs)


@pytest.mark.parametrize("op, kernel", [
    ("mamba2_replay", broken_forgets_the_ring),
    ("mamba2_update", broken_keeps_old_state),
    ("mamba2_materialize", broken_folds_new_rows_only),
])
def test_negative_control(op, kernel):
    """An op broken on purpose fails the suite."""
    with override_kernel(op, "cpu", kernel), pytest.raises(AssertionError):
        for sample in samples(op):
            run(sample)


@pytest.mark.parametrize("bias", [-100.0, 19.9, 20.0, 20.1, 90.0, 1e4])
def test_softplus_range(bias):
    """dt far outside softplus's range neither overflows nor loses the tokens after it."""
    sample = samples("mamba2_replay")[1]
    arguments = named(sample.op, *sample.make())
    arguments["dt_bias"] = torch.full_like(arguments["dt_bias"], bias)
    arguments["dt"][:, 1:] -= bias  # one huge step, then ordinary ones
    want = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in arguments.items()}
    expected = truth_mamba2.mamba2_replay(**want)
    assert_close("y", call(sample.op, arguments)[0], expected, 2e-5)


@pytest.mark.parametrize("committed, q, window, flushes", [
    (12, 4, 16, False), (13, 4, 16, True), (13, 1, 16, False), (16, 1, 16, True), (16, 0, 16, False),
    (5, 1, 0, True), (5, 0, 0, False),  # the small-batch route; an empty row's cursors do not move, so it must not fold
])
def test_flush_rule(committed, q, window, flushes):
    """Flush iff committed + q > W with the row's real length; otherwise the state is not written at all."""
    sample = samples("mamba2_replay")[1]
    arguments = named(sample.op, *sample.make())
    slot = int(arguments["slots"][0])
    for name in ("x_ring", "B_ring", "dt_ring"):
        arguments[name].nan_to_num_(0.1)
    arguments["ring_committed"][slot], arguments["query_lens"][0] = committed, q
    arguments["window"] = window
    before = arguments["state"].clone()
    call(sample.op, arguments)
    assert (not torch.equal(arguments["state"][slot], before[slot])) == flushes


def test_many_cycles_follow_the_truth():
    """200 steps with varying q and acceptance, cursors moved as the spec says: every output equals the truth."""
    generator = torch.Generator().manual_seed(5)
    heads, dim, n, window, tokens, ring = 2, 8, 4, 6, 3, 11
    A = -torch.tensor([0.3, 1.1])
    state = torch.zeros(2, heads, dim, n)
    rings = (torch.full((2, heads, ring, dim), float("nan")), torch.full((2, 1, ring, n), float("nan")),
             torch.full((2, heads, ring), float("nan")))
    start, committed = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    truth = torch.zeros(heads, dim, n, dtype=torch.float64)
    flushes = 0
    for _ in range(200):
        q = int(torch.randint(0, tokens + 1, (), generator=generator))
        accepted = int(torch.randint(0, q + 1, (), generator=generator))
        x = torch.randn(1, tokens, heads, dim, generator=generator)
        dt = torch.randn(1, tokens, heads, generator=generator)
        B, C = torch.randn(2, 1, tokens, 1, n, generator=generator)
        y = mamba2_replay(state, *rings, start, committed, x, dt, A, B, C, None, None, None, torch.tensor([1]),
                          torch.tensor([q]), window=window)
        step = truth_mamba2.softplus(dt.double())
        draft = truth
        for t in range(q):
            draft = truth_mamba2.advance(draft, x[0, t].double(), B[0, t].double(), step[0, t], A.double())
            want = truth_mamba2.output(draft, x[0, t].double(), C[0, t].double(), None, None)
            assert_close("y", y[0, t], want, 1e-5)
            truth = draft if t < accepted else truth
        if committed[1] + q > window:
            flushes += 1
            start[1], committed[1] = (start[1] + committed[1]) % ring, accepted
        else:
            committed[1] += accepted
    assert flushes > 30


BAD = {
    "window smaller than T": (dict(window=3), "window is 3, expected at least T = 4"),
    "ring too short": (dict(window=17), "window is 17, expected at most R - T = 20 - 4"),
    "slot out of range": (dict(slots=torch.tensor([1, 2, 3, 4, 99])), "slots is 99"),
    "slot twice": (dict(slots=torch.tensor([1, 2, 2, 4, 0])), "at most once"),
    "query_lens too long": (dict(query_lens=torch.tensor([5, 0, 0, 0, 0])), "query_lens is 5"),
    "integer x": (dict(x=torch.zeros(5, 4, 4, 32, dtype=torch.int32)), "x is of dtype torch.int32"),
    "head count": (dict(A=-torch.ones(3)), r"x is of shape .* expected \[B, T, H, P\]|A is of shape \(3,\)"),
    "scale for a float state": (dict(state_scale=torch.ones(7, 4, 32)), "state_scale is given"),
    "stochastic without a seed": (dict(philox_rounds=3), "seed is None"),
    "cursor beyond the ring": (dict(ring_committed=torch.full((7,), 19, dtype=torch.int32)), "ring_committed is 19"),
}


@pytest.mark.parametrize("change, message", BAD.values(), ids=BAD)
def test_bad_input(change, message):
    """A ValueError names the argument, what came and what was expected; nothing has been written."""
    arguments = named("mamba2_replay", *samples("mamba2_replay")[1].make())
    arguments.update(change)
    assert_refused(mamba2_replay, arguments, message)


@pytest.mark.parametrize("op", ["mamba2_replay", "mamba2_update", "mamba2_materialize"])
def test_rates_are_negative(op):
    """A_log given for A, or one rate of zero, is refused; NaN passes, for it shows in what comes out."""
    arguments = named(op, *samples(op)[0].make())
    one = arguments["A"].clone()
    one[..., -1] = 0.0
    for wrong in (-arguments["A"], one)[: 1 if op == "mamba2_materialize" else 2]:
        assert_refused(OPS[op].wrapper, {**arguments, "A": wrong},
                       rf"{op}: A is \S+ in places, expected negative rates \(-exp\(A_log\), not A_log\)")
    OPS[op].wrapper(**{**arguments, "A": arguments["A"] * torch.nan})


def test_wrong_types():
    """A TypeError names the argument."""
    arguments = named("mamba2_replay", *samples("mamba2_replay")[1].make())
    with pytest.raises(TypeError, match="mamba2_replay: x is list, expected Tensor"):
        mamba2_replay(**dict(arguments, x=[1.0]))
    with pytest.raises(TypeError, match="mamba2_replay: window is float, expected int"):
        mamba2_replay(**dict(arguments, window=16.0))
    arguments.pop("slots")
    with pytest.raises(TypeError, match="mamba2_replay: missing a required argument: 'slots'"):
        mamba2_replay(**arguments)
