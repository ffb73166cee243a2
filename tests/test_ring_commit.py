"""`ring_commit` against the specification: exact vectors and several hundred drawn steps."""

import pytest
import torch
import truth_ring
from harness import call, check_sample, named

from torch_replay.ops.mamba2.op import check_materialize_values
from torch_replay.ops.registry import OPS, override_kernel
from torch_replay.ops.ring import naive
from torch_replay.ops.ring import samples as draw
from torch_replay.ops.ring.op import ring_commit
from torch_replay.ops.samples import Sample


def i32(values):
    return torch.tensor(values, dtype=torch.int32)


class Step:
    """One request in row 1 of 2 (row 0 is empty), request 2 of 3. table [G][C]; cursors {slot: (start, committed)}."""

    def __init__(self, table, cursors=None, slots=12, ring_len=20, window=16, block_size=4, materialize=True):
        self.groups = len(table)
        self.tables = i32([[[11] * len(row), row] for row in table])
        self.start, self.committed = torch.zeros(2, self.groups, slots, dtype=torch.int32)
        self.start[:, 0], self.committed[:, 0] = -5, 77
        for slot, (start, committed) in (cursors or {}).items():
            self.start[:, slot], self.committed[:, slot] = start, committed
        self.sizes = dict(ring_len=ring_len, window=window, block_size=block_size, materialize=materialize)

    def run(self, q, accepted, after, prefilling=False, live=0, uniform=True, post_step=False, kernel=ring_commit):
        """Commits q tokens so that `after` are computed; returns the plan (src, dst, start, count) by group."""
        moved = q if prefilling else min(max(accepted, 0), q)
        computed = after if post_step else after - moved
        plans = torch.full((4, self.groups, 2), 99, dtype=torch.int32)
        lens = i32([0, q])
        arguments = dict(query_start_loc=None, query_lens=lens) if uniform else dict(
            query_start_loc=i32([0, 0, q]), query_lens=None)
        positional = [self.start, self.committed, *plans, self.tables, *arguments.values(), i32([9, 9, computed]),
                      i32([9, 9, accepted]), torch.tensor([True, prefilling]), i32([0, 0, live]), i32([-1, 2])]
        kernel(*positional, **self.sizes, post_step=post_step)
        assert plans[:, :, 0].T.tolist() == [[0, 0, 0, -1]] * self.groups, "the empty row has a plan"
        assert (self.start[:, 0] == -5).all() and (self.committed[:, 0] == 77).all(), "the null slot was written"
        return [tuple(plan) for plan in plans[:, :, 1].T.tolist()]

    def at(self, slot, group=0):
        return int(self.start[group, slot]), int(self.committed[group, slot])


NO_PLAN = (0, 0, 0, -1)


def test_public_vector():
    """W 16, R 20: the published sequence ends at start 4, committed 1. Its step of 18 tokens is refused: no kernel runs
    it, as more tokens than the window would overwrite rows being folded. The reference alone is held to the vector."""
    step = Step([[1]], block_size=1000)
    for q, accepted in ((4, 2), (4, 1), (14, 3)):
        step.run(q, accepted, 50)
    with pytest.raises(ValueError, match="query_lens is 18 tokens in decode row 1, expected at most window = 16"):
        step.run(18, 2, 50)
    with pytest.raises(ValueError, match="query_start_loc is 18 tokens in decode row 1"):
        step.run(18, 2, 50, uniform=False)
    assert step.at(1) == (3, 3)
    step.run(18, 2, 50, kernel=naive.ring_commit)
    for q, accepted in ((16, 16), (1, 1)):
        step.run(q, accepted, 50)
    assert step.at(1) == (4, 1)


