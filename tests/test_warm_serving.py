"""After `Engine.warm_up` serving compiles nothing, whatever comes, and the warm-up has left no trace in the text."""

import pytest
import torch
from test_engine import RandomDrafter
from test_warmup import fill, live_tensors, recorded, untouched
from tiny import engine, tiny_model
from torch._dynamo.utils import counters

from torch_replay import ReplayContext, SamplingParams
from torch_replay.engine import decode_step as step

PATTERN = ("mamba2", "gdn", "swa", "full")
GREEDY = SamplingParams(max_tokens=10, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=10, temperature=1.0, top_k=20, seed=3, ignore_eos=True)
OPTIONS = {
    "spec": {"num_spec": 2, "window": 3},
    "no_spec": {},
    "snapshots": {"num_spec": 2, "prefix_cache": True, "block_size": 3},
    "plain": {"num_spec": 2, "replay": False},
}


@pytest.fixture(scope="module")
def model():
    return tiny_model(pattern=PATTERN)


@pytest.fixture(autouse=True)
def dynamo_alone(monkeypatch):
    """Whether something compiles is Dynamo's decision; what its backend then does is not tested here."""
    compile_alone = step.compile_alone
    monkeypatch.setattr(step, "compile_alone", lambda method, **options: compile_alone(method, backend="eager"))


def no_results(runner) -> torch.Tensor:
    """What a decode step without rows gives."""
    return torch.zeros(runner.decode.rows, runner.decode.tokens + 2, dtype=torch.int32)


def compiled() -> tuple[int, int]:
    """Graphs and frames that Dynamo has compiled in this process."""
    return counters["stats"]["unique_graphs"], counters["frames"]["total"]


def sweep(runner) -> list[list[int]]:
    """Every batch size, greedy, sampled and mixed, drafts of every length, prompts seen before, aborts in mid-text."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, 61, (n,), generator=generator).tolist() for n in (30, 1, 17)]
    if runner.config.num_spec:
        runner.scheduler.drafter = RandomDrafter([])
    texts = []
    for size in range(1, len(prompts) + 1):
        for params in ([GREEDY] * size, [SAMPLED] * size, [GREEDY, SAMPLED, GREEDY][:size]):
            victim = runner.add_request([7, 8, 9], GREEDY)
            ids = [runner.add_request(prompt, each) for prompt, each in zip(prompts, params)]
            for _ in range(4):
                runner.step()
            runner.abort(victim)
            final = {}
            while runner.has_work:
                final.update((output.id, output.token_ids) for output in runner.step())
            texts += [final[i] for i in ids]
    return texts


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_serving_compiles_nothing(model, options):
    """A full sweep makes no graph and recompiles none, publishes and adopts snapshots, and writes the eager text."""
    want = sweep(engine(model, max_num_seqs=3, **options))
    runner = engine(model, max_num_seqs=3, compiled=True, **options)
    before = compiled()
    runner.warm_up()
    warm = compiled()
    assert warm[0] - before[0] == 2  # the greedy and the sampled step
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert sweep(runner) == want
    assert compiled() == warm
    if "prefix_cache" in options:
        counts = runner.scheduler.prefix.counts
        assert counts.published_snapshots > 20 and counts.hits > 5


@pytest.mark.slow
def test_cold_serving_compiles(model):
    """Negative control: what was not warmed up is seen to compile, a whole engine as well as one route."""
    for warm_up in (lambda runner: None, lambda runner: runner.warm_up(sampling=False)):
        runner = engine(model, max_num_seqs=3, compiled=True)
        warm_up(runner)
        warm = compiled()
        sweep(runner)
        assert compiled()[0] > warm[0]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_warm_up_leaves_no_trace(model, options):
    """Pools, tables, key-value caches and request buffers keep every byte, also with requests in mid-service."""
    runner = engine(model, max_num_seqs=3, **options)
    states, requests = list(runner.memory.states.values()), runner.state.requests
    caches = [cache for caches in runner.memory.kv.values() for cache in caches]
    buffers = [value for value in vars(requests).values() if isinstance(value, torch.Tensor)]

    def all_tensors():
        of_states = [live_tensors(s) if isinstance(s, ReplayContext) else [s.state, s.conv_ring, s.own_slots]
                     for s in states]
        return sum(of_states, [*caches, *buffers])

    def used(tensors):
        # the plans are a step's own, and a step of padding clears them and the table by row
        scratch = {t.data_ptr() for s in states if isinstance(s, ReplayContext) for t in (
            s.block_tables, s.src_slots, s.dst_slots, s.plan_start, s.plan_count)}
        return [t for t in tensors if t.data_ptr() not in scratch]

    if options.get("replay", True):
        for context in states:
            fill(context)
    with untouched(used(all_tensors())):
        runner.warm_up()
    runner = engine(model, max_num_seqs=3, **options)
    ids = [runner.add_request(prompt, GREEDY) for prompt in ([1, 2, 3, 4, 5], [6] * 20)]
    final = {}
    while runner.has_work:
        final.update((output.id, output.token_ids) for output in runner.step())
        runner.warm_up()
    want = engine(model, max_num_seqs=3, **options).generate([[1, 2, 3, 4, 5], [6] * 20], GREEDY)
    assert [final[i] for i in ids] == [output.token_ids for output in want]


def test_engine_warms_what_it_serves_with(model):
    """The decode ops run at the engine's own step size; snapshots are warmed in mode align alone."""
    ops = ("mamba2_replay", "gdn_replay", "ring_reset", "mamba2_materialize", "gdn_materialize", "pad_replayed_slots")
    for options, absent in (({}, {*ops[3:]}), (OPTIONS["snapshots"], set())):
        runner = engine(model, max_num_seqs=3, **options)
        runner.decode.run = {"greedy": lambda runner=runner: no_results(runner)}
        with recorded(*ops) as calls:
            runner.warm_up(sampling=False)
        assert {name for name, *_ in calls} == set(ops) - absent
        assert [args[14].tolist() for name, args, *_ in calls if name == "mamba2_replay"][0] == [1, 2, 3, 4]


@pytest.mark.parametrize("pattern", [PATTERN, ("mamba2", "engram", "full")], ids=len)
def test_prefill_is_warmed_up(pattern):
    """A whole chunk runs through the eager prefill, writes no cache, and only while no request is running."""
    runner = engine(tiny_model(pattern=pattern), max_num_seqs=3, chunk_size=20)
    runner.decode.run = {"greedy": lambda: no_results(runner)}
    caches = [cache for caches in runner.memory.kv.values() for cache in caches]
    with recorded("write_kv") as calls, untouched(caches):
        runner.warm_up(sampling=False)
    assert [args[3].tolist() for _, args, *_ in calls] == [[-1] * 20] * len(caches)
    runner.decode.run = {"greedy": runner.decode.greedy_step}
    runner.add_request([1, 2, 3], GREEDY)
    runner.step()
    with recorded("write_kv") as calls:
        runner.warm_up(sampling=False)
    assert all(args[3].shape == (4,) for _, args, *_ in calls)  # the decode step's rows alone
