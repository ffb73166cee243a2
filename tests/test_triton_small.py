"""Triton kernels of the ring, convolution and token families, on the GPU or in the interpreter."""

import importlib

import pytest
import torch
import truth_conv
import truth_ring
import truth_tokens
from harness import RATIO, assert_close, call, check_sample, clone, named, raw, stacked
from triton_harness import DEVICE, DTYPES, GPU, on_device, triton_kernel

from torch_replay.ops.conv import naive as conv_naive
from torch_replay.ops.conv import samples as conv_samples
from torch_replay.ops.registry import OPS, override_kernel
from torch_replay.ops.ring import samples as ring_samples
from torch_replay.ops.samples import Sample
from torch_replay.ops.tokens import samples as token_samples

pytestmark = on_device

TRUTHS = {"gather_block_tables": truth_ring, "ring_reset": truth_ring, "ring_commit": truth_ring,
          "ring_advance": truth_ring,
          "compact_active": truth_ring, "conv_replay": truth_conv, "prepare_positions": truth_tokens,
          "compute_slot_mappings": truth_tokens, "pad_replayed_slots": truth_tokens, "gather_replay_rows": truth_tokens,
          "write_kv": truth_tokens}
POOL_OPS = ("copy_slots", "zero_slots")  # compared as bytes
SAMPLES = [s for s in ring_samples.SAMPLES + conv_samples.SAMPLES + token_samples.SAMPLES if s.op not in POOL_OPS]
POOLS = [s for s in conv_samples.SAMPLES if s.op in POOL_OPS]


def truth(op):
    return getattr(TRUTHS[op], op)


def check(sample, dtype=torch.float32, seed=0):
    """One sample through the op's Triton kernel."""
    with triton_kernel(sample.op):
        if sample.op in POOL_OPS:
            check_bytes(sample, dtype, seed)
        else:
            check_sample(sample, truth(sample.op), DEVICE, dtype, seed=seed)


def check_bytes(sample, dtype=torch.float32, seed=0):
    """Pools compare as bytes: copies and zeros are exact in every dtype, NaN included."""
    arguments = named(sample.op, *sample.make(DEVICE, dtype, seed))
    want = {name: stacked(clone(value)).cpu() for name, value in arguments.items()}
    call(sample.op, arguments)
    getattr(truth_conv, sample.op)(**dict(want, pool=conv_naive.as_integers(want["pool"])))
    for name, value in arguments.items():
        assert torch.equal(raw(stacked(value).cpu()), raw(want[name])), f"{sample}: {name}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sample", SAMPLES + POOLS, ids=str)
def test_against_truth(sample, dtype):
    """Outputs and every mutated element equal the truth, nothing else is written."""
    for seed in range(3):
        check(sample, dtype, seed)


def one(rng, low, high):
    return int(rng.integers(low, high, 1))


def pick(rng, *values):
    return values[one(rng, 0, len(values))]


def random_commit(rng):
    rows, tokens = one(rng, 2, 40), one(rng, 1, 17)
    window = pick(rng, 0, *[tokens + one(rng, 0, 8)] * 4)
    return ring_samples.commit(
        rng, groups=one(rng, 1, 4), rows=rows, reqs=rows + one(rng, 1, 4), columns=one(rng, 1, 24), tokens=tokens,
        window=window, ring_len=max(window, tokens) + tokens + one(rng, 0, 6), block_size=one(rng, 1, 21),
        empty=one(rng, 0, rows), padded=one(rng, 0, 2), mapped=one(rng, 0, 5) > 0, uniform=pick(rng, False, True),
        post_step=pick(rng, False, True), materialize=one(rng, 0, 5) > 0, prefilling=pick(rng, 0.0, 0.3, 1.0),
        null=pick(rng, 0.0, 0.2), live=one(rng, 0, 4) > 0, dtype=pick(rng, torch.int32, torch.int64))


def random_gather(rng):
    rows, reqs = one(rng, 1, 70), one(rng, 2, 90)
    return ring_samples.gather(rng, groups=one(rng, 1, 4), rows=rows, reqs=reqs, columns=one(rng, 1, 20),
                               num_reqs=one(rng, 0, min(rows, reqs) + 1), empty=one(rng, 0, rows))


def random_reset(rng):
    rows = one(rng, 1, 40)
    return ring_samples.reset(rng, groups=one(rng, 1, 4), rows=rows, reqs=rows + one(rng, 1, 5),
                              columns=one(rng, 2, 7), empty=one(rng, 0, rows), mapped=one(rng, 0, 4) > 0)


