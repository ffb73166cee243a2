"""Short convolution and slot copies against the plain loops."""

import pytest
import torch
import truth_conv
from harness import assert_close, assert_refused, call, check_sample, named, raw, stacked

from torch_replay.ops.conv import naive
from torch_replay.ops.conv import samples as draw
from torch_replay.ops.conv.op import conv_replay, copy_slots
from torch_replay.ops.registry import OPS, override_kernel
from torch_replay.ops.samples import Sample

CONV = [sample for sample in draw.SAMPLES if sample.op == "conv_replay"]
COPY = [sample for sample in draw.SAMPLES if sample.op == "copy_slots"]
ZERO = [sample for sample in draw.SAMPLES if sample.op == "zero_slots"]


def i32(values):
    return torch.tensor(values, dtype=torch.int32)


def check_bytes(sample):
    """Pools compare as bytes: copies and zeros are exact in every dtype, NaN included."""
    arguments, want = (named(sample.op, *sample.make()) for _ in range(2))
    call(sample.op, arguments)
    want["pool"] = stacked(want["pool"])
    getattr(truth_conv, sample.op)(**dict(want, pool=naive.as_integers(want["pool"])))
    for name, value in arguments.items():
        assert torch.equal(raw(value), raw(want[name])), f"{sample}: {name}"


@pytest.mark.parametrize("sample", CONV, ids=str)
def test_conv_against_truth(sample):
    """Outputs and ring equal the truth; NaN in columns before position 0 and in the null slot reaches nothing."""
    for seed in range(3):
        check_sample(sample, truth_conv.conv_replay, seed=seed)


@pytest.mark.parametrize("sample", CONV[:4], ids=str)
def test_conv_bf16(sample):
    """bfloat16 inputs and ring stay within 1e-2 of the truth, and the ring holds the inputs bit for bit."""
    check_sample(sample, truth_conv.conv_replay, dtype=torch.bfloat16)
    arguments = named("conv_replay", *sample.make(dtype=torch.bfloat16))
    want = arguments["conv_ring"].clone()
    call("conv_replay", arguments)
    truth_conv.conv_replay(**dict(arguments, conv_ring=want, x=arguments["x"].clone()))
    assert torch.equal(raw(arguments["conv_ring"]), raw(want))


@pytest.mark.parametrize("sample", COPY + ZERO, ids=str)
def test_slots_against_truth(sample):
    """Every byte of the pool equals the truth, nothing else is written."""
    for seed in range(3):
        check_bytes(Sample(sample.op, f"{sample.id}{seed}", sample.build))


def random_conv(rng):
    one = lambda low, high: int(rng.integers(low, high, 1))  # noqa: E731
    rows, tokens, width = one(1, 6), one(1, 9), one(1, 6)
    return draw.conv(rng, rows=rows, tokens=tokens, dim=one(1, 9), width=width,
                     ring_len=width - 1 + tokens + one(0, 5), padded=one(0, rows), ragged=bool(one(0, 2)),
                     strided=bool(one(0, 2)), bias=bool(one(0, 2)), silu=bool(one(0, 2)), far=one(1, 40))


def random_copy(rng):
    one = lambda low, high: int(rng.integers(low, high, 1))  # noqa: E731
    rows = one(1, 8)
    return draw.slots(rng, layers=one(1, 5), groups=one(1, 4), rows=rows, shape=(3,) * one(0, 4),
                      dtype=(torch.float32, torch.float16, torch.float8_e4m3fn, torch.bool)[one(0, 4)],
                      listed=one(0, rows + 1))


def random_zero(rng):
    one = lambda low, high: int(rng.integers(low, high, 1))  # noqa: E731
    return draw.zeroed(rng, layers=one(1, 5), groups=one(1, 4), rows=one(1, 8), shape=(3,) * one(0, 4),
                       dtype=(torch.float32, torch.float16, torch.float8_e4m3fn, torch.int8)[one(0, 4)])