@pytest.mark.parametrize("start, committed, q, accepted, want", [
    (7, 12, 4, 4, (7, 16)),  # the window's edge: no flush
    (7, 13, 4, 4, (0, 4)),  # flush
    (7, 13, 1, 1, (7, 14)),  # the row's own length counts, not the longest
    (7, 16, 1, 1, (3, 1)),
    (18, 5, 12, 3, (3, 3)),  # 23 mod 20; a power-of-two mask would give 19 or 23
    (19, 1, 16, 16, (20, 16)),  # q = T = W, the ring has 32 rows
    (7, 14, 2, 0, (7, 14)),  # nothing accepted: frozen
    (7, 14, 4, 0, (1, 0)),  # nothing accepted, but the forward folded 14 rows
    (7, 3, 2, 9, (7, 5)),  # accepted is clamped to q
    (7, 3, 2, -1, (7, 3)),
    (7, 16, 0, 1, (7, 16)),  # an empty row
])
@pytest.mark.parametrize("uniform", [True, False], ids=["query_lens", "query_start_loc"])
@pytest.mark.parametrize("post_step", [False, True])
def test_cursors(start, committed, q, accepted, want, uniform, post_step):
    """Cursors of a decode row, in both layouts and with num_computed from before and after the step."""
    step = Step([[3]], {3: (start, committed)}, block_size=1000, ring_len=32 if q == 16 else 20)
    assert step.run(q, accepted, 50, uniform=uniform, post_step=post_step) == [NO_PLAN]
    assert step.at(3) == want


@pytest.mark.parametrize("start, committed, q, accepted, after, size, cursors, plan", [
    (2, 4, 4, 2, 4, 4, (2, 6), (2, 6)),  # published vectors
    (2, 13, 4, 3, 6, 4, (15, 3), (15, 1)),
    (0, 0, 7, 7, 515, 512, (0, 7), (0, 4)),  # 508 + 7 over 512
    (0, 0, 7, 7, 130, 128, (0, 7), (0, 5)),  # 123 + 7 over 128
    (5, 9, 4, 3, 8, 8, (5, 12), (5, 12)),  # at the last accepted token
    (5, 9, 4, 3, 10, 8, (5, 12), (5, 10)),  # at the first
    (5, 9, 4, 3, 11, 8, (5, 12), None),  # one token later: it was due a step ago
    (5, 9, 4, 3, 7, 8, (5, 12), None),
    (5, 9, 4, 1, 8, 8, (5, 10), (5, 10)),  # a single accepted token
    (5, 9, 4, 0, 8, 8, (5, 9), None),  # none accepted: at the edge, but not by this step
    (5, 16, 4, 0, 8, 8, (1, 0), None),
    (5, 14, 4, 4, 9, 8, (19, 4), (19, 3)),  # the flushed rows are in the checkpoint already
    (0, 2, 7, 7, 10, 2, (0, 9), (0, 9)),  # several edges in one step: the last one only
    (0, 2, 7, 6, 11, 2, (0, 8), (0, 7)),
    (0, 3, 1, 1, 1600, 1600, (0, 4), (0, 4)),  # chunk ended mid block at 364 and crosses 1600 much later
    (0, 3, 1, 1, 364, 1600, (0, 4), None),
])
@pytest.mark.parametrize("post_step", [False, True])
def test_snapshot(start, committed, q, accepted, after, size, cursors, plan, post_step):
    """Where a snapshot starts and how many rows it folds; the live request goes on undisturbed."""
    column = after // size - 1
    table = [0] * (max(column, 0) + 2)
    table[max(column, 0)], table[-1] = 5, 3
    step = Step([table], {3: (start, committed), 5: (9, 9)}, block_size=size)
    got = step.run(q, accepted, after, live=len(table) - 1, post_step=post_step)
    assert got == [NO_PLAN if plan is None else (3, 5, *plan)]
    assert step.at(3) == cursors
    assert step.at(5) == ((9, 9) if plan is None else (0, 0))


@pytest.mark.parametrize("accepted, after, plan, cursors", [
    (2, 8, (3, 3, 6, 7), (0, 0)),  # in place at the edge: canonical
    (3, 9, NO_PLAN, (6, 8)),  # past the edge: the rows beyond it would be lost
])
def test_destination_is_the_live_slot(accepted, after, plan, cursors):
    """dst == live."""
    step = Step([[9, 3]], {3: (6, 5), 9: (1, 1)}, block_size=4)
    assert step.run(4, accepted, after, live=1) == [plan]
    assert (step.at(3), step.at(9)) == (cursors, (1, 1))


