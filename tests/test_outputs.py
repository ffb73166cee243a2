"""What `step` and `generate` hand out: aborts, prompts that are refused, logits that are not finite, prompts alone."""

import tracemalloc

import pytest
import torch
from tiny import engine, greedy, tiny_model

from torch_replay import SamplingParams
from torch_replay.engine import decode_step as steps
from torch_replay.engine.output import Stream
from torch_replay.engine.request import Request

PATTERN = ("mamba2", "gdn", "swa", "full")
COUNT = 12
PARAMS = SamplingParams(max_tokens=COUNT, ignore_eos=True)
PROMPTS = [[5, 6, 7, 8, 9, 10], [11, 12], [13, 14, 15, 16, 17, 18, 19, 20, 21]]
BAD = 3  # the token whose embedding is NaN


@pytest.fixture(scope="module")
def model():
    return tiny_model(4, pattern=PATTERN)


@pytest.fixture(scope="module")
def want(model):
    return [greedy(model, prompt, COUNT) for prompt in PROMPTS]


def drain(runner) -> dict:
    """Last outputs by id; a finished request has nothing after its end."""
    final = {}
    while runner.has_work:
        for output in runner.step():
            assert output.id not in final or final[output.id].finish_reason is None
            final[output.id] = output
    return final


def test_aborts_are_handed_out(model, want):
    """Running, waiting and in a callback: one output, finished, with the tokens so far; the engine has work until then.
    """
    runner = engine(model, max_num_seqs=2)
    for name, prompt in enumerate(PROMPTS):
        runner.add_request(prompt, PARAMS, str(name))
    for _ in range(4):
        runner.step()
    known = list(runner._live["0"].request.output_ids)
    assert runner.abort("0") and runner.abort("2") and not runner.abort("0") and not runner.abort("nobody")
    first = {output.id: output for output in runner.step()}
    assert (first["0"].finish_reason, first["0"].token_ids) == ("abort", known) and known == want[0][: len(known)]
    assert (first["2"].finish_reason, first["2"].token_ids) == ("abort", [])
    assert drain(runner)["1"].token_ids == want[1]
    runner.add_request(PROMPTS[0], PARAMS, "alone")
    assert runner.abort("alone") and runner.has_work and not runner.scheduler.has_work
    assert [output.finish_reason for output in runner.step()] == ["abort"]
    assert not runner.has_work and runner.step() == []


@pytest.mark.parametrize("run_ahead", [False, True])
def test_aborts_in_callbacks(model, want, run_ahead):
    """A callback that aborts its own request, another that runs and one that waits."""
    runner = engine(model, max_num_seqs=2, run_ahead=run_ahead)

    def kill(output):
        if len(output.token_ids) == 5:
            assert runner.abort("0") and runner.abort("1") and runner.abort("2")

    for name, prompt in enumerate(PROMPTS):
        runner.add_request(prompt, PARAMS, str(name), kill if name == 0 else None)
    final = drain(runner)
    assert [final[name].finish_reason for name in "012"] == ["abort"] * 3
    assert final["0"].token_ids == want[0][:5] and final["2"].token_ids == []
    assert final["1"].token_ids == want[1][: len(final["1"].token_ids)] != []


def test_generate_returns_aborts_in_place(model, want):
    """A request that somebody aborts meanwhile keeps its place among the outputs."""
    runner = engine(model)
    outer = runner.add_request(PROMPTS[0], PARAMS, on_output=lambda output: runner.abort("request-1"))
    outputs = runner.generate(PROMPTS[1:], PARAMS)
    assert [output.finish_reason for output in outputs] == ["abort", "length"]
    assert outputs[1].token_ids == want[2]
    assert drain(runner)[outer].token_ids == want[0]


def test_generate_is_all_or_none(model, want):
    """With one bad prompt, a failing step or an interrupt, nothing of the call is left; what was there goes on."""
    runner = engine(model)
    seen = []

    def other(output):
        seen.append(output.new_text)
        if len(output.token_ids) == 3:
            raise KeyboardInterrupt

    runner.add_request(PROMPTS[0], PARAMS, "other", other)
    with pytest.raises(ValueError, match="token 99"):
        runner.generate([PROMPTS[1], [99], PROMPTS[2]], PARAMS)
    assert list(runner._live) == ["other"] and len(runner.scheduler.waiting) == 1
    with pytest.raises(ValueError, match="expected 3 SamplingParams, one a prompt, got 2"):
        runner.generate(PROMPTS, [PARAMS] * 2)
    with pytest.raises(KeyboardInterrupt):
        runner.generate(PROMPTS[1:], PARAMS)
    assert list(runner._live) == ["other"] and list(runner.scheduler._live) == ["other"]
    final = drain(runner)
    assert list(final) == ["other"] and final["other"].token_ids == want[0]
    assert len(seen) == COUNT, "each token once"
    assert [output.token_ids for output in runner.generate(PROMPTS, PARAMS)] == want


