"""Token ops against the token-by-token truth."""

import pytest
import torch
import truth_tokens
from harness import assert_refused, call, check_sample, named, raw

from torch_replay.ops.registry import OPS, override_kernel
from torch_replay.ops.tokens import naive
from torch_replay.ops.tokens.op import compute_slot_mappings, prepare_positions, write_kv
from torch_replay.ops.tokens.samples import SAMPLES


def samples(op):
    return [sample for sample in SAMPLES if sample.op == op]


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def run(sample, dtype=torch.float32, seed=0):
    check_sample(sample, getattr(truth_tokens, sample.op), dtype=dtype, seed=seed)


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_against_truth(sample):
    """Every mutated tensor equals the truth, filler included; nothing else is written."""
    run(sample)


@pytest.mark.parametrize("sample", samples("write_kv"), ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_write_is_a_copy(sample, dtype):
    """Named slots hold k and v in the cache's dtype, bit for bit; every other byte of the pool is as before."""
    arguments = named(sample.op, *sample.make(dtype=dtype))
    cache, slots = arguments["cache"], arguments["slot_mapping"]
    pool = torch.empty(0, dtype=cache.dtype).set_(cache.untyped_storage())
    before = pool.clone()
    call(sample.op, arguments)
    want = cache.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            want[slot // cache.shape[1], slot % cache.shape[1], 0] = arguments["k"][token].to(cache.dtype)
            want[slot // cache.shape[1], slot % cache.shape[1], 1] = arguments["v"][token].to(cache.dtype)
    assert torch.equal(raw(cache), raw(want))
    written = int((slots >= 0).sum()) * cache[0, 0].numel()
    bits = torch.int32 if cache.dtype == torch.float32 else torch.int16
    assert int((pool.view(bits) != before.view(bits)).sum()) <= written


def draw_batch(generator, rows, tokens, reqs):
    """q [rows], requests (never the identity, some rows empty) and computed [reqs] of a random batch."""
    q = torch.randint(0, tokens + 1, (rows,), generator=generator, dtype=torch.int32)
    requests = (torch.randperm(reqs - 1, generator=generator)[:rows] + 1).int()
    requests[torch.rand(rows, generator=generator) < 0.2] = -1
    return q, requests, torch.randint(0, 100, (reqs,), generator=generator, dtype=torch.int32)


@pytest.mark.parametrize("seed", range(30))
def test_random_batches(seed):
    """Random rows, requests, lengths, block sizes and layouts: the truth; the two layouts agree token by token."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda low, high: int(torch.randint(low, high + 1, (), generator=generator))  # noqa: E731
    rows, tokens, lead, tail = draw(1, 6), draw(1, 9), draw(0, 1), draw(0, 4)
    reqs = rows + draw(1, 4)
    q, requests, computed = draw_batch(generator, rows, tokens, reqs)
    assert requests.tolist() != list(range(rows))
    sizes = torch.randint(1, 20, (draw(1, 3),), generator=generator, dtype=torch.int32)
    columns = draw(1, 120)
    block_tables = torch.randint(0, 1000, (len(sizes), rows, columns), generator=generator, dtype=torch.int32)
    found = {}
    for name, width, lens in (("ragged", q, None), ("uniform", torch.full_like(q, tokens), q)):
        start = lead + torch.cat([i32(0), width.cumsum(0).int()])
        count = int(start[-1]) + tail
        got = [torch.full((count,), 7), torch.full((rows,), 7, dtype=torch.int32),
               torch.full((len(sizes), count), 7)]
        want = [value.clone() for value in got]
        prepare_positions(got[0], got[1], requests, start, computed, lens)
        truth_tokens.prepare_positions(want[0], want[1], requests, start, computed, lens)
        compute_slot_mappings(got[2], block_tables, start, got[0], sizes, lens)
        truth_tokens.compute_slot_mappings(want[2], block_tables, start, want[0], sizes, lens)
        for result, value in zip(got, want):
            assert torch.equal(result, value)
        real = [token for row in range(rows) for token in truth_tokens.row_tokens(start, lens, row)]
        found[name] = got[0][real], got[1], got[2][:, real]
    for ragged, uniform in zip(found["ragged"], found["uniform"]):
        assert torch.equal(ragged, uniform)


def test_write_then_read():
    """What goes in through the slot mappings comes out at the positions, for every row and group."""
    sizes, start, lens = i32(4, 3), i32(0, 5, 10), i32(5, 2)
    tables = torch.stack([torch.tensor([[2, 5, 1, 0], [4, 3, 6, 0]]), torch.tensor([[9, 8, 7, 6], [5, 4, 3, 2]])]).int()
    positions, seq_lens = torch.empty(11, dtype=torch.int64), torch.empty(2, dtype=torch.int32)
    prepare_positions(positions, seq_lens, i32(3, 1), start, i32(9, 6, 9, 1), lens)
    assert positions.tolist() == [1, 2, 3, 4, 5, 6, 7, 0, 0, 0, 0] and seq_lens.tolist() == [6, 8]
    slots = torch.empty(2, 11, dtype=torch.int64)
    compute_slot_mappings(slots, tables, start, positions, sizes, lens)
    k, v = torch.randn(2, 11, 2, 3)
    for group, size in enumerate(sizes.tolist()):
        cache = torch.zeros(10, size, 2, 2, 3)
        write_kv(cache, k, v, slots[group])
        for row, row_tokens in enumerate((range(5), range(5, 7))):
            for token in row_tokens:
                block = int(tables[group, row, int(positions[token]) // size])
                assert torch.equal(cache[block, int(positions[token]) % size], torch.stack([k[token], v[token]]))
        assert int((cache != 0).sum()) == 7 * 2 * 2 * 3


def test_null_block_is_never_written():
    """Where slots are not checked, on a GPU, a slot of the null block still writes nothing."""
    cache, kv = torch.zeros(3, 4, 2, 1, 2), torch.ones(3, 1, 2)
    naive.write_kv(cache, kv, kv, torch.tensor([0, 3, 4]))
    assert not cache[0].any() and cache[1, 0].all() and not cache[1, 1:].any()


def test_padded_batches_larger_than_the_request_table():
    """Rows beyond the number of requests, as buckets have them, read nothing and get nothing."""
    positions, seq_lens = torch.full((16,), 9), torch.full((16,), 9, dtype=torch.int32)
    requests = torch.cat([i32(1, 0), torch.full((14,), -1, dtype=torch.int32)])
    prepare_positions(positions, seq_lens, requests, torch.arange(17, dtype=torch.int32), i32(5, 8))
    assert positions.tolist() == [8, 5] + [0] * 14 and seq_lens.tolist() == [9, 6] + [0] * 14


def broken_forgets_computed(positions, seq_lens, idx_mapping, query_start_loc, num_computed, query_lens=None):
    rows = torch.arange(len(idx_mapping))
    naive.prepare_positions(positions, seq_lens, rows, query_start_loc, num_computed, query_lens)


def broken_keeps_the_tail(slot_mappings, *args, **kwargs):
    fresh = slot_mappings.clone()
    naive.compute_slot_mappings(fresh, *args, **kwargs)
    slot_mappings.copy_(torch.where(fresh < 0, slot_mappings, fresh))


def broken_writes_pads_to_the_null_block(cache, k, v, slot_mapping):
    for token, slot in enumerate(slot_mapping.clamp(min=0).tolist()):
        cache[slot // cache.shape[1], slot % cache.shape[1]] = torch.stack([k[token], v[token]]).nan_to_num(1.0)


@pytest.mark.parametrize("op, kernel", [
    ("prepare_positions", broken_forgets_computed),
    ("compute_slot_mappings", broken_keeps_the_tail),
    ("write_kv", broken_writes_pads_to_the_null_block),
])
def test_negative_control(op, kernel):
    """An op broken on purpose fails the suite."""
    with override_kernel(op, "cpu", kernel), pytest.raises(AssertionError):
        for sample in samples(op):
            run(sample)


BAD = {
    "positions int32": ("prepare_positions", dict(positions=torch.zeros(23, dtype=torch.int32)),
                        "positions is of dtype torch.int32, expected torch.int64"),
    "seq_lens rows": ("prepare_positions", dict(seq_lens=i32(0, 0)), r"idx_mapping is of shape \(5,\)"),
    "start rows": ("prepare_positions", dict(query_start_loc=i32(0, 4, 8, 12, 16)),
                   r"query_start_loc is of shape \(5,\), expected \[B\+1\] with B = 5"),
    "start decreases": ("prepare_positions", dict(query_start_loc=i32(0, 8, 4, 12, 16, 20)), "never decrease"),
    "start beyond the tokens": ("prepare_positions", dict(query_start_loc=i32(0, 4, 8, 12, 16, 24)),
                                "query_start_loc is 24"),
    "query_lens too long": ("prepare_positions", dict(query_lens=i32(5, 0, 0, 0, 0)), r"query_lens is \[5, 0"),
    "query_lens negative": ("prepare_positions", dict(query_lens=i32(0, 0, -1, 0, 0)), "query_lens is"),
    "request out of range": ("prepare_positions", dict(idx_mapping=i32(1, 0, 99, -1, -1)), "idx_mapping is 99"),
    "negative computed": ("prepare_positions", dict(num_computed=torch.full((8,), -3)), "num_computed is -3"),
    "groups": ("compute_slot_mappings", dict(block_sizes=i32(8)), r"block_sizes is of shape \(1,\)"),
    "block size 0": ("compute_slot_mappings", dict(block_sizes=i32(8, 0)), "block_sizes is 0"),
    "float positions": ("compute_slot_mappings", dict(positions=torch.zeros(23)), "positions is of dtype"),
    "negative position": ("compute_slot_mappings", dict(positions=torch.full((23,), -2)), "positions is -2"),
    "slot beyond the cache": ("write_kv", dict(slot_mapping=torch.tensor([-1, 16, 17, 18, 64, 20, 21])),
                              r"slot_mapping is 64 .* expected values in \[16, 63\]"),
    "slot in the null block": ("write_kv", dict(slot_mapping=torch.tensor([-1, 16, 17, 18, 15, 20, 21])),
                               "slot_mapping is 15"),
    "slot twice": ("write_kv", dict(slot_mapping=torch.tensor([-1, -1, 17, 18, 17, 20, 21])), "at most once"),
    "heads": ("write_kv", dict(v=torch.zeros(7, 3, 64)), r"v is of shape \(7, 3, 64\), expected .* with KVH = 2"),
    "cache halves": ("write_kv", dict(cache=torch.zeros(4, 16, 3, 2, 64)), "cache is of shape .* with 2 = 2"),
    "integer k": ("write_kv", dict(k=torch.zeros(7, 2, 64, dtype=torch.int32)), "k is of dtype torch.int32"),
}


@pytest.mark.parametrize("op, change, message", BAD.values(), ids=BAD)
def test_bad_input(op, change, message):
    """A ValueError names the argument, what came and what was expected; nothing has been written."""
    sample = {"prepare_positions": 2, "compute_slot_mappings": 2, "write_kv": 1}[op]
    arguments = named(op, *samples(op)[sample].make())
    arguments.update(change)
    assert_refused(OPS[op].wrapper, arguments, f"{op}: .*{message}")


def test_wrong_types():
    """A TypeError names the argument."""
    arguments = named("write_kv", *samples("write_kv")[0].make())
    with pytest.raises(TypeError, match="write_kv: slot_mapping is list, expected Tensor"):
        write_kv(**dict(arguments, slot_mapping=[1, 2]))
    arguments = named("prepare_positions", *samples("prepare_positions")[0].make())
    with pytest.raises(TypeError, match="prepare_positions: query_lens is int, expected Tensor or None"):
        prepare_positions(**dict(arguments, query_lens=3))
    arguments.pop("num_computed")
    with pytest.raises(TypeError, match="prepare_positions: missing a required argument: 'num_computed'"):
        prepare_positions(**arguments)
