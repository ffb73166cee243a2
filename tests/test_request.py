"""Requests as they come in: prompts of every type, seeds, tokens and texts that end them, and what drafts count for."""

import numpy as np
import pytest
import torch
from test_engine import Letters
from tiny import engine, tiny_config, tiny_model
from tokenizers import Tokenizer, decoders, models

from torch_replay import SamplingParams
from torch_replay.engine.stats import add_up, summarize

PROMPT = [5, 1, 7, 3]


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def runner(model):
    return engine(model)


@pytest.fixture(scope="module")
def want(model):
    return engine(model).generate([PROMPT], SamplingParams(max_tokens=30, ignore_eos=True))[0].token_ids


@pytest.mark.parametrize("prompt", [
    [5.0, 1, 7, 3], [5, True, 7, 3], [5, "1", 7], b"\x05\x01", bytearray(b"\x05"), memoryview(b"\x05"), ["5", "1"],
    np.array([5.0, 1.0]), torch.tensor([5.0]), torch.tensor([True]), 5, None, [[5, 1]], np.array([[5, 1]]),
    torch.tensor(5), [5, None],
], ids=lambda prompt: type(prompt).__name__)
def test_prompts_that_are_no_token_ids(runner, prompt):
    """Refused with the argument's name and what came; nothing is queued."""
    with pytest.raises((TypeError, ValueError), match=r"prompt(\[\d\])?: expected .*, got "):
        runner.add_request(prompt)
    assert not runner.has_work


@pytest.mark.parametrize("prompt", [
    tuple(PROMPT), np.array(PROMPT), np.array(PROMPT, np.uint16), list(np.array(PROMPT)), torch.tensor(PROMPT),
    torch.tensor(PROMPT, dtype=torch.int32), range(3, 7), iter(PROMPT),
], ids=lambda prompt: type(prompt).__name__)
def test_prompts_of_many_types(runner, prompt):
    """Integers of any sequence, array or tensor of one dimension."""
    stream = runner._checked(prompt, SamplingParams())
    assert stream.request.prompt_ids == (list(range(3, 7)) if isinstance(prompt, range) else PROMPT)
    assert {type(token) for token in stream.request.prompt_ids} == {int}


def test_seed(runner, model):
    """Without a seed each request has one of its own, which its outputs tell and which draws the same text again."""
    prompts, params = [PROMPT] * 4, SamplingParams(max_tokens=8, temperature=1.0, ignore_eos=True)
    torch.manual_seed(0)
    outputs = runner.generate(prompts, params)
    assert len({output.seed for output in outputs}) == len({tuple(output.token_ids) for output in outputs}) == 4
    assert params.seed is None and all(0 <= output.seed < 2**53 for output in outputs)
    again = runner.generate(prompts, [SamplingParams(max_tokens=8, temperature=1.0, ignore_eos=True, seed=output.seed)
                                      for output in outputs])
    assert [(o.seed, o.token_ids) for o in again] == [(o.seed, o.token_ids) for o in outputs]
    torch.manual_seed(0)
    assert runner.generate([PROMPT], params)[0].seed not in {output.seed for output in outputs}


def test_stop_needs_a_tokenizer(runner):
    """A stop text that nobody could find is refused."""
    with pytest.raises(ValueError, match=r"stop is \('x',\), expected none: the engine has no tokenizer"):
        runner.add_request(PROMPT, SamplingParams(stop="x"))
    assert not runner.has_work


