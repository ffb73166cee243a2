"""Attention ops against the one-token-at-a-time float64 truth, and against dense attention over whole sequences."""

import random

import pytest
import torch
import truth_attention
from harness import assert_close, assert_refused, call, check_sample, named, raw

from torch_replay.ops.attention import naive
from torch_replay.ops.attention.op import paged_attention, swa_attention, swa_indices
from torch_replay.ops.attention.samples import SAMPLES
from torch_replay.ops.registry import OPS, override_kernel
from torch_replay.ops.tokens.op import compute_slot_mappings, prepare_positions, write_kv


def samples(op):
    return [sample for sample in SAMPLES if sample.op == op]


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def run(sample, dtype=torch.float32, seed=0):
    check_sample(sample, getattr(truth_attention, sample.op), dtype=dtype, seed=seed)


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_against_truth(sample):
    """Outputs and mutated tensors equal the truth; NaN that a token may not see and fresh memory reach nothing."""
    run(sample)


@pytest.mark.parametrize("sample", samples("swa_attention")[:5] + samples("paged_attention")[:5], ids=str)
def test_bf16_against_truth(sample):
    """bfloat16 queries and cache stay within 1e-2 of the truth."""
    run(sample, torch.bfloat16)


@pytest.mark.parametrize("sample", samples("swa_attention") + samples("paged_attention"), ids=str)
def test_work_in_small_pieces(sample, monkeypatch):
    """However little is gathered at a time, the result is the same."""
    monkeypatch.setattr(naive, "GATHER_LIMIT", 1)
    monkeypatch.setattr(naive, "MASK_LIMIT", 1)
    run(sample, seed=1)


class Requests:
    """Requests with all their queries, keys and values, run chunk by chunk through the ops and a paged cache.

    Sizes are drawn independently of each other; requests never have their own row number.
    """

    def __init__(self, seed: int, lengths: list[int] = None, window: int = None):
        self.draw = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        self.lengths = lengths or [self.draw.randint(1, 40) for _ in range(self.draw.randint(1, 4))]
        self.window = window or self.draw.randint(1, 20)
        self.count, self.block_size = len(self.lengths), self.draw.randint(1, 9)
        self.kv_heads, self.dim = self.draw.choice((1, 2, 3)), self.draw.choice((4, 9))
        self.heads = self.kv_heads * self.draw.choice((1, 2, 3))
        self.data = [torch.randn(length, self.heads + 2 * self.kv_heads, self.dim, generator=generator)
                     for length in self.lengths]
        self.ids = (torch.randperm(self.count + 1, generator=generator)[: self.count] + 1).tolist()
        columns = max(-(-length // self.block_size) for length in self.lengths)
        blocks = (torch.randperm(self.count * columns, generator=generator) + 1).view(self.count, columns)
        self.tables = [row.int() for row in blocks]
        self.cache = torch.full((blocks.numel() + 1, self.block_size, 2, self.kv_heads, self.dim), float("nan"))

    def step(self, done: list[int], chunks: dict[int, int], uniform: bool, fillers: int = 1):
        """Runs chunks[r] tokens of each request r named; returns {r: (window output, full output)}."""
        order = list(chunks)
        rows = len(order) + fillers  # the last ones empty
        width = max(chunks.values())
        q = i32(*[chunks[r] for r in order], *[0] * fillers)
        start = torch.cat([i32(0), (torch.full_like(q, width) if uniform else q).cumsum(0).int()])
        lens = q if uniform else None
        tokens = int(start[-1]) + fillers
        data = torch.full((tokens, *self.data[0].shape[1:]), float("nan"))
        for row, r in enumerate(order):
            data[int(start[row]) : int(start[row]) + chunks[r]] = self.data[r][done[r] : done[r] + chunks[r]]
        query, k, v = data.split([self.heads, self.kv_heads, self.kv_heads], 1)
        table = torch.zeros(rows, len(self.tables[0]), dtype=torch.int32)
        for row, r in enumerate(order):
            table[row] = self.tables[r]
        requests = i32(*[self.ids[r] for r in order], *[-1] * fillers)
        assert requests.tolist() != list(range(rows))
        computed = torch.full((self.count + 2,), 99999, dtype=torch.int32)
        for r in order:
            computed[self.ids[r]] = done[r]
        positions, seq_lens = torch.empty(tokens, dtype=torch.int64), torch.empty(rows, dtype=torch.int32)
        prepare_positions(positions, seq_lens, requests, start, computed, lens)
        slots = torch.empty(1, tokens, dtype=torch.int64)
        compute_slot_mappings(slots, table[None], start, positions, i32(self.block_size), lens)
        write_kv(self.cache, k, v, slots[0])
        indices = torch.empty(tokens, self.window, dtype=torch.int32)
        counts = torch.empty(tokens, dtype=torch.int32)
        swa_indices(indices, counts, seq_lens, start, table, slots[0], None, lens, window=self.window,
                    block_size=self.block_size)
        scale = self.dim**-0.5
        near = swa_attention(query, self.cache, indices, counts, scale=scale)
        full = paged_attention(query, self.cache, table, seq_lens, start, lens, scale=scale)
        owned = torch.zeros(tokens, dtype=torch.bool)
        result = {}
        for row, r in enumerate(order):
            mine = slice(int(start[row]), int(start[row]) + chunks[r])
            owned[mine] = True
            result[r] = near[mine], full[mine]
        assert not near[~owned].any() and not full[~owned].any()
        return result

    def run_all(self, uniform: bool, largest: int):
        """Every request from its first token to its last, in chunks of at most `largest`."""
        done = [0] * self.count
        outputs = {r: [] for r in range(self.count)}
        while any(done[r] < self.lengths[r] for r in range(self.count)):
            left = {r: self.lengths[r] - done[r] for r in range(self.count)}
            chosen = [r for r in self.draw.sample(range(self.count), self.draw.randint(1, self.count)) if left[r]]
            chunks = {r: min(left[r], self.draw.randint(0, largest)) for r in chosen}
            if not any(chunks.values()):
                continue
            for r, pair in self.step(done, chunks, uniform, self.draw.randint(0, 2)).items():
                outputs[r].append(pair)
                done[r] += chunks[r]
        return [[torch.cat(parts) for parts in zip(*outputs[r])] for r in range(self.count)]

    def dense(self, r: int, window: int):
        """Attention of a whole request in float64, without any cache."""
        q, k, v = self.data[r].double().split([self.heads, self.kv_heads, self.kv_heads], 1)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) * self.dim**-0.5
        ones = torch.ones(len(q), len(q), dtype=torch.bool)
        scores.masked_fill_(~(ones.tril() & ones.triu(1 - window)), -torch.inf)
        return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v)


