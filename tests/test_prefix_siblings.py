"""Prompts that begin alike and then part: the hit is the last edge before they do, and the text that of a solo run."""

import random

import pytest
import torch
from prefix_harness import Watch, poison_free
from test_prefix_cache import keys_of, make, new, run
from tiny import greedy, tiny_model

from torch_replay import SamplingParams
from torch_replay.models import cached
from torch_replay.ops.scan import naive

TOKENS = 10
PARAMS = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
SHARED = {16: 16, 40: 32, 64: 64, 96: 96}  # tokens that a sibling shares -> boundary of its hit


def prompts_of_siblings(own=None) -> list[list[int]]:
    """A prompt of 120 tokens, and by `SHARED` those that share its first tokens and no more: `own` others follow, None:
    as many as make 120."""
    rng = random.Random(4)
    first = [rng.randint(1, 60) for _ in range(120)]
    others = [[rng.randint(1, 60) for _ in range(own or 120 - n)] for n in SHARED]
    for n, other in zip(SHARED, others):
        other[0] = first[n] % 60 + 1
    return [first, *(first[:n] + other for n, other in zip(SHARED, others))]


def hits_and_texts(model, prompts, **options) -> tuple[list[int], list[list[int]]]:
    """Each sibling meets a cache that only the first prompt has been through."""
    hits, texts = [], []
    for prompt in prompts[1:]:
        watch = Watch(model, num_snapshots=20, **options)
        watch.run(prompts[:1], PARAMS)
        poison_free(watch.runner)
        texts += watch.run([prompt], PARAMS)
        hits.append(watch.counts.hit_tokens)
    return hits, texts


@pytest.fixture(scope="module")
def model():
    return tiny_model(3, pattern=("mamba2", "gdn", "full", "mlp"))


@pytest.fixture(scope="module")
def solo(model):
    return [greedy(model, prompt, TOKENS) for prompt in prompts_of_siblings()]


@pytest.mark.parametrize("options", [dict(), dict(chunk_size=50), dict(chunk_size=19), dict(num_spec=2)], ids=str)
def test_siblings(model, solo, options):
    """16, 40, 64 and 96 tokens of 120 shared: hits at 16, 32, 64 and 96, wherever chunks end."""
    assert hits_and_texts(model, prompts_of_siblings(), **options) == (list(SHARED.values()), solo[1:])


def test_siblings_with_a_window():
    """W 16: a hit at H starts from the snapshot at H - 16, and one at 16 would gain nothing."""
    model = tiny_model(3, pattern=("mamba2", "swa", "full"), window=16)
    hits, texts = hits_and_texts(model, prompts_of_siblings())
    assert hits == [0, 32, 64, 96] and all(len(text) == TOKENS for text in texts)


def test_siblings_together(model, solo):
    """After the first all of them run in one batch, compiled prefill's rows of edges beside each other."""
    watch, prompts = Watch(model, num_snapshots=40, max_num_seqs=5, chunk_size=50), prompts_of_siblings()
    assert watch.run(prompts[:1], PARAMS) == solo[:1]
    assert watch.run(prompts[1:], PARAMS) == solo[1:]
    assert watch.counts.hit_tokens == sum(SHARED.values())
    assert watch.run(prompts, PARAMS) == solo and watch.counts.hit_tokens == sum(SHARED.values()) + 5 * 112


def state_of_a_token_less(right):
    return lambda edges, *rest: right((edges - 1).clamp(min=0), *rest)


def conv_inputs_of_a_token_less(right):
    def append(states, place, raw, batch):
        edges, batch.edges = batch.edges, None if batch.edges is None else (batch.edges - 1).clamp(min=0)
        right(states, place, raw, batch)
        batch.edges = edges

    return append


@pytest.mark.parametrize("module, name, wrong", [
    (naive, "_states_at", state_of_a_token_less), (cached, "_append_conv", conv_inputs_of_a_token_less)],
    ids=["state", "conv_ring"])
def test_a_wrong_snapshot_shows(model, solo, monkeypatch, module, name, wrong):
    """Negative control: a state, or conv inputs, of one token less change what follows a hit, and nothing else. With
    few tokens of their own, for what lies further back counts less."""
    prompts = prompts_of_siblings(own=1)
    want = list(SHARED.values()), [greedy(model, prompt, TOKENS) for prompt in prompts[1:]]
    assert hits_and_texts(model, prompts) == want
    monkeypatch.setattr(module, name, wrong(getattr(module, name)))
    hits, texts = hits_and_texts(model, prompts)
    assert hits == want[0] and sum(text != right for text, right in zip(texts, want[1])) >= 2
    assert Watch(model, num_snapshots=20).run(prompts_of_siblings()[:1], PARAMS) == solo[:1]


