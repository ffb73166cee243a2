"""Decode steps under CUDA-graph trees: one launch a step, nothing recorded after warm-up, the eager text."""

import pytest
import torch
from cuda_graphs import STRICT, device_calls, recordings
from test_warm_serving import GREEDY, sweep
from tiny import engine, tiny_model

from torch_replay import SamplingParams
from torch_replay.graphs.compiled import compile_alone

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

PATTERN = ("mamba2", "engram", "gdn", "swa", "full", "mlp")
OPTIONS = {
    "spec": {"num_spec": 2, "window": 3},
    "no_spec": {},
    "snapshots": {"num_spec": 2, "prefix_cache": True, "block_size": 3},
    "snapshots_ahead": {"prefix_cache": True, "block_size": 3},
    "plain": {"num_spec": 2, "replay": False},
}


@pytest.fixture(scope="module")
def model():
    return tiny_model(pattern=PATTERN).cuda()


def warm(model, **options):
    runner = engine(model, max_num_seqs=3, compiled=True, **options)
    with torch._inductor.config.patch(STRICT), recordings() as made:
        runner.warm_up(quiet=True)
    assert len(made) == 2 * len(runner.steps), "each size on each route is recorded once"
    return runner


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_serving_records_nothing(model, options):
    """After warm-up a full sweep compiles and records nothing, skips no graph, and writes the eager text."""
    want = sweep(engine(model, max_num_seqs=3, **options))
    runner = warm(model, **options)
    once = torch._dynamo.config.patch(error_on_recompile=True)
    with torch._inductor.config.patch(STRICT), once, recordings() as made:
        assert sweep(runner) == want
    assert not made
    assert runner.compile_counts.as_dict() == {"graphs": 1, "graph_breaks": 0, "recompiles": 0}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_one_launch_a_step(model, options):
    """A decode step is one copy up, one graph launch and one copy back: no kernel beside the graph, no wait between."""
    runner = warm(model, **options)
    for prompt in ([3] * 20, [5, 6]):
        runner.add_request(prompt, SamplingParams(max_tokens=60, ignore_eos=True))
    for _ in range(5):
        runner.step()
    steps = 6
    before = runner.stats.decode_steps
    calls = device_calls(lambda: [runner.step() for _ in range(steps)])
    assert runner.stats.decode_steps == before + steps
    assert calls["cudaGraphLaunch"] == steps
    assert not [name for name in calls if "LaunchKernel" in name], calls
    assert calls["cudaMemcpyAsync"] == 2 * steps
    # waiting is for events alone; the profiler and `device_calls` wait for the device at their end
    assert "cudaStreamSynchronize" not in calls and calls["cudaDeviceSynchronize"] < steps, calls


def test_a_launch_beside_the_graph_shows(model):
    """Negative control: a kernel that runs eagerly between steps is seen."""
    runner = warm(model)
    flight = runner.decode.launch([], "greedy")
    calls = device_calls(lambda: (runner.decode.launch([], "greedy"), torch.ones(3, device="cuda") + 1))
    flight.result()
    assert any("LaunchKernel" in name for name in calls)


def test_results_outlive_the_next_step(model):
    """What a step gave is still there after the next one was launched."""
    runner = warm(model)
    for prompt in ([3] * 20, [5, 6]):
        runner.add_request(prompt, GREEDY)
    runner.step()
    runner.runs_ahead = False
    requests = runner.scheduler.running
    rows = [(request.index, [request.output_ids[-1]]) for request in requests]
    first = runner.decode.launch(rows, "greedy")
    second = runner.decode.launch([(index, [1]) for index, _ in rows], "greedy")
    eager = engine(model, max_num_seqs=3)
    for prompt in ([3] * 20, [5, 6]):
        eager.add_request(prompt, GREEDY)
    eager.step()
    want = eager.decode.launch([(request.index, [request.output_ids[-1]]) for request in eager.scheduler.running])
    assert first.result().samples == want.result().samples
    assert second.result() != first.result()


def test_padded_rows_are_inert(model):
    """A step of one request in the largest size changes no slot, block or history but the request's own."""
    runner = warm(model, decode_sizes=(4,))
    runner.add_request([3] * 20, SamplingParams(max_tokens=60, ignore_eos=True))
    runner.step()
    request = runner.scheduler.running[0]
    pools = [pool for states in runner.memory.states.values() for pool in states.block_copy_tensors()]
    pools.append(runner.state.requests.history.ids[None, :-1])
    before = [pool.clone() for pool in pools]
    caches = {kind: cache.clone() for kind, cache in runner.memory.kv.items()}
    used = {kind: {0, *table} for kind, table in request.tables.items()}
    for _ in range(20):
        runner.step()
        for kind, table in request.tables.items():
            used[kind].update(table)
    for pool, kept in zip(pools, before):
        own = request.index + 1 if pool.shape[1] > runner.config.max_num_seqs else request.index
        others = [slot for slot in range(pool.shape[1]) if slot != own]
        assert torch.equal(pool[:, others], kept[:, others])
    for kind, cache in runner.memory.kv.items():
        others = [block for block in range(cache.shape[1]) if block not in used[kind]]
        assert len(others) > 3 and torch.equal(cache[:, others], caches[kind][:, others])


def test_other_pools(model):
    """Pools that are replaced by others of the same shape are recorded anew, and the text goes on as it would have."""
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    want = engine(model, max_num_seqs=3).generate([[3] * 20], params)[0].token_ids
    runner = warm(model)
    runner.add_request([3] * 20, params)
    for _ in range(5):
        runner.step()
    runner.memory.kv = {kind: cache.clone() for kind, cache in runner.memory.kv.items()}
    for step in runner.steps:
        step.compile()
    final = []
    while runner.has_work:
        final = runner.step() or final
    assert final[0].token_ids == want


def test_an_unmarked_cache_is_an_error():
    """Negative control of the strict mode: a mutated input without a static address may not pass unnoticed."""
    class Step:
        def __init__(self):
            self.cache = torch.zeros(64, device="cuda")

        def run(self):
            self.cache.add_(1)

    step = Step()
    run = compile_alone(step.run, cuda=True)
    with torch._inductor.config.patch(STRICT), torch.no_grad(), pytest.raises(Exception, match="mutated inputs"):
        for _ in range(3):
            run()
