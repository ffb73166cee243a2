"""Triton kernels of the gated delta rule and Kimi Delta Attention ops, on a GPU or in the interpreter.

test_triton_ops.py runs every sample of these ops; here is what takes more than one launch, or inputs of its own.
"""

import importlib

import pytest
import torch
import truth_gdn
import truth_kda
from harness import assert_close, call, check_sample, clone, named, raw
from triton_harness import DEVICE, GPU, on_device, triton_kernel

from torch_replay.ops.registry import override_kernel
from torch_replay.ops.samples import Sample

pytestmark = on_device

TRUTHS = {"gdn": truth_gdn, "kda": truth_kda}
FAMILIES = {name: importlib.import_module(f"torch_replay.ops.{name}.samples") for name in TRUTHS}
RINGS = ("u_ring", "k_ring", "g_ring")
families = pytest.mark.parametrize("family", list(FAMILIES))


def make(family, op, dtype=torch.float32, **options):
    """Arguments of an op, by name, on the device."""
    build = getattr(FAMILIES[family], op)
    sample = Sample(f"{family}_{op}", "made", lambda rng: build(rng, **options))
    return named(sample.op, *sample.make(DEVICE, dtype))


def launch(op, arguments):
    with triton_kernel(op):
        return call(op, arguments)


def on_cpu(arguments, to64=False):
    return {name: clone(value, to64).cpu() if isinstance(value, torch.Tensor) else value
            for name, value in arguments.items()}


def flushing(arguments, committed):
    """The same arguments with `committed` live rows in every slot and finite rings."""
    arguments["ring_committed"].fill_(committed)
    for name in RINGS:
        arguments[name].nan_to_num_(-0.1)
    return arguments


@pytest.mark.parametrize("op, argument", [
    ("gdn_replay", "ring_committed"), ("gdn_update", "a"), ("gdn_materialize", "g_ring"), ("kda_replay", "g_ring"),
    ("kda_update", "a"), ("kda_materialize", "u_ring")])
def test_negative_control(op, argument):
    """A kernel that is given zeros for one argument fails the comparison that the samples go through."""
    family = op[:3]
    kernel = getattr(importlib.import_module(f"torch_replay.ops.{family}.kernels"), op)
    position = list(named(op, *next(s for s in FAMILIES[family].SAMPLES if s.op == op).make())).index(argument)

    def broken(*args, **kwargs):
        return kernel(*args[:position], torch.zeros_like(args[position]), *args[position + 1 :], **kwargs)

    sample = next(s for s in FAMILIES[family].SAMPLES if s.op == op and "odd_sizes" in s.id)
    with override_kernel(op, DEVICE, broken), pytest.raises(AssertionError):
        check_sample(sample, getattr(TRUTHS[family], op), DEVICE)


@families
@pytest.mark.parametrize("first, rest", [(50.0, 50.0), (-200.0, -200.0), (1e4, -3.0), (-3.0, 90.0)])
def test_decay_range(family, first, rest):
    """No decay (g = 0), g = -50 a token, and one huge step before ordinary ones: no overflow, no digits lost."""
    arguments = make(family, "replay", tokens=4, rows=2)
    arguments["A_log"].zero_(), arguments["dt_bias"].zero_()
    arguments["a"].fill_(rest)[:, 0] = first
    slots = arguments["slots"].long()
    flushing(arguments, 13)
    arguments["g_ring"][slots] = rest if rest < 0 else -0.003
    arguments["g_ring"][slots, :, arguments["ring_start"][slots].long()] = -1e4
    want = on_cpu(arguments, to64=True)
    expected = getattr(TRUTHS[family], f"{family}_replay")(**want)
    o = launch(f"{family}_replay", arguments)[0]
    assert_close("o", o, expected, 1e-5)
    for name in ("state", *RINGS):
        assert_close(name, arguments[name][slots], want[name][slots.cpu()], 1e-5)


