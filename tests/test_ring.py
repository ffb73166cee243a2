"""The ring ops against the plain loops, and what they refuse; what `ring_commit` computes has a file of its own."""

import pytest
import torch
import truth_ring
from harness import assert_refused, call, check_sample, named, poisoned_outputs
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_replay.ops.registry import OPS, override_kernel
from torch_replay.ops.ring import naive
from torch_replay.ops.ring import samples as draw
from torch_replay.ops.ring.op import _ring_commit, compact_active, gather_block_tables, ring_commit, ring_reset
from torch_replay.ops.samples import Rng, Sample

SAMPLES = draw.SAMPLES


def i32(values):
    return torch.tensor(values, dtype=torch.int32)


def of(op):
    return [sample for sample in SAMPLES if sample.op == op]


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_against_truth(sample):
    """Every element of every mutated tensor and output equals the truth, nothing else is written."""
    for seed in range(3):
        check_sample(sample, getattr(truth_ring, sample.op), seed=seed)


def random_gather(rng):
    rows, reqs = int(rng.integers(1, 9, 1)), int(rng.integers(2, 12, 1))
    return draw.gather(rng, groups=int(rng.integers(1, 4, 1)), rows=rows, reqs=reqs, columns=int(rng.integers(1, 6, 1)),
                       num_reqs=int(rng.integers(0, min(rows, reqs) + 1, 1)), empty=int(rng.integers(0, rows, 1)))


def random_reset(rng):
    if int(rng.integers(0, 8, 1)) == 0:
        return draw.reset_chain(rng)
    rows = int(rng.integers(1, 9, 1))
    return draw.reset(rng, groups=int(rng.integers(1, 4, 1)), rows=rows, reqs=rows + int(rng.integers(1, 5, 1)),
                      columns=int(rng.integers(2, 7, 1)), empty=int(rng.integers(0, rows, 1)),
                      mapped=bool(rng.integers(0, 4, 1)))


def random_compact(rng):
    rows = int(rng.integers(1, 20, 1))
    return draw.compact(rng, groups=int(rng.integers(1, 4, 1)), rows=rows, num_reqs=int(rng.integers(0, rows + 1, 1)),
                        share=float(rng.uniform(0, 1, 1)))


@pytest.mark.parametrize("op, build", [
    ("gather_block_tables", random_gather), ("ring_reset", random_reset), ("compact_active", random_compact)])
def test_random_cases(op, build):
    """300 cases of drawn sizes, with empty rows, null slots, columns outside the table and no identity mapping."""
    for case in range(300):
        check_sample(Sample(op, f"random{case}", build), getattr(truth_ring, op))


def broken_gather_keeps_stale_rows(block_tables, request_tables, idx_mapping, num_reqs):
    before = block_tables.clone()
    naive.gather_block_tables(block_tables, request_tables, idx_mapping, num_reqs)
    block_tables[:, int(num_reqs) :] = before[:, int(num_reqs) :]


def broken_reset_row_after_row(ring_start, ring_committed, block_tables, src_cols, dst_cols, idx_mapping=None):
    for row in range(block_tables.shape[1]):
        req = torch.tensor([row]) if idx_mapping is None else idx_mapping[row : row + 1]
        naive.ring_reset(ring_start, ring_committed, block_tables[:, row : row + 1], src_cols, dst_cols, req)


def broken_compact_reads_stale_rows(plan_count, num_reqs, *, out):
    naive.compact_active(plan_count, torch.full_like(num_reqs, plan_count.shape[1]), out=out)


def broken_commit_power_of_two(*args, ring_len, **kwargs):
    naive.ring_commit(*args, ring_len=1 << (ring_len - 1).bit_length(), **kwargs)


