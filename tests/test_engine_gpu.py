"""The engine on a GPU: in float32 its greedy text is the CPU's, on every route."""

import pytest
import torch
from tiny import PATTERN, engine, tiny_model
from triton_harness import GPU, on_device

from torch_replay import SamplingParams

pytestmark = [*on_device, pytest.mark.skipif(not GPU, reason="needs a GPU")]
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)
ROUTES = {
    "compiled": dict(compiled=True),
    "drafts": dict(compiled=True, num_spec=3),
    "plain update": dict(replay=False, num_spec=2),
    "prefix cache": dict(compiled=True, num_spec=2, prefix_cache=True, block_size=3, state_block_size=3),
    "engram": dict(compiled=True, num_spec=2, pattern=("mamba2", "engram", "gdn", "mlp", "engram", "full")),
}


def texts(device: str, pattern=PATTERN, compiled=False, **options) -> tuple[list, object]:
    model = tiny_model(3, pattern=pattern).to(device)
    runner = engine(model, compiled=compiled and device == "cuda", **options)
    shared = torch.randint(1, 61, (30,), generator=torch.Generator().manual_seed(0)).tolist()
    first = [output.token_ids for output in runner.generate([shared, shared[:7], [5]], PARAMS)]
    return first + [output.token_ids for output in runner.generate([shared + [9, 9]], PARAMS)], runner


@pytest.mark.parametrize("options", ROUTES.values(), ids=ROUTES)
def test_text_equals_the_cpu(options):
    """Same tokens for prompts of several lengths and for a prompt that continues an earlier one."""
    want, _ = texts("cpu", **options)
    got, runner = texts("cuda", **options)
    assert got == want
    if options.get("compiled"):
        assert runner.compile_counts.as_dict() == {"graphs": 1, "graph_breaks": 0, "recompiles": 0}
    if options.get("prefix_cache"):
        assert runner.stats.as_dict()["prefix_hits"] == 1


@pytest.mark.parametrize("options", [{}, ROUTES["prefix cache"], {"replay": False, "chunk_size": 8}],
                         ids=["replay", "prefix cache", "plain"])
def test_compiled_prefill(options):
    """The text is that of eager prefill, for one row and several, chunks that go on and prefix hits; after the warm-up
    nothing compiles."""
    options = {**options, "compiled": False}
    model = tiny_model(3).to("cuda")
    prompts = [torch.randint(1, 61, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (30, 1, 12)]
    rounds = [prompts[:count] for count in (1, 2, 3)] + [[prompts[0] + [9, 9]]]
    runners = [engine(model, compiled_prefill=compiled, **options) for compiled in (True, False)]
    assert [runner.prefill_step is not None for runner in runners] == [True, False]
    runners[0].warm_up(quiet=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        got, want = ([[output.token_ids for output in runner.generate(each, PARAMS)] for each in rounds]
                     for runner in runners)
        assert got == want
    assert runners[0].compile_counts.as_dict() == {"graphs": 1, "graph_breaks": 0, "recompiles": 0}
