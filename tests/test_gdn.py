"""Gated delta rule ops against the token-by-token float64 truth."""

import pytest
import torch
import truth_gdn
from harness import assert_close, assert_refused, call, check_sample, clone, named, raw, rms_ratio, stacked

from torch_replay.ops.gdn import naive
from torch_replay.ops.gdn.op import gdn_materialize, gdn_replay, gdn_update
from torch_replay.ops.gdn.samples import SAMPLES, replay
from torch_replay.ops.registry import override_kernel
from torch_replay.ops.samples import Sample

BY_ID = {str(sample): sample for sample in SAMPLES}
SPEC = BY_ID["gdn_replay-spec_ragged_padded"]
RINGS = ("u_ring", "k_ring", "g_ring")


def of(op):
    return [sample for sample in SAMPLES if sample.op == op]


def run(sample, dtype=torch.float32, seed=0):
    coarse = "int8" in sample.id or "fp8" in sample.id  # compared decoded, in a test of their own
    skip = ("state", "state_scale") if coarse else ()
    check_sample(sample, getattr(truth_gdn, sample.op), dtype=dtype, skip=skip, seed=seed)


def double(arguments):
    return {k: clone(v, to64=True) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_against_truth(sample):
    """Outputs and every mutated tensor equal the truth; NaN in dead ring rows and fresh memory reaches nothing."""
    run(sample)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sample", of("gdn_replay")[:5] + of("gdn_update")[:2], ids=str)
def test_half_precision_against_truth(sample, dtype):
    """bfloat16 and float16 activations and rings stay within their precision of the truth."""
    run(sample, dtype)


SIZES = [(1, 1, 2), (2, 7, 9), (5, 5, 10), (11, 13, 24), (11, 16, 32), (16, 16, 32), (16, 16, 45)]


@pytest.mark.parametrize("tokens, window, ring", SIZES)
def test_token_counts(tokens, window, ring):
    """Any T up to W works, with rings of the smallest legal length and longer, ragged rows included."""
    options = dict(rows=4, tokens=tokens, window=window, ring_len=ring, ragged=True, key_dim=16, value_dim=24)
    for route in (window, 0):
        sample = Sample("gdn_replay", f"T{tokens}", lambda rng, r=route: replay(rng, **options, route_window=r))
        run(sample)


@pytest.mark.parametrize("sample", [s for s in SAMPLES if "int8" in s.id or "fp8" in s.id], ids=str)
def test_eight_bit_state(sample):
    """An 8-bit state decodes to the truth within its precision, and rows that do not flush keep their bytes."""
    arguments = named(sample.op, *sample.make())
    before = {name: stacked(clone(value)) for name, value in arguments.items()}
    state, scale = before["state"], before["state_scale"]
    want = double(dict(before, state=truth_gdn.decoded(state, scale), state_scale=None))
    untouched = want["state"].clone()
    getattr(truth_gdn, sample.op)(**want)
    call(sample.op, arguments)
    arguments = {name: stacked(value) for name, value in arguments.items()}
    same = (want["state"] == untouched).flatten(-3).all(-1)
    assert same.any() and not same.all()
    assert torch.equal(arguments["state"].view(torch.uint8)[same], state.view(torch.uint8)[same])
    assert torch.equal(arguments["state_scale"][same], scale[same])
    got = truth_gdn.decoded(arguments["state"], arguments["state_scale"])
    assert_close("state", got[~same], want["state"][~same], 5e-2 if state.dtype == torch.float8_e4m3fn else 2e-2)


def broken_forgets_the_ring(*args, **kwargs):
    args = list(args)
    args[5] = torch.zeros_like(args[5])
    return naive.gdn_replay(*args, **kwargs)


def broken_folds_one_row_less(*args, **kwargs):
    args = list(args)
    args[7] = (args[7] - 1).clamp(min=0)  # count
    return naive.gdn_materialize(*args, **kwargs)


def broken_keeps_old_state(state, *args, **kwargs):
    return naive.gdn_update(state.clone(), *args, **kwargs)


@pytest.mark.parametrize("op, kernel", [
    ("gdn_replay", broken_forgets_the_ring),
    ("gdn_update", broken_keeps_old_state),
    ("gdn_materialize", broken_folds_one_row_less),
])
def test_negative_control(op, kernel):
    """An op broken on purpose fails the suite."""
    with override_kernel(op, "cpu", kernel), pytest.raises(AssertionError):
        for sample in of(op):
            run(sample)


@pytest.mark.parametrize("first, rest", [(50.0, 50.0), (-200.0, -200.0), (1e4, -3.0), (-3.0, 90.0), (20.1, 19.9)])
def test_decay_range(first, rest):
    """No decay (g = 0), g = -50 a token, and one huge step before ordinary ones: no overflow, no digits lost."""
    arguments = named(SPEC.op, *SPEC.make())
    arguments["A_log"].zero_(), arguments["dt_bias"].zero_()
    arguments["a"].fill_(rest)[:, 0] = first
    want = double(arguments)
    expected = truth_gdn.gdn_replay(**want)
    assert_close("o", call(SPEC.op, arguments)[0], expected, 1e-5)
    assert_close("state", arguments["state"], want["state"], 1e-5)
    g = arguments["g_ring"].nan_to_num(0.0)
    assert g.min() >= -1e4 and g.max() <= 0


@pytest.mark.parametrize("committed, q, flushes", [
    (12, 4, False), (13, 4, True), (13, 3, False), (13, 1, False), (16, 0, False), (16, 1, True), (0, 4, False)])
def test_flush_rule(committed, q, flushes):
    """Flush iff committed + q > W with the row's real length; otherwise the state is not written at all."""
    arguments = named(SPEC.op, *SPEC.make())
    slot = int(arguments["slots"][0])
    for name in RINGS:
        arguments[name].nan_to_num_(-0.1)
    arguments["ring_committed"][slot], arguments["query_lens"][0] = committed, q
    before = arguments["state"].clone()
    call(SPEC.op, arguments)
    assert (not torch.equal(arguments["state"][slot], before[slot])) == flushes


@pytest.mark.parametrize("sample", of("gdn_replay"), ids=str)
def test_writes_only_what_it_owns(sample):
    """Bit for bit: no state or scale of a row that does not flush, no ring row but the row's q new ones changes."""
    arguments = named(sample.op, *sample.make())
    before = {name: clone(arguments[name]) for name in ("state", "state_scale", *RINGS)}
    call(sample.op, arguments)
    slots, lens = arguments["slots"].tolist(), arguments["query_lens"]
    ring_len, tokens = arguments["u_ring"].shape[2], arguments["v"].shape[1]
    for slot in range(arguments["state"].shape[0]):
        row = slots.index(slot) if slot in slots and slot > 0 else None
        q = 0 if row is None else tokens if lens is None else int(lens[row])
        start, committed = int(arguments["ring_start"][slot]), int(arguments["ring_committed"][slot])
        if row is None or committed + q <= arguments["window"]:
            for name in ("state", "state_scale"):
                if before[name] is not None:
                    assert torch.equal(raw(arguments[name][slot]), raw(before[name][slot])), (name, slot)
        kept = [r for r in range(ring_len) if (r - start - committed) % ring_len >= q]
        for name in RINGS:
            assert torch.equal(raw(arguments[name][slot][:, kept]), raw(before[name][slot][:, kept])), (name, slot)


def test_nan_poison():
    """NaN in padded rows, in tokens from q on, in unused slots and in the null slot reaches no result."""
    clean, dirty = (named(SPEC.op, *SPEC.make()) for _ in range(2))
    lens = torch.where(dirty["slots"] > 0, dirty["query_lens"], 0)
    for row, q in enumerate(lens.tolist()):
        for name in ("q", "k", "v", "a", "b"):
            dirty[name][row, q:] = float("nan")
    used = [s for s in dirty["slots"].tolist() if s > 0]
    for slot in set(range(dirty["state"].shape[0])) - set(used):
        for name in ("state", *RINGS):
            dirty[name][slot] = float("nan")
    assert torch.equal(call(SPEC.op, clean)[0], call(SPEC.op, dirty)[0])
    for name in ("state", *RINGS):
        assert torch.equal(raw(clean[name][used]), raw(dirty[name][used])), name


@pytest.mark.parametrize("sample", [s for s in of("gdn_update") if "padded" in s.id], ids=str)
def test_update_never_writes_the_null_slot(sample):
    """Padded rows and tokens that are not kept leave slot 0 as it was (a NaN there would hide a write)."""
    arguments = named(sample.op, *sample.make())
    arguments["state"][0] = 7.0
    call(sample.op, arguments)
    assert (arguments["state"][0] == 7.0).all()


@pytest.mark.parametrize("ring_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_outputs_are_what_the_ring_replays_to(ring_dtype):
    """Outputs come from the keys and updates as stored: replaying the stored rows in float64 gives them exactly."""
    options = dict(rows=3, tokens=5, window=8, ring_dtype=ring_dtype, key_dim=16, value_dim=24)
    sample = Sample("gdn_replay", "stored", lambda rng: replay(rng, **options))
    arguments = named(sample.op, *sample.make())
    want = double(arguments)
    o = call(sample.op, arguments)[0]
    q = truth_gdn.prepared(*(want[n] for n in ("q", "k", "a", "b", "A_log", "dt_bias", "scale", "l2norm")))[0]
    for row, slot in enumerate(arguments["slots"].tolist()):
        current = want["state"][slot]
        start, committed = int(want["ring_start"][slot]), int(want["ring_committed"][slot])
        for j in range(committed + 5):
            stored = (arguments[name][slot, :, (start + j) % 13].double() for name in RINGS)
            current = truth_gdn.decay_and_add(current, *stored)
            if j >= committed:
                t = j - committed
                assert_close(f"row {row} token {t}", o[row, t], truth_gdn.output(current, q[row, t]), 1e-5)


@pytest.mark.parametrize("sample", of("gdn_materialize"), ids=str)
def test_snapshot_of_zero_rows_is_an_exact_copy(sample):
    """count 0 copies state and scale bit for bit, in every state dtype; what has no plan keeps its bytes."""
    arguments = named(sample.op, *sample.make())
    arguments["count"].clamp_(max=0)
    before = {name: clone(arguments[name]) for name in ("state", "state_scale") if arguments[name] is not None}
    want = {name: clone(value) for name, value in before.items()}
    listed = [row for row in arguments["active_rows"].tolist() if row >= 0]
    for layer, group in enumerate(arguments["layer_group"].tolist()):
        for row in listed:
            src, dst, count = (int(arguments[name][group, row]) for name in ("src_slots", "dst_slots", "count"))
            if count == 0 and src and dst:
                for name, value in want.items():
                    value[layer][dst] = before[name][layer][src]
    call(sample.op, arguments)
    for name, value in want.items():
        assert torch.equal(raw(arguments[name]), raw(value)), name


def test_no_rows():
    """An empty batch gives an empty output and writes nothing."""
    for op in ("gdn_replay", "gdn_update"):
        arguments = named(op, *BY_ID[f"{op}-typical"].make())
        for name in ("q", "k", "v", "a", "b", "slots"):
            arguments[name] = arguments[name][:0]
        before = clone(arguments["state"])
        assert call(op, arguments)[0].shape == (0, 1, 4, 128)
        assert torch.equal(raw(arguments["state"]), raw(before))


def step_inputs(generator, tokens, key_heads, heads, key_dim, value_dim):
    shapes = ((key_heads, key_dim), (key_heads, key_dim), (heads, value_dim), (heads,), (heads,))
    return [torch.randn(1, tokens, *shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("switching", [False, True], ids=["one_window", "alternating_windows"])
def test_many_cycles_follow_the_truth(switching):
    """200 steps with varying q and acceptance, cursors moved as the spec says: outputs and final state are the truth's.

    With alternating windows a third of the steps takes the small-batch route.
    """
    generator = torch.Generator().manual_seed(5)
    key_heads, heads, key_dim, value_dim, window, tokens, ring = 2, 4, 6, 5, 6, 3, 11
    A_log, bias = torch.tensor([-2.0, -1.0, 0.0, 0.5]), torch.tensor([0.1, -0.3, 0.2, 0.0])
    state = torch.zeros(3, heads, value_dim, key_dim)
    rings = [torch.full(shape, float("nan")) for shape in (
        (3, heads, ring, value_dim), (3, key_heads, ring, key_dim), (3, heads, ring))]
    start, committed = torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    truth, flushes = torch.zeros(heads, value_dim, key_dim, dtype=torch.float64), 0
    for _ in range(200):
        q = int(torch.randint(0, tokens + 1, (), generator=generator))
        accepted = int(torch.randint(0, q + 1, (), generator=generator))
        route = 0 if switching and torch.rand((), generator=generator) < 1 / 3 else window
        inputs = step_inputs(generator, tokens, key_heads, heads, key_dim, value_dim)
        o = gdn_replay(state, *rings, start, committed, *inputs, A_log, bias, torch.tensor([1]), torch.tensor([q]),
                       window=route, scale=0.4, l2norm=True)
        queries, keys, v, a, b = (x[0].double() for x in inputs)
        queries, keys, g, beta = truth_gdn.prepared(queries, keys, a, b, A_log.double(), bias.double(), 0.4, True)
        draft = truth
        for t in range(q):
            u = truth_gdn.corrected(draft, keys[t], v[t], g[t], beta[t])
            draft = truth_gdn.decay_and_add(draft, u, keys[t], g[t])
            assert_close("o", o[0, t], truth_gdn.output(draft, queries[t]), 1e-5)
            truth = draft if t < accepted else truth
        if q and committed[1] + q > route:
            flushes += 1
            start[1], committed[1] = (start[1] + committed[1]) % ring, accepted
        else:
            committed[1] += accepted
    assert flushes > 20 and committed[1] > 0
    one = torch.tensor([[1]])
    gdn_materialize(state[None], *(r[None] for r in rings), one, one + 1, start[None, 1:2], committed[None, 1:2],
                    torch.tensor([0]), torch.tensor([0]))
    assert_close("logical state", state[2], truth, 1e-5)


def test_low_precision_ring_does_not_drift():
    """300 flushes at mild decay with a bfloat16 ring: the error stays at the ring's precision and does not grow."""
    generator = torch.Generator().manual_seed(9)
    heads, key_dim, value_dim, window = 2, 32, 16, 4
    A_log, bias = torch.full((heads,), -5.0), torch.zeros(heads)  # g is about -0.005 a token
    exact, state = torch.zeros(2, 2, heads, value_dim, key_dim).unbind()
    rings = [torch.zeros(2, 1, 2 * window, dim, dtype=torch.bfloat16).repeat(1, n, 1, 1)
             for n, dim in ((heads, value_dim), (1, key_dim))] + [torch.zeros(2, heads, 2 * window)]
    start, committed = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    slots, options, errors = torch.tensor([1]), dict(scale=key_dim**-0.5, l2norm=True), []
    for _ in range(301):
        inputs = step_inputs(generator, window, 1, heads, key_dim, value_dim)
        want = gdn_update(exact, *inputs, A_log, bias, slots, **options)
        got = gdn_replay(state, *rings, start, committed, *inputs, A_log, bias, slots, window=window, **options)
        errors.append(rms_ratio(got, want))
        start[1] = (start[1] + committed[1]) % (2 * window)
        committed[1] = window
    early, late = sum(errors[30:90]) / 60, sum(errors[240:300]) / 60
    assert late < 1e-2 and late < 1.5 * early, (early, late)


def test_stochastic_flush_draws_from_the_seed():
    """Other seeds round otherwise, the same seed alike, and the mean over seeds beats rounding to nearest."""
    options = dict(rows=2, state_dtype=torch.float16, rounds=10, key_dim=8, value_dim=8)
    sample = Sample("gdn_replay", "seeds", lambda rng: replay(rng, **options))

    def flushed(seed, **changes):
        arguments = dict(named(sample.op, *sample.make()), **changes)
        if seed is not None:
            arguments["seed"] = torch.tensor(seed)
        slot = int(arguments["slots"][arguments["ring_committed"][arguments["slots"]].argmax()])
        arguments["ring_committed"][slot] = 16
        for name in RINGS:
            arguments[name].nan_to_num_(-0.1)
        call(sample.op, arguments)
        return arguments["state"][slot].double()

    exact = flushed(None, state=named(sample.op, *sample.make())["state"].float())
    assert torch.equal(flushed(3), flushed(3)) and not torch.equal(flushed(3), flushed(4))
    mean = torch.stack([flushed(seed) for seed in range(64)]).mean(0)
    assert rms_ratio(mean, exact) < 0.6 * rms_ratio(flushed(0, philox_rounds=0), exact)


def test_stochastic_snapshots_differ_by_layer():
    """Two layers with the same content round differently, the same call twice alike."""
    sample = BY_ID["gdn_materialize-state_fp16_stochastic"]
    results = []
    for _ in range(2):
        arguments = named(sample.op, *sample.make())
        for name in ("state", *RINGS):
            arguments[name][1] = arguments[name][0]
        arguments["layer_group"].zero_()
        call(sample.op, arguments)
        results.append(arguments["state"])
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0][0], results[0][1])


BAD = {
    "window smaller than T": (dict(window=3), "window is 3, expected at least T = 4"),
    "negative window": (dict(window=-1), "window is -1"),
    "ring too short": (dict(window=17), "window is 17, expected at most R - T = 20 - 4"),
    "slot out of range": (dict(slots=torch.tensor([1, 2, 3, 4, 5, 99])), "slots is 99"),
    "slot twice": (dict(slots=torch.tensor([1, 2, 2, 4, 5, 0])), "at most once"),
    "query_lens too long": (dict(query_lens=torch.tensor([5, 0, 0, 0, 0, 0])), "query_lens is 5"),
    "integer v": (dict(v=torch.zeros(6, 4, 4, 32, dtype=torch.int32)), "v is of dtype torch.int32"),
    "half g_ring": (dict(g_ring=torch.zeros(8, 4, 20, dtype=torch.bfloat16)), "g_ring is of dtype torch.bfloat16"),
    "key dim": (dict(k=torch.zeros(6, 4, 2, 31)), r"k is of shape \(6, 4, 2, 31\), expected .* with K = 32"),
    "value heads": (dict(A_log=torch.ones(3)), r"A_log is of shape \(3,\), expected \[HV\] with HV = 4"),
    "head ratio": (dict(q=torch.zeros(6, 4, 3, 32), k=torch.zeros(6, 4, 3, 32), k_ring=torch.zeros(8, 3, 20, 32)),
                   "v is of 4 heads, expected a multiple of 3 key heads"),
    "no tokens": (dict(q=torch.zeros(6, 0, 2, 32), k=torch.zeros(6, 0, 2, 32), v=torch.zeros(6, 0, 4, 32),
                       a=torch.zeros(6, 0, 4), b=torch.zeros(6, 0, 4)), "q is of 0 tokens a row"),
    "scale for a float state": (dict(state_scale=torch.ones(8, 4, 32)), "state_scale is given"),
    "no scale for an 8-bit state": (dict(state=torch.zeros(8, 4, 32, 32, dtype=torch.int8)), "state_scale is None"),
    "stochastic without a seed": (dict(philox_rounds=3), "seed is None"),
    "cursor beyond the ring": (dict(ring_committed=torch.full((8,), 19, dtype=torch.int32)), "ring_committed is 19"),
}


@pytest.mark.parametrize("change, message", BAD.values(), ids=BAD)
def test_bad_input(change, message):
    """A ValueError names the argument, what came and what was expected; nothing has been written."""
    arguments = dict(named(SPEC.op, *SPEC.make()), **change)
    assert_refused(gdn_replay, arguments, message)


def test_bad_plans_and_kept_slots():
    """Materialise and update refuse heads that do not divide and slots that are both read and written."""
    arguments = named("gdn_materialize", *BY_ID["gdn_materialize-typical"].make())
    with pytest.raises(ValueError, match="u_ring is of 4 heads, expected a multiple of 3 key heads"):
        gdn_materialize(**dict(arguments, k_ring=torch.zeros(3, 11, 3, 20, 32)))
    crossed = arguments["src_slots"].roll(1, 1)
    with pytest.raises(ValueError, match="dst_slots is .* expected no slot that another row reads"):
        gdn_materialize(**dict(arguments, dst_slots=crossed, count=torch.ones_like(crossed)))
    arguments = named("gdn_update", *BY_ID["gdn_update-spec_kept_ragged_padded"].make())
    arguments["token_slots"][1, 1] = arguments["slots"][0]
    with pytest.raises(ValueError, match="token_slots is .* expected none of the slots read"):
        gdn_update(**arguments)


def test_wrong_types():
    """A TypeError names the argument."""
    arguments = named(SPEC.op, *SPEC.make())
    with pytest.raises(TypeError, match="gdn_replay: v is list, expected Tensor"):
        gdn_replay(**dict(arguments, v=[1.0]))
    with pytest.raises(TypeError, match="gdn_replay: window is float, expected int"):
        gdn_replay(**dict(arguments, window=16.0))
    with pytest.raises(TypeError, match="gdn_replay: l2norm is int, expected bool"):
        gdn_replay(**dict(arguments, l2norm=1))
    arguments.pop("A_log")
    with pytest.raises(TypeError, match="gdn_replay: missing a required argument: 'A_log'"):
        gdn_replay(**arguments)
