"""Triton kernels of the Mamba-2 family, on the GPU or in the interpreter."""

import pytest
import torch
import truth_mamba2
from harness import assert_close, call, check_sample, clone, named, poisoned_outputs, stacked
from triton_harness import DEVICE, DTYPES, GPU, on_device, triton_kernel

from torch_replay.ops import mamba2_replay, rounding
from torch_replay.ops.mamba2 import naive
from torch_replay.ops.mamba2.samples import materialize, replay, update
from torch_replay.ops.registry import OPS, override_kernel
from torch_replay.ops.samples import Sample, samples

pytestmark = on_device

OP_NAMES = ("mamba2_replay", "mamba2_update", "mamba2_materialize")
SAMPLES = [sample for op in OP_NAMES for sample in samples(op)]
EIGHT_BIT = [s for s in SAMPLES if "int8" in s.id or "fp8" in s.id]
BUILDERS = {"mamba2_replay": replay, "mamba2_update": update, "mamba2_materialize": materialize}

on_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")


def sample(op, name, **options):
    return Sample(op, name, lambda rng: BUILDERS[op](rng, **options))


# Where the kernels branch and the table does not go: rings of several blocks of rows, tiles that split the head.
MORE = [
    sample("mamba2_replay", "long_ring_token_1", rows=3, heads=2, window=40, ring_len=45),
    sample("mamba2_replay", "long_ring_token_2", rows=3, tokens=2, heads=2, window=80, ring_len=97),
    sample("mamba2_replay", "wide_head", rows=2, tokens=3, heads=2, dim=80, state_dim=96, groups=1, ragged=True),
    sample("mamba2_replay", "wide_head_token_1", rows=2, heads=2, dim=96, state_dim=80, groups=1),
    sample("mamba2_update", "wide_head", rows=2, heads=2, dim=80, state_dim=96, groups=1),
    sample("mamba2_materialize", "wide_head", layers=2, rows=4, heads=2, dim=80, state_dim=96, state_groups=1),
]


def run(sample, dtype=torch.float32, seed=0):
    skip = ("state", "state_scale") if sample in EIGHT_BIT else ()  # compared decoded, in a test of their own
    with triton_kernel(sample.op):
        check_sample(sample, getattr(truth_mamba2, sample.op), DEVICE, dtype, skip=skip, seed=seed)


def arguments_of(sample, dtype=torch.float32, seed=0):
    return named(sample.op, *sample.make(DEVICE, dtype, seed))


def launch(op, arguments):
    with triton_kernel(op):
        return call(op, arguments)


def in64(arguments):
    return {k: (v.double() if v.is_floating_point() else v).cpu() if isinstance(v, torch.Tensor) else v
            for k, v in arguments.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sample", SAMPLES + MORE, ids=str)
def test_against_truth(sample, dtype):
    """Outputs and every mutated tensor equal the truth; NaN in dead ring rows and fresh memory reaches nothing."""
    run(sample, dtype)


@pytest.mark.skipif(GPU, reason="all dtypes run above")
@pytest.mark.parametrize("name", ["spec_ragged_padded", "one_row_no_optionals", "ring_bf16"])
def test_fp16_operands(name):
    """16-bit activations keep their dtype in products where rings share it (bfloat16 is left to the GPU: the
    interpreter multiplies its bit patterns)."""
    run(next(s for s in SAMPLES if s.id == name), torch.float16)


@pytest.mark.parametrize("sample", EIGHT_BIT, ids=str)
def test_eight_bit_state(sample):
    """An 8-bit state decodes to the truth within its precision, and rows that do not flush keep their bytes."""
    arguments = arguments_of(sample)
    first = {name: stacked(clone(value)) for name, value in arguments.items()}
    before = first["state"]
    want = in64(dict(first, state=truth_mamba2.decoded(before, first["state_scale"]), state_scale=None))
    untouched = want["state"].clone()
    getattr(truth_mamba2, sample.op)(**want)
    launch(sample.op, arguments)
    same = (want["state"] == untouched).flatten(-3).all(-1)
    assert same.any() and not same.all()
    state, scale = (stacked(arguments[name]).cpu() for name in ("state", "state_scale"))
    now = state.view(torch.uint8)
    assert torch.equal(now[same], before.view(torch.uint8).cpu()[same])
    got = truth_mamba2.decoded(state, scale)
    assert_close("state", got[~same], want["state"][~same], 5e-2 if before.dtype == torch.float8_e4m3fn else 2e-2)


def forgets_the_ring(kernel):
    return lambda *args, **kwargs: kernel(*args[:5], torch.zeros_like(args[5]), *args[6:], **kwargs)


def keeps_old_state(kernel):
    return lambda state, *args, **kwargs: kernel(state.clone(), *args, **kwargs)


def folds_a_row_less(kernel):
    return lambda *args, **kwargs: kernel(*args[:8], (args[8] - 1).clamp(min=0), *args[9:], **kwargs)


@pytest.mark.parametrize("op, broken", [
    ("mamba2_replay", forgets_the_ring), ("mamba2_update", keeps_old_state), ("mamba2_materialize", folds_a_row_less)])
def test_negative_control(op, broken):
    """A kernel broken on purpose fails the suite."""
    small = samples(op)[1]
    with triton_kernel(op):
        kernel = OPS[op].kernel(DEVICE)
    with override_kernel(op, DEVICE, broken(kernel)), pytest.raises(AssertionError):
        check_sample(small, getattr(truth_mamba2, op), DEVICE)


@pytest.mark.parametrize("bias", [-100.0, 20.1, 1e4])
@pytest.mark.parametrize("tokens", [1, 4])
def test_softplus_range(bias, tokens):
    """dt far outside softplus's range neither overflows nor loses the tokens after it."""
    arguments = arguments_of(sample("mamba2_replay", "softplus", rows=2, tokens=tokens, heads=2, ring_len=20))
    arguments["dt_bias"] = torch.full_like(arguments["dt_bias"], bias)
    arguments["dt"][:, 1:] -= bias  # one huge step, then ordinary ones
    arguments["dt_ring"][:, :, 3] = 1e4  # and one among the rows, which may be live
    expected = truth_mamba2.mamba2_replay(**in64(arguments))
    assert_close("y", launch("mamba2_replay", arguments)[0], expected, 2e-5)


@pytest.mark.parametrize("committed, q, window, flushes", [
    (12, 4, 16, False), (13, 4, 16, True), (13, 1, 16, False), (16, 1, 16, True), (16, 0, 16, False),
    (5, 1, 0, True), (5, 0, 0, False), (0, 1, 0, False)])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.int8], ids=str)
