"""Bounded replay of sliding-window KV after a prefix hit: slots, starts, clamps, and the text of warm requests."""

import random
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prefix_harness import Watch, poison_free
from test_engine import Injected, RandomDrafter
from tiny import engine, greedy, tiny_model

from torch_replay import SamplingParams, ops
from torch_replay.engine.request import Request
from torch_replay.models.memory import MemoryConfig, ModelMemory
from torch_replay.ops.attention import naive as attention
from torch_replay.ops.registry import override_kernel
from torch_replay.states.builders import FullAttentionBuilder, ReplayAttnMetadata, SlidingWindowBuilder
from torch_replay.states.model_state import ReplayModelState
from torch_replay.states.request_state import InputBatch, RequestState


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


# name: window, replay_start by row, q by row, first position by row, positions that lose their shared slots
PADDED = {
    "replayed_then_fresh": (4, [16, 0], [6, 2], [16, 0], {16, 17, 18, 19}),
    "first_chunk_inside": (32, [64], [16], [64], set(range(64, 80))),
    "second_chunk_inside": (32, [64], [16], [80], set(range(80, 96))),
    "last_chunk_beyond": (32, [64], [4], [96], set()),
    "chunk_across_the_end": (32, [64], [10], [90], set(range(90, 96))),
    "no_start_no_replay": (4, [0, 0], [6, 2], [0, 0], set()),
    "window_one": (1, [5], [3], [5], {5}),
    "decode_after_replay": (4, [16], [1], [40], set()),
}


@pytest.mark.parametrize("window, starts, q, first, padded", PADDED.values(), ids=PADDED)
def test_padded_slots(window, starts, q, first, padded):
    """Replayed tokens, told by position, lose their slot in cacheable groups and keep it in the window's."""
    start = i32(0, *q).cumsum(0).int()
    positions = torch.cat([torch.arange(begin, begin + count) for begin, count in zip(first, q)])
    slots = torch.arange(2 * len(positions)).view(2, -1)
    want = slots.clone()
    want[0, torch.tensor([int(p) in padded for p in positions])] = -1
    ops.pad_replayed_slots(slots, i32(0), start, positions, i32(*starts), window=window)
    assert torch.equal(slots, want)


def model_state(pattern=("full", "swa"), window=4, requests=6, block=4):
    model = tiny_model(pattern=pattern, window=window)
    kinds = [kind for kind in ("full", "swa") if kind in pattern]
    memory = ModelMemory(model, MemoryConfig(requests, 4, block, dict.fromkeys(kinds, 64)))
    return ReplayModelState(memory, RequestState(memory, 64))


def batch_of(state, rows, prefilling, computed):
    """An input batch of (request index, tokens) and the requests' lengths before it."""
    inputs = InputBatch.empty(len(rows), max(tokens for _, tokens in rows), "cpu")
    inputs.fill([(index, [1] * tokens) for index, tokens in rows], prefilling)
    for (index, _), length in zip(rows, computed):
        state.requests.num_computed[index] = length
    return inputs


def test_starts_by_row():
    """Requests 3 and 1 prefill: [16, 0]; the same request decoding: 0; padding reads nobody's slot."""
    state = model_state()
    state.replay_start.copy_(i32(9, 0, 9, 16, 9, 9))
    assert state.replay_starts(batch_of(state, [(3, 6), (1, 2)], [True, True], [16, 0])).tolist() == [16, 0]
    assert state.replay_starts(batch_of(state, [(3, 1)], [False], [40])).tolist() == [0]
    assert state.replay_starts(batch_of(state, [(3, 1), (-1, 0)], [True, True], [16])).tolist() == [16, 0]
    stale = batch_of(state, [(index, 1) for index in range(6)], [False] * 6, [8] * 6)
    assert state.replay_starts(stale).tolist() == [0] * 6
    dummy = state.prepare_dummy_inputs(3, 4)
    dummy.is_prefilling = torch.ones(3, dtype=torch.bool)
    assert state.replay_starts(dummy).tolist() == [0, 0, 0]


def test_starts_are_overwritten():
    """A request that takes an index sets its start, 0 too; removal clears it."""
    state = model_state()
    request = Request("a", [1], index=2, replay_start=16)
    state.add_request(request)
    assert state.replay_start.tolist() == [0, 0, 16, 0, 0, 0]
    request.replay_start = 0
    state.add_request(request)
    assert not state.replay_start.any()
    state.replay_start[2] = 7
    state.remove_request(2)
    assert not state.replay_start.any()


def test_only_window_builders_get_the_start():
    """The builder of full attention gets nothing."""
    state = model_state()
    extra = ReplayAttnMetadata(i32(16))
    assert extra.extra_args(FullAttentionBuilder(state.groups["full"])) == {}
    assert extra.extra_args(SlidingWindowBuilder(state.groups["swa"]))["replay_start"] is extra.replay_start