class Letters:
    """A tokenizer of one letter a token."""

    def encode(self, text):
        return type("Encoding", (), {"ids": [ord(c) - 64 for c in text]})

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(64 + i) for i in ids)


def test_one_string_and_several_params(model):
    """A bare string is one prompt; each prompt may have parameters of its own."""
    runner = engine(model)
    runner.tokenizer = Letters()
    output, = runner.generate("ABCDE", PARAMS)
    assert output.token_ids == greedy(model, [1, 2, 3, 4, 5], COUNT)
    counts = [3, 7]
    outputs = runner.generate(["ABC", "XYZ"], [SamplingParams(max_tokens=n, ignore_eos=True) for n in counts])
    assert [len(output.token_ids) for output in outputs] == counts


def test_outputs_of_others_outlast_generate(model, want):
    """What other requests produced while `generate` ran, the next `step` hands out, no text of it lost."""
    runner = engine(model)
    runner.tokenizer = Letters()
    runner.add_request(PROMPTS[0], SamplingParams(max_tokens=4, ignore_eos=True), "short")
    runner.add_request(PROMPTS[1], PARAMS, "long")
    runner.generate([PROMPTS[2]], SamplingParams(max_tokens=6, ignore_eos=True))
    outputs = {output.id: output for output in runner.step()}
    assert outputs["short"].token_ids == want[0][:4] and outputs["short"].finish_reason == "length"
    assert outputs["short"].new_text == outputs["short"].text and len(outputs["short"].text) == 4
    assert drain(runner)["long"].token_ids == want[1]


def test_salts_and_callbacks_are_checked(model):
    """What would raise in every later step is refused at once."""
    runner = engine(model, prefix_cache=True, block_size=3, state_block_size=3)
    with pytest.raises(ValueError, match="cache_salt"):
        runner.add_request(PROMPTS[0], PARAMS, cache_salt="\ud800")
    with pytest.raises(TypeError, match="on_output"):
        runner.add_request(PROMPTS[0], PARAMS, on_output=3)
    assert not runner.has_work


@pytest.fixture(scope="module")
def poisoned():
    model = tiny_model(4, pattern=PATTERN)
    model.embedding.weight[BAD] = float("nan")
    return model


NAN_OPTIONS = {
    "plain": {}, "without_replay": {"replay": False}, "drafts": {"num_spec": 2}, "ahead": {"run_ahead": True},
    "chunks": {"chunk_size": 4}, "prefixes": {"prefix_cache": True, "block_size": 3, "state_block_size": 3,
                                              "chunk_size": 3},
}


@pytest.fixture
def masked(poisoned):
    """The tied embedding makes the logits of the poisoned token NaN for everybody: a mask of -Inf takes its place."""
    head = poisoned.logits
    poisoned.logits = lambda hidden: head(hidden).index_fill(-1, torch.tensor([BAD]), -torch.inf)
    yield poisoned
    del poisoned.logits


def check_published(runner) -> None:
    """All that others may take over is finite."""
    prefix = runner.scheduler.prefix
    if prefix is None:
        return
    assert prefix.counts.published_blocks and prefix.counts.published_snapshots
    for tensor in runner.memory.kv["full"]:
        assert tensor[list(prefix.full_pools["full"]._block_of.values())].isfinite().all()
    slots = [runner.memory.snapshot_slots(snapshot)[0] for snapshot in prefix.snapshots._block_of.values()]
    for states in runner.memory.states.values():
        assert states.state[:, slots].isfinite().all()  # dead columns of a conv ring may hold anything


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", NAN_OPTIONS)
def test_nan_in_a_prompt(masked, name, temperature):
    """The request ends with an error and a message, leaves nothing that others find, and nobody's text changes: not
    beside it, and not in the slots and blocks that it had."""
    params = SamplingParams(max_tokens=COUNT, temperature=temperature, seed=5, ignore_eos=True)
    want = [output.token_ids for output in engine(masked).generate(PROMPTS, params)]
    runner = engine(masked, max_num_seqs=2, **NAN_OPTIONS[name])
    bad = [5, 6, 7, BAD, 9, 10, 11]
    outputs = runner.generate([bad, PROMPTS[0], bad, *PROMPTS[1:], bad], params)
    assert [output.finish_reason for output in outputs] == ["error", "length", "error", "length", "length", "error"]
    assert all("NaN" in outputs[i].error and outputs[i].token_ids == [] for i in (0, 2, 5))
    assert [outputs[i].token_ids for i in (1, 3, 4)] == want and outputs[1].error is None
    check_published(runner)
    assert not runner.scheduler.has_work and not any(pool.num_used for pool in runner.scheduler.pools.values())


