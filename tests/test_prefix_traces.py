"""Random traces of a prefix cache over memory in miniature: nobody ever reads what other tokens wrote."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_prefix_cache import make, new
from test_scheduler import Guess

from torch_replay.engine.prefix_cache import PrefixCache, extend_keys
from torch_replay.states.groups import INNER_EDGES


class World:
    """Memory in miniature: each KV slot and snapshot remembers the tokens that led to it, and every read is checked.

    `pads`: replayed tokens go to no shared block, as `ops.pad_replayed_slots` sees to.
    """

    def __init__(self, scheduler, pads=True):
        self.scheduler, self.pads = scheduler, pads
        self.kv = {name: {} for name in scheduler.pools}
        self.snapshots, self.seen = {}, Counter()

    def start(self, plan):
        """The states of admitted requests come from snapshots of their own first tokens."""
        for request in plan.admitted:
            if request.hit_tokens:
                self.seen["hits"] += 1
                self.seen["replays"] += request.replay_start > 0
                if self.scheduler.prefix.snapshots:
                    assert self.snapshots[request.source] == tuple(request.tokens[: request.num_computed])
            assert (request.source > 0) == (request.hit_tokens > 0 and self.scheduler.prefix.snapshots is not None)

    def read(self, request, start):
        for group in self.scheduler.groups:
            table, window = request.tables[group.name], group.sliding_window
            low = 0 if window is None else max(request.replay_start, start - window + 1, 0)
            for position in range(low, start):
                slot = table[position // self.scheduler.block_size], position % self.scheduler.block_size
                assert slot[0] > 0, "a null block in view"
                assert self.kv[group.name][slot] == tuple(request.tokens[: position + 1])

    def write(self, request, start, tokens, end):
        """Tokens start .. end of `tokens`; rejected drafts are written as well."""
        window = self.scheduler.prefix.replay_window
        for group in self.scheduler.groups:
            for position in range(start, end):
                replayed = request.replay_start and position < request.replay_start + window
                if replayed and group.prefix_cacheable and self.pads:
                    continue
                block = request.tables[group.name][position // self.scheduler.block_size]
                pool = self.scheduler.pools[group.name]
                assert block > 0 and pool._holders[block] == 1, "written by its only holder"
                assert block not in pool._key_of, "what is published does not change"
                slot = block, position % self.scheduler.block_size
                self.kv[group.name][slot] = tuple(tokens[: position + 1])

    def publish(self, request, before, after, tokens, prefilling):
        """A decode publishes the last edge it crossed, a prefill all in it that it has snapshots for, and INNER_EDGES
        before its end at most; the rest is junk."""
        size = self.scheduler.prefix.state_block_size
        edge = after // size * size
        assert not prefilling or sum(at < after for at in request.snapshots) <= INNER_EDGES
        for at, snapshot in request.snapshots.items():
            assert at > request.hit_tokens and at % size == 0
            due = before < at <= after if prefilling else before < at == edge
            self.snapshots[snapshot] = tuple(tokens[:at]) if due else "junk"


def forward(world, rng, request, start, count, drafts, prefilling):
    """One row of a step. Returns accepted drafts."""
    world.read(request, start)
    tokens = request.tokens + drafts
    world.write(request, start, tokens, start + count)
    accepted = 0 if prefilling else rng.randint(0, len(drafts))
    taken = count if prefilling else 1 + accepted
    world.publish(request, start, start + taken, tokens, prefilling)
    return taken, drafts[:accepted]


@st.composite
def traces(draw):
    block, state_block = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    states = draw(st.booleans())
    window = draw(st.one_of(st.none(), st.integers(1, 12), st.integers(0, 2).map(lambda n: n * block + 1)))
    if states and window:
        window = state_block * draw(st.integers(1, 3))
    return dict(
        full=draw(st.booleans()) or not (states or window), window=window, block_size=block, state_block=state_block,
        snapshots=draw(st.integers(1, 9)) if states else None, num_spec=draw(st.integers(0, 4)), max_model_len=60,
        chunk_size=draw(st.integers(1, 20)), prefill_budget=draw(st.integers(1, 30)),
        max_num_seqs=draw(st.integers(2, 4)), prefill_rows=draw(st.integers(1, 3)),
        blocks=2 + -(-60 // block) + draw(st.integers(0, 20)),
    ), draw(st.integers(0, 2**32 - 1))


def run_trace(sizes, seed, pads=True):
    rng = random.Random(seed)
    scheduler = make(**sizes, drafter=Guess(seed))
    world = World(scheduler, pads)
    stems = [[rng.randint(0, 2) for _ in range(40)] for _ in range(2)]
    coming = []
    for name in range(14):
        tokens = rng.choice(stems)[: rng.randint(1, 40)] + [rng.randint(3, 9) for _ in range(rng.randint(0, 3))]
        coming.append(new(str(name), tokens, rng.randint(1, 14), salt=rng.choice(["", "", "", "s"])))
    requests, steps = list(coming), 0
    while coming or scheduler.has_work:
        if coming and (rng.random() < 0.4 or not scheduler.has_work):
            scheduler.add(coming.pop())
        if rng.random() < 0.03:
            scheduler.abort(rng.choice(requests).id)
        if not scheduler.has_work:
            continue
        steps += 1
        assert steps < 3000
        plan = scheduler.schedule()
        world.seen["preempted"] += len(plan.preempted)
        assert scheduler.running[0] in plan.requests
        world.start(plan)
        rows = [(c.request, c.start, c.length, [], True) for c in plan.prefills]
        rows += [(r, r.num_computed, 1 + len(d), d, False) for r, d in zip(plan.decodes, plan.drafts, strict=True)]
        fails = rng.random() < 0.05
        for request, start, count, drafts, prefilling in rows:
            if fails and rng.random() < 0.5:
                continue
            done, taken = forward(world, rng, request, start, count, drafts, prefilling)
            if fails:
                continue
            scheduler.advance(request, done, taken)
            if request.num_computed < request.num_tokens and prefilling:
                continue
            request.output_ids += [*taken, rng.randint(0, 2)]
            if len(request.output_ids) >= request.params.max_tokens or rng.random() < 0.03:
                scheduler.finish(request, "stop")
        if fails:
            for request in plan.requests:
                world.snapshots.update(dict.fromkeys(request.snapshots.values(), "junk"))
            scheduler.recover()
            world.seen["failed"] += 1
        for pool in scheduler._all_pools:
            assert pool.num_used + pool.num_free + pool.num_pending == pool.num_blocks - 1
        tables = {name: {b for r in scheduler.running for b in r.tables[name] if b} for name in scheduler.pools}
        for name, pool in scheduler.pools.items():
            assert set(pool._holders) == tables[name], "held by tables and nobody else"
        if scheduler.prefix.snapshots:
            assert scheduler.prefix.snapshots.num_used == 0, "snapshots are held within a step only"
    assert not any(pool._holders for pool in scheduler._all_pools)
    world.seen["evicted"] += scheduler.prefix.evictions
    world.seen["published"] += scheduler.prefix.counts.published_snapshots
    return world.seen


def test_random_traces():
    """Shared stems, drafts, failures, aborts, preemption, tight pools: every read finds its own tokens' memory."""
    seen = Counter()

    @settings(max_examples=250, deadline=None, derandomize=True, database=None)
    @given(traces())
    def every_trace(trace):
        seen.update(run_trace(*trace))

    every_trace()
    assert all(seen[event] > 50 for event in ("hits", "replays", "preempted", "failed", "evicted", "published")), seen


def test_without_padding_the_traces_fail():
    """Negative control: a replay that writes to the shared blocks is caught."""
    sizes = dict(window=6, block_size=3, max_model_len=60, num_spec=0)
    assert run_trace(sizes, 1)["replays"]
    with pytest.raises(AssertionError, match="written by its only holder|what is published"):
        run_trace(sizes, 1, pads=False)


def test_publishing_too_early_fails_the_traces(monkeypatch):
    """Negative control: a cache that publishes a draft's edge though it was rejected hands out junk."""
    settle = PrefixCache.settle

    def eager(self, request, before, drafts, under_way=False):
        for edge in list(request.snapshots):
            extend_keys(request.prefix_keys, request.tokens + [0] * 9, self.key_step, request.cache_salt)
            self.snapshots.publish(request.snapshots[edge], self._key(request, edge))
        settle(self, request, before, drafts, under_way)

    monkeypatch.setattr(PrefixCache, "settle", eager)
    with pytest.raises(AssertionError):
        for seed in range(20):
            run_trace(dict(snapshots=9, block_size=2, num_spec=4, max_model_len=60), seed)