def random_compact(rng):
    rows = one(rng, 1, 90)
    return ring_samples.compact(rng, groups=one(rng, 1, 4), rows=rows, num_reqs=one(rng, 0, rows + 1),
                                share=float(rng.uniform(0, 1, 1)))


def random_conv(rng):
    rows, tokens, width = one(rng, 1, 6), one(rng, 1, 40), one(rng, 1, 6)
    return conv_samples.conv(
        rng, rows=rows, tokens=tokens, dim=one(rng, 1, 150), width=width,
        ring_len=width - 1 + tokens + one(rng, 0, 5), padded=one(rng, 0, rows), ragged=pick(rng, False, True),
        strided=pick(rng, False, True), bias=pick(rng, False, True), silu=pick(rng, False, True), far=one(rng, 1, 90))


def random_copy(rng):
    rows = pick(rng, one(rng, 1, 8), one(rng, 8, 90))
    return conv_samples.slots(
        rng, layers=one(rng, 1, 5), groups=one(rng, 1, 4), rows=rows,
        shape=[one(rng, 1, 6) for _ in range(one(rng, 0, 4))],
        dtype=pick(rng, torch.float32, torch.float16, torch.float8_e4m3fn, torch.bool), listed=one(rng, 0, rows + 1))


def random_positions(rng):
    rows = one(rng, 1, 40)
    return token_samples.positions_of(rng, rows=rows, tokens=one(rng, 1, 20), uniform=pick(rng, False, True),
                                      tail=one(rng, 0, 9), padded=one(rng, 0, rows), empty=(one(rng, 0, rows),))


def random_zero(rng):
    return conv_samples.zeroed(
        rng, layers=one(rng, 1, 4), groups=one(rng, 1, 3), rows=one(rng, 1, 20),
        shape=tuple(one(rng, 1, 9) for _ in range(one(rng, 0, 5))), strided=pick(rng, False, True),
        dtype=pick(rng, torch.float32, torch.float16, torch.int8))


def random_mappings(rng):
    rows = one(rng, 1, 40)
    return token_samples.mappings(
        rng, rows=rows, tokens=one(rng, 1, 20), sizes=[one(rng, 1, 40) for _ in range(one(rng, 1, 4))],
        uniform=pick(rng, False, True), tail=one(rng, 0, 9), padded=one(rng, 0, rows))


RANDOM = {"ring_commit": (random_commit, 200), "gather_block_tables": (random_gather, 40),
          "ring_reset": (random_reset, 40), "compact_active": (random_compact, 40), "conv_replay": (random_conv, 25),
          "copy_slots": (random_copy, 60), "zero_slots": (random_zero, 40), "prepare_positions": (random_positions, 40),
          "compute_slot_mappings": (random_mappings, 40)}
SHARE = 1.0 if GPU else 0.4  # of these cases: the interpreter runs the programs of a launch one after the other


@pytest.mark.parametrize("op", RANDOM)
def test_random_cases(op):
    """Drawn sizes, larger than one block of a kernel in some dimension now and then."""
    build, cases = RANDOM[op]
    for case in range(int(cases * SHARE)):
        check(Sample(op, f"random{case}", build))


def tensor(values, dtype=torch.int32):
    return torch.as_tensor(values, dtype=dtype).to(DEVICE)


@pytest.mark.parametrize("rows", [5, 33, 1024, 1500])
def test_reset_reads_before_it_writes(rows):
    """One cycle through all rows of the batch, in both cursors."""
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(rows)) + 1
    start, committed = (tensor(torch.arange(rows + 1) * step)[None].clone() for step in (3, 5))
    tables = tensor(torch.stack([order, order.roll(-1)], 1))[None]
    columns = tensor([0] * rows), tensor([1] * rows)
    with triton_kernel("ring_reset"):
        call("ring_reset", dict(ring_start=start, ring_committed=committed, block_tables=tables, src_cols=columns[0],
                                dst_cols=columns[1], idx_mapping=None))
    for got, step in ((start, 3), (committed, 5)):
        assert torch.equal(got[0, order.roll(-1).to(DEVICE)], tensor(order * step)) and got[0, 0] == 0


