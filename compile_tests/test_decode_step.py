"""The uniform decode step is one graph, stays one graph, and computes what it computes eagerly."""

from collections import Counter

import pytest
import torch
from packing_examples import inputs_of
from tiny import engine, tiny_model
from torch._inductor.utils import run_and_get_code

from torch_replay import SamplingParams
from torch_replay.engine.decode_step import DecodeStep
from torch_replay.engram import DeviceTable
from torch_replay.graphs import pack_parameters
from torch_replay.graphs.compiled import compile_alone
from torch_replay.ops.registry import OPS, inlining

PATTERN = ("mamba2", "gdn", "swa", "full", "mlp", "mamba2")
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def model():
    return tiny_model(pattern=PATTERN)


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 61, (n,), generator=generator).tolist() for n in (5, 1, 37, 70, 16, 12)]


def compiled_engine(model, backend: str, **options):
    """An engine whose greedy step is compiled by `backend`."""
    runner = engine(model, compiled=True, **options)
    if backend != "inductor":
        runner.decode.run["greedy"] = compile_alone(runner.decode.greedy_step, backend=backend)
    return runner


def traced(model, route="greedy", inlined=False, **options) -> tuple[Counter, int]:
    """Calls of the decode step's FX graph by target, and how many graphs there were.

    inlined: as on a CPU by default. False: every op of this project is one call, as on a GPU."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    runner = engine(model, **options)
    torch._dynamo.reset()
    step = getattr(runner.decode, f"{route}_step")
    runner.decode.run[route] = torch.compile(step, fullgraph=True, backend=backend, dynamic=False)
    with inlining(inlined):
        runner.warm_up(sampling=route == "sampled", greedy=route == "greedy")
    nodes = [node for node in graphs[0].graph.nodes if node.op == "call_function"]
    return Counter(str(node.target) for node in nodes), len(graphs)


HISTOGRAM = {
    "replay": {
        "prepare_positions": 1, "gather_block_tables": 3, "compute_slot_mappings": 1, "swa_indices": 1,
        "conv_replay": 3, "mamba2_replay": 2, "gdn_replay": 1, "write_kv": 2, "swa_attention": 1, "paged_attention": 1,
        "ring_commit": 2,
    },
    "snapshots": {
        "prepare_positions": 1, "gather_block_tables": 3, "compute_slot_mappings": 1, "swa_indices": 1,
        "conv_replay": 3, "mamba2_replay": 2, "gdn_replay": 1, "write_kv": 2, "swa_attention": 1, "paged_attention": 1,
        "ring_commit": 2, "compact_active": 2, "mamba2_materialize": 1, "gdn_materialize": 1, "copy_slots": 2,
    },
    "plain": {
        "prepare_positions": 1, "gather_block_tables": 1, "compute_slot_mappings": 1, "swa_indices": 1,
        "conv_replay": 3, "mamba2_update": 2, "gdn_update": 1, "write_kv": 2, "swa_attention": 1, "paged_attention": 1,
    },
}


@pytest.mark.parametrize("memory", HISTOGRAM)
@pytest.mark.parametrize("num_spec, route", [(0, "greedy"), (3, "greedy"), (3, "sampled")])
def test_op_histogram(model, memory, num_spec, route):
    """An op does one family's work: these and no others stand in the graph, and the matmuls are ordinary torch."""
    options = {"plain": {"replay": False}, "snapshots": {"prefix_cache": True, "state_block_size": 3}}
    calls, graphs = traced(model, route, num_spec=num_spec, **options.get(memory, {}))
    assert graphs == 1
    ours = {name.removeprefix("torch_replay."): n for name, n in calls.items() if name.startswith("torch_replay.")}
    assert {name.removesuffix(".default"): n for name, n in ours.items()} == HISTOGRAM[memory]
    # in and out of each mixer, up and down of the MLP, and the tied head
    assert sum(n for name, n in calls.items() if "linear" in name) == 2 * len(PATTERN) + 1


@pytest.mark.parametrize("memory", HISTOGRAM)
def test_inlined_op_histogram(model, memory):
    """By default, on a CPU, the small ops are gone from the graph and the others stay."""
    options = {"plain": {"replay": False}, "snapshots": {"prefix_cache": True, "state_block_size": 3}}
    calls, graphs = traced(model, inlined=True, num_spec=3, **options.get(memory, {}))
    assert graphs == 1
    ours = {name.split(".")[1]: n for name, n in calls.items() if name.startswith("torch_replay.")}
    assert ours == {name: n for name, n in HISTOGRAM[memory].items() if not OPS[name].inline_on_cpu}
    assert ours.keys() != HISTOGRAM[memory].keys()