def test_random_cases():
    """200 drawn calls of each op, ring lengths, widths and lengths drawn independently."""
    for case in range(200):
        check_sample(Sample("conv_replay", f"random{case}", random_conv), truth_conv.conv_replay)
        check_bytes(Sample("copy_slots", f"random{case}", random_copy))
        check_bytes(Sample("zero_slots", f"random{case}", random_zero))


@pytest.mark.parametrize("ring_dtype", [torch.float32, torch.bfloat16])
def test_many_steps_with_rejected_drafts(ring_dtype):
    """150 steps of ragged drafts: rejecting needs nothing, every output equals a convolution of the whole sequence."""
    generator = torch.Generator().manual_seed(3)
    rows, tokens, dim, width = 3, 4, 5, 4
    ring = torch.full((rows + 1, dim, width - 1 + tokens), float("nan"), dtype=ring_dtype)
    weight, bias = torch.randn(dim, width, generator=generator), torch.randn(dim, generator=generator)
    kept = [torch.zeros(width - 1, dim, dtype=torch.float64) for _ in range(rows)]
    slots = i32([2, 3, 1])
    for _ in range(150):
        x = torch.randn(rows, tokens, dim, generator=generator)
        q = torch.randint(0, tokens + 1, (rows,), generator=generator)
        positions = torch.tensor([len(inputs) - (width - 1) for inputs in kept])
        y = conv_replay(ring, x, weight, bias, positions, slots, q, silu=False)
        for row in range(rows):
            history = torch.cat([kept[row], x[row].to(ring_dtype).double()])
            for t in range(int(q[row])):
                at = len(kept[row]) + t
                want = bias.double() + (weight.double().T * history[at - width + 1 : at + 1]).sum(0)
                assert_close("y", y[row, t].double(), want, 1e-5)
            assert (y[row, int(q[row]) :] == 0).all()
            accepted = int(torch.randint(0, int(q[row]) + 1, (), generator=generator))
            kept[row] = history[: len(kept[row]) + accepted]
    assert ring[0].isnan().all()


def test_inputs_are_rounded_before_use():
    """What goes through a bfloat16 ring is used rounded at once: rounding it before changes no bit."""
    arguments, rounded = (named("conv_replay", *CONV[-1].make()) for _ in range(2))
    rounded["x"] = rounded["x"].bfloat16().float()
    assert not torch.equal(arguments["x"], rounded["x"])
    assert torch.equal(call("conv_replay", arguments)[0], call("conv_replay", rounded)[0])
    assert torch.equal(raw(arguments["conv_ring"]), raw(rounded["conv_ring"]))


def test_shortest_ring_keeps_the_history_of_an_edge():
    """Rc = width - 1 + T: an edge at the first accepted token still has its width - 1 inputs after T were written."""
    width, tokens = 4, 4
    ring = torch.full((2, 1, width - 1 + tokens), float("nan"))
    for first in range(0, 40, tokens):
        x = torch.arange(first, first + tokens).float().view(1, tokens, 1)
        conv_replay(ring, x, torch.ones(1, width), None, i32([first]), i32([1]), silu=False)
        for position in range(max(0, first + 1 - (width - 1)), first + tokens):
            assert ring[1, 0, position % ring.shape[2]] == position


def test_strided_inputs_are_read_in_place():
    """Column slices of a wide projection, a transposed x and expanded positions give the bits of contiguous ones."""
    arguments = named("conv_replay", *CONV[0].make())
    want = call("conv_replay", dict(arguments, conv_ring=arguments["conv_ring"].clone()))[0]
    x = arguments["x"].transpose(0, 2).contiguous().transpose(0, 2)
    weight = torch.stack([arguments["weight"]] * 2, -1)[..., 0]
    assert torch.equal(call("conv_replay", dict(arguments, x=x, weight=weight))[0], want)