@pytest.mark.parametrize("rows, listed", [(5, 5), (64, 64), (65, 65), (300, 6), (300, 300), (1030, 1030)])
@pytest.mark.parametrize("width", [1, 3, 1100])
def test_copy_reads_before_it_writes(rows, listed, width):
    """One cycle through all listed rows, with few and many rows, short and long slots."""
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(rows))[:listed] + 1
    if width * rows > 100_000:
        width = 40
    pool = torch.arange(2 * (rows + 1) * width, dtype=torch.int32, device=DEVICE).view(2, rows + 1, width)
    want = pool.clone()
    want[:, order.roll(-1).to(DEVICE)] = pool[:, order.to(DEVICE)]
    src, dst = torch.zeros(2, 1, rows, dtype=torch.int32)
    src[0, :listed], dst[0, :listed] = order, order.roll(-1)
    active = torch.cat([torch.randperm(listed), torch.full((rows - listed,), -1)])
    with triton_kernel("copy_slots"):
        call("copy_slots", dict(pool=pool, src_slots=tensor(src), dst_slots=tensor(dst), layer_group=tensor([0, 0]),
                                active_rows=tensor(active)))
    assert torch.equal(pool, want)


def narrow(shape, dtype, keep):
    """A view into a larger pool that leaves out the last elements of some dimensions."""
    whole = torch.randint(0, 100, shape).to(dtype)
    return whole, whole[tuple(slice(None, size) for size in keep)]