@families
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.int8], ids=str)
def test_writes_only_what_it_owns(family, state_dtype):
    """Bit for bit: no state or scale of a row that does not flush, no ring row but the row's q new ones changes."""
    arguments = make(family, "replay", rows=5, tokens=3, window=5, ring_len=9, ragged=True, padded=1, heads=2,
                     state_dtype=state_dtype, key_dim=16, value_dim=40)
    slot = int(arguments["slots"][0])
    arguments["ring_committed"][slot] = 5
    for name in RINGS:
        arguments[name][slot].nan_to_num_(-0.1)
    before = {name: clone(arguments[name]) for name in ("state", "state_scale", *RINGS)}
    launch(f"{family}_replay", arguments)
    slots, lens = arguments["slots"].tolist(), arguments["query_lens"].tolist()
    flushed = 0
    for slot in range(arguments["state"].shape[0]):
        q = lens[slots.index(slot)] if slot and slot in slots else 0
        start, committed = int(arguments["ring_start"][slot]), int(arguments["ring_committed"][slot])
        flushes = q > 0 and committed > 0 and committed + q > 5
        flushed += flushes
        for name in ("state", "state_scale"):
            if before[name] is not None:
                assert torch.equal(raw(arguments[name][slot]), raw(before[name][slot])) != flushes, (name, slot)
        kept = [r for r in range(9) if (r - start - committed) % 9 >= q]
        for name in RINGS:
            assert torch.equal(raw(arguments[name][slot][:, kept]), raw(before[name][slot][:, kept])), (name, slot)
    assert flushed


@families
@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn], ids=str)
def test_stochastic_flush_draws_as_the_reference(family, state_dtype):
    """Seed, element, slot and layer enter the draw as in the reference: all but a few stored values are the same."""
    options = dict(state_dtype=state_dtype, rounds=7, rows=2, heads=2, key_heads=1, key_dim=24, value_dim=20)
    for op in ("replay", "materialize"):
        arguments = make(family, op, **options)
        if op == "replay":
            flushing(arguments, 16)
        before, want = on_cpu(arguments), on_cpu(arguments)
        call(f"{family}_{op}", want)
        launch(f"{family}_{op}", arguments)
        got, want, before = (x["state"].cpu().view(torch.uint8) for x in (arguments, want, before))
        changed = want != before
        assert changed.float().mean() > 0.1
        assert (got != want)[changed].float().mean() < 5e-3, op


@families
def test_list_of_rows_ends_at_the_first_minus_one(family):
    """Rows behind the first -1 are not listed, whatever stands there; an empty list writes nothing."""
    op = f"{family}_materialize"
    arguments = make(family, "materialize", layers=2, key_dim=16, value_dim=16)
    for listed in ([-1, 0, 1, 2, 3], [2, -1, 1, 0, 4]):
        arguments["active_rows"].copy_(torch.tensor(listed))
        want = on_cpu(arguments)
        call(op, want)
        launch(op, arguments)
        assert_close("state", arguments["state"], want["state"], 1e-5)


@families
def test_many_cycles_follow_the_truth(family):
    """Fill-flush cycles with varying q, acceptance and window: outputs and the logical state stay the truth's."""
    truth_of, cycles = TRUTHS[family], 200 if GPU else 8
    generator = torch.Generator().manual_seed(5)
    key_heads, heads, key_dim, value_dim, window, tokens, ring = 1, 2, 24, 20, 6, 3, 11
    gate = (key_dim,) if family == "kda" else ()
    A_log, bias = torch.tensor([-1.0, 0.5]), torch.randn(heads, *gate, generator=generator)
    state = torch.zeros(4, heads, value_dim, key_dim, device=DEVICE)
    rings = [torch.full(shape, float("nan"), device=DEVICE) for shape in (
        (4, heads, ring, value_dim), (4, key_heads, ring, key_dim), (4, heads, ring, *gate))]
    start, committed = torch.zeros(2, 4, dtype=torch.int32, device=DEVICE).unbind()
    slots = torch.tensor([2, 0], device=DEVICE)
    truth, flushes, history, first = torch.zeros(heads, value_dim, key_dim, dtype=torch.float64), 0, 0, 0
    while flushes < cycles:
        q = int(torch.randint(0, tokens + 1, (), generator=generator))
        accepted = int(torch.randint(0, q + 1, (), generator=generator))
        route = window if torch.rand((), generator=generator) < 0.8 else 0
        inputs = [torch.randn(2, tokens, *shape, generator=generator) for shape in (
            (key_heads, key_dim), (key_heads, key_dim), (heads, value_dim), (heads, *gate), (heads,))]
        arguments = [state, *rings, start, committed, *(x.to(DEVICE) for x in inputs), A_log.to(DEVICE),
                     bias.to(DEVICE), slots, torch.tensor([q, q], device=DEVICE)]
        o = launch(f"{family}_replay", named(f"{family}_replay", arguments, dict(
            window=route, scale=0.4, l2norm=True)))[0]
        queries, keys, v, a, b = (x[0].double() for x in inputs)
        extra = (None,) if family == "kda" else ()
        queries, keys, g, beta = truth_of.prepared(
            queries, keys, a, b, A_log.double(), bias.double(), 0.4, True, *extra)
        draft = truth
        for t in range(q):
            u = truth_of.corrected(draft, keys[t], v[t], g[t], beta[t])
            draft = truth_of.decay_and_add(draft, u, keys[t], g[t])
            assert_close("o", o[0, t], truth_of.output(draft, queries[t]), 1e-5)
            truth = draft if t < accepted else truth
        assert not o[1].any() and not o[0, q:].any()
        if q and history + q > route:
            flushes += history > 0
            first, history = (first + history) % ring, accepted
        else:
            history += accepted
        start[2], committed[2] = first, history
    one = torch.tensor([[2]], device=DEVICE)
    launch(f"{family}_materialize", named(f"{family}_materialize", (
        state[None], *(r[None] for r in rings), one, one + 1, start[None, 2:3], committed[None, 2:3],
        torch.tensor([0], device=DEVICE), torch.tensor([0], device=DEVICE)), {}))
    assert_close("logical state", state[3], truth, 1e-5)


