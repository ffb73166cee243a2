"""The prefill of prompt chunks is two graphs for good, and computes what it computes eagerly."""

import functools
import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch
from harness import assert_close
from tiny import tiny_model
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.exc import RecompileError
from torch._dynamo.utils import counters

from torch_replay import Engine, EngineConfig, ReplayContext, SamplingParams
from torch_replay.engine import prefill_step as prefill
from torch_replay.engine.prefill_step import PrefillStep
from torch_replay.engram import DeviceTable
from torch_replay.graphs import pack_parameters
from torch_replay.ops.registry import override_kernel
from torch_replay.ops.scan import naive

PATTERN = ("mamba2", "gdn", "swa", "full")
PARAMS = SamplingParams(max_tokens=3, ignore_eos=True)
OPTIONS = {
    "replay": (PATTERN, dict(chunk_size=16, window=3, num_spec=2)),
    "snapshots": (("mamba2", "swa", "full"), dict(prefix_cache=True, block_size=3, state_block_size=3, chunk_size=20)),
    "plain": (("gdn",), dict(replay=False, num_spec=2, prefill_budget=30)),
    "engram": (("engram", "mamba2"), dict(prefill_rows=3)),
    "one_token": (("swa",), dict(chunk_size=1)),
    "one_row": (("mamba2", "full"), dict(prefill_rows=1)),
}


def engine(model, **options) -> Engine:
    """Up to four requests, all of which may prefill in one step. Decode is eager: it is not what is tested."""
    return Engine(model, None, EngineConfig(**{"max_num_seqs": 4, "max_model_len": 64, "compiled": False, **options}))


class Recording(list):
    """A backend that keeps the graphs it is given and runs them as they are, or made functional first."""

    functional = False

    def __call__(self, graph, inputs):
        self.append(graph)
        return aot_eager(graph, inputs) if self.functional else graph.forward


@pytest.fixture
def graphs(monkeypatch) -> Recording:
    """Graphs of prefill steps. What Inductor makes of them is another test's."""
    seen, compile_alone = Recording(), prefill.compile_alone
    monkeypatch.setattr(prefill, "compile_alone", lambda method: compile_alone(method, backend=seen))
    return seen