def attention_of(state, inputs):
    batch = state.prepare_inputs(inputs)
    state.prepare_attn(batch, inputs)
    return batch.attn


def test_window_metadata_of_a_replay():
    """Start 16, W 4, positions 16..21: lens 1, 2, 3, 4, 4, 4, the first index max(16, pos - 3). Validity comes from
    the window group's slots, for those of the other group are padded; the next step, a decode, is clamped no more."""
    state = model_state(block=16)
    state.requests.kv_tables[0, 3, :2], state.requests.kv_tables[1, 3, :2] = i32(7, 8), i32(0, 5)
    state.replay_start[3] = 16
    attn = attention_of(state, batch_of(state, [(3, 6)], [True], [16]))
    assert attn["full"].slot_mapping.tolist() == [-1] * 4 + [8 * 16 + 4, 8 * 16 + 5]
    assert attn["swa"].slot_mapping.tolist() == [5 * 16 + i for i in range(6)]
    assert attn["swa"].lens.tolist() == [1, 2, 3, 4, 4, 4]
    firsts = [max(16, position - 3) for position in range(16, 22)]
    assert attn["swa"].indices[:, 0].tolist() == [5 * 16 + first - 16 for first in firsts]
    attn = attention_of(state, batch_of(state, [(3, 1)], [False], [18]))
    assert attn["full"].slot_mapping.tolist() == [8 * 16 + 2]
    assert attn["swa"].lens.tolist() == [4], "no start: position 15 is in view"
    assert attn["swa"].indices[0].tolist() == [-1, 80, 81, 82], "and it lies in a null block: -1, counted, skipped"


def test_invalid_tokens_have_no_window():
    """A token without a slot in the window group: length 0 and a row of -1, whatever the buffers held."""
    indices, lens = torch.full((2, 4), 9, dtype=torch.int32), i32(9, 9)
    ops.swa_indices(indices, lens, i32(18), i32(0, 2), i32(1, 2).view(1, 2), torch.tensor([-1, 33]), i32(16), window=4,
                    block_size=16)
    assert lens.tolist() == [0, 2] and indices.tolist() == [[-1] * 4, [32, 33, -1, -1]]


def test_replay_then_fewer_then_as_many_rows():
    """A replaying step of 3 rows, a decode of 2, a prefill of 3: row 2 starts at 0 again."""
    state = model_state()
    state.replay_start.copy_(i32(0, 8, 8, 8, 0, 0))
    rows = [(1, 2), (2, 2), (3, 2)]
    assert state.replay_starts(batch_of(state, rows, [True] * 3, [8] * 3)).tolist() == [8, 8, 8]
    assert state.replay_starts(batch_of(state, rows[:2], [False] * 2, [10] * 2)).tolist() == [0, 0]
    assert state.replay_starts(batch_of(state, rows, [True, False, False], [10] * 3)).tolist() == [8, 0, 0]


# Replay is exact if no layer reads, of the replayed tokens, more than the one window layer wrote: no state-space layer
# and no second window may lie behind the first one.
EXACT = {
    "no_window": ("mamba2", "full", "gdn", "mlp"),
    "states_alone": ("gdn", "mamba2"),
    "attention_alone": ("full", "mlp", "full"),
    "one_window_last": ("mamba2", "gdn", "full", "swa", "mlp"),
    "n_grams_across_the_hit": ("mamba2", "engram", "full", "engram", "swa"),
    "one_window_then_full": ("mamba2", "swa", "full", "mlp", "full"),
}
INEXACT = {"two_windows": ("swa", "mamba2", "full", "swa"), "states_behind": ("swa", "full", "gdn")}
_models, _solo = {}, {}


def model_of(pattern, window):
    if (pattern, window) not in _models:
        _models[pattern, window] = tiny_model(7, pattern=pattern, window=window, vocab=31)
    return _models[pattern, window]


def solo(pattern, window, prompt, count):
    """What a request writes alone, from the full-sequence forward without any cache."""
    name = pattern, window, tuple(prompt)
    if len(_solo.get(name, ())) < count:
        _solo[name] = greedy(model_of(pattern, window), list(prompt), count)
    return _solo[name][:count]


def prompts_of(seed=5):
    rng = random.Random(seed)
    stem = [rng.randint(1, 30) for _ in range(41)]
    return [stem, stem, stem[:37] + [3, 4], stem + [5, 6, 7]]


PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)


