"""Drafts: prompt lookup and assistants, which transformers refuses for models with a state, and taking tokens back."""

import random

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[hf]'")

from hugging_face.hf_models import build, feed, prompts  # noqa: E402

from torch_replay.integrations.transformers import make_cache, replace  # noqa: E402

pytestmark = pytest.mark.hf
ONE_EACH = ["Mamba2", "Bamba", "Qwen3Next", "KimiLinear", "FalconH1"]  # an op each, a model without attention, a hybrid


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


class Oracle:
    """Drafts the true continuation, spoilt at a random place, so that every accepted count occurs."""

    requires_model_outputs, model_kwargs_overrides = False, {}

    def __init__(self, sequence, drafts):
        self.sequence, self.drafts, self.random, self.accepted = sequence, drafts, random.Random(1), []

    def get_candidates(self, input_ids, *args, **kwargs):
        at = input_ids.shape[1]
        draft = self.sequence[:, at : min(at + self.drafts, self.sequence.shape[1] - 1)].clone()
        wrong = self.random.randrange(self.drafts + 1)
        if wrong < draft.shape[1]:
            draft[:, wrong] = (draft[:, wrong] + 1) % 60 + 2
        return torch.cat([input_ids, draft], 1), None

    def update_candidate_strategy(self, input_ids, scores, matches):
        self.accepted.append(int(matches))


@pytest.mark.parametrize("name", ONE_EACH)
def test_rejected_drafts_leave_nothing(name):
    """Generation with drafts of which any number is accepted gives the tokens of generation without."""
    model, (ids, _) = build(name), prompts(1, 12)
    expected = model.generate(ids, max_new_tokens=50, do_sample=False)
    replace(model, window=8, num_spec=1)
    for drafts, max_len in ((4, None), (3, 80)):
        oracle = Oracle(expected, drafts)
        model._get_candidate_generator = lambda oracle=oracle, **kwargs: oracle
        cache = make_cache(model, max_len=max_len, num_spec=drafts)
        got = model.generate(ids, max_new_tokens=50, do_sample=False, prompt_lookup_num_tokens=drafts, cache=cache)
        assert torch.equal(got, expected)
        assert set(oracle.accepted) >= set(range(drafts + 1)) and len(oracle.accepted) < 30
    del model._get_candidate_generator


@pytest.mark.parametrize("name", ONE_EACH)
def test_prompt_lookup(name):
    """prompt_lookup_num_tokens works as it is; the drafts are checked several at a time."""
    model = build(name)
    text = model.generate(prompts(1, 12)[0], max_new_tokens=30, do_sample=False)
    prompt = torch.cat([text, text[:, :13]], 1)  # found again, whether or not the model repeats itself
    expected = model.generate(prompt, max_new_tokens=40, do_sample=False)
    replace(model, window=8)
    lengths = []
    model.register_forward_pre_hook(lambda m, a, k: lengths.append(k["input_ids"].shape[1]), with_kwargs=True)
    got = model.generate(prompt, max_new_tokens=40, do_sample=False, prompt_lookup_num_tokens=3,
                         max_matching_ngram_size=1)
    assert torch.equal(got, expected)
    assert lengths[0] > prompt.shape[1] and 4 in lengths[1:]


@pytest.mark.parametrize("name", ["Mamba2", "Bamba", "Qwen3Next", "KimiLinear"])
def test_assistant(name):
    """A replaced assistant's drafts are taken back too; one that is not replaced is refused: they would be spoilt."""
    model, (ids, _) = build(name), prompts(1, 12)
    expected = model.generate(ids, max_new_tokens=40, do_sample=False)
    assistant = build(name)
    for p in assistant.parameters():
        p.mul_(1 + 0.01 * torch.randn_like(p))
    model.generation_config.pad_token_id = None  # which would be taken for padding where a model writes it
    settings = assistant.generation_config
    settings.pad_token_id = None
    settings.num_assistant_tokens, settings.assistant_confidence_threshold = 4, 0.0
    replace(model, window=8)
    with pytest.raises(ValueError, match=f"assistant_model {name}ForCausalLM keeps a state"):
        model.generate(ids, max_new_tokens=5, assistant_model=assistant)
    replace(assistant, window=8)
    calls = []
    model.register_forward_pre_hook(lambda m, a, k: calls.append(k["input_ids"].shape[1]), with_kwargs=True)
    got = model.generate(ids, max_new_tokens=40, do_sample=False, assistant_model=assistant)
    assert torch.equal(got, expected)
    # with 4 drafts a forward, of a model that is nearly the same: spoilt drafts would need three times as many
    assert len(calls) < 18, calls


def test_refused():
    """What could not take drafts back is refused before anything runs."""
    model, (ids, _) = build("Bamba"), prompts(1, 12)
    replace(model)
    plain = transformers.DynamicCache(config=model.config)
    with pytest.raises(ValueError, match="cache is a DynamicCache, which cannot take drafts back"):
        model.generate(ids, max_new_tokens=5, prompt_lookup_num_tokens=3, cache=plain)
    assert plain.get_seq_length() == 0


@pytest.mark.parametrize("name", ONE_EACH)
def test_crop(name):
    """Tokens taken back never happened: after several single steps, after drafts, and in a static cache."""
    model, (ids, _) = build(name), prompts(2, 40)
    other = prompts(2, 40, seed=2)[0]
    replace(model, window=6)
    for max_len in (None, 64):
        cache = make_cache(model, 2, max_len, num_spec=3)
        feed(model, cache, ids, [10, 1, 1, 1])
        for count in (2, 2, 1, 3, 2, 3):  # over several windows, and single steps where the ring is full
            at = int(cache.memory.positions[1])
            wrong = other[:, at : at + count]
            chunks = [count] if count == 3 else [1] * count
            for start in range(0, count, chunks[0]):
                place = {"position_ids": torch.arange(at + start, at + start + chunks[0]).expand(2, -1)}
                model(wrong[:, start : start + chunks[0]], cache=cache, use_cache=True,
                      **({} if name == "Mamba2" else place))
            cache.crop(-count)
            right = ids[:, at : at + 2]
            for i in range(2):
                place = {"position_ids": torch.full((2, 1), at + i)}
                logits = model(right[:, i : i + 1], cache=cache, use_cache=True,
                               **({} if name == "Mamba2" else place)).logits
            cache.crop(0)
        at = int(cache.memory.positions[1])
        expected = model(ids[:, :at]).logits[:, -1:]
        torch.testing.assert_close(logits, expected, rtol=0, atol=5e-5 * float(expected.abs().max()))
        with pytest.raises(ValueError, match="rewind of 4 tokens, expected"):
            cache.crop(-4)
        with pytest.raises(ValueError, match="tokens_to_remove is 1, expected 0 or less"):
            cache.crop(1)
        assert int(cache.memory.positions[1]) == at == int(cache.get_seq_length())


@pytest.mark.parametrize("name", ONE_EACH)
def test_forwards_of_any_length(name):
    """Prompts in chunks, single steps and steps of several tokens in any order: the logits of one forward."""
    chunks = [9, 1, 1, 2, 1, 4, 1, 1, 9, *[1] * 9, 2, 2, 2, 2, 6, 1, 1]
    model, (ids, _) = build(name), prompts(2, sum(chunks))
    expected = model(ids).logits
    replace(model, window=8, num_spec=1)
    for recording in (False, True):
        cache = make_cache(model, 2)
        if recording:
            cache.activate_past_recording()
        got = feed(model, cache, ids, chunks)
        torch.testing.assert_close(got, expected, rtol=0, atol=5e-5 * float(expected.abs().max()))
