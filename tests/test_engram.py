"""Engram ops against the truth, the golden hashes, bad input, and ids that must never index."""

import pytest
import torch
import truth_engram
from harness import assert_refused, call, check_sample, named
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_replay.ops import engram_lookback, engram_lookup, ngram_hash
from torch_replay.ops.engram import naive
from torch_replay.ops.engram.samples import SAMPLES
from torch_replay.ops.registry import OPS, override_kernel


def samples(op):
    return [sample for sample in SAMPLES if sample.op == op]


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def i64(*values):
    return torch.tensor(values, dtype=torch.int64)


def run(sample, seed=0):
    check_sample(sample, getattr(truth_engram, sample.op), seed=seed)


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_against_truth(sample):
    """Every output and mutated element equals the truth, filler included; nothing else is written."""
    for seed in range(4):
        run(sample, seed)


@pytest.mark.parametrize("sample", samples("engram_lookup"), ids=str)
def test_lookup_is_exact(sample):
    """16-bit rows come back bit for bit, float8 ones as the nearest bfloat16 of value times factor."""
    arguments = named(sample.op, *sample.make())
    (got,) = call(sample.op, arguments)
    want = truth_engram.engram_lookup(**{k: v.double() if k == "table" else v for k, v in arguments.items()})
    assert torch.equal(got.double(), want.to(got.dtype).double())


def test_extreme_exponents():
    """2^-127 and 2^127 are right, 255 and an e4m3 NaN give NaN."""
    table = torch.tensor([1.0, 448.0, float("nan"), 2.0**-9] + [0.0] * 28).expand(4, 32).to(torch.float8_e4m3fn)
    got = engram_lookup(table, torch.tensor([[0], [127], [254], [255]], dtype=torch.uint8), i64(0, 1, 2, 3)[None])[0]
    assert got.dtype == torch.bfloat16
    assert got[0, :2].double().tolist() == [2.0**-127, 448 * 2.0**-127]
    assert got[1, [0, 1, 3]].tolist() == [1.0, 448.0, 2.0**-9]
    assert got[2, 0].item() == 2.0**127 and got[2, 1].isinf()
    assert got[3].isnan().all() and got[:, 2].isnan().all()


def test_lookback_golden():
    """Newest first, -1 before the start; rows behind num_reqs and empty padded ones are -1 though they held ids."""
    token_ids = torch.zeros(4, 8, dtype=torch.int32)
    token_ids[2], token_ids[1] = torch.arange(11, 19), torch.arange(21, 29)
    lookback = torch.full((5, 3), 99, dtype=torch.int32)
    positions = i64(2, 3, 0, 5, 7, 7)
    engram_lookback(lookback, token_ids, positions, i32(0, 2, 3, 3, 4), i32(2, 1, 3, 1), i32(3))
    assert lookback.tolist() == [[12, 11, -1], [-1] * 3, [-1] * 3, [-1] * 3, [-1] * 3]
    engram_lookback(lookback, token_ids, positions, i32(0, 2, 3, 3, 4), i32(2, 1, 3, 1), i32(4))
    assert lookback[3].tolist() == [25, 24, 23]


GOLDEN = {
    1: {0: [15973665, 119375926, 133627205, 269774027, 369561413],
        2: [379248, 114357284, 141971515, 262166777, 372299915],
        4: [4962484, 114100166, 131961394, 267755225, 378482165],
        5: [10635489, 123477372, 132966618, 268236513, 369370666]},
    14: {4: [4611249, 117783754, 136036074, 269634794, 372025762],
         5: [11305274, 123883017, 130128479, 266601802, 368898107]},
}
GOLDEN_IDS = [5, 17, 99091, -1, 42, 7]  # compressed; -1 is a masked id