def test_copy_chain_and_swap():
    """1 -> 2, 2 -> 3 and a swap 4 <-> 5 in one call: each destination gets what its source held before."""
    pool = torch.arange(7).float().view(1, 7, 1).clone()
    pool[0, 0] = float("nan")
    copy_slots(pool, i32([[1, 2, 4, 5, 0, 6]]), i32([[2, 3, 5, 4, 6, 0]]), i32([0]), i32([5, 4, 3, 2, 1, 0]))
    assert pool[0, 1:, 0].tolist() == [1, 1, 2, 5, 4, 6] and pool[0, 0].isnan()


def test_copy_into_itself_and_snapshots_do_not_alias():
    """src == dst is no change; a published copy keeps its bytes when the live slot moves on."""
    pool = torch.randn(2, 4, 3)
    before = pool.clone()
    copy_slots(pool, i32([[1, 2]]), i32([[1, 3]]), i32([0, 0]), i32([0, 1]))
    pool[:, 2] = 0
    assert torch.equal(pool[:, 1], before[:, 1]) and torch.equal(pool[:, 3], before[:, 2])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16, torch.float32,
                                   torch.float64, torch.int8, torch.uint8, torch.bool, torch.int64])
def test_copy_keeps_every_bit(dtype):
    """All bytes, NaN payloads among them, in a pool whose last dimension is not dense."""
    width = torch.empty((), dtype=dtype).element_size()
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (2, 3, 5, 2 * width), dtype=torch.uint8)
    pool = bits.view(dtype).transpose(2, 3)
    assert not pool.is_contiguous()
    copy_slots(pool, i32([[1]]), i32([[2]]), i32([0, 0]), i32([0]))
    assert torch.equal(bits[:, 2], bits[:, 1])


def broken_conv_reads_before_position_0(conv_ring, x, weight, bias, positions, slots, query_lens=None, *, silu, out):
    shifted = positions + 100 * conv_ring.shape[2]
    naive.conv_replay(conv_ring, x, weight, bias, shifted, slots, query_lens, silu=silu, out=out)


def broken_conv_ignores_lengths(conv_ring, x, weight, bias, positions, slots, query_lens=None, *, silu, out):
    naive.conv_replay(conv_ring, x, weight, bias, positions, slots, None, silu=silu, out=out)


def broken_copy_row_after_row(pool, src_slots, dst_slots, layer_group, active_rows):
    for row in naive.listed_rows(active_rows):
        naive.copy_slots(pool, src_slots, dst_slots, layer_group, torch.stack([row]))


def broken_zero_null_slot(pool, slots, layer_group):
    naive.as_integers(pool)[torch.arange(pool.shape[0])[:, None], slots[layer_group.long()].long()] = 0


def broken_zero_first_group(pool, slots, layer_group):
    naive.zero_slots(pool, slots, torch.zeros_like(layer_group))


@pytest.mark.parametrize("op, kernel", [
    ("conv_replay", broken_conv_reads_before_position_0),
    ("conv_replay", broken_conv_ignores_lengths),
    ("copy_slots", broken_copy_row_after_row),
    ("zero_slots", broken_zero_null_slot),
    ("zero_slots", broken_zero_first_group),
])
def test_negative_control(op, kernel):
    """An op broken on purpose fails the suite."""
    with override_kernel(op, "cpu", kernel), pytest.raises(AssertionError):
        for sample in CONV if op == "conv_replay" else [s for s in COPY + ZERO if s.op == op]:
            (test_conv_against_truth if op == "conv_replay" else test_slots_against_truth)(sample)