def test_destination_is_the_live_slot_after_a_flush():
    """In place with a flush: only the new rows are folded, from where the window now starts."""
    step = Step([[3]], {3: (18, 14)}, block_size=4)
    assert step.run(4, 2, 4) == [(3, 3, 12, 2)]
    assert step.at(3) == (0, 0)


@pytest.mark.parametrize("tables, plans, cursors", [
    ([[0, 3], [5, 3]], [NO_PLAN, (3, 5, 2, 6)], [((2, 6), (9, 9)), ((2, 6), (0, 0))]),  # group 0: no destination
    ([[5, 0], [5, 3]], [NO_PLAN, (3, 5, 2, 6)], [((2, 4), (9, 9)), ((2, 6), (0, 0))]),  # group 0: no live slot
    ([[5, 3], [0, 3]], [(3, 5, 2, 6), NO_PLAN], [((2, 6), (0, 0)), ((2, 6), (9, 9))]),
    ([[5, 3], [6, 4]], [(3, 5, 2, 6), (4, 6, 2, 6)], [((2, 6), (0, 0)), ((2, 4), (9, 9))]),
])
def test_plans_are_per_group(tables, plans, cursors):
    """A group without a slot neither publishes a stale slot nor keeps the others from publishing."""
    step = Step(tables, {3: (2, 4), 4: (2, 4), 5: (9, 9)})
    assert step.run(4, 2, 4, live=1) == plans
    assert [(step.at(3, g), step.at(5, g)) for g in (0, 1)] == cursors


@pytest.mark.parametrize("live", [-1, 2, 100])
def test_live_column_outside_the_table(live):
    """No live slot: nothing moves, nothing is planned."""
    step = Step([[3, 5]], {3: (2, 4), 5: (9, 9)})
    assert step.run(4, 2, 4, live=live) == [NO_PLAN]
    assert (step.at(3), step.at(5)) == ((2, 4), (9, 9))


@pytest.mark.parametrize("before, q, live, reset, plan", [
    (0, 4, 0, {1}, None),  # ends on an edge in its own column: already there
    (0, 4, 3, {1, 4}, (4, 1, 0, 0)),  # elsewhere: a copy
    (0, 3, 3, {1, 4}, None),  # mid block
    (3, 6, 3, {1, 2, 3, 4}, None),  # 3..8 touches columns 0, 1, 2
    (4, 4, 3, {2, 4}, (4, 2, 0, 0)),  # from an edge on: column 0 is not touched
    (3, 1, 3, {1, 4}, (4, 1, 0, 0)),  # a chunk of one token
    (5, 30, 3, {2, 3, 4}, None),  # runs past the table's end
    (6, 30, 3, {2, 3, 4}, None),  # and ends on an edge there
    (60, 4, 3, {4}, None),
])
@pytest.mark.parametrize("post_step", [False, True])
def test_prefill(before, q, live, reset, plan, post_step):
    """A chunk resets every column it touched and its live slot, and copies at an edge (block size 4, C = 4)."""
    step = Step([[1, 2, 3, 4]], {slot: (slot, slot) for slot in range(1, 12)})
    got = step.run(q, 1, before + q, prefilling=True, live=live, post_step=post_step)
    assert got == [NO_PLAN if plan is None else plan]
    assert {slot for slot in range(1, 12) if step.at(slot) == (0, 0)} == reset
    assert all(step.at(slot) in ((0, 0), (slot, slot)) for slot in range(1, 12))


def test_prefill_skips_null_slots():
    """Null columns and a null live slot: the rest is still reset, no plan."""
    step = Step([[1, 0, 2]], {slot: (slot, slot) for slot in range(1, 12)})
    assert step.run(12, 12, 12, prefilling=True, live=1) == [NO_PLAN]
    assert (step.at(1), step.at(2), step.at(3)) == ((0, 0), (0, 0), (3, 3))


@pytest.mark.parametrize("prefilling, cursors", [(True, (0, 0)), (False, (2, 8))])
def test_mode_none(prefilling, cursors):
    """Without snapshots a prefill resets the live slot alone, and no plan is made at an edge."""
    step = Step([[3, 5]], {3: (2, 4), 5: (9, 9)}, materialize=False)
    assert step.run(4, 4, 4, prefilling=prefilling) == [NO_PLAN]
    assert (step.at(3), step.at(5)) == (cursors, (9, 9))


