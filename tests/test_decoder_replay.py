"""Decoder-side replay: the rows that a prompt keeps in the tail, what that changes, and prompt log probabilities."""

from dataclasses import replace

import pytest
import torch
from harness import assert_close
from prefix_harness import Watch, poison_free
from test_bounded_replay import batch_of, i32, model_state
from tiny import engine, greedy, tiny_config, tiny_model

from torch_replay import SamplingParams, ops
from torch_replay.engine.scheduler import Plan
from torch_replay.models import HybridModel
from torch_replay.models.layers import rope_rows
from torch_replay.states.builders import SlidingWindowBuilder
from torch_replay.states.groups import KVGroup
from torch_replay.states.model_state import ReplayModelState

PATTERN = ("mamba2", "full", "swa", "mlp", "swa")
PARAMS = SamplingParams(max_tokens=10, ignore_eos=True)


def tail_model(layers, pattern=PATTERN, window=6):
    model = tiny_model(5, pattern=pattern, window=window, vocab=31)
    model.config = replace(model.config, decoder_replay_layers=layers)
    return model


def prompts():
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(1, 31, (n,), generator=generator).tolist() for n in (40, 5, 23)]


def gather(q, seq_lens, starts, kept, window, groups=2):
    """The op on a ragged batch: (rows, kept_query_start_loc, positions, slots, kv_start), and positions and slots."""
    start, kept_start = i32(0, *q).cumsum(0).int(), i32(0, *kept).cumsum(0).int()
    positions = torch.cat([torch.arange(length - count, length) for length, count in zip(seq_lens, q)])
    slots = torch.arange(groups * len(positions)).view(groups, -1)
    n = sum(kept)
    out = (torch.full((n,), -7), torch.zeros_like(start), torch.full((n,), -7), torch.full((groups, n), -7),
           torch.zeros(len(q), dtype=torch.int32))
    ops.gather_replay_rows(*out, start, start - kept_start, i32(*seq_lens), i32(*starts), positions, slots,
                           window=window)
    return out, positions, slots


def test_kept_rows():
    """W 128: a decode, a prompt of 300 and one of 100 that replays from 50."""
    (rows, start, positions, slots, lowest), before, mapping = gather(
        [1, 300, 100], [500, 300, 300], [0, 0, 50], [1, 128, 100], 128)
    assert rows.tolist() == [0, *range(173, 301), *range(301, 401)]
    assert start.tolist() == [0, 1, 129, 229] and lowest.tolist() == [0, 172, 50]
    assert torch.equal(positions, before[rows]) and torch.equal(slots, mapping[:, rows])


def test_rows_of_prompt_logprobs():
    """The request whose every output is read keeps its 300 rows; the other keeps 128."""
    (rows, start, *_), _, _ = gather([1, 300, 300], [500, 300, 300], [0, 0, 0], [1, 300, 128], 128)
    assert rows.tolist() == [0, *range(1, 301), *range(473, 601)] and start.tolist() == [0, 1, 301, 429]


def tail_state(window=4, **options):
    state = model_state(window=window)
    groups = [KVGroup("full", 64), KVGroup("swa", 64, window)]
    return ReplayModelState(state.memory, state.requests, groups, **options)


def tail_of(state, rows, prefilling, computed):
    inputs = batch_of(state, rows, prefilling, computed)
    for index, _ in rows:
        state.requests.kv_tables[:, index] = 1 + torch.arange(16)
    batch = state.prepare_inputs(inputs)
    state.prepare_attn(batch, inputs)
    return batch.tail


def test_which_rows_a_step_keeps():
    """Prompts keep their last W, decodes and prompts with log probabilities all; kv starts follow; uniform layout."""
    state = tail_state(tail_windows=1)
    state.keeps_rows[2] = True
    tail = tail_of(state, [(1, 6), (2, 9), (3, 10), (0, 7)], [True, True, True, False], [20, 0, 0, 3])
    assert tail.rows.tolist() == [*range(2, 6), *range(10, 19), *range(26, 30), *range(30, 37)]
    assert tail.batch.query_start_loc.tolist() == [0, 4, 13, 17, 24]
    assert tail.batch.positions.tolist() == [*range(22, 26), *range(9), *range(6, 10), *range(3, 10)]
    assert tail.batch.attn["swa"].lens.tolist() == [1, 2, 3, 4, 1, 2, 3, *[4] * 6, 1, 2, 3, 4, *[4] * 7]
    assert list(tail.batch.attn) == ["swa"]


