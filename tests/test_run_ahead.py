"""Steps launched before the results of the last are there: the same text, whoever ends, fails or waits meanwhile."""

import pytest
import torch
from harness import failing_kernel
from test_engine import Injected
from tiny import engine, tiny_model

from torch_replay import SamplingParams
from torch_replay.engine.decode_step import SAME_TOKEN
from torch_replay.ops.registry import override_kernel

PATTERN = ("mamba2", "engram", "swa", "full")
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
OPTIONS = {
    "plain": {},
    "sampled": {},
    "without_replay": {"replay": False},
    "preempted": {"num_blocks": 14, "block_size": 4},
    "snapshots": {"prefix_cache": True, "block_size": 3, "state_block_size": 3},
    "small_steps": {"decode_sizes": (1, 2, 5)},
}


@pytest.fixture(scope="module")
def model():
    return tiny_model(2, pattern=PATTERN)


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 61, (n,), generator=generator).tolist() for n in (5, 1, 20, 9)]


def watched(runner) -> dict:
    """Counts of decode steps of a runner, and of those launched ahead: they do not know some last token."""
    counts = {"steps": 0, "ahead": 0}
    for step in runner.steps:
        def launch(rows, route, launch=step.launch):
            counts["steps"] += 1
            counts["ahead"] += any(tokens[0] == SAME_TOKEN for _, tokens in rows)
            return launch(rows, route)

        step.launch = launch
    return counts


def texts(runner, prompts, params=PARAMS) -> list[list[int]]:
    return [output.token_ids for output in runner.generate(prompts, params)]


@pytest.mark.parametrize("name", OPTIONS)
def test_text(model, prompts, name):
    """Most steps are launched ahead, and every text is what it is without."""
    params = SamplingParams(max_tokens=24, temperature=0.9, seed=5, ignore_eos=True) if name == "sampled" else PARAMS
    want = texts(engine(model, **OPTIONS[name]), prompts, params)
    runner = engine(model, run_ahead=True, **OPTIONS[name])
    counts = watched(runner)
    assert texts(runner, prompts, params) == want
    assert counts["ahead"] > (2 if name == "preempted" else counts["steps"] // 2)
    if name == "snapshots":
        published = runner.scheduler.prefix.counts.published_snapshots
        again = engine(model, **OPTIONS[name])
        texts(again, prompts)
        assert published == again.scheduler.prefix.counts.published_snapshots > 10
        assert texts(runner, [prompts[2] + [1, 2]]) == texts(again, [prompts[2] + [1, 2]])
        assert runner.scheduler.prefix.counts.hits == 1


def test_a_wrong_token_shows(model, prompts):
    """Negative control: the token that the device keeps for the next step is what that step reads."""
    want = texts(engine(model), prompts)
    runner = engine(model, run_ahead=True)
    run = runner.decode.run["greedy"]

    def spoiled():
        out = run()
        runner.state.requests.last_token.add_(1)
        return out

    runner.decode.run["greedy"] = spoiled
    assert texts(runner, prompts) != want


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_requests_that_end_early(model, prompts, prefix_cache):
    """Stopped by a token while their next step is under way: nothing more of them comes, and the others go on."""
    options = {"prefix_cache": prefix_cache, "block_size": 3} if prefix_cache else {}
    want = texts(engine(model), prompts)
    stops = [want[0][5], want[1][7]]
    runner = engine(model, run_ahead=True, **options)
    outputs = {}

    def on_output(output):
        outputs[output.id] = output.token_ids
        place = {"0": 0, "1": 1}.get(output.id)
        if place is not None and stops[place] in output.token_ids:
            runner.abort(output.id)

    for place, prompt in enumerate(prompts):
        runner.add_request(prompt, PARAMS, str(place), on_output)
    counts = watched(runner)
    while runner.has_work:
        runner.step()
    for place, tokens in enumerate(want):
        end = tokens.index(stops[place]) + 1 if place < 2 else len(tokens)
        assert outputs[str(place)] == tokens[:end]
    assert counts["ahead"] > 5
    pools = runner.scheduler.pools.values()
    for pool in [*pools, runner.scheduler.indices]:
        pool.begin_step()
    assert all(pool.num_free == pool.num_blocks - 1 for pool in pools)
    late = runner.generate([prompts[3]], PARAMS)[0]
    assert late.token_ids == want[3], "a step that nobody waits for is dropped"


@pytest.mark.parametrize("after", [7, 11, 12, 20])
def test_a_failed_step(model, prompts, after):
    """A step that fails as it is launched ahead: the results of the one under way are kept, the failed one is done
    again, and the exception comes out."""
    want = texts(engine(model), prompts)
    runner = engine(model, run_ahead=True)
    ids = [runner.add_request(prompt, PARAMS) for prompt in prompts]
    final, raised, kept = {}, 0, 0
    with override_kernel("mamba2_replay", "cpu", failing_kernel("mamba2_replay", after, Injected)):
        while runner.has_work:
            known = sum(len(request.output_ids) for request in runner.scheduler.running)
            try:
                final.update((output.id, output.token_ids) for output in runner.step())
            except Injected:
                raised += 1
                kept = sum(len(r.output_ids) for r in runner.scheduler.waiting) - known
    assert raised == 1 and kept >= 0
    assert [final[i] for i in ids] == want


def test_not_with_drafts(model):
    """What a draft is depends on the text: an engine with drafts does not run ahead."""
    assert engine(model, run_ahead=True).runs_ahead
    assert not engine(model, run_ahead=True, num_spec=2).runs_ahead
    assert not engine(model).runs_ahead, "and on a CPU there is nothing to wait for"
