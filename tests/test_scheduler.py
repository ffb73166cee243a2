"""Requests and scheduler: what a step may contain, who owns which block, and that everybody finishes."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_replay.engine.block_pool import BlockPool
from torch_replay.engine.drafter import NoDraft
from torch_replay.engine.request import Request, SamplingParams
from torch_replay.engine.scheduler import Plan, Scheduler
from torch_replay.states.groups import KVGroup


class Guess:
    """Drafts of varying length, at times more than allowed."""

    def __init__(self, seed=0):
        self.random = random.Random(seed)

    def propose(self, tokens, limit):
        return [7] * self.random.randint(0, limit + 2)


def make(groups=(), drafter=None, **sizes):
    defaults = dict(max_num_seqs=4, max_model_len=64, block_size=4, prefill_budget=16, chunk_size=8, prefill_rows=2,
                    num_spec=0)
    return Scheduler(list(groups), **(defaults | sizes), drafter=drafter or NoDraft())


def new(name, length, max_tokens=8):
    return Request(name, list(range(length)), SamplingParams(max_tokens=max_tokens))


def commit(scheduler, plan, chooser=None, stop_rate=0.0):
    """A model that accepts a random number of drafts and now and then ends a request; does what the engine does."""
    for chunk in plan.prefills:
        scheduler.advance(chunk.request, chunk.length)
    made = [(chunk.request, 1) for chunk in plan.prefills if chunk.last]
    for request, drafts in zip(plan.decodes, plan.drafts, strict=True):
        accepted = 1 + (chooser.randint(0, len(drafts)) if chooser else len(drafts))
        scheduler.advance(request, accepted, drafts[: accepted - 1])
        made.append((request, accepted))
    for request, count in made:
        request.output_ids += [7] * count
        room = min(request.params.max_tokens - len(request.output_ids), scheduler.max_model_len - request.num_tokens)
        assert room >= 0
        if room == 0 or (chooser and chooser.random() < stop_rate):
            scheduler.finish(request, "length" if room == 0 else "stop")


def run(scheduler, steps=10_000):
    """Steps until nothing is left; the plans."""
    plans = []
    while scheduler.has_work:
        plans.append(scheduler.schedule())
        check(scheduler, plans[-1])
        commit(scheduler, plans[-1])
        assert len(plans) < steps
    return plans


def owned(scheduler):
    """Blocks in tables, by group, and request indices in use."""
    tables = {name: [b for r in scheduler.running for b in r.tables[name] if b] for name in scheduler.pools}
    return tables, [r.index for r in scheduler.running]


def check(scheduler, plan):
    """Everything that must hold right after `schedule`."""
    tables, indices = owned(scheduler)
    for name, pool in scheduler.pools.items():
        assert len(set(tables[name])) == len(tables[name]) == pool.num_used
        assert all(0 < block < pool.num_blocks for block in tables[name])
        assert pool.num_used + pool.num_free + pool.num_pending == pool.num_blocks - 1
    assert len(set(indices)) == len(indices) and all(0 <= i < scheduler.max_num_seqs for i in indices)

    rows = plan.requests
    assert len(set(rows)) == len(rows) and rows, "a step with work to do must do some"
    assert not set(rows) & set(plan.preempted)
    assert plan.decodes == [r for r in scheduler.running if r.is_decoding], "every decoding request decodes"
    assert scheduler.running[0] in rows, "the oldest advances"
    assert len(plan.prefills) <= scheduler.prefill_rows
    assert sum(p.length for p in plan.prefills) <= scheduler.prefill_budget
    for p in plan.prefills:
        assert not p.request.is_decoding and p.start == p.request.num_computed
        assert 1 <= p.length <= scheduler.chunk_size and p.start + p.length <= p.request.num_tokens
        assert p.last == (p.start + p.length == p.request.num_tokens)
        assert covered(scheduler, p.request, p.start, p.length)
    for r, drafts in zip(plan.decodes, plan.drafts, strict=True):
        assert len(drafts) <= scheduler.num_spec
        assert len(r.output_ids) + len(drafts) + 1 <= r.params.max_tokens
        assert r.num_tokens + len(drafts) + 1 <= scheduler.max_model_len
        assert covered(scheduler, r, r.num_computed, 1 + len(drafts))
    for r in scheduler.waiting:
        assert r.index == -1 and r.num_computed == 0 and not any(r.tables.values())
    arrivals = [r.arrival for r in scheduler.waiting]
    assert arrivals == sorted(arrivals)


def in_view(scheduler, request):
    """Blocks of a request, by group, that its next query may see."""
    blocks = {}
    for group in scheduler.groups:
        seen = max(request.num_computed - (group.sliding_window or request.num_computed + 1) + 1, 0)
        blocks[group.name] = set(request.tables[group.name][seen // scheduler.block_size :])
    return blocks


def covered(scheduler, request, start, length):
    """Every position that these tokens read or write has a block."""
    for group in scheduler.groups:
        seen = 0 if group.sliding_window is None else max(start - group.sliding_window + 1, 0)
        table = request.tables[group.name]
        if any(table[p // scheduler.block_size] == 0 for p in range(seen, start + length)):
            return False
    return True


@st.composite
def traces(draw):
    """A scheduler with tight pools, and requests of which nearly all fit alone."""
    block_size, max_model_len = draw(st.integers(1, 5)), draw(st.integers(12, 40))
    sizes = dict(block_size=block_size, max_model_len=max_model_len, max_num_seqs=draw(st.integers(2, 5)),
                 prefill_budget=draw(st.integers(1, 24)), chunk_size=draw(st.integers(1, 9)),
                 prefill_rows=draw(st.integers(1, 3)), num_spec=draw(st.integers(0, 3)))
    alone = -(-(max_model_len - 1) // block_size)
    windows = draw(st.lists(st.sampled_from([None, None, 1, 2, 5, 9]), min_size=1, max_size=3))
    least = [alone if window is None else min(alone, window // block_size + 2) for window in windows]
    groups = [KVGroup(str(i), 1 + least[i] + draw(st.integers(0, 4)), window) for i, window in enumerate(windows)]
    seed = draw(st.integers(0, 2**32 - 1))
    chooser = random.Random(seed)  # drawn by hypothesis, lengths are mostly too short to meet one another
    requests = [new(f"r{i}", chooser.randint(1, max_model_len // 2), chooser.randint(1, 30)) for i in range(8)]
    return sizes, groups, requests, seed


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(traces())
def test_random_traces(trace):
    """Requests arrive, stop, are aborted, and steps fail; the plans hold their promises and everybody finishes."""
    sizes, groups, coming, seed = trace
    requests = list(coming)
    scheduler, chooser = make(groups, Guess(seed), **sizes), random.Random(seed)
    for step in range(20_000):
        if not coming and not scheduler.has_work:
            break
        if coming and (not scheduler.has_work or chooser.random() < 0.8):
            try:
                scheduler.add(coming[0])
            except ValueError:  # too large to run alone
                requests.remove(coming[0])
            coming.pop(0)
        if step < 200 and requests and chooser.random() < 0.02:
            victim = chooser.choice(requests)
            live = victim.arrival >= 0 and not victim.finished
            assert scheduler.abort(victim.id) == live
        order = list(scheduler.running)
        before = {r: (in_view(scheduler, r), r.index) for r in order}
        plan = scheduler.schedule()
        if not scheduler.has_work:
            assert plan == Plan()
            continue
        check(scheduler, plan)
        kept = len(order) - len(plan.preempted)
        assert set(plan.preempted) == set(order[kept:]), "the youngest give way"
        assert not plan.preempted or scheduler.running == order[:kept], "nobody is admitted meanwhile"
        tables, indices = owned(scheduler)
        for r in plan.preempted:  # what a step frees, it does not hand out
            assert not any(before[r][0][name] & set(tables[name]) for name in tables)
            assert before[r][1] not in indices
        if step < 200 and chooser.random() < 0.04:
            others = {r: (r.num_computed, r.index) for r in scheduler.running if r not in plan.requests}
            scheduler.recover()
            assert all(r.num_computed == 0 and r in scheduler.waiting for r in plan.requests + plan.preempted)
            assert {r: (r.num_computed, r.index) for r in scheduler.running} == others
        else:
            commit(scheduler, plan, chooser, stop_rate=0.02)
            if chooser.random() < 0.5:  # the engine may release early, or leave it to the next step
                for r in scheduler.running:
                    scheduler.release_window(r)
    assert all(r.finish_reason in ("stop", "length", "abort") for r in requests)
    assert all(len(r.output_ids) <= r.params.max_tokens and r.num_tokens <= scheduler.max_model_len for r in requests)
    for pool in (*scheduler.pools.values(), scheduler.indices):
        pool.begin_step()
        assert pool.num_used == 0 and pool.num_free == pool.num_blocks - 1


def test_check_sees_a_shared_block():
    """Negative control: a pool that hands a block out twice fails the checks of the trace test."""
    scheduler = make([KVGroup("full", 9)])
    pool = scheduler.pools["full"]
    pool.allocate = lambda count: BlockPool.allocate(pool, count) and [1] * count
    scheduler.add(new("a", 8))
    with pytest.raises(AssertionError):
        check(scheduler, scheduler.schedule())


def test_preemption_takes_the_youngest():
    """With room for one and a half, the younger request gives way, once, and both finish; drafts go first."""
    scheduler = make([KVGroup("full", 7)], Guess(), num_spec=3)
    old, young = new("old", 8, 12), new("young", 7, 12)
    scheduler.add(old)
    scheduler.add(young)
    plans = run(scheduler)
    assert (old.preemptions, young.preemptions) == (0, 1)
    assert old.finish_reason == young.finish_reason == "length"
    assert len(old.output_ids) == len(young.output_ids) == 12
    lost = next(i for i, plan in enumerate(plans) if plan.preempted)
    assert plans[lost].preempted == [young] and plans[lost].decodes == [old]
    assert plans[lost].drafts == [[]]
    redone = [p for plan in plans[lost:] for p in plan.prefills]
    assert redone[0].request is young and redone[0].start == 0 and redone[-1].last
    assert sum(p.length for p in redone) > 7, "prompt and outputs are prefilled again"


def test_two_short_rows_take_two_victims():
    """Each row that lacks a block for the next step gets one of its own: a victim with one block helps one row."""
    scheduler = make([KVGroup("full", 5)], block_size=8, prefill_rows=4)
    a, b, c, d = (new(name, length, 20) for name, length in zip("abcd", (6, 6, 1, 1)))
    for request in (a, b, c, d):
        scheduler.add(request)
    plans = []
    while not (plans and plans[-1].preempted):
        plans.append(scheduler.schedule())
        commit(scheduler, plans[-1])
    assert a.num_tokens == b.num_tokens == 9 and plans[-1].decodes == [a, b]
    assert plans[-1].preempted == [d, c]
    assert scheduler.schedule().decodes == [a, b]


def test_oldest_is_never_preempted():
    """Whatever the pressure, the request at the head keeps its blocks, and readmission keeps the order of arrival."""
    scheduler = make([KVGroup("full", 12), KVGroup("window", 12, 5)])
    requests = [new(f"r{i}", 5, 30) for i in range(6)]
    for request in requests:
        scheduler.add(request)
    admitted = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        check(scheduler, plan)
        assert scheduler.running[0] not in plan.preempted
        admitted += [p.request.arrival for p in plan.prefills if p.start == 0]
        commit(scheduler, plan)
    assert requests[0].preemptions == 0 and sum(r.preemptions for r in requests) > 0
    firsts = list(dict.fromkeys(admitted))
    assert firsts == sorted(firsts)


def test_prefill_budget_rows_and_order():
    """Chunks run first come first served, admitted requests before new ones, within rows, chunk size and budget."""
    scheduler = make(prefill_budget=10, chunk_size=6, prefill_rows=2)
    a, b, c = new("a", 13), new("b", 5), new("c", 1)
    for request in (a, b, c):
        scheduler.add(request)
    seen = [[(p.request.id, p.start, p.length, p.last) for p in plan.prefills] for plan in run(scheduler)]
    assert seen[:4] == [
        [("a", 0, 6, False), ("b", 0, 4, False)],
        [("a", 6, 6, False), ("b", 4, 1, True)],
        [("a", 12, 1, True), ("c", 0, 1, True)],
        [],
    ]


def test_one_token_prompt_is_prefilled_first():
    """A request decodes only once it has an output."""
    scheduler = make()
    request = new("a", 1, 3)
    scheduler.add(request)
    plan = scheduler.schedule()
    assert [p.request for p in plan.prefills] == [request] and not plan.decodes
    commit(scheduler, plan)
    assert scheduler.schedule().decodes == [request]


def test_draft_limits():
    """Drafts stop where max_tokens or max_model_len would be passed, and never at less."""

    class Always:
        def propose(self, tokens, limit):
            return [1] * limit

    for sizes, max_tokens in ((dict(max_model_len=64), 9), (dict(max_model_len=13), 50)):
        scheduler = make(drafter=Always(), num_spec=3, **sizes)
        request = new("a", 4, max_tokens)
        scheduler.add(request)
        plans = run(scheduler)
        assert [len(plan.drafts[0]) for plan in plans if plan.drafts] == [3, 3]
        assert request.finish_reason == "length" and len(request.output_ids) == 9


def test_window_group_needs_window_and_chunk_only():
    """A long request runs in a window pool much smaller than its text; blocks behind the window become null."""
    scheduler = make([KVGroup("window", 5, 6)], max_model_len=200, chunk_size=4)
    request = new("a", 100, 90)
    scheduler.add(request)
    held = 0
    while scheduler.has_work:
        plan = scheduler.schedule()
        check(scheduler, plan)
        table = list(request.tables["window"])
        dead = max(request.num_computed - 5, 0) // 4
        assert not any(table[:dead]) and all(table[dead:])
        held = max(held, len(table) - dead)
        commit(scheduler, plan)
    assert held <= 4 and request.preemptions == 0


def test_recover_keeps_order_and_others():
    """After a failed step its requests, and those it preempted, wait at the head in their order."""
    scheduler = make([KVGroup("full", 40)], prefill_rows=1, max_num_seqs=2)
    a, b, c = (new(name, 12) for name in "abc")
    for request in (a, b, c):
        scheduler.add(request)
    plan = scheduler.schedule()
    scheduler.recover()
    assert scheduler.waiting == [a, b, c] and a.num_computed == 0 and a.index == -1 and a.tables == {"full": []}
    scheduler.recover()  # a second time changes nothing
    assert scheduler.waiting == [a, b, c]
    plan = scheduler.schedule()
    commit(scheduler, plan)
    scheduler.abort("a")
    scheduler.recover()
    assert scheduler.waiting == [b, c] and a.finish_reason == "abort"
    run(scheduler)
    assert b.finish_reason == c.finish_reason == "length" and b.preemptions == 0


def test_failing_drafter():
    """What a drafter raises comes out, and the scheduler goes on where it was."""

    class Fails(Guess):
        def propose(self, tokens, limit):
            if self.random.random() < 0.5:
                raise ArithmeticError("no guess")
            return [1]

    scheduler = make([KVGroup("full", 9), KVGroup("window", 9, 3)], Fails(), num_spec=2)
    requests = [new(f"r{i}", 6, 12) for i in range(3)]
    for request in requests:
        scheduler.add(request)
    failures = 0
    for _ in range(1000):
        if not scheduler.has_work:
            break
        try:
            plan = scheduler.schedule()
        except ArithmeticError:
            failures += 1
            continue
        check(scheduler, plan)
        commit(scheduler, plan)
    assert failures > 3 and all(len(r.output_ids) == 12 for r in requests)


def test_release_after_finish():
    """Releasing the window of a request that has just ended, or waits, does nothing."""
    scheduler = make([KVGroup("window", 9, 2)])
    request = new("a", 8)
    scheduler.add(request)
    scheduler.release_window(request)
    commit(scheduler, scheduler.schedule())
    assert scheduler.abort("a") and request.num_computed == 8
    scheduler.release_window(request)
    assert request.tables == {"window": []}


def test_freed_indices_wait_a_step():
    """An index freed between two steps is free in the second; one freed within a step is not reused in it."""
    scheduler = make(max_num_seqs=1)
    a, b = new("a", 3), new("b", 3)
    scheduler.add(a)
    scheduler.add(b)
    commit(scheduler, scheduler.schedule())
    assert scheduler.abort("a") and not scheduler.abort("a")
    assert scheduler.schedule().prefills[0].request is b and b.index == 0


def test_add_refuses():
    """Each request that can never run is refused with its reason."""
    scheduler = make([KVGroup("full", 4), KVGroup("window", 6, 9)], max_model_len=32)
    scheduler.add(new("a", 4))
    for request, message in (
        (new("a", 4), "id: expected one that no unfinished request has"),
        (new("b", 0), "prompt_ids: expected 1 to 31 tokens, got 0"),
        (new("b", 32), "prompt_ids: expected 1 to 31 tokens, got 32"),
        (new("b", 6, 8), "at most 3 blocks in group 'full', got 4 for 6 prompt tokens and max_tokens=8"),
    ):
        with pytest.raises(ValueError, match=message):
            scheduler.add(request)
    with pytest.raises(ValueError, match="at most 3 blocks in group 'window', got 5"):
        make([KVGroup("window", 4, 9)]).add(new("b", 20))
    scheduler.add(new("b", 5, 8))  # the last of its 13 tokens needs no block
    used = new("c", 4)
    scheduler.add(used)
    scheduler.abort("c")
    with pytest.raises(ValueError, match="expected a new one"):
        scheduler.add(used)
    scheduler.add(new("c", 4))  # an id is free again after its request has finished
    with pytest.raises(ValueError, match="reason"):
        scheduler.finish(used, "bored")
    with pytest.raises(ValueError, match="unfinished one"):
        scheduler.finish(used, "stop")


def test_sizes_are_checked():
    """Sizes that are no positive integers and doubled names are refused."""
    for name in ("max_num_seqs", "block_size", "prefill_budget", "chunk_size", "prefill_rows"):
        with pytest.raises(ValueError, match=name):
            make(**{name: 0})
    with pytest.raises(TypeError, match="num_spec"):
        make(num_spec=True)
    with pytest.raises(ValueError, match="a name of its own"):
        make([KVGroup("a", 4), KVGroup("a", 4)])
    with pytest.raises(ValueError, match="group a: sliding_window is 0"):
        make([KVGroup("a", 4, 0)])
    with pytest.raises(ValueError, match="num_blocks"):
        make([KVGroup("a", 1)])


def test_block_pool():
    """All or nothing, never the null block, freed blocks one step later, double frees refused whole."""
    pool = BlockPool(5)
    assert pool.allocate(5) is None and pool.num_free == 4
    assert pool.allocate(0) == [] and pool.allocate(3) == [1, 2, 3]
    pool.free([2, 0, 0, 1])
    assert (pool.num_free, pool.num_pending, pool.num_used) == (1, 2, 1)
    assert pool.allocate(2) is None
    for bad in ([3, 3], [3, 1], [3, 9], [-1]):
        with pytest.raises(ValueError, match="each once"):
            pool.free(bad)
    assert pool.num_used == 1
    pool.begin_step()
    assert pool.allocate(3) == [4, 2, 1]


def test_request():
    """Prompt ids are copied and checked; decoding needs an index, an output and one token left."""
    prompt = [1, 2]
    request = Request("a", prompt)
    prompt.append(3)
    assert request.tokens == [1, 2] and request.num_tokens == 2 and not request.finished
    request.num_computed, request.output_ids = 2, [5]
    assert not request.is_decoding
    request.index = 0
    assert request.is_decoding and request.tokens == [1, 2, 5]
    for bad, error in (([1.0], TypeError), ([-1], ValueError), ([True], TypeError)):
        with pytest.raises(error, match=r"prompt_ids\[0\]"):
            Request("a", bad)
    with pytest.raises(TypeError, match="id"):
        Request(1, [1])