@pytest.mark.parametrize("pattern", EXACT.values(), ids=EXACT)
@pytest.mark.parametrize("options", [{}, {"num_spec": 3, "chunk_size": 7}], ids=["whole", "spec_chunks"])
def test_warm_text_is_cold_text(pattern, options):
    """One after the other, each over memory that was NaN where nothing is kept: the text of a cold run."""
    window = 12
    watch = Watch(model_of(pattern, window), block_size=4, num_snapshots=30, **options)
    for prompt in prompts_of():
        poison_free(watch.runner)
        assert watch.run([prompt], PARAMS) == [solo(pattern, window, prompt, 8)]
    assert watch.counts.hits >= 2
    assert watch.counts.replayed_tokens == (window if "swa" in pattern else 0) * watch.counts.hits


@pytest.mark.parametrize("pattern", INEXACT.values(), ids=INEXACT)
def test_replay_is_bounded(pattern):
    """Where windows stack, or a state follows one, replay is an approximation: nothing shared changes by it, and a
    window as wide as the prompt is not replayed and so exact."""
    watch = Watch(model_of(pattern, 8), block_size=4, num_snapshots=30)
    for prompt in prompts_of():
        poison_free(watch.runner)
        watch.run([prompt], PARAMS)  # checks every published bit after every step
    assert watch.counts.hits >= 2 and watch.counts.replayed_tokens == 8 * watch.counts.hits
    wide = Watch(model_of(pattern, 48), block_size=4, num_snapshots=30)
    for prompt in prompts_of():
        assert wide.run([prompt], PARAMS) == [solo(pattern, 48, prompt, 8)]
    assert wide.counts.hits == 0


def test_salted_requests_share_nothing():
    """The engine hands the salt through: the same prompt hits under its own salt alone."""
    runner = engine(model_of(EXACT["attention_alone"], 8), prefix_cache=True, block_size=4)
    for salt, hits in (("a", 0), ("b", 0), ("", 0), ("a", 1)):
        runner.add_request(prompts_of()[0], SamplingParams(max_tokens=1), cache_salt=salt)
        while runner.has_work:
            runner.step()
        assert runner.stats.as_dict()["prefix_hits"] == hits
    with pytest.raises(TypeError, match="cache_salt: expected a string, got 3"):
        runner.add_request([1], cache_salt=3)
    assert not runner.has_work


def warm_logits(pattern, window, block):
    """Logits of the first token after a cold prompt and after a hit on it."""
    runner = engine(model_of(pattern, window), prefix_cache=True, block_size=block, num_snapshots=30)
    seen, last, head = [], [], runner.model.logits
    runner.model.logits = lambda x: (seen.append(head(x)), seen[-1])[1]
    try:
        for _ in range(2):
            runner.generate([prompts_of()[0]], SamplingParams(max_tokens=1))
            last.append(seen[-1])
    finally:
        del runner.model.logits
    return last


def test_one_window_layer_is_exact():
    """The logits after a hit are those of the cold prompt; with two window layers they are not, and should not be."""
    for pattern in ("one_window_last", "one_window_then_full"):
        cold, warm = warm_logits(EXACT[pattern], 12, 4)
        assert (cold - warm).abs().max() < 1e-3
    cold, warm = warm_logits(INEXACT["two_windows"], 8, 4)
    assert (cold - warm).abs().max() > 0.05


def test_without_padding_shared_blocks_change():
    """Negative control: the watch sees what padding prevents."""
    watch = Watch(model_of(INEXACT["two_windows"], 8), block_size=4, num_snapshots=30)
    with override_kernel("pad_replayed_slots", "cpu", lambda *args, **kwargs: None):
        watch.run(prompts_of()[:1], PARAMS)
        with pytest.raises(AssertionError, match="full changed"):
            watch.run(prompts_of()[1:2], PARAMS)


def test_without_the_clamp_garbage_is_read():
    """Negative control: a window that looks below the start of the replay reads what others left in the block."""

    def unclamped(*args, **kwargs):
        args = list(args)
        args[6] = None
        attention.swa_indices(*args, **kwargs)

    texts = []
    for poisons, kernel in ((False, attention.swa_indices), (True, attention.swa_indices), (True, unclamped)):
        watch = Watch(model_of(("swa", "full", "swa"), 9), block_size=4)
        with override_kernel("swa_indices", "cpu", kernel):
            watch.run(prompts_of()[:1], PARAMS)
            if poisons:
                poison_free(watch.runner)
            texts += watch.run(prompts_of()[1:2], PARAMS)
        assert watch.counts.hits == 1
    assert texts[0] == texts[1] != texts[2]