def test_last_prompt_chunk_of_one_token_as_decode():
    """64 + 1 + decode: the one-token chunk that ran as a decode row is a ring row, and later steps add to it."""
    step = Step([[3]], {3: (7, 9)}, block_size=1000)
    step.run(64, 1, 64, prefilling=True)
    step.run(1, 1, 65)
    assert step.at(3) == (0, 1)
    step.run(4, 2, 67)
    assert step.at(3) == (0, 3)


def test_preempted_and_resumed():
    """Prompt 10, 5 generated, preempted, resumed with a chunk of 15: cursors begin anew; the next step commits 1."""
    step = Step([[3]], block_size=1000)
    step.run(10, 1, 10, prefilling=True)
    for after in range(11, 16):
        step.run(1, 1, after)
    assert step.at(3) == (0, 5)
    step.run(15, 1, 15, prefilling=True)
    assert step.at(3) == (0, 0)
    step.run(1, 1, 16)
    assert step.at(3) == (0, 1)


def test_one_rejection_then_full_accepts():
    """A rejection counts once: ten steps that accept all tokens after it lose nothing."""
    step, committed, total = Step([[3]], block_size=1000), 0, 0
    for accepted in [1] + [4] * 10:
        flushed = committed + 4 > 16
        committed, total = (accepted if flushed else committed + accepted), total + (committed if flushed else 0)
        step.run(4, accepted, 100)
        assert step.at(3) == (total % 20, committed)


def test_padded_prompt_tail():
    """Two real tokens padded to four count as two; an empty draft in an engine of T = 4 counts one."""
    step = Step([[3]], block_size=1000)
    step.run(2, 2, 2)
    step.run(1, 1, 3)
    assert step.at(3) == (0, 3)


def test_small_batch_route():
    """window 0 folds whatever was committed; the next step with window 16 goes on from the new cursors."""
    step = Step([[3]], {3: (18, 5)}, block_size=1000, window=0)
    step.run(4, 2, 50)
    assert step.at(3) == (3, 2)
    step.sizes["window"] = 16
    step.run(4, 3, 53)
    assert step.at(3) == (3, 5)


# Drawn cases


def random_commit(rng):
    """Sizes drawn independently of each other; window 0 now and then; blocks shorter and longer than a step."""
    one = lambda low, high: int(rng.integers(low, high, 1))  # noqa: E731
    rows, tokens, columns = one(2, 10), one(1, 17), one(1, 6)
    window = 0 if one(0, 6) == 0 else tokens + one(0, 8)
    return draw.commit(
        rng, groups=one(1, 4), rows=rows, reqs=rows + one(1, 4), columns=columns, tokens=tokens, window=window,
        ring_len=max(window, tokens) + tokens + one(0, 6), block_size=one(1, 21), empty=one(0, rows),
        padded=one(0, 2), mapped=one(0, 5) > 0, uniform=bool(one(0, 2)), post_step=bool(one(0, 2)),
        materialize=one(0, 5) > 0, prefilling=(0.0, 0.3, 1.0)[one(0, 3)], null=(0.0, 0.2)[one(0, 2)],
        live=one(0, 4) > 0, dtype=(torch.int32, torch.int64)[one(0, 2)])


CASES = [Sample("ring_commit", f"random{case}", random_commit) for case in range(800)]
ROW_ARGUMENTS = ("block_tables", "query_start_loc", "query_lens", "num_computed", "num_accepted", "is_prefilling",
                 "live_cols", "idx_mapping", "block_size", "post_step", "materialize")


def test_random_cases():
    """800 drawn steps: every cursor and every plan element equals the truth, nothing else is written."""
    for sample in CASES:
        check_sample(sample, truth_ring.ring_commit)


