"""Triton kernels of the attention ops against the float64 truth: under the interpreter, or on a CUDA device if any."""

import random

import pytest
import torch

pytest.importorskip("triton")

import truth_attention  # noqa: E402
from harness import RATIO, assert_close, call, check_sample, named  # noqa: E402
from triton_harness import DEVICE, on_device  # noqa: E402
from triton_harness import GPU as ON_GPU  # noqa: E402

from torch_replay.ops.attention import kernels, naive  # noqa: E402
from torch_replay.ops.attention.samples import SAMPLES  # noqa: E402
from torch_replay.ops.registry import OPS, override_kernel  # noqa: E402
from torch_replay.ops.samples import Rng  # noqa: E402

pytestmark = on_device
HALVES = [torch.float16, torch.bfloat16]


def samples(*ops):
    return [sample for sample in SAMPLES if sample.op in ops]


def check(sample, dtype=torch.float32, kernel=None, seed=0):
    with override_kernel(sample.op, DEVICE, kernel or getattr(kernels, sample.op)):
        check_sample(sample, getattr(truth_attention, sample.op), DEVICE, dtype, seed=seed)


def attend(op, arguments):
    with override_kernel(op, DEVICE, getattr(kernels, op)):
        return call(op, arguments)[0]


def attend_naive(op, arguments):
    """On the CPU, in float32."""
    arguments = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
    return call(op, {name: value.float() if name in ("q", "cache") else value for name, value in arguments.items()})[0]


@pytest.fixture
def short_splits(monkeypatch):
    """Keys are split as if every few of them were many."""
    monkeypatch.setattr(kernels, "SPLIT_KEYS", 4)
    monkeypatch.setattr(kernels, "SPLIT_PROGRAMS", 10000)
    monkeypatch.setattr(kernels, "MAX_SPLITS", 4)


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_against_truth(sample):
    """Outputs and mutated tensors equal the truth; NaN that a token may not see and fresh memory reach nothing."""
    check(sample)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("sample", samples("swa_attention", "paged_attention")[:: 1 if ON_GPU else 3], ids=str)
def test_half_precision_against_truth(sample, dtype, monkeypatch):
    """16-bit queries and caches stay within the tolerance of their dtype."""
    if dtype == torch.bfloat16 and not ON_GPU:
        # the interpreter multiplies the bits of bfloat16 operands as if they were integers
        monkeypatch.setattr(kernels, "_compute_dtype", lambda q, cache: kernels.tl.float32)
    check(sample, dtype, seed=1)


@pytest.mark.parametrize("sample", samples("swa_attention")[1:6] + samples("paged_attention")[1:8], ids=str)
def test_split_keys(sample, short_splits):
    """Parts of the keys attended to apart, parts without any key among them, merge to the truth."""
    check(sample, seed=2)


def ragged_case(seed: int, dtype=torch.float32):
    """paged_attention on sizes drawn independently; the cache's dims permuted and cut from wider ones."""
    draw, rng = random.Random(seed), Rng(seed, DEVICE, dtype)
    rows, block_size = draw.randint(1, 6), (1, 3, 7, 16, 64)[seed % 5]
    kv_heads, group, dim = draw.randint(1, 3), draw.choice((1, 2, 5, 8)), draw.choice((8, 16, 33, 64, 80))
    q_lens = [draw.choice((0, 1, draw.randint(2, 40))) for _ in range(rows)]
    lengths = [q + draw.choice((0, 1, draw.randint(2, 150))) if q else 0 for q in q_lens]
    uniform = seed % 2 == 1
    widths = [max(q_lens)] * rows if uniform else q_lens
    starts = [sum(widths[:row]) for row in range(rows + 1)]
    tokens = starts[-1] + draw.randint(0, 3) + (starts[-1] == 0)
    columns = max(lengths) // block_size + 2
    blocks = rows * columns + 1
    table = rng.tensor([block + 1 for block in rng.permutation(rows * columns)], torch.int64).view(rows, columns)
    table[rng.integers(0, 8, rows, columns) == 0] = 0
    cache = rng.normal(2, blocks, kv_heads, dim + 3, block_size + 1)[..., :dim, :block_size].permute(1, 4, 0, 2, 3)
    q = rng.normal(dim, tokens, kv_heads * group + 1).permute(1, 2, 0)[:, 1:]
    query_lens = rng.tensor(q_lens) if uniform else None
    args = (q, cache, table, rng.tensor(lengths), rng.tensor(starts), query_lens)
    return named("paged_attention", args, dict(scale=dim**-0.5))


