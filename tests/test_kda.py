"""Kimi Delta Attention ops against the token-by-token float64 truth, and against the gated delta rule ops."""

import pytest
import torch
import truth_kda
from harness import RATIO, assert_close, assert_refused, call, check_sample, clone, compare, named, raw, stacked

from torch_replay.ops.gdn.samples import SAMPLES as GDN_SAMPLES
from torch_replay.ops.kda import naive
from torch_replay.ops.kda.op import kda_materialize, kda_replay, kda_update
from torch_replay.ops.kda.samples import SAMPLES, replay
from torch_replay.ops.registry import override_kernel
from torch_replay.ops.samples import Sample

BY_ID = {str(sample): sample for sample in SAMPLES}
SPEC = BY_ID["kda_replay-spec_ragged_padded"]
RINGS = ("u_ring", "k_ring", "g_ring")
PREPARED = ("q", "k", "a", "b", "A_log", "dt_bias", "scale", "l2norm", "lower_bound")


def of(op):
    return [sample for sample in SAMPLES if sample.op == op]


def run(sample, dtype=torch.float32):
    coarse = "int8" in sample.id or "fp8" in sample.id  # compared decoded, in a test of their own
    check_sample(sample, getattr(truth_kda, sample.op), dtype=dtype, skip=("state", "state_scale") if coarse else ())


