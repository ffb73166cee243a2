"""Every family: what a replaced model computes is what transformers computes, in logits, layers and states."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[hf]'")

from hugging_face.hf_models import FAMILIES, build, feed, prompts  # noqa: E402

from torch_replay.integrations.transformers import make_cache, replace, restore  # noqa: E402

pytestmark = pytest.mark.hf
STEPS = [9] + [1] * 29  # a prompt, then decode over six windows


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def outputs_of_mixers(model) -> list:
    """A list that forwards of the model append (layer, output) to."""
    seen = []
    for module in model.modules():
        if hasattr(module, "conv1d") and hasattr(module, "layer_idx"):
            module.register_forward_hook(lambda m, a, out: seen.append((m.layer_idx, out)))
    return seen


def states(cache) -> dict:
    """Recurrent states and the inputs that a convolution reads, by layer."""
    found = {}
    for at, layer in enumerate(cache.layers):
        if getattr(layer, "recurrent_states", None):
            found[at] = layer.recurrent_states[0].clone(), layer.conv_states[0][..., 1:].clone()
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_layers_and_states(name):
    """Decode over several windows equals transformers' own at 5e-5 of the largest value, layer by layer."""
    model, (ids, _) = build(name), prompts(2, sum(STEPS))
    layers = outputs_of_mixers(model)
    theirs = transformers.DynamicCache(config=model.config)
    expected = feed(model, theirs, ids, STEPS)
    expected_layers, layers[:] = list(layers), []
    parameters = {key: value.data_ptr() for key, value in model.state_dict().items()}

    replace(model, window=5)
    ours = make_cache(model, max_batch=2)
    got = feed(model, ours, ids, STEPS)
    torch.testing.assert_close(got, expected, rtol=0, atol=5e-5 * float(expected.abs().max()))
    assert len(layers) == len(expected_layers) > len(STEPS)
    for (at, y), (expected_at, expected_y) in zip(layers, expected_layers, strict=True):
        assert at == expected_at
        torch.testing.assert_close(y, expected_y, rtol=0, atol=5e-5 * float(expected_y.abs().max()))
    expected_states, got_states = states(theirs), states(ours)
    assert got_states.keys() == expected_states.keys() == set(ours.index)
    for at, pair in expected_states.items():
        for mine, other in zip(got_states[at], pair, strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=5e-5 * float(other.abs().max()))
    assert {key: value.data_ptr() for key, value in model.state_dict().items()} == parameters

    # a ring that is forgotten shows
    forgetful = make_cache(model, max_batch=2)
    feed(model, forgetful, ids, STEPS[:4])
    assert int(forgetful.memory.ring_committed[0, 1]) == 3
    forgetful.memory.ring_committed.zero_()
    wrong = model(ids[:, 12:13], cache=forgetful, use_cache=True).logits
    assert float((wrong - expected[:, 12:13]).abs().max()) > 0.1

    restore(model)
    again = feed(model, transformers.DynamicCache(config=model.config), ids, STEPS)
    assert torch.equal(again, expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_state_matters(name):
    """With the weights of these tests, zeroing the recurrent states moves the logits: the tests see the state."""
    model, (ids, _) = build(name), prompts(2, 13)
    cache = transformers.DynamicCache(config=model.config)
    feed(model, cache, ids, [12])
    zeroed = copy.deepcopy(cache)
    for layer in zeroed.layers:
        for state in getattr(layer, "recurrent_states", {}).values():
            state.zero_()
    token = ids[:, 12:]
    logits = [model(token, cache=c, use_cache=True).logits for c in (cache, zeroed)]
    assert float((logits[0] - logits[1]).abs().max()) > 0.1


@pytest.mark.parametrize("name", FAMILIES)
def test_generate(name):
    """generate with left padding, greedy and by beams, in a growing and in a static cache: the same tokens."""
    model, (ids, mask) = build(name), prompts(3, 12, padded=True)
    greedy = dict(attention_mask=mask, max_new_tokens=26, do_sample=False)
    beams = dict(attention_mask=mask, max_new_tokens=12, do_sample=False, num_beams=3)
    expected = [model.generate(ids, **arguments) for arguments in (greedy, beams)]
    replace(model, window=5)
    for arguments, tokens in zip((greedy, beams), expected, strict=True):
        assert torch.equal(model.generate(ids, **arguments), tokens)
    rows = make_cache(model, max_batch=4, max_len=40)
    assert torch.equal(model.generate(ids, cache=rows, **greedy), expected[0])