BAD = [
    ("conv_replay", dict(conv_ring=torch.zeros(7, 12, 6)), "conv_ring is of 6 columns, expected at least .* = 7"),
    ("conv_replay", dict(slots=i32([1, 2, 3, 4, 7])), "slots is 7"),
    ("conv_replay", dict(slots=i32([1, 2, 2, 4, 0])), "every non-null slot at most once"),
    ("conv_replay", dict(positions=i32([1, 2, -3, 4, 5])), "positions is -3"),
    ("conv_replay", dict(query_lens=i32([5, 0, 0, 0, 0])), "query_lens is 5"),
    ("conv_replay", dict(bias=torch.zeros(11)), r"bias is of shape \(11,\), expected \[D\] with D = 12"),
    ("conv_replay", dict(weight=torch.zeros(12, 0)), "weight is of width 0, expected 1 or more"),
    ("conv_replay", dict(x=torch.zeros(5, 4, 12, dtype=torch.float64)), "x is of dtype torch.float64"),
    ("conv_replay", dict(x=torch.zeros(5, 0, 12)), "x is of 0 tokens a row"),
    ("copy_slots", dict(pool=torch.zeros(3)), r"pool is of shape \(3,\), expected \[L, S, ...\]"),
    ("copy_slots", dict(pool=torch.zeros(3, 11, dtype=torch.complex64)), "pool is of dtype torch.complex64"),
    ("copy_slots", dict(pool=torch.zeros(2, 11)), r"layer_group is of shape \(3,\), expected \[L\] with L = 2"),
    ("copy_slots", dict(src_slots=i32([[11] * 5] * 2)), "src_slots is 11"),
    ("copy_slots", dict(dst_slots=i32([[-1] * 5] * 2)), "dst_slots is -1"),
    ("copy_slots", dict(src_slots=i32([[3] * 5] * 2), dst_slots=i32([[1] * 5] * 2)), "dst_slots .* at most once"),
    ("copy_slots", dict(layer_group=i32([0, 1, 2])), "layer_group is 2"),
    ("copy_slots", dict(active_rows=i32([0, 1, 5, -1, -1])), "active_rows is 5"),
    ("zero_slots", dict(pool=torch.zeros(3)), r"pool is of shape \(3,\), expected \[L, S, ...\]"),
    ("zero_slots", dict(layer_group=i32([0, 1])), r"layer_group is of shape \(2,\), expected \[L\] with L = 3"),
    ("zero_slots", dict(slots=i32([[1] * 4 + [11]] * 2)), "slots is 11"),
    ("zero_slots", dict(slots=torch.zeros(2, 5)), "slots is of dtype torch.float32"),
    ("zero_slots", dict(layer_group=i32([0, 1, 2])), "layer_group is 2"),
]


@pytest.mark.parametrize("op, change, message", BAD)
def test_bad_input(op, change, message):
    """A ValueError names the argument, what came and what was expected; nothing has been written."""
    sample = {"conv_replay": CONV[1], "copy_slots": COPY[0], "zero_slots": ZERO[0]}[op]
    arguments = dict(named(op, *sample.make()), **change)
    assert_refused(OPS[op].overload, arguments, f"{op}: .*{message}")


def test_garbage_in_rows_that_are_not_used():
    """Positions of padded rows and plans of unlisted rows may hold anything."""
    arguments = named("conv_replay", *CONV[1].make())
    arguments["positions"][arguments["slots"] == 0] = -(2**31)
    assert (call("conv_replay", arguments)[0][arguments["slots"] == 0] == 0).all()
    arguments = named("copy_slots", *COPY[0].make())
    unlisted = ({0, 1, 2, 3, 4} - set(arguments["active_rows"][:4].tolist())).pop()
    arguments["src_slots"][:, unlisted] = arguments["dst_slots"][:, unlisted] = 10**6
    call("copy_slots", arguments)


def test_wrong_types():
    """A TypeError names the argument."""
    arguments = named("conv_replay", *CONV[0].make())
    with pytest.raises(TypeError, match="conv_replay: silu is int, expected bool"):
        conv_replay(**dict(arguments, silu=1))
    arguments.pop("bias")
    with pytest.raises(TypeError, match="conv_replay: missing a required argument: 'bias'"):
        conv_replay(**arguments)
    with pytest.raises(TypeError, match="copy_slots: pool is int, expected Tensor"):
        copy_slots(0, i32([[0]]), i32([[0]]), i32([0]), i32([0]))
