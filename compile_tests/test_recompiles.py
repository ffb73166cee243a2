"""One graph serves all that changes from step to step: rows, draft lengths, positions in the ring, and counts."""

import contextlib

import pytest
import torch
from harness import named
from mini_step import WINDOW, MiniStep, batches
from tiny import engine, tiny_model
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.exc import RecompileError

from torch_replay import SamplingParams
from torch_replay.ops.registry import OPS
from torch_replay.ops.samples import samples


class Counting:
    """The backend "aot_eager", whose guards are those of Inductor's front, with a count of the graphs it was given."""

    def __init__(self):
        self.graphs = 0
        torch._dynamo.reset()

    def __call__(self, graph, inputs):
        self.graphs += 1
        return aot_eager(graph, inputs)


def compiled(fn, dynamic=None):
    backend = Counting()
    return torch.compile(fn, fullgraph=True, backend=backend, dynamic=dynamic), backend


@contextlib.contextmanager
def no_more_graphs():
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield


@torch.no_grad()
def test_steps():
    """Rows 2 to 5, of which some are empty, drafts of 0 to T - 1 tokens, rings that wrap: one graph, the eager bits."""
    steps = [batch for rows in (4, 2, 5, 3, 4) for batch in batches(rows, 6, empty=rows % 2, seed=rows)]
    eager, module = MiniStep(), MiniStep()
    step, backend = compiled(module)
    for value in steps[0]:
        torch._dynamo.mark_dynamic(value, 0)
    wrapped = torch.zeros_like(module.start, dtype=torch.bool)
    for i, batch in enumerate(steps):
        with no_more_graphs() if i else contextlib.nullcontext():
            before = module.start.clone()
            got = step(*batch)
        wrapped |= module.start < before
        assert all(map(torch.equal, got, eager(*batch)))
    assert backend.graphs == 1
    for name, cache in eager.caches().items():
        assert torch.equal(getattr(module, name), cache), name
    live = module.state_tables[0, :, -1].long()
    assert wrapped[0, live].all() and module.num_computed.max() > 3 * module.x_ring.shape[3] > WINDOW


@torch.no_grad()
def test_steps_that_count():
    """Negative control: a step that keeps its position in Python is compiled again at the next position."""
    module = MiniStep(layers=1)
    module.position = 0

    def step(*batch):
        module.position += 1
        return module(*batch)[0] * module.position

    run, _ = compiled(step)
    first, second = batches(4, 2)
    run(*first)
    with no_more_graphs(), pytest.raises(RecompileError, match="position"):
        run(*second)


# op -> argument, four values of it that a sample of the op allows
COUNTS = {
    "pad_replayed_slots": ("window", (3, 4, 5, 6)),
    "gather_replay_rows": ("window", (3, 4, 5, 6)),
    "swa_indices": ("block_size", (3, 4, 5, 6)),
    "ring_commit": ("block_size", (3, 4, 5, 6)),
    "ring_advance": ("ring_len", (20, 21, 22, 23)),
    "mamba2_replay": ("window", (16, 15, 14, 13)),
    "gdn_replay": ("window", (16, 15, 14, 13)),
    "kda_replay": ("window", (16, 15, 14, 13)),
    "mamba2_prefill": ("philox_rounds", (6, 7, 8, 10)),
    "gdn_prefill": ("philox_rounds", (6, 7, 8, 10)),
    "kda_prefill": ("philox_rounds", (6, 7, 8, 10)),
    "conv_prefill": ("max_query_len", (13, 14, 15, 16)),
    "conv_replay": ("max_query_len", (4, 5, 6, 7)),
    "mamba2_update": ("max_query_len", (4, 5, 6, 7)),
    "gdn_update": ("max_query_len", (4, 5, 6, 7)),
    "kda_update": ("max_query_len", (4, 5, 6, 7)),
    "mamba2_materialize": ("philox_rounds", (6, 7, 8, 10)),
    "gdn_materialize": ("philox_rounds", (6, 7, 8, 10)),
    "kda_materialize": ("philox_rounds", (6, 7, 8, 10)),
}


def test_every_count_is_tried():
    """Each op with a count in its schema is in the table."""
    assert {name for name, op in OPS.items() if "SymInt" in op.schema} == set(COUNTS)