def golden_constants():
    """Multipliers and primes of the published geometry, written out here."""
    multipliers = torch.tensor([[76632096046245, 4839876093313, 35959672319349, 73987337458391],
                                [67716810739261, 51510806800915, 30921347202721, 82619226485591]])
    above = [57, 79, 81, 97, 121, 129, 133, 183, 189, 207, 211, 253, 277, 289, 307, 321, 339, 381, 393, 399, 403, 409,
             447, 463, 477, 487, 499, 507, 511, 573, 609, 627, 667, 669, 693, 697, 711, 729, 759, 769, 781, 799, 813,
             819, 841, 877, 879, 889]
    primes = 16_000_000 + torch.tensor(above).view(2, 3, 8)
    offsets = (primes.flatten(1).cumsum(1) - primes.flatten(1)).view(2, 3, 8)
    return multipliers, primes, offsets


def golden_hash(chunk_edges, layers=(0, 1)):
    """The golden sequence hashed in chunks; tokens are compressed ids, 99092 of them masked at the end."""
    multipliers, primes, offsets = (t[list(layers)] for t in golden_constants())
    token_map = torch.cat([torch.arange(99092), i64(-1)])
    ids = torch.tensor([99092 if token < 0 else token for token in GOLDEN_IDS])
    found = []
    for begin, end in zip(chunk_edges, chunk_edges[1:]):
        before = ids[:begin].flip(0)[:3]
        lookback = torch.cat([before, torch.full((3 - len(before),), -1)]).int()[None]
        found.append(ngram_hash(ids[begin:end], torch.arange(begin, end), i32(0, end - begin), lookback, token_map,
                                multipliers, primes, offsets, i64(3)))
    return torch.cat(found).view(len(ids), len(layers), 24)


@pytest.mark.parametrize("edges", [(0, 6), (0, 1, 2, 3, 4, 5, 6), (0, 2, 5, 6), (0, 4, 6)], ids=str)
def test_hash_golden(edges):
    """The published vectors, both layers at once, for any chunking."""
    got = golden_hash(edges)
    for place, layer in enumerate((1, 14)):
        for position, want in GOLDEN[layer].items():
            assert got[position, place, [0, 7, 8, 16, 23]].tolist() == want
        assert torch.equal(golden_hash(edges, (place,))[:, 0], got[:, place])
    assert got.max() < 2**29 and got.min() >= 0


def test_blocking_is_sticky():
    """What lies behind a masked id never changes a hash; what lies before it does."""
    sample = samples("ngram_hash")[0]
    arguments = named("ngram_hash", *sample.make())
    arguments.update(ids=i32(4, 5, 6, 7), positions=torch.arange(4), query_start_loc=i32(0, 4), query_lens=None,
                     lookback=torch.full((1, 3), -1, dtype=torch.int32), token_map=torch.arange(40))
    arguments["token_map"][6] = -1
    (base,) = call("ngram_hash", arguments)
    (behind,) = call("ngram_hash", arguments | {"ids": i32(9, 8, 6, 7)})
    (before,) = call("ngram_hash", arguments | {"ids": i32(4, 5, 6, 8)})
    assert torch.equal(base[2:], behind[2:]) and not torch.equal(base[:2], behind[:2])
    assert torch.equal(base[:3], before[:3]) and not torch.equal(base[3], before[3])


@pytest.mark.parametrize("strange", [-1, -(2**31), 40, 2**31 - 1], ids=str)
@pytest.mark.parametrize("place", ["ids", "lookback"])
def test_strange_ids_are_masked_ids(strange, place):
    """An id below 0 or beyond the vocabulary hashes as a masked one, in the chunk and in the lookback."""
    arguments = named("ngram_hash", *samples("ngram_hash")[0].make())
    arguments["token_map"][7] = -1
    hashed = []
    for value in (7, strange):
        changed = arguments[place].clone()
        changed.view(-1)[:3] = value
        hashed.append(call("ngram_hash", arguments | {place: changed})[0])
    assert torch.equal(*hashed)