def test_tokens_that_end(runner, model, want, monkeypatch):
    """stop_token_ids, and every end-of-text token of the model unless it is ignored."""
    first, second = want[4], next(token for token in want[5:] if token not in want[:5])
    ends = [want.index(token) + 1 for token in (first, second)]

    def run(**params):
        output = runner.generate([PROMPT], SamplingParams(max_tokens=30, **params))[0]
        return output.finish_reason, len(output.token_ids)

    assert run(stop_token_ids=[second], ignore_eos=True) == ("stop", ends[1])
    assert run(stop_token_ids=(second, first), ignore_eos=True) == ("stop", min(ends))
    monkeypatch.setitem(model.config.__dict__, "eos_token_id", (second, first))
    assert run() == ("stop", min(ends))
    assert run(ignore_eos=True) == ("length", 30)
    with pytest.raises(ValueError, match=r"stop_token_ids holds 61, expected ids in \[0, 61\)"):
        runner.add_request(PROMPT, SamplingParams(stop_token_ids=(61,)))
    for bad in ([1.0], "12", [True], 3):
        with pytest.raises(TypeError, match="stop_token_ids"):
            SamplingParams(stop_token_ids=bad)
    with pytest.raises(ValueError, match="stop_token_ids: expected an integer of at least 0, got -1"):
        SamplingParams(stop_token_ids=[-1])


def test_several_end_of_text_tokens_in_a_config():
    """One token or a list of them, as model folders have it."""
    def config(eos):
        return type(tiny_config())(**{**tiny_config().__dict__, "eos_token_id": eos})

    assert config([3, 5]).eos_token_ids == (3, 5) and config(3).eos_token_ids == (3,)
    assert hash(config([3, 5])) == hash(config((3, 5)))
    for bad in ([], [3, 61], [True], "3", None, [3.0]):
        with pytest.raises(ValueError, match="eos_token_id: got"):
            config(bad)


def test_text_is_decode_of_all_tokens(model, want):
    """Words with blanks between them, special tokens left out unless they are asked for."""
    tokenizer = Tokenizer(models.WordLevel({f"▁w{i}": i for i in range(61)}, unk_token="▁w0"))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([f"▁w{want[2]}"])
    runner = engine(model)
    runner.tokenizer, pieces = tokenizer, []
    for skip in (True, False):
        params = SamplingParams(max_tokens=30, ignore_eos=True, skip_special_tokens=skip)
        runner.add_request(PROMPT, params, on_output=lambda output: pieces.append(output.new_text))
        while runner.has_work:
            output = runner.step()[-1]
        assert output.text == tokenizer.decode(want, skip_special_tokens=skip) == "".join(pieces)
        pieces.clear()


def test_score_only():
    """max_tokens=0 needs prompt_logprobs: without either nothing would come back."""
    assert SamplingParams(max_tokens=0, prompt_logprobs=True).max_tokens == 0
    with pytest.raises(ValueError, match="max_tokens: expected an integer of at least 1, got 0"):
        SamplingParams(max_tokens=0)


class Oracle:
    """Proposes what the model will say."""

    def __init__(self, prompt, answer):
        self.prompt, self.answer = prompt, answer

    def propose(self, tokens, limit):
        done = len(tokens) - len(self.prompt)
        return self.answer[done : done + limit]


@pytest.mark.parametrize("end", ["token", "text", "callback"])
def test_acceptance_counts_what_arrived(model, want, end):
    """Five drafts, all right, of which the text has two when it ends: two of five, for the request and in all."""
    runner = engine(model, num_spec=5)
    runner.tokenizer, runner.scheduler.drafter = Letters(), Oracle(PROMPT, want)
    last = want[2]  # the prompt gives the first token, drafts the next five
    assert last not in want[:2]
    params = {"token": {"stop_token_ids": [last]}, "text": {"stop": Letters().decode([last])}, "callback": {}}[end]
    params = SamplingParams(max_tokens=30, ignore_eos=True, **params)

    def callback(output):
        if end == "callback" and len(output.token_ids) > 1:
            runner.abort(output.id)

    name = runner.add_request(PROMPT, params, on_output=callback)
    request = runner._live[name].request
    while runner.has_work:
        runner.step()
    drafted, accepted, tokens = (5, 5, 7) if end == "callback" else (5, 2, 3)
    assert len(request.output_ids) == tokens
    assert (request.drafted, request.accepted) == (drafted, accepted)
    assert (runner.stats.drafted, runner.stats.accepted_drafts) == (drafted, accepted)
    idle = engine(model, num_spec=5).stats.counters()
    assert summarize(add_up([runner.stats.counters(), idle]))["acceptance_rate"] == accepted / drafted
