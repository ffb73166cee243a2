"""Prefix cache: what a hit is, where chunks end, who holds what, and what goes first."""

from array import array

import pytest

from torch_replay.engine.block_pool import BlockPool
from torch_replay.engine.drafter import NoDraft
from torch_replay.engine.prefix_cache import extend_keys
from torch_replay.engine.request import Request, SamplingParams
from torch_replay.engine.scheduler import Scheduler
from torch_replay.states.groups import KVGroup


def make(full=True, window=None, snapshots=None, state_block=None, blocks=40, block_size=16, **sizes):
    """A scheduler of one full-attention group, one window group and snapshots, those that are asked for."""
    groups = [KVGroup("full", blocks)] * full + ([KVGroup("swa", blocks, window)] if window else [])
    defaults = dict(max_num_seqs=4, max_model_len=512, prefill_budget=512, chunk_size=512, prefill_rows=4, num_spec=0,
                    drafter=NoDraft(), prefix_cache=True)
    return Scheduler(groups, block_size=block_size, num_snapshots=snapshots, state_block_size=state_block,
                     **(defaults | sizes))


def new(name, tokens, max_tokens=1, salt=""):
    ids = list(range(tokens)) if isinstance(tokens, int) else tokens
    return Request(name, ids, SamplingParams(max_tokens=max_tokens), cache_salt=salt)


def run(scheduler, *requests):
    """Runs requests to their end, without a model; by request the chunks (start, length) of its prompt."""
    for request in requests:
        if request.arrival < 0:
            scheduler.add(request)
    chunks = {request.id: [] for request in requests}
    while scheduler.has_work:
        plan = scheduler.schedule()
        for chunk in plan.prefills:
            chunks[chunk.request.id].append((chunk.start, chunk.length))
            scheduler.advance(chunk.request, chunk.length)
        for request in plan.decodes:
            scheduler.advance(request, 1)
        for request in [chunk.request for chunk in plan.prefills if chunk.last] + plan.decodes:
            request.output_ids.append(7)
            if len(request.output_ids) == request.params.max_tokens:
                scheduler.finish(request, "length")
    return [chunks[request.id] for request in requests]


# name: scheduler, length of the first prompt (0, 1, 2, ...) and the second, then H, first token computed, replay_start
HITS = {
    "whole_blocks": (dict(), 100, 100, 96, 96, 0),
    "one_token_is_left": (dict(), 96, 96, 80, 80, 0),
    "shorter_prompt": (dict(), 100, 50, 48, 48, 0),
    "longer_prompt": (dict(), 50, 100, 48, 48, 0),
    "below_a_block": (dict(), 16, 16, 0, 0, 0),
    "replayed": (dict(window=32), 100, 100, 96, 64, 64),
    "mid_block_match_is_cut": (dict(window=32), 63, 100, 48, 16, 16),
    "hit_of_the_window": (dict(window=32), 47, 100, 0, 0, 0),
    "hit_of_a_block_more": (dict(window=32), 48, 100, 48, 16, 16),
    "window_1_mod_block": (dict(window=33), 100, 100, 96, 63, 63),
    "large_blocks_255_of_128": (dict(window=128, block_size=128), 255, 300, 0, 0, 0),
    "window_beyond_the_prompt": (dict(window=200), 100, 100, 0, 0, 0),
    "snapshot_at_H": (dict(snapshots=8), 100, 100, 96, 96, 0),
    "snapshot_at_H_minus_window": (dict(window=32, snapshots=8), 100, 100, 96, 64, 64),
    "state_block_is_not_the_kv_block": (dict(window=24, snapshots=8, state_block=24), 100, 100, 96, 72, 72),
    "H_waits_for_both_blocks": (dict(snapshots=8, state_block=24), 100, 100, 96, 96, 0),
    "states_alone": (dict(full=False, snapshots=8), 100, 100, 96, 96, 0),
    "states_and_window": (dict(full=False, window=32, snapshots=8), 100, 100, 96, 64, 64),
    "window_alone_has_nothing": (dict(full=False, window=32), 100, 100, 0, 0, 0),
    "nothing_at_all": (dict(full=False), 100, 100, 0, 0, 0),
}