@pytest.mark.parametrize("uniform", [False, True], ids=["ragged", "uniform"])
@pytest.mark.parametrize("seed", range(12))
def test_chunks_equal_the_whole(seed, uniform):
    """Any split into chunks, in either layout, gives dense attention over the sequence, windowed and full."""
    requests = Requests(seed)
    outputs = requests.run_all(uniform, largest=1 + 5 * (seed % 4))
    for r, (near, full) in enumerate(outputs):
        assert_close("window", near, requests.dense(r, requests.window), 1e-5)
        assert_close("full", full, requests.dense(r, len(full)), 1e-5)


@pytest.mark.parametrize("seed", range(6))
def test_uniform_equals_ragged(seed):
    """The same tokens give the same outputs in both layouts."""
    one, other = Requests(100 + seed), Requests(100 + seed)
    chunks = {r: 1 + r % length for r, length in enumerate(one.lengths)}
    ragged, uniform = one.step([0] * one.count, chunks, False), other.step([0] * one.count, chunks, True)
    for r in chunks:
        for left, right in zip(ragged[r], uniform[r]):
            assert_close("layouts", left, right, 1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_wide_window_equals_full_attention(seed):
    """A window no smaller than the sequence sees what full attention sees."""
    requests = Requests(200 + seed)
    requests.window = max(requests.lengths) + seed % 2
    for near, full in requests.run_all(seed % 2 == 0, largest=17):
        assert_close("window", near, full, 2e-6)


@pytest.mark.parametrize("seed", range(8))
def test_random_windows(seed):
    """Window, block size, lengths, replay starts and skipped tokens drawn independently: the truth's indices."""
    draw = random.Random(seed)
    rows, window, block_size = draw.randint(1, 5), draw.randint(1, 40), draw.randint(1, 20)
    q = i32(*[draw.randint(0, 9) for _ in range(rows)])
    seq_lens = q + i32(*[draw.choice((0, 1, draw.randint(0, 90))) for _ in range(rows)])
    start = torch.cat([i32(0), q.cumsum(0).int()])
    tokens = int(start[-1]) + draw.randint(1, 3)
    table = torch.randint(0, 500, (rows, 100 // block_size + 1), dtype=torch.int32)  # some blocks null
    slots = torch.tensor([draw.choice((-1, 5, 6)) for _ in range(tokens)])
    replay = i32(*[draw.randint(0, length) for length in (seq_lens - q).tolist()]) if seed % 2 else None
    got = torch.full((tokens, window), 7, dtype=torch.int32), torch.full((tokens,), 7, dtype=torch.int32)
    want = got[0].clone(), got[1].clone()
    swa_indices(*got, seq_lens, start, table, slots, replay, window=window, block_size=block_size)
    truth_attention.swa_indices(*want, seq_lens, start, table, slots, replay, None, window, block_size)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_replay_clamp():
    """A replay that starts at 16 sees nothing below 16: window lengths 1, 2, 3, 4, 4, 4 at positions 16 .. 21."""
    indices, lens = torch.full((8, 4), 7, dtype=torch.int32), torch.full((8,), 7, dtype=torch.int32)
    table = i32(0, 0, 0, 0, 3, 2)[None]  # blocks of 4; those below the start are null
    slots = torch.tensor([12, 13, 14, 15, 8, 9, -1, -1])
    swa_indices(indices, lens, i32(22), i32(0, 6), table, slots, i32(16), window=4, block_size=4)
    assert lens.tolist() == [1, 2, 3, 4, 4, 4, 0, 0]
    assert indices[:6, 0].tolist() == [12, 12, 12, 12, 13, 14]
    assert indices[0].tolist() == [12, -1, -1, -1] and indices[5].tolist() == [14, 15, 8, 9]
    assert (indices[6:] == -1).all()


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("length, window, bad", [(9, 5, 6), (70, 33, 40), (70, 33, 69), (70, 33, 1)])
def test_a_bad_token_does_not_reach_the_tokens_before(length, window, bad, poison):
    """Keys and values that are not finite change no token that does not see them, in one chunk as in many."""
    clean, spoiled = (Requests(7, [length, 6], window) for _ in range(2))
    spoiled.data[0][bad, spoiled.heads :] = poison
    want, got = (requests.step([0, 0], {0: length, 1: 6}, False) for requests in (clean, spoiled))
    for left, right in zip(got[1], want[1]):
        assert_close("other request", left, right, 1e-5)
    for kind, seeing in ((0, range(bad, min(length, bad + window))), (1, range(bad, length))):
        blind = [token for token in range(length) if token not in seeing]
        assert_close("unseen", got[0][kind][blind], want[0][kind][blind], 1e-5)
        assert not got[0][kind][bad].isfinite().any()


def test_row_batches():
    """Every row that reads anything is in exactly one batch; batches stay below the limit unless a row alone is not."""
    draw = random.Random(1)
    for _ in range(200):
        rows = draw.randint(0, 12)
        lens = [draw.choice((0, 1, 1, 4, 300)) for _ in range(rows)]
        seq_lens = [draw.choice((0, 5, 300, 2000)) for _ in range(rows)]
        limit = draw.choice((1, 1000, 5000))
        batches = list(naive.row_batches(lens, seq_lens, limit))
        assert sorted(sum(batches, [])) == [row for row in range(rows) if lens[row] and seq_lens[row]]
        for batch in batches:
            assert len(batch) == 1 or len(batch) * max(seq_lens[row] for row in batch) <= limit


def test_no_tokens():
    """A step without tokens returns an empty output."""
    q, cache = torch.empty(0, 4, 8), torch.full((3, 4, 2, 2, 8), float("nan"))
    out = swa_attention(q, cache, torch.empty(0, 5, dtype=torch.int32), torch.empty(0, dtype=torch.int32), scale=1.0)
    assert out.shape == (0, 4, 8)
    out = paged_attention(q, cache, i32(1, 2)[None], i32(7), i32(0, 0), scale=1.0)
    assert out.shape == (0, 4, 8)


def broken_forgets_the_clamp(indices, lens, seq_lens, query_start_loc, block_table, slot_mapping, replay_start=None,
                             query_lens=None, **kwargs):
    naive.swa_indices(indices, lens, seq_lens, query_start_loc, block_table, slot_mapping, None, query_lens, **kwargs)


def broken_takes_one_row_less(q, cache, indices, lens, *, scale, out):
    naive.swa_attention(q, cache, indices, (lens - 1).clamp(min=0), scale=scale, out=out)


def broken_is_not_causal(q, cache, block_table, seq_lens, query_start_loc, query_lens=None, *, scale, out):
    naive.paged_attention(q, cache, block_table, seq_lens + 1, query_start_loc, query_lens, scale=scale, out=out)


@pytest.mark.parametrize("op, kernel", [
    ("swa_indices", broken_forgets_the_clamp),
    ("swa_attention", broken_takes_one_row_less),
    ("paged_attention", broken_is_not_causal),
])
def test_negative_control(op, kernel):
    """An op broken on purpose fails the suite."""
    with override_kernel(op, "cpu", kernel), pytest.raises(AssertionError):
        for sample in samples(op):
            run(sample)


# Changes to the sample "uniform_ragged_padded" (5 rows of 4 tokens, 22 in all), or to "typical" of swa_attention (8
# tokens, window 64, 9 blocks of 16, 4 heads over 2).
BAD = {
    "window of the indices": ("swa_indices", dict(window=9), r"indices is of shape \(22, 8\), expected .* window = 9"),
    "window 0": ("swa_indices", dict(window=0), "window is 0"),
    "block size 0": ("swa_indices", dict(block_size=0), "block_size is 0"),
    "lens int64": ("swa_indices", dict(lens=torch.zeros(22, dtype=torch.int64)), "lens is of dtype torch.int64"),
    "rows": ("swa_indices", dict(replay_start=i32(0, 0)), r"replay_start is of shape \(2,\), .* with B = 5"),
    "shorter than its tokens": ("swa_indices", dict(seq_lens=i32(3, 4, 4, 4, 4)), r"seq_lens is \[3, 4"),
    "too many tokens a row": ("swa_indices", dict(query_lens=i32(4, 0, 9, 0, 0)), "query_lens is"),
    "slots beyond int32": ("swa_indices", dict(indices=torch.zeros(22, 8, dtype=torch.int32),
                                               block_table=torch.full((5, 12), 2**30)), "block_table is 1073741824"),
    "heads": ("swa_attention", dict(q=torch.zeros(8, 5, 64)), "q is of 5 heads, expected a multiple of the cache's 2"),
    "integer q": ("swa_attention", dict(q=torch.zeros(8, 4, 64, dtype=torch.int32)), "q is of dtype torch.int32"),
    "head dim": ("swa_attention", dict(q=torch.zeros(8, 4, 32)), "cache is of shape .* with D = 32"),
    "lens beyond the window": ("swa_attention", dict(lens=i32(1, 1, 1, 65, 1, 1, 1, 1)), "lens is 65"),
    "slot beyond the cache": ("swa_attention", dict(indices=torch.full((8, 64), 144)), "indices is 144"),
    "slot in the null block": ("swa_attention", dict(indices=torch.full((8, 64), 15)), "indices is 15"),
    "start rows": ("paged_attention", dict(query_start_loc=i32(0, 4)), "query_start_loc is of shape"),
    "start beyond the tokens": ("paged_attention", dict(query_start_loc=i32(0, 4, 8, 12, 16, 23)),
                                "query_start_loc is 23"),
    "longer than the table": ("paged_attention", dict(seq_lens=i32(500, 4, 4, 4, 4)), "seq_lens is 500"),
    "shorter than its chunk": ("paged_attention", dict(seq_lens=i32(3, 4, 4, 4, 4)), r"seq_lens is \[3, 4"),
    "block beyond the cache": ("paged_attention", dict(block_table=torch.full((5, 6), 99)), "block_table is 99"),
    "float table": ("paged_attention", dict(block_table=torch.zeros(5, 6)), "block_table is of dtype torch.float32"),
}


@pytest.mark.parametrize("op, change, message", BAD.values(), ids=BAD)
def test_bad_input(op, change, message):
    """A ValueError names the argument, what came and what was expected; nothing has been written."""
    arguments = named(op, *samples(op)[0 if op == "swa_attention" else 2].make())
    arguments.update(change)
    assert_refused(OPS[op].wrapper, arguments, f"{op}: .*{message}")


def test_wrong_types():
    """A TypeError names the argument."""
    arguments = named("swa_attention", *samples("swa_attention")[0].make())
    with pytest.raises(TypeError, match="swa_attention: lens is list, expected Tensor"):
        swa_attention(**dict(arguments, lens=[1]))
    with pytest.raises(TypeError, match="swa_attention: scale is str, expected float"):
        swa_attention(**dict(arguments, scale="1"))
    arguments = named("swa_indices", *samples("swa_indices")[0].make())
    with pytest.raises(TypeError, match="swa_indices: window is float, expected int"):
        swa_indices(**dict(arguments, window=16.0))
    arguments.pop("block_size")
    with pytest.raises(TypeError, match="swa_indices: missing a required argument: 'block_size'"):
        swa_indices(**arguments)


def test_arguments_stay():
    """Attention reads its cache and writes nothing."""
    for op in ("swa_attention", "paged_attention"):
        arguments = named(op, *samples(op)[1].make())
        before = arguments["cache"].clone()
        call(op, arguments)
        assert torch.equal(raw(arguments["cache"]), raw(before))