@pytest.mark.parametrize("name", ["plain", "drafts", "ahead", "prefixes", "without_replay"])
def test_nan_in_a_decode_step(model, want, name):
    """One request's state turns NaN while it decodes: it ends where it was, with an error, and the others go on."""
    runner = engine(model, **NAN_OPTIONS[name])
    ids = [runner.add_request(prompt, PARAMS) for prompt in PROMPTS]
    for _ in range(4):
        runner.step()
    victim = runner._live[ids[1]].request
    runner.memory.states["mamba2"].state[:, victim.index + 1] = float("nan")
    final = drain(runner)
    assert final[ids[1]].finish_reason == "error" and "NaN" in final[ids[1]].error
    text = final[ids[1]].token_ids
    assert text == want[1][: len(text)] and 0 < len(text) < COUNT
    assert [final[ids[0]].token_ids, final[ids[2]].token_ids] == [want[0], want[2]]
    check_published(runner)
    assert [output.token_ids for output in runner.generate(PROMPTS, PARAMS)] == want, "slots are clean for the next"


def test_nan_negative_control(model, want, monkeypatch):
    """Without the check of the logits the request goes on with tokens of no meaning."""
    monkeypatch.setattr(steps, "sound", lambda samples, logits: samples)
    with pytest.raises(AssertionError):
        test_nan_in_a_decode_step(model, want, "plain")


def test_sound():
    """NaN, +Inf and a row of -Inf alone are no logits; some -Inf are a mask."""
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[0.0, 1.0], [nan, 1.0], [1.0, nan], [inf, 0.0], [-inf, 0.0], [-inf, -inf], [-inf, nan]])
    samples = torch.arange(7)
    assert steps.sound(samples, logits).tolist() == [0, -1, -1, -1, 4, -1, -1]


@pytest.mark.parametrize("options", [{}, {"chunk_size": 7}, {"num_blocks": 9, "block_size": 8}, {"num_spec": 2},
                                     {"run_ahead": True}], ids=str)
def test_a_prompt_alone(model, options):
    """max_tokens=0 scores a prompt, also one that fills the context: no token, and log probabilities of all others."""
    runner = engine(model, max_model_len=64, **options)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, 61, (n,), generator=generator).tolist() for n in (64, 1, 30)]
    outputs = runner.generate(prompts, SamplingParams(max_tokens=0, prompt_logprobs=True))
    for prompt, output in zip(prompts, outputs):
        assert (output.token_ids, output.text, output.finish_reason) == ([], "", "length")
        truth = model(torch.tensor([prompt]))[0, :-1].log_softmax(-1)
        want = truth.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
        assert output.prompt_logprobs[0] is None
        assert output.prompt_logprobs[1:] == pytest.approx(want, rel=1e-3, abs=1e-4)
    with pytest.raises(ValueError, match="expected 1 to 64 tokens, got 65"):
        runner.add_request([1] * 65, SamplingParams(max_tokens=0, prompt_logprobs=True))
    with pytest.raises(ValueError, match="expected 1 to 63 tokens, got 64"):
        runner.add_request([1] * 64, SamplingParams(max_tokens=1))


def test_outputs_cost_their_new_tokens():
    """Of 2,000 outputs none copies the tokens before or the prompt's log probabilities, and each stays what it was."""
    params = SamplingParams(max_tokens=2000, prompt_logprobs=True, ignore_eos=True)
    request, outputs = Request("a", list(range(2000)), params), []
    request.prompt_logprobs = [-1.0] * 1999
    stream = Stream(request, None)
    tracemalloc.start()
    try:
        for token in range(2000):
            stream.commit([token], (), 10_000, outputs)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size < 2000 * 1000  # a copy at each step: 16 MB of tokens, 32 MB of log probabilities
    told = [output for _, output in outputs]
    assert [len(output.token_ids) for output in told] == list(range(1, 2001))
    assert all(told[step].token_ids == list(range(step + 1)) for step in range(0, 2000, 100))
    assert type(told[-1].token_ids) is list and told[-1].finish_reason == "length"
    assert told[0].prompt_logprobs is told[-1].prompt_logprobs and len(told[0].prompt_logprobs) == 2000


def test_tokens_told_read_like_a_list():
    """Length, items from either end, slices, comparison, repr; errors beyond the end though the list goes on."""
    items = list(range(10, 16))
    view = Stream(Request("a", [1], PARAMS, items), None).end(None, []).token_ids
    items.append(99)
    assert len(view) == 6 and view[-1] == 15 and view[2] == 12
    assert view[1:4] == [11, 12, 13] and view[::-2] == [15, 13, 11]
    assert view == items[:6] and view != items and list(view) == items[:6] and repr(view) == repr(items[:6])
    assert view == view[:] and 99 not in view and view.index(15) == 5
    for place in (6, -7):
        with pytest.raises(IndexError, match=f"item {place} of 6"):
            view[place]
