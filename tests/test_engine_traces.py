"""Random traces: requests come, go, are preempted and aborted, steps fail; every text equals the request's solo run."""

import random
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from test_engine import Injected, RandomDrafter
from tiny import engine, greedy, tiny_model

from torch_replay import SamplingParams
from torch_replay.ops.mamba2 import naive
from torch_replay.ops.registry import OPS, override_kernel

TRACES = 80
PATTERN = ("mamba2", "swa", "gdn", "full", "mlp")
SEEN = Counter()
_models, _solo = {}, {}


def model_of(window: int):
    """One model for each attention window: the weights are the same."""
    if window not in _models:
        _models[window] = tiny_model(7, pattern=PATTERN, window=window, vocab=31)
    return _models[window]


def solo(window: int, prompt: tuple, count: int) -> list[int]:
    """What the request writes alone, from the full-sequence forward without any cache."""
    if len(_solo.get((window, prompt), ())) < count:
        _solo[window, prompt] = greedy(model_of(window), list(prompt), count)
    return _solo[window, prompt][:count]


@st.composite
def traces(draw):
    """Sizes are drawn independently; attention windows of 1 mod block come up often."""
    block = draw(st.sampled_from([1, 2, 3, 4, 7, 16]))
    attention = draw(st.one_of(st.integers(1, 24), st.integers(0, 3).map(lambda n: n * block + 1)))
    tokens = draw(st.integers(1, 6))
    window = draw(st.integers(tokens, 17))
    requests = draw(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=2, max_size=6))
    longest = max(prompt + count for prompt, count in requests)
    return {
        "attention": attention,
        "requests": requests,
        "seed": draw(st.integers(0, 2**16)),
        "options": {
            "block_size": block, "num_spec": tokens - 1, "window": window,
            "ring_len": window + tokens + draw(st.integers(0, 9)), "replay": draw(st.sampled_from([True, True, False])),
            "max_num_seqs": draw(st.integers(2, 4)), "chunk_size": draw(st.integers(1, 24)),
            "prefill_budget": draw(st.integers(1, 40)), "prefill_rows": draw(st.integers(1, 3)),
            "run_ahead": draw(st.booleans()),
            "num_blocks": 1 + -(-longest // block) + draw(st.integers(0, 4)) + (1 if block > 1 else tokens),
        },
    }


def check_ranges(runner) -> None:
    """Cursors stay in range, and the null slot's never move."""
    for states in runner.memory.states.values():
        if hasattr(states, "ring_start"):
            assert states.ring_start.min() >= 0 and states.ring_start.max() < states.ring_len
            assert states.ring_committed.min() >= 0 and states.ring_committed.max() <= states.window
            assert not states.ring_start[:, 0].any() and not states.ring_committed[:, 0].any()
            assert not states.state[:, 0].any()
    for caches in runner.memory.kv.values():
        assert not any(cache[0].any() for cache in caches)


def run_trace(trace) -> None:
    rng = random.Random(trace["seed"])
    model = model_of(trace["attention"])
    prompts = [tuple(rng.randint(1, 30) for _ in range(length)) for length, _ in trace["requests"]]
    counts = [count for _, count in trace["requests"]]
    want = [solo(trace["attention"], prompt, count) for prompt, count in zip(prompts, counts)]
    runner = engine(model, **trace["options"])
    runner.scheduler.drafter = RandomDrafter([list(prompt) + text for prompt, text in zip(prompts, want)])
    waiting, final, aborted = list(range(len(prompts))), {}, set()
    kernel = OPS["mamba2_replay"].kernels["cpu"]
    armed = [False]

    def sometimes_failing(*args, **kwargs):
        if armed[0]:
            armed[0] = False
            raise Injected
        return kernel(*args, **kwargs)

    with override_kernel("mamba2_replay", "cpu", sometimes_failing):
        while waiting or runner.has_work:
            action = rng.random()
            if waiting and (action < 0.4 or not runner.has_work):
                index = waiting.pop(rng.randrange(len(waiting)))
                params = SamplingParams(max_tokens=counts[index], ignore_eos=True)
                runner.add_request(list(prompts[index]), params, str(index))
            elif 0.4 <= action < 0.42 and runner._live:
                aborted.add(name := rng.choice(list(runner._live)))
                SEEN["aborted"] += 1
                assert runner.abort(name)
            else:
                armed[0] = rng.random() < 0.03
                live = {name: entry.request for name, entry in runner._live.items()}
                try:
                    outputs = runner.step()
                except Injected:
                    SEEN["failed"] += 1
                    continue
                finally:
                    SEEN["preempted"] += sum(request.preemptions for request in live.values() if request.finished)
                final.update((output.id, output) for output in outputs)
                check_ranges(runner)
    for index, text in enumerate(want):
        if str(index) not in aborted:
            assert final[str(index)].token_ids == text, f"request {index}"
    SEEN["accepted"] += runner.stats.accepted_drafts
    SEEN["rejected"] += runner.stats.drafted - runner.stats.accepted_drafts
    SEEN["flushed"] += runner.stats.flushes


@pytest.mark.slow
def test_random_traces():
    """Each request's text equals its solo run, whatever else happened around it; and everything did happen."""

    @settings(max_examples=TRACES, deadline=None, derandomize=True, database=None,
              suppress_health_check=list(HealthCheck))
    @given(traces())
    def every_trace(trace):
        run_trace(trace)

    every_trace()
    events = ("aborted", "failed", "preempted", "accepted", "rejected", "flushed")
    assert all(SEEN[event] > 10 for event in events), SEEN


def test_negative_control():
    """A replay op that forgets its ring fails the traces."""

    def forgets(*args, **kwargs):
        args = list(args)
        args[5] = torch.zeros_like(args[5])
        return naive.mamba2_replay(*args, **kwargs)

    @settings(max_examples=20, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck),
              phases=[Phase.generate])  # the first failure is all that is asked for
    @given(traces())
    def broken(trace):
        run_trace(trace)

    with override_kernel("mamba2_replay", "cpu", forgets), pytest.raises(AssertionError):
        broken()