def test_flush_rule(committed, q, window, flushes, state_dtype):
    """Flush iff committed + q > W, with rows to fold; otherwise the state's bytes are not written at all."""
    arguments = arguments_of(sample("mamba2_replay", "flush", rows=2, tokens=4, heads=1, groups=1, ragged=True,
                                    state_dtype=state_dtype))
    slot = int(arguments["slots"][0])
    for name in ("x_ring", "B_ring", "dt_ring"):
        arguments[name].nan_to_num_(0.1)
    arguments["ring_committed"][slot], arguments["query_lens"][0] = committed, q
    arguments["query_lens"][1] = 0
    arguments["window"] = window
    before = arguments["state"].clone().view(torch.uint8)
    launch("mamba2_replay", arguments)
    changed = (arguments["state"].view(torch.uint8) != before).flatten(1).any(1).tolist()
    assert changed == [flushes and index == slot for index in range(len(changed))]


@pytest.mark.parametrize("tokens", [1, 3])
def test_many_cycles_follow_the_truth(tokens):
    """200 flushes on a GPU, 8 elsewhere, with varying q and acceptance: every output equals the truth."""
    generator = torch.Generator().manual_seed(5)
    heads, dim, n, window, ring = 2, 8, 4, 6, 11
    A = -torch.tensor([0.3, 1.1])
    state = torch.zeros(2, heads, dim, n, device=DEVICE)
    rings = [torch.full(shape, float("nan"), device=DEVICE)
             for shape in ((2, heads, ring, dim), (2, 1, ring, n), (2, heads, ring))]
    start, committed = torch.zeros(2, 2, dtype=torch.int32, device=DEVICE)
    truth = torch.zeros(heads, dim, n, dtype=torch.float64)
    slots = torch.tensor([1], device=DEVICE)
    flushes = 0
    while flushes < (200 if GPU else 8):
        q = int(torch.randint(0, tokens + 1, (), generator=generator))
        accepted = int(torch.randint(0, q + 1, (), generator=generator))
        x = torch.randn(1, tokens, heads, dim, generator=generator)
        dt = torch.randn(1, tokens, heads, generator=generator)
        B, C = torch.randn(2, 1, tokens, 1, n, generator=generator)
        new = [value.to(DEVICE) for value in (x, dt, A, B, C)]
        with triton_kernel("mamba2_replay"), poisoned_outputs():
            y = mamba2_replay(state, *rings, start, committed, *new, None, None, None, slots,
                              torch.tensor([q], device=DEVICE), window=window).cpu()
        step = truth_mamba2.softplus(dt.double())
        draft = truth
        for t in range(q):
            draft = truth_mamba2.advance(draft, x[0, t].double(), B[0, t].double(), step[0, t], A.double())
            assert_close("y", y[0, t], truth_mamba2.output(draft, x[0, t].double(), C[0, t].double(), None, None), 1e-5)
            truth = draft if t < accepted else truth
        if q and committed[1] + q > window:
            flushes += 1
            start[1], committed[1] = (start[1] + committed[1]) % ring, accepted
        else:
            committed[1] += accepted


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_flush_rounds_to_nearest(dtype):
    """philox_rounds = 0 stores exactly the float32 result rounded to nearest, ties to even."""
    case = sample("mamba2_replay", "nearest", rows=3, heads=2, state_dtype=dtype, route_window=0)
    arguments = arguments_of(case)
    exact = dict(arguments_of(case), state=arguments["state"].float())
    launch("mamba2_replay", arguments)
    launch("mamba2_replay", exact)
    written = (exact["state"] != exact["state"].to(dtype).float()).any()
    assert written
    assert torch.equal(arguments["state"][1:], rounding.round_nearest(exact["state"], dtype)[1:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8, torch.float8_e4m3fn], ids=str)