def test_offsets_are_64_bit():
    """Rows beyond 2^31 survive, and a history too long for 32-bit offsets is read where it lies."""
    arguments = named("ngram_hash", *samples("ngram_hash")[3].make())
    assert int(call("ngram_hash", arguments)[0].max()) > 2**40
    token_ids, table = distant_rows(torch.int32), distant_rows(torch.float16)
    lookback = torch.zeros(1, 2, dtype=torch.int32)
    engram_lookback(lookback, token_ids, i64(3), i32(0, 1), i32(1), i32(1))
    assert lookback.tolist() == [[3, 2]]
    assert engram_lookup(table, None, i32(1, 0)[None])[0].tolist() == [[1, 2, 3, 4], [-1, -2, -3, -4]]


def distant_rows(dtype):
    """[2, 4] whose rows lie 2^31 elements apart; memory comes by the page, so what lies between costs none."""
    rows = torch.empty(2**31 + 4, dtype=dtype).as_strided((2, 4), (2**31, 1))
    rows.copy_(torch.tensor([[-1, -2, -3, -4], [1, 2, 3, 4]]))
    return rows


def test_mixed_devices():
    """Table on the host and rows on the GPU go to the CUDA kernel, and the fake answers on the rows' device."""
    with FakeTensorMode():
        table, rows = torch.empty(9, 64, dtype=torch.float16), torch.empty(5, 6, dtype=torch.int64, device="cuda")
        out = torch.ops.torch_replay.engram_lookup(table, None, rows)
        assert out.device.type == "cuda" and out.shape == (5, 6, 64) and out.dtype == torch.float16
        with pytest.raises(Exception, match="rows is on cpu, expected on cuda:0 like table"):
            torch.ops.torch_replay.engram_lookup(torch.empty(9, 64, device="cuda"), None, i64(0)[None])


def broken_oldest_first(lookback, *args, **kwargs):
    naive.engram_lookback(lookback, *args, **kwargs)
    lookback.copy_(lookback.flip(1))


def broken_unblocks(ids, positions, query_start_loc, lookback, token_map, *args, out):
    """A masked id hashes as id 0 and blocks nothing."""
    naive.ngram_hash(ids, positions, query_start_loc, lookback, token_map.clamp(min=0), *args, out=out)


def broken_multiplies(table, scales, rows, *, out):
    """Missing rows are multiplied by zero instead of being left out."""
    naive.engram_lookup(table, scales, rows.clamp(min=0), out=out)
    out *= (rows >= 0)[..., None]


def broken_scale(table, scales, rows, *, out):
    naive.engram_lookup(table, None if scales is None else scales.flip(1), rows, out=out)


@pytest.mark.parametrize("op, kernel", [
    ("engram_lookback", broken_oldest_first),
    ("ngram_hash", broken_unblocks),
    ("engram_lookup", broken_multiplies),
    ("engram_lookup", broken_scale),
])
def test_negative_control(op, kernel):
    """An op broken on purpose fails the suite."""
    with override_kernel(op, "cpu", kernel), pytest.raises(AssertionError):
        for sample in samples(op):
            for seed in range(4):
                run(sample, seed)