def test_random_cases_cover_every_rule():
    """The drawn steps reach every branch, or they would prove little."""
    seen = dict.fromkeys(("decode plans", "copies", "in place", "lost in place", "one group only", "edges skipped"), 0)
    for sample in CASES:
        arguments = named("ring_commit", *sample.make())
        if not arguments["materialize"]:
            continue
        rows = naive.commit_rows(**{name: arguments[name] for name in ROW_ARGUMENTS})
        due = rows.active & ~rows.prefilling & (rows.edge > 0) & (rows.edge > rows.after - rows.accepted)
        aliased = due & (rows.live > 0) & (rows.live == rows.dst)
        seen["decode plans"] += int((rows.planned & ~rows.prefilling).sum())
        seen["copies"] += int((rows.planned & rows.prefilling).sum())
        seen["in place"] += int((aliased & rows.planned).sum())
        seen["lost in place"] += int((aliased & ~rows.planned).sum())
        seen["one group only"] += int((rows.planned.any(0) & ~rows.planned.all(0)).sum())
        seen["edges skipped"] += int((due & (rows.accepted > 2 * arguments["block_size"])).sum())
    assert min(seen.values()) > 20, list(seen.values())


def test_plans_satisfy_the_materialise_op():
    """No row's destination is another row's source, counts fit the ring, slots are real: materialise accepts it all."""
    for sample in CASES:
        a = named("ring_commit", *sample.make())
        call("ring_commit", a)
        pool = torch.empty(1, a["ring_start"].shape[1])
        rows = torch.arange(a["block_tables"].shape[1])
        check_materialize_values("mamba2_materialize", pool, a["ring_len"], a["src_slots"], a["dst_slots"],
                                 a["plan_start"], a["plan_count"], torch.arange(len(a["ring_start"])), rows)
        assert (a["plan_count"] <= (a["window"] or a["ring_len"])).all()


@pytest.mark.parametrize("turn", ["post_step", "layout"])
def test_equivalent_calls(turn):
    """num_computed from before or after the step, and either layout of the lengths, give the same result."""
    for sample in CASES[:200]:
        a, b = (named("ring_commit", *sample.make()) for _ in range(2))
        lens = a["query_lens"] if a["query_start_loc"] is None else a["query_start_loc"].diff()
        if turn == "layout":
            b["query_lens"] = lens if a["query_lens"] is None else None
            starts = torch.cat([lens.new_zeros(1), lens.cumsum(0).to(lens.dtype)])
            b["query_start_loc"] = starts if a["query_start_loc"] is None else None
        else:
            for row in range(len(lens)):
                req = row if a["idx_mapping"] is None else int(a["idx_mapping"][row])
                accepted = min(max(int(a["num_accepted"][req]), 0), int(lens[row]))
                moved = int(lens[row]) if a["is_prefilling"][row] else accepted
                if req >= 0:
                    b["num_computed"][req] += -moved if a["post_step"] else moved
            b["post_step"] = not a["post_step"]
        for arguments in (a, b):
            call("ring_commit", arguments)
        for name in OPS["ring_commit"].mutates:
            assert torch.equal(a[name], b[name]), f"{sample}: {name}"


def broken_clamps_accepted_to_one(*args, **kwargs):
    args = list(args)
    args[10] = args[10].clamp(min=1)
    naive.ring_commit(*args, **kwargs)


def broken_plans_by_group_0(*args, **kwargs):
    naive.ring_commit(*args, **kwargs)
    for plan in args[2:6]:
        plan[1:] = plan[:1]


def broken_publishes_before_the_live_update(*args, **kwargs):
    before = [cursors.clone() for cursors in args[:2]]
    naive.ring_commit(*args, **kwargs)
    in_place = (args[2] == args[3]) & (args[2] > 0)
    for cursors, old in zip(args[:2], before):
        for group, row in in_place.nonzero().tolist():
            cursors[group, args[2][group, row]] = old[group, args[2][group, row]]


@pytest.mark.parametrize("kernel", [
    broken_clamps_accepted_to_one, broken_plans_by_group_0, broken_publishes_before_the_live_update])
def test_negative_control(kernel):
    """Defects of published kernels, built in on purpose, are found."""
    with override_kernel("ring_commit", "cpu", kernel), pytest.raises(AssertionError):
        test_random_cases()


def test_draws_are_never_the_identity():
    """A mapping that happened to be the identity would hide a mix-up of rows and requests."""
    for sample in CASES:
        mapping = named("ring_commit", *sample.make())["idx_mapping"]
        assert mapping is None or mapping.tolist() != list(range(len(mapping)))