@pytest.mark.parametrize("op, argument, values", [(op, *rest) for op, rest in COUNTS.items()], ids=COUNTS)
@torch.no_grad()
def test_counts(op, argument, values):
    """Four values of a count share a graph."""
    wanted = {"philox_rounds": "state_fp16_stochastic", "max_query_len": "packed_padded"}.get(argument)
    sample = next(sample for sample in samples(op) if wanted in (None, sample.id))

    step, backend = compiled(lambda arguments, count: OPS[op].overload(**arguments, **{argument: count}), dynamic=True)
    with torch._dynamo.config.patch(specialize_float=True):  # else Dynamo begins twice, for floats
        for i, value in enumerate(values):
            arguments = named(op, *sample.make())
            del arguments[argument]
            if argument == "window" and "ring_committed" in arguments:
                arguments["ring_committed"].clamp_(max=min(values))
            with no_more_graphs() if i else contextlib.nullcontext():
                step(arguments, value)
    assert backend.graphs == 1


@torch.no_grad()
def test_counts_that_are_no_symbols():
    """Negative control: a count that the schema calls `int` has a graph for each value."""
    library = torch.library.Library("torch_replay_recompiles", "FRAGMENT")
    library.define("shifted(Tensor x, int count) -> Tensor")
    library.impl("shifted", lambda x, count: x + count, "CPU")
    torch.library.register_fake("torch_replay_recompiles::shifted", lambda x, count: torch.empty_like(x), lib=library)
    step, _ = compiled(lambda x, count: torch.ops.torch_replay_recompiles.shifted(x, count), dynamic=True)
    step(torch.zeros(3), 16)
    with no_more_graphs(), pytest.raises(RecompileError):
        step(torch.zeros(3), 15)


@pytest.mark.parametrize("modes, graphs", [
    ((torch.inference_mode,), 1), ((torch.no_grad,), 1), ((torch.inference_mode, torch.no_grad), 2),
], ids=["inference_mode", "no_grad", "in turn"])
def test_modes_of_ordinary_caches(modes, graphs):
    """Caches made under no_grad serve steps under either mode; whoever changes between them has one graph for each."""
    with torch.no_grad():
        eager, module = MiniStep(), MiniStep()
    step, backend = compiled(module)
    for i, batch in enumerate(batches(4, 6, empty=1)):
        with modes[i % len(modes)]():
            got = step(*batch)
        with torch.no_grad():
            assert all(map(torch.equal, got, eager(*batch)))
    assert backend.graphs == graphs


def test_modes_of_inference_caches():
    """Caches made under inference_mode serve steps under it, and no others: torch refuses to write them outside, with
    its own message. Made in `inference_mode(False)` inside of it they are ordinary ones."""
    with torch.inference_mode():
        module = MiniStep()
        with torch.inference_mode(False), torch.no_grad():
            eager, ordinary = MiniStep(), MiniStep()
    first, *rest = batches(4, 4, empty=1)
    step, backend = compiled(module)
    for batch in (first, *rest):
        with torch.inference_mode():
            got = step(*batch)
        with torch.no_grad():
            assert all(map(torch.equal, got, eager(*batch)))
    assert backend.graphs == 1
    with torch.no_grad(), pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
        step(*first)
    step, backend = compiled(ordinary)
    with torch.no_grad():
        for batch in (first, *rest):
            got = step(*batch)
    assert backend.graphs == 1 and torch.equal(ordinary.state, eager.state)


def test_engine_under_inference_mode():
    """An engine that was made outside generates the same inside."""
    model = tiny_model(pattern=("mamba2", "swa"))
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    want, runner = engine(model).generate([[1, 2, 3]], params)[0].token_ids, engine(model)
    with torch.inference_mode():
        assert runner.generate([[1, 2, 3]], params)[0].token_ids == want


def test_engine_made_under_inference_mode():
    """An engine that was made inside generates the same outside."""
    model = tiny_model(pattern=("mamba2", "swa"))
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    want = engine(model).generate([[1, 2, 3]], params)[0].token_ids
    with torch.inference_mode():
        runner = engine(model)
    assert runner.generate([[1, 2, 3]], params)[0].token_ids == want