def test_stochastic_rounding(dtype):
    """Draws are those of the reference: two seeds differ, and nearly every value is the reference's, bit for bit."""
    case = sample("mamba2_materialize", "stochastic", layers=2, rows=2, heads=2, state_dtype=dtype, rounds=10)
    results = []
    for seed in (77, 78):
        arguments = dict(arguments_of(case), seed=torch.tensor([seed], device=DEVICE))
        launch("mamba2_materialize", arguments)
        results.append(arguments["state"].view(rounding.bits(dtype)))
    want = arguments_of(case)
    naive.mamba2_materialize(**want)
    changed = results[0] != arguments_of(case)["state"].view(rounding.bits(dtype))
    assert changed.any() and (results[0] != results[1])[changed].float().mean() > 0.2
    # sums in another order move a value across its draw now and then
    assert (results[0] != want["state"].view(rounding.bits(dtype)))[changed].float().mean() < 0.01


@on_gpu
@pytest.mark.parametrize("sample", [s for s in SAMPLES if s.id in (
    "typical", "spec_ragged_padded", "small_batch_route", "state_int8", "state_fp8_stochastic",
    "state_fp16_stochastic", "spec_kept_ragged_padded")], ids=str)
def test_five_launches_give_five_times_the_same_bytes(sample):
    """Identical launches leave identical bytes in every tensor, forced flush included."""
    seen = set()
    for _ in range(5):
        arguments = arguments_of(sample, torch.bfloat16)
        out = launch(sample.op, arguments)
        tensors = [*out, *(v for v in arguments.values() if isinstance(v, torch.Tensor))]
        seen.add(b"".join(t.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes() for t in tensors))
    assert len(seen) == 1


@pytest.mark.parametrize("tokens", [1, 4])
def test_pool_beyond_2_31_elements(tokens):
    """Slots whose offsets pass 2^31 elements (a few slots without a GPU) work like the same slots of a small pool."""
    heads, dim, n, rows = (128, 64, 128, 2) if GPU else (2, 16, 32, 2)
    slots = 2**31 // (heads * dim * n) + 8 if GPU else 12
    case = sample("mamba2_replay", "far", rows=rows, tokens=tokens, heads=heads, dim=dim, state_dim=n, slots=5,
                  route_window=0)
    near, far = arguments_of(case), arguments_of(case)
    far["slots"] = near["slots"] + slots - 5
    for name in ("state", "x_ring", "B_ring", "dt_ring", "ring_start", "ring_committed"):
        far[name] = torch.empty(slots, *near[name].shape[1:], dtype=near[name].dtype, device=DEVICE)
        far[name][-4:] = near[name][-4:]

    def same(op, of):
        out, want = (launch(op, of(side)) for side in (far, near))
        assert all(torch.equal(*pair) for pair in zip(out, want))
        for name in ("state", "x_ring", "B_ring", "dt_ring"):
            assert torch.equal(far[name][-4:].nan_to_num(7.0), near[name][-4:].nan_to_num(7.0)), f"{op}: {name}"

    def plan(side):
        at, last = (lambda *values: torch.tensor([values], device=DEVICE)), len(side["state"]) - 1
        pools = {name: side[name][None] for name in ("state", "x_ring", "B_ring", "dt_ring", "A")}
        return dict(pools, src_slots=at(last, last - 1), dst_slots=at(last - 2, last - 3), ring_start=at(3, 0),
                    count=at(5, 0), layer_group=at(0)[0], active_rows=at(0, 1)[0])

    same("mamba2_replay", lambda side: side)
    same("mamba2_update", lambda side: {name: side[name] for name in (
        "state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias", "slots")})
    for side in (near, far):
        for name in ("x_ring", "B_ring", "dt_ring"):
            side[name][-4:] = side[name][-4:].nan_to_num(0.1)
    same("mamba2_materialize", plan)