BAD = {
    "lookback dtype": ("engram_lookback", dict(lookback=torch.zeros(5, 3, dtype=torch.int64)),
                       "lookback is of dtype torch.int64, expected torch.int32"),
    "lookback rows": ("engram_lookback", dict(lookback=torch.zeros(4, 3, dtype=torch.int32)),
                      "lookback is of 4 rows, expected B = 5 or more"),
    "depth 0": ("engram_lookback", dict(lookback=torch.zeros(5, 0, dtype=torch.int32)), "lookback is of depth 0"),
    "start rows": ("engram_lookback", dict(query_start_loc=i32(0, 4, 8, 12, 16)), r"expected \[B\+1\] with B = 5"),
    "too many requests": ("engram_lookback", dict(num_reqs=i32(6)), r"num_reqs is 6 .* values in \[0, 5\]"),
    "request out of range": ("engram_lookback", dict(idx_mapping=i32(8, 0, 0, 0, 0)), r"idx_mapping is 8"),
    "chunk beyond the history": ("engram_lookback", dict(token_ids=torch.zeros(8, 5)[:, :5].int()), "positions is"),
    "float history": ("engram_lookback", dict(token_ids=torch.zeros(8, 30)), "token_ids is of dtype torch.float32"),
    "n does not fit": ("ngram_hash", dict(multipliers=torch.ones(2, 3, dtype=torch.int64)),
                       r"primes is of shape \(2, 3, 3\), expected \[L, n-1, H\] with n = 3"),
    "layers": ("ngram_hash", dict(offsets=torch.zeros(1, 3, 3, dtype=torch.int64)), "offsets is of shape .* L = 2"),
    "unigrams": ("ngram_hash", dict(multipliers=torch.ones(2, 1, dtype=torch.int64)), "orders up to 1, expected 2"),
    "shallow lookback": ("ngram_hash", dict(lookback=torch.zeros(5, 2, dtype=torch.int32)),
                         "lookback is of depth 2, expected n - 1 = 3 or more"),
    "few lookback rows": ("ngram_hash", dict(lookback=torch.zeros(4, 3, dtype=torch.int32)), "B = 5 or more"),
    "no start": ("ngram_hash", dict(query_start_loc=torch.tensor(0)), r"query_start_loc is of shape \(\)"),
    "prime 0": ("ngram_hash", dict(primes=torch.zeros(2, 3, 3, dtype=torch.int64)), "primes is 0"),
    "negative pad": ("ngram_hash", dict(pad_id=i32(-1)), "pad_id is -1"),
    "multiplier 0": ("ngram_hash", dict(multipliers=torch.zeros(2, 4, dtype=torch.int64)), "multipliers is 0"),
    "overflow": ("ngram_hash", dict(multipliers=torch.full((2, 4), 2**60)), r"multipliers is 1152921504606846976, "
                 r"expected at most \(2\^63 - 1\)"),
    "two pads": ("ngram_hash", dict(pad_id=i32(1, 2)), r"pad_id is of shape \(2,\)"),
    "row beyond the table": ("engram_lookup", dict(rows=i64(1, 50)[None]), r"rows is 50 .* values in \[-1, 49\]"),
    "no exponents": ("engram_lookup", dict(scales=None), "scales is None, expected exponents exactly for float8"),
    "exponents of 16 bits": ("engram_lookup", dict(table=torch.zeros(50, 64)), "scales is given, expected exponents"),
    "odd float8 rows": ("engram_lookup", dict(table=torch.zeros(50, 48).to(torch.float8_e4m3fn)), "a multiple of 32"),
    "exponent count": ("engram_lookup", dict(scales=torch.zeros(50, 4, dtype=torch.uint8)), "scales is of shape"),
    "float rows": ("engram_lookup", dict(rows=torch.zeros(1, 2)), "rows is of dtype torch.float32"),
    "integer table": ("engram_lookup", dict(table=torch.zeros(50, 64, dtype=torch.uint8)), "table is of dtype"),
}


@pytest.mark.parametrize("op, change, message", BAD.values(), ids=BAD)
def test_bad_input(op, change, message):
    """A ValueError names the argument, what came and what was expected; nothing has been written."""
    sample = {"engram_lookback": 1, "ngram_hash": 1, "engram_lookup": 1}[op]
    arguments = named(op, *samples(op)[sample].make())
    arguments.update(change)
    assert_refused(OPS[op].wrapper, arguments, f"{op}: .*{message}")


def test_wrong_types():
    """A TypeError names the argument."""
    arguments = named("ngram_hash", *samples("ngram_hash")[0].make())
    with pytest.raises(TypeError, match="ngram_hash: pad_id is int, expected Tensor"):
        ngram_hash(**dict(arguments, pad_id=3))
    with pytest.raises(TypeError, match="engram_lookup: scales is float, expected Tensor or None"):
        engram_lookup(torch.zeros(4, 4), 1.0, i64(0)[None])