@pytest.mark.parametrize("sizes, first, second, boundary, start, replay_start", HITS.values(), ids=HITS)
def test_hits(sizes, first, second, boundary, start, replay_start):
    """The longest boundary that blocks, snapshots and window admit, cut to whole blocks, one token left to compute."""
    scheduler = make(**sizes)
    run(scheduler, new("first", first))
    request = new("second", second)
    scheduler.add(request)
    plan = scheduler.schedule()
    assert (request.hit_tokens, plan.prefills[0].start, request.replay_start) == (boundary, start, replay_start)
    counts, window = scheduler.prefix.counts, sizes.get("window") or 0
    assert (counts.hits, counts.hit_tokens) == (int(boundary > 0), boundary)
    assert counts.replayed_tokens == boundary - start == (window if boundary else 0)
    block = scheduler.block_size
    if window:  # null below the replay, and not in the block where it starts
        table = request.tables["swa"]
        assert not any(table[: start // block]) and all(table[start // block :])
    if "full" in request.tables:
        each = block // scheduler.prefix.key_step
        keys = keys_of(range(boundary), scheduler.prefix.key_step)[each - 1 :: each]
        found = [scheduler.pools["full"].find(key) for key in keys]
        assert request.tables["full"][: boundary // block] == found and all(request.tables["full"])
    if sizes.get("snapshots"):
        keys = keys_of(range(start), scheduler.prefix.key_step)
        assert request.source == (scheduler.prefix.snapshots.find(keys[-1]) if boundary else 0)


def test_chunks_may_end_inside_the_replay():
    """W 32, prompt 100, H 96, chunks of 16: 16, 16, 4; the six shared blocks are kept from the first chunk on."""
    scheduler = make(window=32, chunk_size=16)
    run(scheduler, new("first", 100))
    held = [scheduler.pools["full"].find(key) for key in keys_of(range(100), 16)]
    request = new("second", 100)
    assert run(scheduler, request) == [[(64, 16), (80, 16), (96, 4)]]
    scheduler.add(third := new("third", 100))
    scheduler.schedule()
    assert third.tables["full"][:6] == held and len(third.tables["full"]) == 7


def keys_of(tokens, step, salt=""):
    keys = []
    extend_keys(keys, list(tokens), step, salt)
    return keys


def test_keys():
    """A key depends on every token before it and on the salt; it does not depend on how it was reached."""
    keys = keys_of(range(40), 8)
    assert len(keys) == 5 and len(set(keys)) == 5
    grown = keys_of(range(20), 8)
    extend_keys(grown, list(range(40)), 8, "")
    assert grown == keys
    assert keys_of([0, *range(2, 40), 1], 8)[0] != keys[0]
    other = keys_of([9, *range(1, 40)], 8)
    assert not set(other) & set(keys) and not set(keys_of(range(40), 8, "salt")) & set(keys)


@pytest.mark.parametrize("length", [b"", (64).to_bytes(8, "little")], ids=["bare", "with_length"])
def test_a_crafted_salt_continues_no_chain(length):
    """What an unsalted key was made of, given as a salt: the tokens that follow get another key."""
    following, last = [5] * 8, [6] * 8
    for first in range(200_000):  # until the key is text, which a salt must be
        key = keys_of([first] * 8, 8)[0]
        try:
            salt = (key + length + array("q", following).tobytes()).decode()
        except UnicodeDecodeError:
            continue
        break
    assert keys_of(last, 8, salt)[0] not in keys_of([first] * 8 + following + last, 8)
    assert keys_of([first] * 8, 8, "") != keys_of([first] * 8, 8, "\0" * 8)


def test_a_salt_that_is_no_text():
    """A lone surrogate has no bytes: refused by name, and no key is made."""
    keys = []
    with pytest.raises(ValueError, match="cache_salt: expected text that UTF-8 can encode, got '.ud800'"):
        extend_keys(keys, list(range(16)), 8, "\ud800")
    assert not keys


def test_salt_keeps_tenants_apart():
    """The same tokens under another salt share nothing."""
    scheduler = make(snapshots=8)
    run(scheduler, new("a", 100, salt="one"), new("b", 100, salt="two"))
    assert scheduler.prefix.counts.hits == 0
    run(scheduler, new("c", 100, salt="two"), new("d", 100, salt=""))
    assert scheduler.prefix.counts.hits == 1


# name: sizes, prompt, chunks, edges published
CHUNKS = {
    "inside_and_at_the_end": (dict(), 96, [(0, 96)], [16, 32, 48, 64, 80, 96]),
    "beside_an_edge": (dict(), 100, [(0, 100)], [16, 32, 48, 64, 80, 96]),
    "by_several_chunks": (dict(chunk_size=40), 100, [(0, 40), (40, 40), (80, 20)], [16, 32, 48, 64, 80, 96]),
    "chunks_below_a_block": (dict(chunk_size=6), 33, [(0, 6), (6, 6), (12, 6), (18, 6), (24, 6), (30, 3)], [16, 32]),
    "state_blocks_wider_than_chunks": (dict(chunk_size=40, state_block=48), 100, [(0, 40), (40, 40), (80, 20)],
                                       [48, 96]),
    "short_prompt": (dict(), 16, [(0, 16)], [16]),
    # kept 96; spare ones every 32 tokens would be three, every 64 one
    "half_of_the_snapshots": (dict(snapshots=4), 100, [(0, 100)], [64, 96]),
    # kept 64, where the same prompt would look with its window, and no multiple of the spacing; spare every 128
    "window_back": (dict(snapshots=2, window=32), 104, [(0, 104)], [64]),
    # kept 96 and 100; with those at multiples of 8 the chunk would publish 12 before its end, of 16 six
    "inside_a_chunk_eight": (dict(snapshots=60, state_block=4), 100, [(0, 100)], [16, 32, 48, 64, 80, 96, 100]),
    "eight_in_each_chunk": (dict(snapshots=60, state_block=4, chunk_size=50), 100, [(0, 50), (50, 50)],
                            [*range(8, 97, 8), 100]),
    "no_snapshots": (dict(snapshots=None, chunk_size=40), 100, [(0, 40), (40, 40), (80, 20)], []),
}


@pytest.mark.parametrize("sizes, prompt, chunks, edges", CHUNKS.values(), ids=CHUNKS)
def test_what_chunks_publish(sizes, prompt, chunks, edges):
    """Chunks are as long as they may be; edges where the same prompt, or more, would look for its state, then as many
    others as the limits allow, evenly."""
    scheduler = make(**({"snapshots": 16} | sizes))
    assert run(scheduler, new("a", prompt)) == [chunks]
    assert scheduler.prefix.counts.published_snapshots == len(edges)
    step = scheduler.prefix.key_step
    for edge in edges:
        assert scheduler.prefix.snapshots.find(keys_of(range(prompt), step)[edge // step - 1])


def test_decoding_publishes_every_edge():
    """A second turn, the first one's prompt and output and more, hits at the last edge of the output."""
    scheduler = make(snapshots=16, block_size=4)
    first = new("a", 10, max_tokens=20)
    run(scheduler, first)  # 29 tokens computed: the last one is never fed
    assert scheduler.prefix.counts.published_snapshots == 7  # 4, 8 by the prompt; 12, 16, 20, 24, 28 by the output
    second = new("b", first.tokens + [1, 2, 3])
    assert run(scheduler, second)[0][0][0] == 28


@pytest.mark.parametrize("window, left", [(None, 2), (8, 4)])
def test_a_long_output_leaves_others_their_snapshots(window, left):
    """Of its output's snapshots a request keeps those that its next turn may start from; its prompt's kept one and
    those of others stay, spare ones give way."""
    scheduler = make(window=window, snapshots=9, block_size=4, blocks=100)
    run(scheduler, new("a", 41))
    run(scheduler, long := new("b", [50] * 30, max_tokens=100))
    pool = scheduler.prefix.snapshots
    assert len(set(pool._key_of) - pool._spare) == 1 + left
    run(scheduler, again := new("c", 41), turn := new("d", long.tokens + [1]))
    assert (again.hit_tokens, turn.hit_tokens) == (40, 128) and scheduler.prefix.counts.hits == 2


def test_window_needs_whole_state_blocks():
    """A window that is no multiple of the state block is refused at the start, by name."""
    with pytest.raises(ValueError, match="state_block_size: expected a divisor of the attention window 33.*got 16"):
        make(window=33, snapshots=4)
    make(window=33, snapshots=4, state_block=11)
    make(full=False, window=33)  # no snapshots, no rule


def test_readmission_overwrites_the_start():
    """A request that replayed and is preempted starts anew: at a new hit, or at 0 when the blocks are gone."""
    scheduler = make(window=32, blocks=20)
    run(scheduler, new("first", 100))
    request = new("second", 100, max_tokens=3)
    scheduler.add(request)
    for _ in range(2):
        scheduler.schedule()
        assert request.replay_start == request.num_computed == 64 and request.hit_tokens == 96
        scheduler.recover()
        assert (request.replay_start, request.hit_tokens, request.num_computed, request.source) == (0, 0, 0, 0)
    pool = scheduler.pools["full"]
    pool.begin_step()
    pool.free(pool.allocate(pool.num_free))  # everything is evicted
    assert scheduler.schedule().admitted == [request]
    assert request.replay_start == request.num_computed == request.hit_tokens == 0


def test_failed_steps_publish_nothing():
    """Blocks and snapshots of a step that failed are not found, and nobody holds them."""
    scheduler = make(window=32, snapshots=8)
    scheduler.add(request := new("a", 100))
    scheduler.schedule()
    assert request.snapshots == {64: 1, 32: 2, 96: 3}  # wanted most, then the others
    scheduler.recover()
    assert scheduler.prefix.counts.published_blocks == scheduler.prefix.counts.published_snapshots == 0
    assert not request.snapshots and scheduler.prefix.snapshots.num_used == 0
    run(scheduler, request)
    assert scheduler.prefix.counts.hits == 0  # nothing of the first try was taken over
    scheduler.add(again := new("b", 100))
    scheduler.schedule()
    assert again.hit_tokens == 96


def test_blocks_are_shared_while_in_use():
    """Two requests at once hold the same blocks, which then count once; either may end first."""
    scheduler = make(blocks=12)
    run(scheduler, new("first", 100))
    a, b = new("a", 100, 40), new("b", 100, 40)
    scheduler.add(a)
    scheduler.add(b)
    scheduler.schedule()
    pool = scheduler.pools["full"]
    assert a.tables["full"][:6] == b.tables["full"][:6] and a.tables["full"][6] != b.tables["full"][6]
    assert pool.num_used == 8
    scheduler.finish(a, "stop")
    assert pool.num_used == 7 and all(block in pool._holders for block in b.tables["full"])


def test_least_recently_used_goes_first():
    """Of two prompts the one not touched since is evicted, from its end; the other still hits whole."""
    scheduler = make(blocks=9, block_size=4, max_model_len=32)
    old, fresh, other = [1] * 13, [2] * 13, [3] * 13
    run(scheduler, new("a", old))
    run(scheduler, new("b", fresh))
    run(scheduler, new("c", old))
    run(scheduler, new("d", other))  # takes the two unnamed blocks and two of `fresh`
    assert scheduler.prefix.evictions == 2
    hits = {}
    for name, tokens in (("old", old), ("fresh", fresh)):
        scheduler.add(request := new(name, tokens))
        scheduler.schedule()
        hits[name] = request.hit_tokens
        scheduler.abort(name)
    assert hits == {"old": 12, "fresh": 4}


@pytest.mark.parametrize("window, state_block", [(None, 16), (8, 8)])
def test_snapshots_without_blocks_go_first(window, state_block):
    """Of a prompt the blocks are evicted, of an older one not, for its request still runs: the next snapshot takes the
    place of the younger's, of which no hit can come, and the older's makes its hit."""
    scheduler = make(window=window, snapshots=2, state_block=state_block, block_size=4, blocks=22)
    kept = scheduler.pools["full"], scheduler.prefix.snapshots
    scheduler.add(holder := new("old", [1] * 33, max_tokens=5))
    evictions = []
    for request in (None, new("gone", [2] * 33), new("next", [3] * 33)):
        if request is not None:
            scheduler.add(request)
        for chunk in scheduler.schedule().prefills:
            scheduler.advance(chunk.request, chunk.length)
        (request or holder).output_ids.append(7)
        if request is not None:
            scheduler.finish(request, "length")
        evictions.append(tuple(pool.evictions for pool in kept))
    spare = int(window is not None)  # of the oldest, whose place the second's kept one took
    assert evictions[:2] == [(0, 0), (0, spare)] and evictions[2][0] > 0, "the third took blocks of the second alone"
    assert holder.is_decoding and scheduler.prefix.counts.published_snapshots == 3 + spare
    hits = {}
    for name, token in (("again", 1), ("gone again", 2)):
        scheduler.add(request := new(name, [token] * 33))
        scheduler.schedule()
        hits[name] = request.hit_tokens
        scheduler.abort(name)
    assert hits == {"again": 32, "gone again": 0}


def test_pool():
    """Publish, find, share, evict: in use never handed out, pending not before the next step, named once."""
    pool = BlockPool(4)
    a, b, c = pool.allocate(3)
    assert pool.publish(a, b"a") and not pool.publish(b, b"a") and not pool.publish(a, b"x")
    with pytest.raises(ValueError, match="expected one in use"):
        pool.publish(0, b"n")
    assert pool.share(b"a") == a and pool.holds(b"a")
    pool.free([a])
    assert pool.holds(b"a") and pool.num_used == 3
    pool.free([a, c])
    assert not pool.holds(b"a") and pool.num_free == 0 and pool.num_pending == 2
    assert pool.share(b"a") == a and pool.num_pending == 1  # taken back before it was free
    pool.free([a])
    pool.begin_step()
    assert pool.allocate(2) == [c, a] and pool.find(b"a") is None and pool.evictions == 1
    with pytest.raises(KeyError):
        pool.share(b"a")
