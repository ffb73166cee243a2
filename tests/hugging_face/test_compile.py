"""A replaced model's decode is one graph for every step, flushes included."""

import pytest
import torch
from torch._dynamo.utils import counters

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[hf]'")

from hugging_face.hf_models import FAMILIES, build, feed, prompts  # noqa: E402

from torch_replay.integrations.transformers import make_cache, replace  # noqa: E402

pytestmark = pytest.mark.hf


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def check(name, backend, tokens, **changes):
    """Decode of `tokens` at a time over several windows: one graph, no recompile, the logits of one forward."""
    chunks = [9] + [tokens] * (24 // tokens)
    model, (ids, _) = build(name, **changes), prompts(2, sum(chunks))
    expected = model(ids).logits
    replace(model, window=5, num_spec=tokens - 1)
    step = torch.compile(model, fullgraph=True, backend=backend)
    cache = make_cache(model, max_batch=2, max_len=64)
    with torch._dynamo.config.patch(error_on_recompile=True):
        got = feed(model, cache, ids, chunks, step)
        torch.testing.assert_close(got, expected, rtol=0, atol=5e-5 * float(expected.abs().max()))
        cache.reset()  # the same memory, and the same graph
        torch.testing.assert_close(feed(model, cache, ids, chunks, step), got)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@pytest.mark.parametrize("name", FAMILIES)
def test_one_graph(name):
    check(name, "eager", 1)


@pytest.mark.parametrize("name", ["Bamba", "Qwen3Next"])
def test_one_graph_of_several_tokens(name):
    check(name, "aot_eager", 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Mamba2", "Qwen3_5", "KimiLinear"])
def test_inductor(name):
    layers = {} if name == "Mamba2" else dict(layer_types=["linear_attention", "full_attention"])
    check(name, "inductor", 1, num_hidden_layers=2, **layers)