@pytest.mark.parametrize("rows, prefilling", [
    ([(1, 4), (2, 3)], [True, True]),  # short enough
    ([(1, 9), (2, 9)], [False, False]),  # decodes, longer than the window
    ([(2, 9)], [True]),  # prompt log probabilities
], ids=str)
def test_nothing_trims_nothing_is_built(monkeypatch, rows, prefilling):
    """One metadata build a step, the whole batch's."""
    state, builds, build = tail_state(tail_windows=1), [], SlidingWindowBuilder.build
    monkeypatch.setattr(SlidingWindowBuilder, "build", lambda self, *args, **kwargs: (
        builds.append(self), build(self, *args, **kwargs))[1])
    state.keeps_rows[2] = rows == [(2, 9)]
    assert tail_of(state, rows, prefilling, [0] * len(rows)) is None
    assert builds == [state.builders["swa"]]
    assert tail_of(state, [(1, 9)], [True], [0]) is not None
    assert builds[1:] == [state.builders["swa"], state.tail_builders["swa"]], "a builder of its own"


@pytest.mark.parametrize("windows, exact, kept", [(1, False, 4), (1, True, 4), (3, True, 10), (3, False, 4)])
def test_how_many_rows(windows, exact, kept):
    """window, or window + (layers - 1) (window - 1)."""
    assert tail_state(tail_windows=windows, exact=exact).kept_tokens == kept


def texts(model, **options):
    runner = engine(model, **options)
    for caches in runner.memory.kv.values():
        for cache in caches:
            cache.fill_(float("nan"))
    return [output.token_ids for output in runner.generate(prompts(), PARAMS)]


CHUNKS = [{}, {"chunk_size": 9}, {"chunk_size": 4}, {"chunk_size": 13, "num_spec": 3}]


@pytest.mark.parametrize("options", CHUNKS, ids=str)
def test_exact_mode_is_the_untrimmed_run(options):
    """Two window layers in the tail, and the halo that they need: the text of the full forward, over NaN."""
    model = tail_model(3)
    assert texts(model, exact_decoder_replay=True, **options) == [greedy(model, prompt, 10) for prompt in prompts()]


@pytest.mark.parametrize("options", CHUNKS, ids=str)
def test_one_window_is_exact(options):
    """One window layer in the tail sees all it needs in the last window of rows."""
    model = tail_model(2, pattern=("mamba2", "swa", "full", "mlp", "swa", "mlp"))
    assert texts(model, **options) == [greedy(model, prompt, 10) for prompt in prompts()]


def test_a_halo_too_small_shows():
    """Negative control: with one row less than the window the text of an exact model is another."""
    model = tail_model(3)
    runner = engine(model, exact_decoder_replay=True)
    runner.state.kept_tokens = model.config.sliding_window - 3
    want = [greedy(model, prompt, 10) for prompt in prompts()]
    assert [output.token_ids for output in runner.generate(prompts(), PARAMS)] != want


@torch.no_grad()
def test_trimmed_tail_against_plain_layers():
    """Two windows, the last 6 rows: the logits are those of the tail's own layers on those rows and nothing else."""
    model, prompt = tail_model(3), prompts()[0]
    seen, head = [], model.logits
    model.logits = lambda x: (seen.append(head(x)), seen[-1])[1]
    try:
        engine(model).generate([prompt], SamplingParams(max_tokens=1))
    finally:
        del model.logits
    rope = rope_rows(model.rope, torch.arange(len(prompt)))
    x = model.embedding(torch.tensor([prompt]))
    for layer in model.layers[:2]:
        x = layer(x, rope)
    x, rope = x[:, -6:], rope_rows(model.rope, torch.arange(len(prompt) - 6, len(prompt)))
    for layer in model.layers[2:]:
        x = layer(x, rope)
    assert_close("logits", seen[0][0], head(x)[0, -1], 1e-4)
    assert (seen[0][0] - model(torch.tensor([prompt]))[0, -1]).abs().max() > 0.05, "an approximation, as it should be"


