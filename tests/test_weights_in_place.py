"""Weights that change in place between steps: nothing derived from them is kept, and a reset forgets old prefixes."""

import pytest
import torch
from tiny import engine, tiny_model

from torch_replay import SamplingParams
from torch_replay.engine.scheduler import Plan

PREFIX = [(7 * i) % 61 for i in range(40)]
PROMPTS = [PREFIX + [5, 6, 7], PREFIX + [9, 8]]
CACHE = dict(prefix_cache=True, block_size=8, state_block_size=8, chunk_size=24, max_model_len=128)
FAMILIES = pytest.mark.parametrize("pattern", [("mamba2", "mlp", "full", "mamba2"), ("gdn", "mlp", "full", "gdn")],
                                   ids=["mamba2", "gdn"])


def shift_decays(model, by: float = 1.5) -> None:
    for layer in model.layers:
        if layer.kind in ("mamba2", "gdn"):
            layer.mixer.A_log.add_(by)


def texts(runner, prompts=PROMPTS, count=24) -> list[list[int]]:
    """One prompt after the other, so that later ones hit what earlier ones left."""
    params = SamplingParams(max_tokens=count, ignore_eos=True)
    return [runner.generate([prompt], params)[0].token_ids for prompt in prompts]


@FAMILIES
@pytest.mark.parametrize("by", [1.5, -1.5])
@torch.no_grad()
def test_decays_changed_after_construction(pattern, by):
    """Snapshots that decode steps publish, folded from the ring, use the decays of the step: a second turn that hits
    one reads what a fresh engine reads."""
    model = tiny_model(pattern=pattern)
    runner = engine(model, **CACHE)
    shift_decays(model, by)
    fresh = engine(model, **CACHE)
    for one in (runner, fresh):
        one.turn = PROMPTS[0] + texts(one, PROMPTS[:1])[0] + [3]
    assert runner.turn == fresh.turn
    hits = runner.scheduler.prefix.counts.hits
    got, want = texts(runner, [runner.turn]), texts(fresh, [fresh.turn])
    assert runner.scheduler.prefix.counts.hits > hits
    solo = engine(model, **dict(CACHE, prefix_cache=False))
    assert got == want == texts(solo, [runner.turn])


@torch.no_grad()
def test_stale_decays_would_show(monkeypatch):
    """Negative control: with the decays that the engine was made with, the second turn reads another text. (The ring of
    the gated delta rule holds the decays themselves.)"""
    model = tiny_model(pattern=("mamba2", "mlp", "full", "mamba2"))
    runner = engine(model, **CACHE)
    old = torch.stack([layer.mixer.decay_rates() for layer in model.layers if layer.kind == "mamba2"])
    states = runner.memory.states["mamba2"]
    materialize = states.materialize
    monkeypatch.setattr(states, "materialize", lambda plan, active, A: materialize(plan, active, old))
    shift_decays(model)
    turn = PROMPTS[0] + texts(runner, PROMPTS[:1])[0] + [3]
    assert texts(runner, [turn]) != texts(engine(model, **dict(CACHE, prefix_cache=False)), [turn])


@FAMILIES
@torch.no_grad()
def test_reset_prefix_cache(pattern):
    """After a change of weights and a reset the engine's texts are those of a fresh one, and its cache serves again."""
    model = tiny_model(pattern=pattern)
    runner = engine(model, **CACHE)
    before = texts(runner)
    shift_decays(model)
    counts = runner.scheduler.prefix.counts
    runner.reset_prefix_cache()
    hits = counts.hits
    first = texts(runner)
    assert counts.hits == hits + 1, "the second prompt hits what the first left since the reset"
    assert first == texts(engine(model, **CACHE)) != before


@FAMILIES
@torch.no_grad()
def test_no_reset_would_show(pattern):
    """Negative control: without the reset, prompts read prefixes of the old weights."""
    model = tiny_model(pattern=pattern)
    runner = engine(model, **CACHE)
    texts(runner)
    shift_decays(model)
    assert texts(runner) != texts(engine(model, **CACHE))


@pytest.mark.parametrize("run_ahead", [False, True])
@torch.no_grad()
def test_running_requests_publish_nothing_more(run_ahead):
    """A request that runs through a reset goes on, but what it computes from old states reaches no other request; once
    preempted, it is computed anew and publishes again."""
    model = tiny_model(pattern=("mamba2", "mlp", "full", "mamba2"))
    runner = engine(model, run_ahead=run_ahead, **CACHE)
    prefix = runner.scheduler.prefix
    runner.add_request(PROMPTS[0], SamplingParams(max_tokens=40, ignore_eos=True), "old")
    for _ in range(12):
        runner.step()
    shift_decays(model)
    runner.reset_prefix_cache()
    pools = [*prefix.full_pools.values(), prefix.snapshots]
    assert not any(pool._block_of or pool._key_of or pool._idle for pool in pools)
    published = prefix.counts.published_blocks, prefix.counts.published_snapshots
    while runner.has_work:
        runner.step()
    assert (prefix.counts.published_blocks, prefix.counts.published_snapshots) == published
    assert texts(runner) == texts(engine(model, **CACHE))
    assert all(pool.num_used == 0 for pool in pools)


@torch.no_grad()
def test_preempted_requests_publish_again():
    """What is computed anew after a reset is of the new weights alone."""
    model = tiny_model(pattern=("mamba2", "mlp", "full"))
    runner = engine(model, **CACHE)
    runner.add_request(PROMPTS[0], SamplingParams(max_tokens=4, ignore_eos=True), "old")
    runner.step()
    runner.reset_prefix_cache()
    (request,) = runner.scheduler.running
    assert request.private
    runner.scheduler._preempt(request, Plan())
    assert not request.private
    while runner.has_work:
        runner.step()
    assert runner.scheduler.prefix.counts.published_snapshots > 0


def test_reset_without_a_cache():
    """An engine without a prefix cache has nothing to forget."""
    engine(tiny_model(pattern=("mamba2",))).reset_prefix_cache()
