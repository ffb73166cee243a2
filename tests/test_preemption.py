"""Preemption with a prefix cache and sliding windows: a request that is put back writes what it would have written."""

import random

import pytest
from tiny import engine, greedy, tiny_model

from torch_replay import SamplingParams
from torch_replay.engine.prefix_cache import PrefixCache

COUNT = 24
PARAMS = SamplingParams(max_tokens=COUNT, ignore_eos=True)
OPTIONS = {"prefix_cache": True, "block_size": 4, "state_block_size": 4, "chunk_size": 8, "num_snapshots": 60}


@pytest.fixture(scope="module")
def model():
    return tiny_model(4, pattern=("swa", "mamba2", "swa", "full"), window=8)


def prompts_of(seed: int, stem: list[int]) -> list[list[int]]:
    rng = random.Random(seed)
    return [stem + [rng.randint(1, 60) for _ in range(rng.randint(12, 20))] for _ in range(4)]


def run(model, first: list[list[int]], prompts, **options):
    """Texts of `prompts`, which run together after `first`; the requests' first hits and preemptions; the counts."""
    runner = engine(model, **OPTIONS, **options)
    if first:
        runner.generate(first, PARAMS)
    before = runner.scheduler.prefix.counts.hits
    ids = [runner.add_request(prompt, PARAMS) for prompt in prompts]
    requests = [runner._live[name].request for name in ids]
    hits, final = {}, {}
    while runner.has_work:
        final.update((output.id, output.token_ids) for output in runner.step())
        for request in requests:
            if request.index >= 0:
                hits.setdefault(request.id, []).append(request.hit_tokens)
    return ([final[name] for name in ids], [set(hits[name]) for name in ids],
            sum(request.preemptions for request in requests), runner.scheduler.prefix.counts.hits - before)


@pytest.mark.parametrize("seed", range(2))
def test_own_blocks_are_no_hit(model, seed):
    """A request that began without a hit takes none when it comes back, though its own blocks are still there."""
    prompts = prompts_of(seed, [])
    texts, _, preempted, hits = run(model, [], prompts, num_blocks=28)
    assert preempted > 0 and hits == 0
    assert texts == [greedy(model, prompt, COUNT) for prompt in prompts]


def test_a_hit_is_taken_again(model):
    """A request that began with a hit comes back with the same one."""
    stem = [7 * n % 59 + 1 for n in range(24)]
    prompts = prompts_of(9, stem)
    want, expected, preempted, hits = run(model, [stem + [1]], prompts)
    assert preempted == 0 and hits == len(prompts) and all(len(each) == 1 for each in expected)
    texts, found, preempted, hits = run(model, [stem + [1]], prompts, num_blocks=34)
    assert preempted > 0 and hits > len(prompts)
    same = [place for place in range(len(prompts)) if found[place] == expected[place]]
    assert len(same) > 2
    assert [texts[place] for place in same] == [want[place] for place in same]


def test_negative_control(model, monkeypatch):
    """Where a request may take any hit when it comes back, texts change."""
    lookup = PrefixCache.lookup

    def anew(self, request):
        request.first_hit = None
        return lookup(self, request)

    monkeypatch.setattr(PrefixCache, "lookup", anew)
    prompts = prompts_of(1, [])
    texts, _, preempted, hits = run(model, [], prompts, num_blocks=28)
    assert preempted > 0 and hits > 0
    assert texts != [greedy(model, prompt, COUNT) for prompt in prompts]
