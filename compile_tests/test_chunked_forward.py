"""The chunked forward, which trains and prefills, compiles as one graph and computes what it computes eagerly."""

import torch
from harness import assert_close
from tiny import tiny_model


def test_forward():
    """fullgraph Inductor over two chunks of a model with both scans, both kinds of attention and n-grams."""
    model = tiny_model(pattern=("mamba2", "gdn", "engram", "swa", "full"))
    ids = torch.randint(1, 61, (1, 70), generator=torch.Generator().manual_seed(0))
    torch._dynamo.reset()
    with torch.no_grad():
        assert_close("logits", torch.compile(model, fullgraph=True)(ids), model(ids), 1e-5)