@families
@pytest.mark.skipif(not GPU, reason="the interpreter runs in one thread")
def test_forced_flush_is_deterministic(family):
    """Five launches of a step in which every row flushes give the same bytes: no program reads what another writes."""
    results = []
    for _ in range(5):
        arguments = make(family, "replay", torch.bfloat16, rows=64, tokens=4, key_dim=128, value_dim=128)
        out = launch(f"{family}_replay", flushing(arguments, 16))
        results.append([clone(x) for x in (*out, *(arguments[name] for name in ("state", *RINGS)))])
    for other in results[1:]:
        for one, two in zip(results[0], other):
            assert torch.equal(raw(one), raw(two))


@families
@pytest.mark.skipif(not GPU, reason="needs 6 GB")
def test_offsets_beyond_32_bits(family):
    """The last slots of a pool of more than 2^31 elements give the bytes that a small pool gives."""
    options = dict(rows=2, slots=4, tokens=2, heads=32, key_heads=16, key_dim=128, value_dim=128,
                   state_dtype=torch.bfloat16)
    small = flushing(make(family, "replay", torch.bfloat16, **options), 16)
    large, slots = dict(small), 4200
    small["slots"].copy_(torch.tensor([2, 3]))
    large["slots"] = small["slots"] + slots - 4
    for name in ("state", *RINGS, "ring_start", "ring_committed"):
        pool = small[name]
        large[name] = torch.empty(slots, *pool.shape[1:], dtype=pool.dtype, device=DEVICE)
        large[name][slots - 4 :] = pool
    assert large["state"].numel() > 2**31
    o = launch(f"{family}_replay", large)[0]
    assert torch.equal(o, launch(f"{family}_replay", small)[0])
    for name in ("state", *RINGS):
        assert torch.equal(raw(large[name][slots - 4 :]), raw(small[name])), name

    def snapshot(pools, source):
        one = torch.tensor([[source]], device=DEVICE)
        count, start = torch.full_like(one, 16), pools["ring_start"][source].reshape(1, 1)
        zero = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        pools = [pools[name][None] for name in ("state", *RINGS)]
        launch(f"{family}_materialize", named(f"{family}_materialize", (
            *pools, one, one - 1, start, count, zero, zero), {}))
        return pools[0][0, source - 1]

    assert torch.equal(raw(snapshot(large, slots - 1)), raw(snapshot(small, 3)))
    wide = torch.empty(slots, 32, 128, 128, dtype=torch.bfloat16, device=DEVICE)
    wide[slots - 4 :] = small["state"]
    inputs = [small[name] for name in ("q", "k", "v", "a", "b", "A_log", "dt_bias")]
    results = [launch(f"{family}_update", named(f"{family}_update", (pool, *inputs, where), dict(
        scale=0.1, l2norm=True)))[0] for pool, where in ((wide, large["slots"]), (small["state"], small["slots"]))]
    assert torch.equal(*results) and torch.equal(raw(wide[slots - 4 :]), raw(small["state"]))