def test_with_a_prefix_cache():
    """Both sides of replay at once: published blocks stay what they are, and with one window the text is exact."""
    model = tail_model(2, pattern=("mamba2", "full", "mlp", "swa", "mlp"))
    watch = Watch(model, block_size=4, state_block_size=3, num_snapshots=30, chunk_size=11, num_spec=2)
    stem = prompts()[0]
    for prompt in (stem, stem, stem + [3, 4, 5], stem[:30]):
        poison_free(watch.runner)
        assert watch.run([prompt], PARAMS) == [greedy(model, prompt, 10)]
    assert watch.counts.hits >= 2 and watch.counts.replayed_tokens == 6 * watch.counts.hits


def test_decode_steps_have_no_tail(monkeypatch):
    """What a prefill dropped does not reach the steps after it."""
    runner, tails = engine(tail_model(3)), []
    prepare = runner.state.prepare_attn
    monkeypatch.setattr(runner.state, "prepare_attn",
                        lambda batch, inputs: (prepare(batch, inputs), tails.append(batch.tail)))
    runner.generate(prompts()[:1], PARAMS)
    assert len(tails) == 10 and tails[0].rows.tolist() == list(range(34, 40)) and tails[1:] == [None] * 9


@torch.no_grad()
def reference_logprobs(model, prompt):
    logprobs = model(torch.tensor([prompt]))[0].log_softmax(-1)
    return torch.tensor([logprobs[i, token] for i, token in enumerate(prompt[1:])])


@pytest.mark.parametrize("layers", [0, 3])
@pytest.mark.parametrize("options", [{}, {"chunk_size": 7}, {"prefix_cache": True, "state_block_size": 3,
                                                             "block_size": 3, "chunk_size": 7}], ids=str)
def test_prompt_logprobs(layers, options):
    """By token, None for the first; from all rows although the tail trims, and in spite of a prefix that would hit."""
    model = tail_model(layers)
    runner = engine(model, exact_decoder_replay=True, **options)
    asked, plain = SamplingParams(max_tokens=4, ignore_eos=True, prompt_logprobs=True), PARAMS
    first = runner.generate(prompts(), plain)
    assert all(output.prompt_logprobs is None for output in first)
    ids = [runner.add_request(prompt, params) for prompt, params in zip(prompts() * 2, [asked] * 3 + [plain] * 3)]
    final = {}
    while runner.has_work:
        final.update((output.id, output) for output in runner.step())
    for prompt, name, other, before in zip(prompts(), ids[:3], ids[3:], first):
        values = final[name].prompt_logprobs
        assert values[0] is None and len(values) == len(prompt)
        assert_close("logprobs", torch.tensor(values[1:]), reference_logprobs(model, prompt), 1e-4)
        assert final[name].token_ids == before.token_ids[:4]
        assert final[other].prompt_logprobs is None


def test_prompt_logprobs_after_a_preemption():
    """A request that is computed anew gives its prompt's log probabilities once."""
    model, prompt = tail_model(3), prompts()[2]
    runner = engine(model, chunk_size=7)
    name = runner.add_request(prompt, SamplingParams(max_tokens=6, ignore_eos=True, prompt_logprobs=True))
    request = runner._live[name].request
    while len(request.output_ids) < 3:
        runner.step()
    runner.scheduler._preempt(request, Plan())
    output = None
    while runner.has_work:
        output = (runner.step() or [output])[-1]
    assert len(output.prompt_logprobs) == len(prompt) and len(output.token_ids) == 6
    assert_close("logprobs", torch.tensor(output.prompt_logprobs[1:]), reference_logprobs(model, prompt), 1e-4)


@pytest.mark.parametrize("pattern, layers, message", [
    (PATTERN, 4, "decoder_replay_layers: got 4, which takes in sublayer 1 of kind full"),
    (PATTERN, 5, "which takes in sublayer 0 of kind mamba2"),
    (("swa", "gdn", "mlp"), 2, "sublayer 1 of kind gdn"),
    (PATTERN, 6, r"got 6, expected an integer in \[0, 5\]"), (PATTERN, -1, "got -1"), (PATTERN, True, "got True"),
    (("swa", "full", "mlp"), 1, "got 1, expected a tail with a swa layer"),
])
def test_tail_refuses(pattern, layers, message):
    """The tail holds sliding windows and MLPs alone; anything else is refused with the sublayer's name."""
    with pytest.raises(ValueError, match=message):
        HybridModel(replace(tiny_config(pattern=pattern), decoder_replay_layers=layers))