@pytest.mark.parametrize("seed", range(20 if ON_GPU else 5))
def test_random_ragged(seed, request):
    """Rows, lengths, blocks, heads and strides drawn independently: what the reference computes."""
    if seed % 3 == 0:
        request.getfixturevalue("short_splits")
    for dtype in [torch.float32, *(HALVES if ON_GPU else [])]:
        arguments = ragged_case(seed, dtype)
        got, want = attend("paged_attention", arguments), attend_naive("paged_attention", arguments)
        assert_close("paged_attention", got, want, RATIO[dtype])


@pytest.mark.parametrize("dims", [(96, 1), (128, 3), (256, 2)], ids=str)
@pytest.mark.parametrize("op", ["swa_attention", "paged_attention"])
def test_wide_heads(op, dims):
    """Head dims up to 256 and a group that is no power of two."""
    dim, group = dims
    build = dict(heads=2 * group, kv_heads=2, dim=dim, tokens=3, block_size=7)
    build.update(dict(window=45) if op == "swa_attention" else dict(rows=2, contexts=[60, 0]))
    from torch_replay.ops.attention import samples as families
    make = families.window_attention if op == "swa_attention" else families.paged
    for dtype in [torch.float32, *(HALVES if ON_GPU else [])]:
        arguments = named(op, *make(Rng(dim, DEVICE, dtype), **build))
        assert_close(op, attend(op, arguments), attend_naive(op, arguments), RATIO[dtype])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("part", [0, 1], ids=["keys", "values"])
def test_later_tokens_do_not_leak(part, value):
    """What is not finite at a position of the step reaches the tokens from there on, and none before."""
    rng = Rng(5, DEVICE, torch.float32)
    q, cache = rng.normal(12, 4, 16), rng.normal(4, 7, 2, 2, 16)
    table, lens = rng.tensor([[2, 1, 3]]), rng.tensor([17])
    cache[[1, 3], [6, 0], part, 0, 3] = value  # positions 13 and 14; the tokens stand at 5 .. 16
    arguments = named("paged_attention", (q, cache, table, lens, rng.tensor([0, 12])), dict(scale=0.25))
    got = attend("paged_attention", arguments).cpu()
    want = {name: v.double().cpu() if v is q or v is cache else v for name, v in arguments.items()}
    want = truth_attention.paged_attention(**want)
    assert want[:8].isfinite().all() and (part == 0 or not want[8:, :2, 3].isfinite().any())
    clean = want.isfinite()
    if part == 0 and value != value or part == 1:
        assert torch.equal(got.isfinite(), clean) and torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got[got.isinf()], want[want.isinf()].float())
    assert_close("before", got[:8], want[:8], 1e-5)
    assert_close("other head", got[:, 2:], want[:, 2:], 1e-5)


def test_tokens_that_no_row_owns():
    """Tokens before the first row, behind the last and inside padded rows get 0, whatever q holds there."""
    rng = Rng(6, DEVICE, torch.float32)
    q = rng.normal(40, 2, 16)
    for starts, q_lens in (([5, 5, 21, 30], [0, 16, 7]), ([39, 39, 39, 39], [0, 0, 0]), ([3, 4, 5, 6], [1, 1, 1])):
        filler = torch.ones(40, dtype=torch.bool)
        for start, count in zip(starts, q_lens):
            filler[start : start + count] = False
        poisoned = q.masked_fill(filler.to(DEVICE)[:, None, None], float("nan"))
        args = poisoned, rng.normal(12, 16, 2, 2, 16), rng.tensor([[1, 2], [3, 4], [5, 6]]), rng.tensor([9, 20, 31])
        arguments = named("paged_attention", (*args, rng.tensor(starts), rng.tensor(q_lens)), dict(scale=0.25))
        got, want = attend("paged_attention", arguments), attend_naive("paged_attention", arguments)
        assert_close("paged_attention", got, want, 1e-5)
        assert not got.cpu()[filler].any()