def double(arguments):
    return {k: clone(v, to64=True) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_against_truth(sample):
    """Outputs and every mutated tensor equal the truth; NaN in dead ring rows and fresh memory reaches nothing."""
    run(sample)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sample", of("kda_replay")[:5] + of("kda_update")[:3], ids=str)
def test_half_precision_against_truth(sample, dtype):
    """bfloat16 and float16 activations and rings stay within their precision of the truth."""
    run(sample, dtype)


@pytest.mark.parametrize("tokens, window, ring", [(1, 1, 2), (2, 7, 9), (5, 5, 10), (11, 13, 24), (16, 16, 45)])
def test_token_counts(tokens, window, ring):
    """Any T up to W works, with rings of the smallest legal length and longer, ragged rows included."""
    options = dict(rows=4, tokens=tokens, window=window, ring_len=ring, ragged=True, key_dim=16, value_dim=24)
    for route in (window, 0):
        run(Sample("kda_replay", f"T{tokens}", lambda rng, r=route: replay(rng, **options, route_window=r)))


@pytest.mark.parametrize("sample", [s for s in SAMPLES if "int8" in s.id or "fp8" in s.id], ids=str)
def test_eight_bit_state(sample):
    """An 8-bit state decodes to the truth within its precision, and rows that do not flush keep their bytes."""
    arguments = named(sample.op, *sample.make())
    before = {name: stacked(clone(value)) for name, value in arguments.items()}
    state, scale = before["state"], before["state_scale"]
    want = double(dict(before, state=truth_kda.decoded(state, scale), state_scale=None))
    untouched = want["state"].clone()
    getattr(truth_kda, sample.op)(**want)
    call(sample.op, arguments)
    arguments = {name: stacked(value) for name, value in arguments.items()}
    same = (want["state"] == untouched).flatten(-3).all(-1)
    assert same.any() and not same.all()
    assert torch.equal(raw(arguments["state"])[same], raw(state)[same])
    assert torch.equal(arguments["state_scale"][same], scale[same])
    got = truth_kda.decoded(arguments["state"], arguments["state_scale"])
    assert_close("state", got[~same], want["state"][~same], RATIO[state.dtype])


def broken_forgets_the_ring(*args, **kwargs):
    return naive.kda_replay(*args[:5], torch.zeros_like(args[5]), *args[6:], **kwargs)


def broken_drops_the_lower_bound(kernel):
    return lambda *args, **kwargs: kernel(*args, **dict(kwargs, lower_bound=None))


def broken_keeps_old_state(state, *args, **kwargs):
    return naive.kda_update(state.clone(), *args, **kwargs)


def broken_folds_one_row_less(*args, **kwargs):
    return naive.kda_materialize(*args[:7], (args[7] - 1).clamp(min=0), *args[8:], **kwargs)


@pytest.mark.parametrize("op, kernel, only", [
    ("kda_replay", broken_forgets_the_ring, "typical"),
    ("kda_replay", broken_drops_the_lower_bound(naive.kda_replay), "lower_bound"),
    ("kda_update", broken_keeps_old_state, "typical"),
    ("kda_update", broken_drops_the_lower_bound(naive.kda_update), "spec_kept_ragged_padded_lower_bound"),
    ("kda_materialize", broken_folds_one_row_less, "typical"),
])
def test_negative_control(op, kernel, only):
    """An op broken on purpose fails the suite."""
    with override_kernel(op, "cpu", kernel), pytest.raises(AssertionError):
        run(BY_ID[f"{op}-{only}"])


@pytest.mark.parametrize("lower_bound", [None, -50.0])
@pytest.mark.parametrize("first, rest", [(50.0, 50.0), (-200.0, -200.0), (1e4, -3.0), (-3.0, 90.0), (20.1, 19.9)])
def test_decay_range(first, rest, lower_bound):
    """g = 0, g = -50 a token, one huge step before ordinary ones, alone and beside mild channels: no digits lost."""
    for stride in (1, 2):
        arguments = dict(named(SPEC.op, *SPEC.make()), lower_bound=lower_bound)
        arguments["A_log"].zero_(), arguments["dt_bias"].zero_()
        arguments["a"][..., ::stride] = rest
        arguments["a"][:, 0, :, ::stride] = first
        want = double(arguments)
        expected = truth_kda.kda_replay(**want)
        assert_close("o", call(SPEC.op, arguments)[0], expected, 1e-5)
        assert_close("state", arguments["state"], want["state"], 1e-5)
        g = arguments["g_ring"].nan_to_num(0.0)
        assert g.min() >= (-1e4 if lower_bound is None else lower_bound) and g.max() <= 0


def test_strong_decay_samples_would_overflow_decayed_keys():
    """The strong samples, compared with the truth above, hold rings where exp(-G) is beyond float32 by far."""
    strong = [s for s in SAMPLES if "strong" in s.id and s.op != "kda_update"]
    for sample in strong:
        g = named(sample.op, *sample.make())["g_ring"].nan_to_num(0.0)
        assert torch.exp(-g.sum(-2)).isinf().any() and torch.exp(g.sum(-2)).max() > 1e-3
    assert len(strong) == 3


@pytest.mark.parametrize("sample", [s for s in GDN_SAMPLES if not any(w in s.id for w in ("8", "stoch", "layer"))],
                         ids=str)
def test_equals_gdn_where_channels_share_the_gate(sample):
    """With one decay for all channels of a head, every op gives what its gated delta rule sibling gives."""
    want = named(sample.op, *sample.make())
    arguments = {name: clone(value) for name, value in want.items()}
    key_dim = want["state"].shape[-1]
    for name in ("a", "dt_bias", "g_ring"):
        if name in want:
            arguments[name] = want[name].unsqueeze(-1).repeat_interleave(key_dim, -1)
    expected, got = call(sample.op, want), call(sample.op.replace("gdn", "kda"), arguments)
    floor = RATIO[want["u_ring"].dtype] if "u_ring" in want else 0.0
    for result, value in zip(got, expected, strict=True):
        compare("output", result, value, floor)
    for name in {"state", "u_ring", "k_ring"} & set(want):
        compare(name, arguments[name], want[name], floor)
    if "g_ring" in want:
        shared = want["g_ring"].unsqueeze(-1).expand(arguments["g_ring"].shape)
        assert torch.equal(raw(arguments["g_ring"]), raw(shared))


@pytest.mark.parametrize("committed, q, flushes", [
    (12, 4, False), (13, 4, True), (13, 3, False), (16, 0, False), (16, 1, True), (0, 4, False)])
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


@pytest.mark.parametrize("sample", of("kda_replay"), ids=str)
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
    """NaN in padded rows, in tokens from q on (q = 0 included), in unused slots and the null slot reaches nothing."""
    for lower_bound in (None, -5.0):
        clean, dirty = (dict(named(SPEC.op, *SPEC.make()), lower_bound=lower_bound) for _ in range(2))
        lens = torch.where(dirty["slots"] > 0, dirty["query_lens"], 0)
        assert 0 in dirty["query_lens"] and 0 in dirty["slots"]
        for row, q in enumerate(lens.tolist()):
            for name in ("q", "k", "v", "a", "b"):
                dirty[name][row, q:] = float("nan")
        used = [s for s in dirty["slots"].tolist() if s > 0]
        for slot in set(range(dirty["state"].shape[0])) - set(used):
            for name in ("state", *RINGS):
                dirty[name][slot] = float("nan")
        o = call(SPEC.op, clean)[0]
        assert torch.equal(o, call(SPEC.op, dirty)[0]) and not o[lens == 0].any()
        for name in ("state", *RINGS):
            assert torch.equal(raw(clean[name][used]), raw(dirty[name][used])), name


@pytest.mark.parametrize("sample", [s for s in of("kda_update") if "padded" in s.id], ids=str)
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
    sample = Sample("kda_replay", "stored", lambda rng: replay(rng, **options))
    arguments = named(sample.op, *sample.make())
    want = double(arguments)
    o = call(sample.op, arguments)[0]
    q = truth_kda.prepared(*(want[name] for name in PREPARED))[0]
    for row, slot in enumerate(arguments["slots"].tolist()):
        current = want["state"][slot]
        start, committed = int(want["ring_start"][slot]), int(want["ring_committed"][slot])
        for j in range(committed + 5):
            stored = (arguments[name][slot, :, (start + j) % 13].double() for name in RINGS)
            current = truth_kda.decay_and_add(current, *stored)
            if j >= committed:
                t = j - committed
                assert_close(f"row {row} token {t}", o[row, t], truth_kda.output(current, q[row, t]), 1e-5)


def test_no_rows():
    """An empty batch gives an empty output and writes nothing."""
    for op in ("kda_replay", "kda_update"):
        arguments = named(op, *BY_ID[f"{op}-typical"].make())
        for name in ("q", "k", "v", "a", "b", "slots"):
            arguments[name] = arguments[name][:0]
        before = clone(arguments["state"])
        assert call(op, arguments)[0].shape == (0, 1, 4, 128)
        assert torch.equal(raw(arguments["state"]), raw(before))


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("switching", [False, True], ids=["one_window", "alternating_windows"])
def test_many_cycles_follow_the_truth(switching, lower_bound):
    """200 steps with varying q and acceptance, cursors moved as the spec says: outputs and final state are the truth's.

    With alternating windows a third of the steps takes the small-batch route.
    """
    generator = torch.Generator().manual_seed(5)
    key_heads, heads, key_dim, value_dim, window, tokens, ring = 2, 4, 6, 5, 6, 3, 11
    A_log, bias = torch.tensor([-2.0, -1.0, 0.0, 0.5]), torch.randn(heads, key_dim, generator=generator) * 0.3 - 2.0
    state = torch.zeros(3, heads, value_dim, key_dim)
    rings = [torch.full(shape, float("nan")) for shape in (
        (3, heads, ring, value_dim), (3, key_heads, ring, key_dim), (3, heads, ring, key_dim))]
    start, committed = torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    truth, flushes = torch.zeros(heads, value_dim, key_dim, dtype=torch.float64), 0
    shapes = ((key_heads, key_dim), (key_heads, key_dim), (heads, value_dim), (heads, key_dim), (heads,))
    for _ in range(200):
        q = int(torch.randint(0, tokens + 1, (), generator=generator))
        accepted = int(torch.randint(0, q + 1, (), generator=generator))
        route = 0 if switching and torch.rand((), generator=generator) < 1 / 3 else window
        inputs = [torch.randn(1, tokens, *shape, generator=generator) for shape in shapes]
        o = kda_replay(state, *rings, start, committed, *inputs, A_log, bias, torch.tensor([1]), torch.tensor([q]),
                       window=route, scale=0.4, l2norm=True, lower_bound=lower_bound)
        queries, keys, v, a, b = (x[0].double() for x in inputs)
        queries, keys, g, beta = truth_kda.prepared(
            queries, keys, a, b, A_log.double(), bias.double(), 0.4, True, lower_bound)
        draft = truth
        for t in range(q):
            u = truth_kda.corrected(draft, keys[t], v[t], g[t], beta[t])
            draft = truth_kda.decay_and_add(draft, u, keys[t], g[t])
            assert_close("o", o[0, t], truth_kda.output(draft, queries[t]), 1e-5)
            truth = draft if t < accepted else truth
        if q and committed[1] + q > route:
            flushes += 1
            start[1], committed[1] = (start[1] + committed[1]) % ring, accepted
        else:
            committed[1] += accepted
    assert flushes > 20 and committed[1] > 0
    one = torch.tensor([[1]])
    kda_materialize(state[None], *(r[None] for r in rings), one, one + 1, start[None, 1:2], committed[None, 1:2],
                    torch.tensor([0]), torch.tensor([0]))
    assert_close("logical state", state[2], truth, 1e-5)


BAD = {
    "window smaller than T": (dict(window=3), "window is 3, expected at least T = 4"),
    "ring too short": (dict(window=17), "window is 17, expected at most R - T = 20 - 4"),
    "slot out of range": (dict(slots=torch.tensor([1, 2, 3, 4, 5, 99])), "slots is 99"),
    "slot twice": (dict(slots=torch.tensor([1, 2, 2, 4, 5, 0])), "at most once"),
    "query_lens too long": (dict(query_lens=torch.tensor([5, 0, 0, 0, 0, 0])), "query_lens is 5"),
    "gate of a head": (dict(a=torch.zeros(6, 4, 4)), r"a is of shape \(6, 4, 4\), expected \[B, T, HV, K\]"),
    "gate ring of a head": (dict(g_ring=torch.zeros(8, 4, 20)), r"g_ring is of shape .* expected \[S, HV, R, K\]"),
    "bias of a head": (dict(dt_bias=torch.zeros(4)), r"dt_bias is of shape \(4,\), expected \[HV, K\]"),
    "half g_ring": (dict(g_ring=torch.zeros(8, 4, 20, 32, dtype=torch.bfloat16)), "g_ring is of dtype torch.bfloat16"),
    "head ratio": (dict(q=torch.zeros(6, 4, 3, 32), k=torch.zeros(6, 4, 3, 32), k_ring=torch.zeros(8, 3, 20, 32)),
                   "v is of 4 heads, expected a multiple of 3 key heads"),
    "positive lower bound": (dict(lower_bound=5.0), "lower_bound is 5.0, expected None or a finite number below 0"),
    "infinite lower bound": (dict(lower_bound=-float("inf")), "lower_bound is -inf"),
    "scale for a float state": (dict(state_scale=torch.ones(8, 4, 32)), "state_scale is given"),
    "stochastic without a seed": (dict(philox_rounds=3), "seed is None"),
    "cursor beyond the ring": (dict(ring_committed=torch.full((8,), 19, dtype=torch.int32)), "ring_committed is 19"),
}


@pytest.mark.parametrize("change, message", BAD.values(), ids=BAD)
def test_bad_input(change, message):
    """A ValueError names the argument, what came and what was expected; nothing has been written."""
    arguments = dict(named(SPEC.op, *SPEC.make()), **change)
    assert_refused(kda_replay, arguments, f"kda_replay: .*{message}")


def test_bad_plans_and_kept_slots():
    """Materialise and update refuse what replay refuses, and slots that are both read and written."""
    arguments = named("kda_materialize", *BY_ID["kda_materialize-typical"].make())
    with pytest.raises(ValueError, match="u_ring is of 4 heads, expected a multiple of 3 key heads"):
        kda_materialize(**dict(arguments, k_ring=torch.zeros(3, 11, 3, 20, 32)))
    crossed = arguments["src_slots"].roll(1, 1)
    with pytest.raises(ValueError, match="dst_slots is .* expected no slot that another row reads"):
        kda_materialize(**dict(arguments, dst_slots=crossed, count=torch.ones_like(crossed)))
    arguments = named("kda_update", *BY_ID["kda_update-spec_kept_ragged_padded_lower_bound"].make())
    with pytest.raises(ValueError, match="kda_update: lower_bound is 0.0"):
        kda_update(**dict(arguments, lower_bound=0.0))
    arguments["token_slots"][1, 1] = arguments["slots"][0]
    with pytest.raises(ValueError, match="token_slots is .* expected none of the slots read"):
        kda_update(**arguments)


def test_wrong_types():
    """A TypeError names the argument."""
    arguments = named(SPEC.op, *SPEC.make())
    with pytest.raises(TypeError, match="kda_replay: a is list, expected Tensor"):
        kda_replay(**dict(arguments, a=[1.0]))
    with pytest.raises(TypeError, match="kda_replay: lower_bound is bool, expected float or None or int"):
        kda_replay(**dict(arguments, lower_bound=True))
