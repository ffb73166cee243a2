"""bfloat16, bounds of dt, states of other dtypes: what is equal to transformers there, and what is better."""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[hf]'")

from hugging_face.hf_models import build, feed, prompts  # noqa: E402

from torch_replay.integrations.transformers import make_cache, replace  # noqa: E402

pytestmark = pytest.mark.hf
STEPS = [9] + [1] * 21


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def ratio(x, truth):
    return float((x.float() - truth.float()).norm() / truth.float().norm())


@pytest.mark.parametrize("name", ["Mamba2", "FalconH1", "Qwen3_5", "OlmoHybrid", "KimiLinear"])
def test_bfloat16(name):
    """In bfloat16 we are as near to the same model in float32 as transformers is, in logits and in states."""
    model, (ids, _) = build(name), prompts(2, sum(STEPS))
    for p in model.parameters():
        p.copy_(p.bfloat16())  # the same weights in both
    truth = feed(model, truth_cache := transformers.DynamicCache(config=model.config), ids, STEPS)
    narrow = build(name).bfloat16()
    theirs = feed(narrow, their_cache := transformers.DynamicCache(config=model.config), ids, STEPS)
    replace(narrow, window=5)
    ours = feed(narrow, our_cache := make_cache(narrow, 2), ids, STEPS)
    assert ours.dtype == theirs.dtype and our_cache.memory.state.dtype == torch.float32
    assert ratio(ours, truth) < max(1.3 * ratio(theirs, truth), 1e-2)
    for at in our_cache.index:
        state, other, wide = (cache.layers[at].recurrent_states[0] for cache in (our_cache, their_cache, truth_cache))
        assert ratio(state, wide) < max(1.3 * ratio(other, wide), 1e-2)


def test_bounds_of_dt():
    """A model's time_step_limit holds for decode as for prompts; match="transformers" leaves it out, as there."""
    ids = prompts(2, 30)[0]
    def logits(match):
        model = build("Bamba", time_step_limit=(0.05, 0.1))
        theirs = feed(model, transformers.DynamicCache(config=model.config), ids, STEPS)
        whole = model(ids).logits
        replace(model, window=5, match=match)
        return theirs, whole, feed(model, make_cache(model, 2), ids, STEPS)
    theirs, whole, ours = logits(None)
    close = dict(rtol=0, atol=5e-5 * float(whole.abs().max()))
    assert float((theirs - whole).abs().max()) > 0.5  # transformers differs from itself
    torch.testing.assert_close(ours, whole, **close)
    theirs, whole, ours = logits("transformers")
    torch.testing.assert_close(ours, theirs, **close)


def test_bounds_of_nemotron_h():
    """NemotronH's code has a bound of its own for prompts, whatever its configuration says."""
    ids = prompts(2, 30)[0]
    for match in (None, "transformers"):
        model = build("NemotronH", time_step_min=0.3)
        theirs, mixers = model(ids).logits, [m for m in model.modules() if hasattr(m, "conv1d")]
        own = [mixer.time_step_limit for mixer in mixers]
        for mixer in mixers:
            mixer.time_step_limit = model.config.time_step_limit
        configured = model(ids).logits
        assert own == [(0.3, float("inf"))] * 3 and float((theirs - configured).abs().max()) > 0.5
        for mixer in mixers:
            mixer.time_step_limit = own[0]
        replace(model, window=5, match=match)
        got = feed(model, make_cache(model, 2), ids, [30] if match else STEPS)
        expected = theirs if match else configured
        torch.testing.assert_close(got, expected, rtol=0, atol=5e-5 * float(expected.abs().max()))


def test_beta_above_one():
    """OlmoHybrid's beta runs to 2, in decode and in its prompts; without that factor the result is another."""
    ids, results = prompts(2, 30)[0], []
    for negative in (True, False):
        model = build("OlmoHybrid", linear_allow_neg_eigval=negative)
        expected = feed(model, transformers.DynamicCache(config=model.config), ids, STEPS)
        replace(model, window=5)
        got = feed(model, make_cache(model, 2), ids, STEPS)
        torch.testing.assert_close(got, expected, rtol=0, atol=5e-5 * float(expected.abs().max()))
        results.append(got)
    assert float((results[0] - results[1]).abs().max()) > 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
def test_narrow_states(dtype):
    """Checkpoints may be narrower than transformers' float32; the tokens of a beam search move their scales too."""
    model, (ids, _) = build("Qwen3Next"), prompts(2, sum(STEPS))
    expected = feed(model, transformers.DynamicCache(config=model.config), ids, STEPS)
    replace(model, window=5)
    cache = make_cache(model, 2, state_dtype=dtype)
    assert cache.memory.state.dtype == dtype
    assert 1e-6 < ratio(feed(model, cache, ids, STEPS), expected) < 5e-2
    order = torch.tensor([1, 0])
    cache.reorder_cache(order)
    swapped = make_cache(model, 2, state_dtype=dtype)
    feed(model, swapped, ids[order], STEPS)
    last = ids[order][:, -1:]
    place = dict(use_cache=True, position_ids=torch.full((2, 1), 30))
    logits = [model(last, cache=one, **place).logits for one in (cache, swapped)]
    torch.testing.assert_close(*logits)