def test_sequences_shorter_than_their_tokens():
    """A row with tokens and seq_len 0 reads nothing: output 0, no window."""
    rng = Rng(7, DEVICE, torch.float32)
    start, lens, table = rng.tensor([0, 3, 5]), rng.tensor([0, 2]), rng.tensor([[77777], [1]])
    cache = rng.normal(2, 16, 2, 1, 16)
    got = attend("paged_attention", named(
        "paged_attention", (rng.normal(5, 1, 16), cache, table, lens, start), dict(scale=0.25)))
    assert not got[:3].any() and got[3:].all()
    indices, count = rng.tensor([[9] * 4] * 5), rng.tensor([9] * 5)
    with override_kernel("swa_indices", DEVICE, kernels.swa_indices):
        OPS["swa_indices"].overload(indices, count, lens, start, table, rng.tensor([16] * 5), window=4, block_size=16)
    assert count.tolist() == [0, 0, 0, 1, 2]
    assert indices.tolist() == [[-1] * 4] * 3 + [[16, -1, -1, -1], [16, 17, -1, -1]]


@pytest.mark.parametrize("seed", range(4))
def test_random_windows(seed):
    """Strided outputs and tables, more rows than are searched at a time, windows above one piece: exact."""
    draw, rng = random.Random(seed), Rng(seed, DEVICE, torch.float32)
    rows, block_size, window = (1, 3, 130, 300)[seed], draw.randint(1, 20), (1500, 9, 40, 1)[seed]
    q = rng.tensor([draw.choice((0, 0, 0, 1, 2)) for _ in range(rows - 1)] + [3])
    seq_lens = q + rng.tensor([draw.choice((0, draw.randint(0, 2000))) for _ in range(rows)])
    start = torch.cat([rng.tensor([0]), q.cumsum(0).int()])
    tokens = int(start[-1]) + draw.randint(1, 3)
    table = rng.integers(0, 500, 200, rows).t()
    slots = rng.tensor([draw.choice((-1, 5, 6)) for _ in range(tokens)], torch.int64)
    replay = rng.tensor([draw.randint(0, length) for length in (seq_lens - q).tolist()]) if seed % 2 else None
    made = [(rng.integers(7, 8, window, tokens).t(), rng.integers(7, 8, tokens, 2)[:, 1]) for _ in range(2)]
    for (indices, lens), kernel in zip(made, (kernels.swa_indices, naive.swa_indices)):
        with override_kernel("swa_indices", DEVICE, kernel):
            OPS["swa_indices"].overload(indices, lens, seq_lens, start, table, slots, replay, window=window,
                                        block_size=block_size)
    assert torch.equal(made[0][0], made[1][0]) and torch.equal(made[0][1], made[1][1])


def test_equal_launches_equal_bits(short_splits):
    """Nothing depends on the order in which programs run."""
    arguments = ragged_case(4)
    first = attend("paged_attention", arguments)
    for _ in range(5 if ON_GPU else 1):
        assert torch.equal(attend("paged_attention", arguments), first)


@pytest.mark.parametrize("op, index", [("swa_indices", 1), ("swa_attention", 0), ("paged_attention", 1)])
def test_broken_kernel_fails(op, index, monkeypatch):
    """Negative control: a window one too long, a softmax to another base, and the comparison fails."""
    monkeypatch.setattr(kernels, "LOG2E", 1.0)

    def broken(*args, **kwargs):
        if op == "swa_indices":
            kwargs["block_size"] += 1
        getattr(kernels, op)(*args, **kwargs)

    with pytest.raises(AssertionError, match="expected"):
        check(samples(op)[index], kernel=broken)