def sweep(runner) -> list:
    """One row to four, prompts of one token and of several chunks, prompts seen before, sampled text, and log
    probabilities: (token ids, log probabilities or None) of each request."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, 61, (n,), generator=generator).tolist() for n in (21, 1, 17, 2)]
    rounds = [(prompts[:count], PARAMS) for count in (4, 3, 1)]
    rounds += [([prompts[0] + [5, 6], prompts[2]], replace(PARAMS, temperature=1.0, seed=3)),
               (prompts[1:3], replace(PARAMS, prompt_logprobs=True))]
    return [(output.token_ids, output.prompt_logprobs) for each, params in rounds
            for output in runner.generate(each, params)]


def assert_same(got: list, want: list) -> None:
    assert [ids for ids, _ in got] == [ids for ids, _ in want]
    for (_, values), (_, expected) in zip(got, want, strict=True):
        assert (values is None) == (expected is None)
        if values is not None:
            torch.testing.assert_close(torch.tensor(values[1:]), torch.tensor(expected[1:]))


@pytest.mark.parametrize("pattern, options", OPTIONS.values(), ids=OPTIONS)
def test_two_graphs_serve_everything(graphs, pattern, options):
    """Warm-up makes a graph for one row and one for several; no rows, lengths, starts or hits make another."""
    model, graphs.functional = tiny_model(pattern=pattern), not options.get("replay", True)
    want = sweep(engine(model, **options))
    runner = engine(model, compiled_prefill=True, **options)
    runner.warm_up(quiet=True)
    assert len(graphs) == len(runner.prefill_step.run) == (1 if options.get("prefill_rows") == 1 else 2)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_same(sweep(runner), want)
    assert runner.compile_counts.as_dict() == {"graphs": 1, "graph_breaks": 0, "recompiles": 0}
    if options.get("prefix_cache"):
        assert runner.scheduler.prefix.counts.hits > 3
    for graph in graphs:  # the scans are one call each, with no loop over tokens around it
        calls = Counter(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        for op, kind in (("ssd_prefill", "mamba2"), ("delta_prefill", "gdn")):
            assert calls[f"torch_replay.{op}.default"] == pattern.count(kind)
        assert not any("solve_triangular" in name for name in calls)


@pytest.mark.parametrize("order", [(2,), (2, 3)], ids=str)
def test_as_large_as_the_buffers(graphs, order):
    """Steps of as many rows and tokens as an engine's buffers hold, at first and after smaller ones: no size becomes a
    constant, which `mark_dynamic` refuses (torch 2.11 did so for a slice as long as its buffer)."""
    graphs.functional = True  # functionalisation looks at sizes too
    model = tiny_model(pattern=("engram", "mamba2", "swa"))
    options = dict(max_num_seqs=max(order), prefill_rows=max(order), chunk_size=8, prefill_budget=8 * max(order),
                   prefix_cache=True, block_size=3)
    runners = engine(model, compiled_prefill=True, **options), engine(model, **options)
    assert runners[0].prefill_step.rows == max(order) and runners[0].prefill_step.tokens == 8
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows, tokens in itertools.product(order, (8, 2)):
            prompts = [[1 + row, 60 - tokens] + [rows] * (tokens - 2) for row in range(rows)]
            got, want = ([output.token_ids for output in each.generate(prompts, PARAMS)] for each in runners)
            assert got == want
    assert len(graphs) == 1


def test_steps_that_trim(graphs):
    """With decoder-side replay long chunks run eagerly and short ones compiled, beside each other."""
    model = tiny_model(5, pattern=("mlp", "swa"), window=6)
    model.config = replace(model.config, decoder_replay_layers=1)
    runner = engine(model, compiled_prefill=True)
    runner.warm_up(quiet=True)
    step = runner.prefill_step
    assert [step.takes([(0, [1] * tokens)]) for tokens in (1, 6, 7, 33)] == [True, True, False, False]
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_same(sweep(runner), sweep(engine(model)))
    assert len(graphs) == 2


def test_larger_steps(graphs):
    """More rows or tokens than the step was made for run eagerly."""
    runner = engine(tiny_model(pattern=("mlp",)), compiled_prefill=True, prefill_rows=2, chunk_size=9)
    step = runner.prefill_step
    assert step.takes([(0, [1] * 9), (1, [1])])
    assert not step.takes([(0, [1] * 10)]) and not step.takes([(index, [1]) for index in range(3)])
    samples, logprobs = step([(index, [1] * 11) for index in range(3)], [[], [1], []])
    assert len(samples) == 3 and [len(values) for values in logprobs] == [0, 1, 0] and not graphs


def test_where_prefill_stays_eager(monkeypatch):
    """On a CPU unless it is asked for, and where the host fetches n-gram rows."""
    model = tiny_model(pattern=("engram", "mlp"))
    model.engram.place(DeviceTable(model.engram.weight.detach()))
    assert engine(model).prefill_step is None and engine(model, compiled_prefill=True).prefill_step is not None
    monkeypatch.setattr(DeviceTable, "needs_prefetch", lambda self, device: True)
    assert engine(model, compiled_prefill=True).prefill_step is None


@pytest.mark.parametrize("graph, options", [("one", {}), ("many", {"replay": False})], ids=["one", "many_plain"])
def test_padding_is_inert(graphs, graph, options):
    """A prompt of one token, padded by a second one and by a row: memory is what the eager step leaves, and what
    belongs to nobody, the null slot included, keeps its bytes."""
    model, left = tiny_model(pattern=PATTERN[:3]), []
    for compiled in (True, False):
        runner = engine(model, compiled_prefill=compiled, **options)
        memory, requests = runner.memory, runner.state.requests
        pools = {f"{family} {name}": getattr(states, name) for family, states in memory.states.items()
                 for name in ("state", "conv_ring")} | memory.kv
        for pool in pools.values():
            pool.fill_(7.0)
        if compiled:
            runner.prefill_step = functools.partial(runner.prefill_step, graph=graph)
        runner.add_request([5], PARAMS)
        plan = runner.scheduler.schedule()
        runner._place(plan)
        runner._prefill(plan, None)
        cursors = {f"{family} cursors": states.ring_committed for family, states in memory.states.items()
                   if isinstance(states, ReplayContext)}
        left.append(pools | cursors | {"tables": requests.kv_tables, "computed": requests.num_computed})
    assert len(graphs) == 1
    for (name, got), want in zip(left[0].items(), left[1].values(), strict=True):
        if name not in ("tables", "computed"):
            assert torch.equal(got == 7.0, want == 7.0), name
            assert_close(name, got, want, 1e-6)
        else:  # the last row is that of padding
            assert torch.equal(got[..., :-1, :] if name == "tables" else got[:-1],
                               want[..., :-1, :] if name == "tables" else want[:-1])


def test_unmarked_sizes_recompile(graphs, monkeypatch):
    """Negative control: with sizes that are not marked dynamic, the next length is seen to compile anew."""
    monkeypatch.setattr(torch._dynamo, "mark_dynamic", lambda *args: None)
    runner = engine(tiny_model(pattern=("mlp",)), compiled_prefill=True)
    runner.generate([[1, 2, 3]], PARAMS)
    with torch._dynamo.config.patch(error_on_recompile=True), pytest.raises(RecompileError):
        runner.generate([[1, 2, 3, 4]], PARAMS)


def test_broken_scan_shows(graphs):
    """Negative control: a scan that forgets the state it starts from moves what follows a prompt's first chunk."""
    def forgetful(*args, out):
        naive.ssd_prefill(*args[:5], None, out=out)

    runner, seen = engine(tiny_model(pattern=("mamba2",)), compiled_prefill=True, chunk_size=4), []
    for kernel in (naive.ssd_prefill, naive.ssd_prefill, forgetful):
        with override_kernel("ssd_prefill", "cpu", kernel):
            output, = runner.generate([[3, 1, 4, 1, 5, 9, 2, 6]], replace(PARAMS, prompt_logprobs=True))
        seen.append(torch.tensor(output.prompt_logprobs[1:]))
    assert torch.equal(seen[0], seen[1]) and (seen[0] - seen[2]).abs().max() > 0.1


@pytest.mark.slow
def test_inductor():
    """Compiled for good, with parameters in flat buffers: the eager text, of two rows and of three, by one graph."""
    model = tiny_model(pattern=("mamba2", "full"))
    prompts = [torch.randint(1, 61, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (19, 1, 8)]
    rounds = [prompts, prompts[:2], prompts[1:]]
    want = [[output.token_ids for output in engine(model).generate(each, PARAMS)] for each in rounds]
    runner = engine(model)
    runner.prefill_step = PrefillStep(model, runner.state, 4, 64, pack_parameters(model))
    before = counters["stats"]["unique_graphs"]
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert [[output.token_ids for output in runner.generate(each, PARAMS)] for each in rounds] == want
    assert counters["stats"]["unique_graphs"] == before + 1