@pytest.mark.parametrize("op, kernel", [
    ("gather_block_tables", broken_gather_keeps_stale_rows),
    ("ring_reset", broken_reset_row_after_row),
    ("ring_commit", broken_commit_power_of_two),
    ("compact_active", broken_compact_reads_stale_rows),
])
def test_negative_control(op, kernel):
    """An op broken on purpose fails the suite."""
    with override_kernel(op, "cpu", kernel), pytest.raises(AssertionError):
        for sample in of(op):
            test_against_truth(sample)


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_reference_never_asks_the_host(sample):
    """No reference kernel looks at a value (`item`, `nonzero`): under fake tensors that raises."""
    arguments = named(sample.op, *sample.make())
    with FakeTensorMode() as mode:
        fake = {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
        op = OPS[sample.op]
        out = op.body(**fake)
        getattr(naive, sample.op)(**fake, **({} if out is None else {"out": out}))


# ring_reset: vectors


def reset(start, committed, tables, src, dst, idx_mapping=None):
    start, committed = i32(start), i32(committed)
    ring_reset(start, committed, i32(tables), i32(src), i32(dst), None if idx_mapping is None else i32(idx_mapping))
    return start.tolist(), committed.tolist()


def test_reset_chain():
    """1 -> 2 and 2 -> 3 in one call: slot 3 gets what slot 2 held before the call."""
    got = reset([[0, 5, 7, 9]], [[0, 1, 2, 3]], [[[1, 2], [2, 3]]], [0, 0], [1, 1])
    assert got == ([[0, 5, 5, 7]], [[0, 1, 1, 2]])


def test_reset_swap():
    """Two requests that swap their slots: cursors follow the role."""
    assert reset([[0, 5, 7]], [[0, 1, 2]], [[[1, 2], [2, 1]]], [0, 0], [1, 1]) == ([[0, 7, 5]], [[0, 2, 1]])


def test_reset_of_one_group():
    """Live slot 42 -> 17 in group 0 only; group 1 stays as it is."""
    start, committed = torch.zeros(2, 50, dtype=torch.int32), torch.zeros(2, 50, dtype=torch.int32)
    start[:, 42], committed[:, 42] = 7, 9
    tables = i32([[[42, 17]], [[42, 42]]])
    ring_reset(start, committed, tables, i32([0]), i32([1]))
    assert (start[0, 17], committed[0, 17], start[1, 17], committed[1, 17]) == (7, 9, 0, 0)
    assert (start[:, 42] == 7).all() and (committed[:, 42] == 9).all()


def test_reset_of_a_recycled_slot():
    """Slot 3 stood at start 7, committed 9; a request that starts there has both cursors at 0."""
    assert reset([[0, 0, 0, 7]], [[0, 0, 0, 9]], [[[3]]], [-1], [0]) == ([[0, 0, 0, 0]], [[0, 0, 0, 0]])


@pytest.mark.parametrize("src, dst", [(0, 0), (0, 2), (0, -1), (-1, 3), (0, 5), (9, 2)])
def test_reset_without_a_destination(src, dst):
    """A null slot, a column on either side of the table and the source itself move nothing, the null slot neither."""
    assert reset([[4, 5, 7]], [[3, 1, 2]], [[[1, 2, 0]]], [src], [dst]) == ([[4, 5, 7]], [[3, 1, 2]])


@pytest.mark.parametrize("src", [-1, 3, 2])
def test_reset_without_a_source(src):
    """A source column outside the table or a null source slot gives 0, 0 and not the null slot's cursors."""
    assert reset([[4, 5, 7]], [[3, 1, 2]], [[[1, 2, 0]]], [src], [1]) == ([[4, 5, 0]], [[3, 1, 0]])


def test_reset_from_a_shared_source():
    """Two requests that continue one snapshot both get its cursors."""
    assert reset([[0, 5, 7, 9]], [[0, 1, 2, 3]], [[[1, 2], [1, 3]]], [0, 0], [1, 1]) == ([[0, 5, 5, 5]], [[0, 1, 1, 1]])


def test_reset_by_request():
    """Columns are by request: row 0 is request 2, row 1 has none."""
    got = reset([[0, 5, 7, 9]], [[0, 1, 2, 3]], [[[1, 2], [3, 3]]], [9, 9, 0], [0, 0, 1], [2, -1])
    assert got == ([[0, 5, 5, 9]], [[0, 1, 1, 3]])


# gather_block_tables and compact_active: vectors


def test_gather():
    """Rows beyond num_reqs and rows without a request are null, also where the buffer held something."""
    tables = torch.full((1, 4, 2), 9, dtype=torch.int32)
    gather_block_tables(tables, i32([[[1, 2], [3, 4], [5, 6]]]), i32([2, -1, 0, 1]), i32([3]))
    assert tables.tolist() == [[[5, 6], [0, 0], [1, 2], [0, 0]]]


@pytest.mark.parametrize("num_reqs, rows, count", [(4, [1, 3], 2), (3, [1], 1), (1, [], 0), (0, [], 0)])
def test_compact(num_reqs, rows, count):
    """A plan in any group lists the row; rows from num_reqs on are stale."""
    plans = i32([[-1, 0, -1, -1], [-1, -1, -1, 5]])
    with poisoned_outputs():
        active, number = compact_active(plans, torch.tensor(num_reqs))
    assert (active.tolist(), number.tolist()) == (rows + [-1] * (4 - len(rows)), [count])
    assert active.dtype == number.dtype == torch.int32


def test_one_compile_for_every_num_reqs():
    """num_reqs is a tensor, so that 1, 16 and every other count run the code compiled for the first."""
    compiled = torch.compile(compact_active, backend="aot_eager", fullgraph=True, dynamic=False)
    plans = i32([[0] * 20])
    compiled(plans, i32([20]))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for count in range(21):
            assert compiled(plans, i32([count]))[1].item() == count


# Bad input


BAD = [
    ("ring_reset", dict(idx_mapping=i32([0, 1, 2, 3, 8])), "ring_reset: idx_mapping is 8 in .* values in .-1, 7"),
    ("ring_reset", dict(ring_start=torch.zeros(2, 4, dtype=torch.int32), ring_committed=torch.zeros(
        2, 4, dtype=torch.int32), block_tables=torch.full((2, 5, 4), 4, dtype=torch.int32)), "block_tables is 4"),
    ("ring_reset", dict(block_tables=torch.ones(2, 5, 4, dtype=torch.int32), dst_cols=i32([1] * 8)),
     "dst_cols is naming slots .1, 1.* of group 0, expected every slot at most once"),
    ("ring_reset", dict(ring_start=torch.zeros(2, 33)), "ring_start is of dtype torch.float32, expected torch.int32"),
    ("ring_reset", dict(ring_committed=torch.zeros(2, 9, dtype=torch.int32)), "ring_committed is of shape .2, 9."),
    ("ring_reset", dict(src_cols=i32([0])), "dst_cols is of shape .8,., expected .reqs. with reqs = 1"),
    ("ring_reset", dict(src_cols=i32([0]), dst_cols=i32([0]), idx_mapping=None), "idx_mapping is None with 1 requests"),
    ("gather_block_tables", dict(num_reqs=i32([6])), "num_reqs is 6"),
    ("gather_block_tables", dict(num_reqs=i32([1, 2])), "num_reqs is of shape .2,., expected .1."),
    ("gather_block_tables", dict(idx_mapping=i32([8] * 5)), "idx_mapping is 8"),
    ("gather_block_tables", dict(request_tables=torch.zeros(2, 8, 4, dtype=torch.int32)), "request_tables is of shape"),
    ("gather_block_tables", dict(block_tables=torch.zeros(2, 5, 3)), "block_tables is of dtype torch.float32"),
    ("compact_active", dict(num_reqs=torch.tensor(8)), "num_reqs is 8"),
    ("compact_active", dict(plan_count=i32([1, 2])), r"plan_count is of shape \(2,\), expected \[G, B\]"),
    ("compact_active", dict(num_reqs=torch.tensor(2.0)), "num_reqs is of dtype torch.float32"),
]


@pytest.mark.parametrize("op, change, message", BAD)
def test_bad_input(op, change, message):
    """A ValueError names the argument, what came and what was expected; nothing has been written."""
    arguments = dict(named(op, *of(op)[0].make()), **change)
    assert_refused(OPS[op].overload, arguments, message)


def test_wrong_types():
    """A TypeError names the argument."""
    arguments = named("ring_reset", *of("ring_reset")[0].make())
    with pytest.raises(TypeError, match="ring_reset: src_cols is list, expected Tensor"):
        ring_reset(**dict(arguments, src_cols=[0]))
    with pytest.raises(TypeError, match="compact_active: num_reqs is int, expected Tensor"):
        compact_active(i32([[0]]), 1)
    with pytest.raises(TypeError, match="gather_block_tables: missing a required argument: 'num_reqs'"):
        gather_block_tables(i32([[[0]]]), i32([[[0]]]), i32([0]))


def test_random_draws_cover_every_case():
    """The draws above reach what they are for: fresh, moved and staying slots, and chains within a call."""
    seen = dict(fresh=0, moved=0, stays=0, chained=0)
    for case in range(300):
        rng = Rng(case, "cpu", torch.float32)
        (_, _, tables, src, dst, idx), _ = random_reset(rng)
        source, target = naive.reset_slots(tables, src, dst, idx)
        seen["fresh"] += int(((target > 0) & (source == 0)).sum())
        seen["moved"] += int(((target > 0) & (source > 0) & (source != target)).sum())
        seen["stays"] += int(((target > 0) & (source == target)).sum())
        seen["chained"] += int(any(set(s.tolist()) & set(t.tolist()) - {0} for s, t in zip(source, target)))
    assert min(seen.values()) > 30, seen


# ring_commit: the wrapper, and bad input


def arguments_of(**change):
    sample = next(sample for sample in of("ring_commit") if sample.id == "decode_only")
    return dict(named("ring_commit", *sample.make()), **change)


def test_wrapper_takes_keywords():
    """What follows query_start_loc may be passed by keyword; the result is the op's."""
    a, b = arguments_of(), arguments_of()
    del a["query_start_loc"]
    ring_commit(**a)
    call("ring_commit", b)
    for name in OPS["ring_commit"].mutates:
        assert torch.equal(a[name], b[name]), name


def test_wrapper_compiles():
    """The wrapper traces into one graph, by keyword too, and gives the same bits."""
    a, b = arguments_of(), arguments_of()
    for arguments in (a, b):
        del arguments["query_start_loc"]
    torch.compile(lambda arguments: ring_commit(**arguments), backend="aot_eager", fullgraph=True)(a)
    ring_commit(**b)
    for name in OPS["ring_commit"].mutates:
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("name", ["num_computed", "num_accepted", "is_prefilling", "block_tables", "window"])
def test_missing_arguments(name):
    """A TypeError names what is missing, whatever its place."""
    arguments = arguments_of()
    del arguments[name]
    with pytest.raises(TypeError, match=f"ring_commit.*missing .*'{name}'"):
        ring_commit(**arguments)


BAD_COMMIT = {
    "both layouts": (dict(query_start_loc=i32(range(7))), "query_start_loc is given, query_lens given, expected"),
    "no layout": (dict(query_lens=None), "query_start_loc is None, query_lens None, expected exactly one"),
    "starts too short": (dict(query_lens=None, query_start_loc=i32(range(6))), r"query_start_loc is of shape \(6,\)"),
    "starts decrease": (dict(query_lens=None, query_start_loc=i32([0, 4, 3, 5, 5, 5, 5])), "query_start_loc is"),
    "negative length": (dict(query_lens=i32([-1] * 6)), "query_lens is .*expected 0 or more"),
    "longer than the window": (dict(window=3), "query_lens is 4 tokens in decode row 3, expected at most window = 3"),
    "committed beyond the window": (dict(window=4), "ring_committed is .* values in .0, 4"),
    "ring not longer than the window": (dict(ring_len=16), "ring_len is 16, expected more than window = 16"),
    "start outside the ring": (dict(ring_len=17), "ring_start is|ring_len is 17, expected room"),
    "block size 0": (dict(block_size=0), "block_size is 0, expected 1 or more"),
    "slot outside the pool": (dict(ring_start=i32([[0] * 9] * 2), ring_committed=i32([[0] * 9] * 2)), "block_tables"),
    "request outside": (dict(idx_mapping=i32([9, 0, 1, 2, 3, 4])), "idx_mapping is 9"),
    "before token 0": (dict(num_computed=i32([0] * 9), post_step=True), "num_computed is .*after the step"),
    "plan of another size": (dict(plan_start=i32([[0] * 5] * 2)), r"plan_start is of shape \(2, 5\)"),
    "plan of int64": (dict(plan_count=torch.zeros(2, 6, dtype=torch.int64)), "plan_count is of dtype torch.int64"),
    "float flags": (dict(is_prefilling=torch.zeros(6)), "is_prefilling is of dtype torch.float32"),
    "fewer requests than rows": (dict(idx_mapping=None, num_computed=i32([0] * 5), num_accepted=i32([0] * 5),
                                      live_cols=None), "idx_mapping is None with 5 requests"),
    "live slot twice": (dict(idx_mapping=i32([0] * 6), block_tables=torch.ones(2, 6, 5, dtype=torch.int32),
                             query_lens=i32([1] * 6)), "block_tables is making slots .* live in group 0"),
}


@pytest.mark.parametrize("change, message", BAD_COMMIT.values(), ids=BAD_COMMIT)
def test_bad_commit(change, message):
    """A ValueError names the argument, what came and what was expected; nothing has been written."""
    arguments = arguments_of(**change)
    before = {name: arguments[name].clone() for name in OPS["ring_commit"].mutates}
    with pytest.raises(ValueError, match=f"ring_commit: .*({message})"):
        ring_commit(**arguments)
    for name, value in before.items():
        assert torch.equal(arguments[name], value), name


@pytest.mark.parametrize("tables, prefilling, message", [
    ([[1, 2], [3, 1]], False, "letting row 0 write slot 1 of group 0, expected no slot that row 1 lives in"),
    ([[1, 2], [3, 1]], True, "letting row 0 write slot 1 of group 0, expected no slot that row 1 lives in"),
    ([[1, 2], [1, 3]], False, "making slots .1, 1. published in group 0, expected each in one row only"),
])
def test_conflicts_between_rows(tables, prefilling, message):
    """A slot that one row publishes or resets and another lives in, or that two rows publish, is refused."""
    start, committed, *plans = torch.zeros(2, 1, 4, dtype=torch.int32).unbind() + tuple(i32([[0, 0]]) for _ in range(4))
    with pytest.raises(ValueError, match=message):
        ring_commit(start, committed, *plans, i32([tables]), query_lens=i32([4, 4]), num_computed=i32([0, 0]),
                    num_accepted=i32([4, 4]), is_prefilling=torch.tensor([prefilling, False]), live_cols=i32([1, 1]),
                    block_size=4, window=16, ring_len=20, post_step=False, materialize=True)


def test_wrong_types_of_commit():
    """A TypeError names the argument."""
    with pytest.raises(TypeError, match="ring_commit: block_tables is list, expected Tensor"):
        ring_commit(**arguments_of(block_tables=[[0]]))
    with pytest.raises(TypeError, match="ring_commit: post_step is int, expected bool"):
        ring_commit(**arguments_of(post_step=1))
    with pytest.raises(TypeError, match="ring_commit: window is float, expected int"):
        _ring_commit(**arguments_of(window=16.0))