LAYOUTS = {
    "merges_to_one": lambda: narrow((2, 4, 3, 4, 8), torch.bfloat16, (2, 4)),
    "two_dims": lambda: narrow((2, 4, 6, 8), torch.bfloat16, (2, 4, 6, 6)),
    "odd": lambda: narrow((2, 4, 5, 7), torch.int8, (2, 4, 5, 5)),
    "three_dims": lambda: narrow((2, 4, 3, 4, 8), torch.float16, (2, 4, 3, 3, 4)),
    "six_dims": lambda: narrow((2, 4, 3, 3, 4, 3, 4), torch.float32, (2, 4, 2, 2, 3, 2, 3)),
    "permuted": lambda: (lambda whole: (whole, whole.permute(3, 2, 1, 0)))(torch.randn(6, 5, 4, 2)),
    "slots_innermost": lambda: (lambda whole: (whole, whole.movedim(-1, 1)))(torch.randn(2, 6, 5)),
    "shifted_by_one": lambda: (lambda whole: (whole, whole[1:].view(2, 4, 6)))(torch.randn(49)),
    "one_byte_off": lambda: (lambda whole: (whole, whole[1:].view(2, 4, 6)))(torch.randint(0, 99, (49,)).byte()),
    "expanded_bool": lambda: narrow((2, 4, 1), torch.bool, (2, 4)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_copy_layouts(layout):
    """Any strides: exactly the destination's elements change, in views of larger pools as well."""
    torch.manual_seed(1)
    whole, pool = LAYOUTS[layout]()
    offset, shape, strides = pool.storage_offset(), pool.shape, pool.stride()
    want = whole.clone()
    view = want.as_strided(shape, strides, offset)
    view[:, 3], view[:, 2] = pool[:, 2], pool[:, 3]
    whole = whole.to(DEVICE)
    with triton_kernel("copy_slots"):
        call("copy_slots", dict(pool=whole.as_strided(shape, strides, offset), src_slots=tensor([[2, 3]]),
                                dst_slots=tensor([[3, 2]]), layer_group=tensor([0, 0]), active_rows=tensor([1, 0])))
    assert torch.equal(whole.cpu(), want)


def test_strides():
    """Index vectors, tables, plans and pools with gaps give the bits of dense ones."""
    cases = [Sample("ring_commit", "x", random_commit), Sample("conv_replay", "x", random_conv),
             Sample("ring_reset", "x", random_reset), Sample("gather_block_tables", "x", random_gather),
             Sample("compact_active", "x", random_compact), Sample("prepare_positions", "x", random_positions),
             Sample("compute_slot_mappings", "x", random_mappings)]
    for sample in cases + token_samples.SAMPLES[-9:-6]:
        for seed in range(3):
            arguments = named(sample.op, *sample.make(DEVICE, seed=seed))
            gaps = {name: torch.stack([value] * 3, -1)[..., 1] if isinstance(value, torch.Tensor) and value.dim()
                    else value for name, value in arguments.items()}
            with triton_kernel(sample.op):
                dense, strided = call(sample.op, arguments), call(sample.op, gaps)
            for got, want in zip(strided, dense):
                assert torch.equal(raw(got), raw(want))
            for name in OPS[sample.op].mutates:
                assert torch.equal(raw(gaps[name]), raw(arguments[name])), (sample.op, name)


def test_conv_keeps_bits():
    """The ring holds the inputs bit for bit, and outputs in bfloat16 stay within its tolerance."""
    for sample in [s for s in conv_samples.SAMPLES if s.op == "conv_replay"][:4]:
        arguments = named("conv_replay", *sample.make(DEVICE, torch.bfloat16))
        want = {name: clone(value).cpu() if isinstance(value, torch.Tensor) else value
                for name, value in arguments.items()}
        with triton_kernel("conv_replay"):
            (y,) = call("conv_replay", arguments)
        expected = truth_conv.conv_replay(**want)
        assert torch.equal(raw(arguments["conv_ring"].cpu()), raw(want["conv_ring"]))
        assert_close("y", y, expected, RATIO[torch.bfloat16])


def kernels_of(op):
    return importlib.import_module(f"torch_replay.ops.{OPS[op].body.__module__.split('.')[-2]}.kernels")


@pytest.mark.parametrize("op", [*TRUTHS, *POOL_OPS])
def test_one_launch(op, monkeypatch):
    """Every op is one kernel launch, whatever the groups and rows (ring_commit and compact_active may take two)."""
    runs = []
    jitted = type(next(value for name, value in vars(kernels_of(op)).items() if name.endswith("_kernel")))
    launch = jitted.run
    monkeypatch.setattr(jitted, "run", lambda self, *args, **kwargs: (runs.append(1), launch(self, *args, **kwargs)))
    samples = [s for s in SAMPLES + POOLS if s.op == op and not s.id.startswith(("no_tokens", "no_cacheable"))]
    for sample in samples:
        check(sample)
    assert len(runs) == len(samples)


@pytest.mark.skipif(not GPU, reason="nothing is compiled in the interpreter")
def test_one_binary():
    """Row counts, alignments and strides that change from step to step compile nothing new."""
    ops = {"ring_commit": (random_commit, "_commit_rows_kernel"), "ring_reset": (random_reset, "_reset_cursors_kernel"),
           "gather_block_tables": (random_gather, "_gather_tables_kernel"),
           "compact_active": (random_compact, "_compact_rows_kernel")}
    for op, (build, kernel) in ops.items():
        cache = getattr(kernels_of(op), kernel).device_caches[torch.cuda.current_device()][0]
        before, kinds = len(cache), set()
        for case in range(40):
            arguments = named(op, *Sample(op, f"random{case}", build).make(DEVICE))
            if op == "ring_commit":
                arguments.update(materialize=True, post_step=False)
            kinds.add(tuple(getattr(value, "dtype", value is None) for value in arguments.values()))
            with triton_kernel(op):
                call(op, arguments)
        assert len(cache) - before <= len(kinds)


def row_by_row(op):
    """An op that treats one row after the other: chains and swaps break."""
    def kernel(*args):
        run = getattr(kernels_of(op), op)
        if op == "copy_slots":
            for row in conv_naive.listed_rows(args[-1]):
                run(*args[:-1], row[None])
        else:
            start, committed, tables, src, dst = args[:5]
            for row in range(tables.shape[1]):
                run(start, committed, tables[:, row : row + 1], src[row:], dst[row:], None)
    return kernel


def changed(op, **change):
    """The kernel of an op with some of its arguments replaced: {name: function of the arguments by name}."""
    def kernel(*args, out=None, **kwargs):
        arguments = named(op, args, kwargs)
        for name, value in change.items():
            arguments[name] = value(arguments)
        extra = {} if out is None else {"out": out}
        getattr(kernels_of(op), op)(**arguments, **extra)
    return kernel


@pytest.mark.parametrize("op, kernel", [
    ("copy_slots", row_by_row("copy_slots")),
    ("zero_slots", changed("zero_slots", slots=lambda a: a["slots"].clamp(max=1))),
    ("zero_slots", changed("zero_slots", layer_group=lambda a: a["layer_group"] * 0)),
    ("ring_reset", row_by_row("ring_reset")),
    ("ring_commit", changed("ring_commit", window=lambda a: a["window"] + 1)),
    ("ring_commit", changed("ring_commit", block_size=lambda a: a["block_size"] + 1)),
    ("conv_replay", changed("conv_replay", query_lens=lambda a: None)),
    ("conv_replay", changed("conv_replay", positions=lambda a: a["positions"] + 100 * a["conv_ring"].shape[2])),
    ("write_kv", changed("write_kv", v=lambda a: a["k"])),
    ("prepare_positions", changed("prepare_positions", query_lens=lambda a: None)),
])
def test_negative_control(op, kernel):
    """A kernel broken on purpose fails the suite."""
    tested = [s for s in SAMPLES + POOLS if s.op == op]
    if op == "ring_reset":
        tested = [s for s in tested if s.id == "chain"]
    with override_kernel(op, DEVICE, kernel), pytest.raises(AssertionError):
        for sample in tested:
            if op in POOL_OPS:
                check_bytes(sample)
            else:
                check_sample(sample, truth(op), DEVICE)