def test_decode_steps_hand_out_no_start(monkeypatch):
    """After a replaying prefill every decode step builds its metadata without a start: nothing sticks."""
    runner = engine(model_of(EXACT["one_window_last"], 12), prefix_cache=True, block_size=4)
    starts, build = [], SlidingWindowBuilder.build

    def spy(self, *args, **kwargs):
        starts.append(kwargs.get("replay_start"))
        return build(self, *args, **kwargs)

    monkeypatch.setattr(SlidingWindowBuilder, "build", spy)
    runner.generate(prompts_of()[:1], PARAMS)
    starts.clear()
    runner.generate(prompts_of()[1:2], PARAMS)
    assert starts[0].tolist() == [28] and starts[1:] == [None] * 7
    starts.clear()
    runner.generate([[4, 4, 4]], PARAMS)  # the same index, no hit
    assert starts[0].tolist() == [0]


@st.composite
def traces(draw):
    """Attention window, block, state block, ring window, T and R, each drawn by itself; windows of 1 mod block."""
    name = draw(st.sampled_from([*EXACT, *INEXACT]))
    pattern = {**EXACT, **INEXACT}[name]
    block, tokens = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    window = draw(st.integers(tokens, 12))
    attention = draw(st.one_of(st.integers(1, 12), st.integers(0, 2).map(lambda n: n * block + 1)))
    divisors = [n for n in range(1, 13) if attention % n == 0 or "swa" not in pattern]
    longest = 60
    return name, attention, draw(st.integers(0, 2**16)), {
        "block_size": block, "num_spec": tokens - 1, "window": window,
        "ring_len": window + tokens + draw(st.integers(0, 7)), "state_block_size": draw(st.sampled_from(divisors)),
        "num_snapshots": draw(st.integers(2, 20)), "max_num_seqs": draw(st.integers(2, 4)),
        "chunk_size": draw(st.integers(3, 40)), "prefill_rows": draw(st.integers(1, 3)), "max_model_len": longest + 1,
        "run_ahead": draw(st.booleans()),
        "num_blocks": 1 + -(-longest // block) + draw(st.integers(0, 3)) + (1 if block > 1 else tokens),
    }


SEEN = Counter()


def run_trace(name, attention, seed, options):
    rng = random.Random(seed)
    pattern = {**EXACT, **INEXACT}[name]
    stem = [rng.randint(1, 30) for _ in range(40)]
    cut = rng.choice([20, 33, 40])
    prompts = [stem[: rng.choice([cut, cut, 40])] + [rng.randint(1, 30) for _ in range(rng.randint(0, 4))]
               for _ in range(rng.randint(4, 6))]
    counts = [rng.randint(1, 12) for _ in prompts]
    want = [solo(pattern, attention, prompt, 12)[:count] for prompt, count in zip(prompts, counts)]
    watch = Watch(model_of(pattern, attention), **options)
    runner = watch.runner
    runner.scheduler.drafter = RandomDrafter([prompt + text for prompt, text in zip(prompts, want)])
    waiting, final, requests = list(range(len(prompts))), {}, {}
    forward = runner.state.prepare_attn
    armed = [False]

    def failing(*args):
        forward(*args)
        if armed[0]:
            armed[0] = False
            raise Injected

    runner.state.prepare_attn = failing
    while waiting or runner.has_work:
        if waiting and (rng.random() < 0.5 or not runner.has_work):
            index = waiting.pop(0)
            params = SamplingParams(max_tokens=counts[index], ignore_eos=True)
            runner.add_request(prompts[index], params, str(index))
            requests[str(index)] = runner._live[str(index)].request
            continue
        armed[0] = rng.random() < 0.04
        poison_free(runner)
        try:
            final.update((output.id, output.token_ids) for output in watch.step())
        except Injected:
            SEEN["failed"] += 1
        armed[0] = False
    if name in EXACT:
        assert [final[str(index)] for index in range(len(prompts))] == want
        SEEN["exact_hits"] += watch.counts.hits
        SEEN["exact_replays"] += watch.counts.replayed_tokens
    else:
        SEEN["replays"] += watch.counts.replayed_tokens
    SEEN["preempted"] += sum(request.preemptions for request in requests.values())
    SEEN["snapshots"] += watch.counts.published_snapshots
    SEEN["accepted"] += runner.stats.accepted_drafts
    SEEN["evicted"] += watch.prefix.evictions


@pytest.mark.slow
def test_random_traces():
    """Cold, warm, speculative, preempted and failed runs write the same text wherever replay is exact; everywhere what
    is published stays bit for bit what it was, and host and device publish the same snapshots."""

    @settings(max_examples=60, deadline=None, derandomize=True, database=None,
              suppress_health_check=list(HealthCheck))
    @given(traces())
    def every_trace(trace):
        run_trace(*trace)

    every_trace()
    events = ("exact_hits", "exact_replays", "replays", "preempted", "snapshots", "accepted", "evicted", "failed")
    assert all(SEEN[event] > 5 for event in events), SEEN