def test_engram_op_histogram():
    """Two engram layers add one lookback, one hash and one lookup to the graph, and nothing waits for the host."""
    calls, graphs = traced(tiny_model(pattern=("mamba2", "engram", "mlp", "engram")), num_spec=3)
    assert graphs == 1
    ours = {name.split(".")[1]: n for name, n in calls.items() if name.startswith("torch_replay.")}
    assert {"engram_lookback": 1, "ngram_hash": 1, "engram_lookup": 1}.items() <= ours.items()
    assert len(ours) == 3 + len({"prepare_positions", "gather_block_tables", "conv_replay", "mamba2_replay",
                                 "ring_commit"})


def test_engram_compiles_once():
    """The step with engram layers stays one graph without recompiles, writes the eager text, and copies no history."""
    model = tiny_model(5, pattern=("mamba2", "engram", "full"))
    prompts = [torch.randint(1, 61, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 1, 20)]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    want = [output.token_ids for output in engine(model, num_spec=2).generate(prompts, params)]
    runner = engine(model, compiled=True, num_spec=2)
    _, codes = run_and_get_code(runner.warm_up, sampling=False)
    history = runner.state.requests.history.ids
    copies = [line for code in codes for line in code.splitlines()
              if "empty_strided" in line and f"({history.shape[0]}, {history.shape[1]})" in line]
    assert codes and not copies
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert [output.token_ids for output in runner.generate(prompts, params)] == want
    assert runner.compile_counts.as_dict() == {"graphs": 1, "graph_breaks": 0, "recompiles": 0}


def test_prefetched_engram_compiles_once(monkeypatch):
    """Where the host fetches the rows, the step is one graph too, and it neither hashes nor looks up."""
    model = tiny_model(5, pattern=("mamba2", "engram", "mlp"))
    model.engram.place(DeviceTable(model.engram.weight.detach()))
    prompts = [torch.randint(1, 61, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 1, 20)]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    want = [output.token_ids for output in engine(model, num_spec=2).generate(prompts, params)]
    monkeypatch.setattr(DeviceTable, "needs_prefetch", lambda self, device: True)
    calls, graphs = traced(model, num_spec=2)
    assert graphs == 1 and not any("engram" in name or "ngram" in name for name in calls)
    runner = compiled_engine(model, "aot_eager", num_spec=2)
    runner.warm_up(sampling=False)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert [output.token_ids for output in runner.generate(prompts, params)] == want
    assert runner.compile_counts.as_dict() == {"graphs": 1, "graph_breaks": 0, "recompiles": 0}


@pytest.mark.parametrize("backend, options", [
    ("aot_eager", {"num_spec": 2}), ("aot_eager", {"replay": False, "num_spec": 2}), ("aot_eager", {"window": 3}),
    ("inductor", {"num_spec": 2, "prefix_cache": True, "state_block_size": 3})], ids=str)
def test_one_graph_and_no_recompile(model, prompts, backend, options):
    """Rows come and go, lengths, cursors and draft counts vary: one graph, no break, no recompile, the eager text."""
    want = [output.token_ids for output in engine(model, **options).generate(prompts, PARAMS)]
    runner = compiled_engine(model, backend, **options)
    runner.warm_up(sampling=False)
    with torch._dynamo.config.patch(error_on_recompile=True):
        got = [output.token_ids for output in runner.generate(prompts, PARAMS)]
    assert got == want
    if "prefix_cache" in options:
        assert runner.scheduler.prefix.counts.published_snapshots > 20
    assert runner.compile_counts.as_dict() == {"graphs": 1, "graph_breaks": 0, "recompiles": 0}


def graph_inputs(repeats: int, packed: bool) -> int:
    """Inputs of the greedy step's graph, for a model of so many layers of each kind."""
    model = tiny_model(pattern=PATTERN * repeats)
    parameters = pack_parameters(model, call=lambda: None) if packed else None
    step = DecodeStep(model, engine(model).state, 2, 1, compiled=False, packed=parameters)
    return len(inputs_of(step.run["greedy"]))


def test_inputs_do_not_grow_with_layers():
    """What the host pays for at every step: the same tensors for one layer of each kind as for two."""
    assert graph_inputs(1, packed=True) == graph_inputs(2, packed=True) < 45
    assert graph_inputs(2, packed=False) > 70


def test_counts_see_a_recompile(model):
    """Negative control: a step that branches on a Python number that changes is counted as recompiled."""
    runner = engine(model)

    class Branching:
        limit = 0

        def step(self):
            return torch.ones(2) * self.limit

    branching = Branching()
    run = compile_alone(branching.step)
    for limit in (0, 5):
        branching.limit = limit
        with runner.compile_counts.watch("greedy"):
            run()
    assert runner.compile_counts.recompiles == 1


def test_many_engines(model, prompts):
    """Engines do not share the compiled variants, eight by default, that Dynamo allows a code object."""
    with torch._dynamo.config.patch(recompile_limit=2):
        for _ in range(3):
            runner = compiled_engine(model, "eager")
            assert len(runner.generate(prompts[:1], SamplingParams(max_tokens=3))) == 1