def test_snapshots_take_no_memory_where_nobody_publishes(model):
    """Eagerly a step brings as many edges as a row of it publishes: none for a prompt that is known."""
    watch = Watch(model, num_snapshots=20)
    seen, prefill_inputs = [], watch.runner.state.prefill_inputs
    watch.runner.state.prefill_inputs = lambda rows, tokens, inner=None: (
        seen.append(inner), prefill_inputs(rows, tokens, inner))[1]
    for _ in range(2):
        watch.run(prompts_of_siblings()[:1], PARAMS)
    assert seen == [7, 0]


def published(scheduler, *prompts) -> list[list[int]]:
    """For each prompt, the edges of its first tokens at which a snapshot is published."""
    step = scheduler.prefix.key_step
    return [[(i + 1) * step for i, key in enumerate(keys_of(prompt, step))
             if scheduler.prefix.snapshots.find(key) is not None] for prompt in prompts]


def family(first, length=100) -> list[int]:
    return [first] * length


def test_what_is_evicted():
    """Four snapshots: a hit makes a spare one kept; a kept one takes a free or spare place, else that of the least
    recently used; a spare one takes nobody's but a spare one's."""
    scheduler = make(snapshots=4, blocks=200)
    a, c, d = family(1), family(3), family(4)
    b = a[:70] + [2] * 30
    run(scheduler, new("a", a))
    assert published(scheduler, a) == [[64, 96]]
    run(scheduler, new("b", b))  # hits at 64
    assert scheduler.prefix.counts.hit_tokens == 64 and published(scheduler, a, b) == [[64, 96], [64, 96]]
    run(scheduler, new("c", c))
    assert published(scheduler, a, b, c) == [[64, 96], [64, 96], [96]]
    run(scheduler, new("d", d))  # the end of `a` was used longest ago
    assert published(scheduler, a, b, c, d) == [[64], [64, 96], [96], [96]]


def test_spare_ones_go_first():
    """The newest spare snapshot goes before the oldest kept one; of spare ones the least recently used."""
    scheduler = make(snapshots=6, blocks=200)
    a, b, c = family(1), family(2), family(3)
    run(scheduler, new("a", a))
    run(scheduler, new("b", b))
    assert published(scheduler, a, b) == [[32, 64, 96], [32, 64, 96]]
    run(scheduler, new("c", c, max_tokens=1))
    # of a's spare ones the finer was let go first
    assert published(scheduler, a, b, c) == [[96], [64, 96], [32, 64, 96]]


def test_a_branch_is_published():
    """Two snapshots: the second sibling parts from the first at 40 and publishes 32, where the third hits."""
    scheduler = make(snapshots=2, blocks=200)
    siblings = [family(9, 40) + [i] * 60 for i in range(3)]
    for i, prompt in enumerate(siblings):
        run(scheduler, new(str(i), prompt))
        assert scheduler.prefix.counts.hit_tokens == (32 if i == 2 else 0)
    assert published(scheduler, siblings[2]) == [[32, 96]]


def test_an_unreachable_snapshot_is_no_hit():
    """Blocks without a snapshot, and snapshots without blocks: the hit is the longest boundary that has both."""
    scheduler = make(snapshots=20, blocks=200)
    prompt = family(1)
    run(scheduler, new("a", prompt))
    keys = keys_of(prompt, 16)
    scheduler.prefix.snapshots.begin_step()
    scheduler.pools["full"].begin_step()
    scheduler.prefix.snapshots.withdraw(keys[3])
    scheduler.pools["full"].withdraw(keys[4])
    scheduler.add(request := new("b", prompt))
    scheduler.schedule()
    assert request.hit_tokens == 48 and request.branch_edge == 64


def test_edges_inside_are_claimed_by_plan():
    """A chunk brings its rows' edges by the tokens before them; a decode row brings none."""
    model = tiny_model(3, pattern=("mamba2",))
    runner = Watch(model, num_snapshots=20, block_size=4, state_block_size=4, chunk_size=10).runner
    runner.add_request([1] * 25, PARAMS)
    seen = []
    for _ in range(3):
        plan = runner.scheduler.schedule()
        runner._place(plan)
        chunk = plan.prefills[0]
        tokens = chunk.request.tokens[chunk.start : chunk.start + chunk.length]
        seen.append([sorted(edges) for edges in runner.state.inner_edges([(chunk.request.index, tokens)])])
        runner._prefill(plan, None)
    assert seen == [[[4, 8]], [[2, 6]], [[4]]]
    assert torch.isfinite(runner.memory.states["mamba2"].state).all()
