"""The pass against cache clones: compilation fails, naming the tensor, where Inductor would clone, and only there."""

from unittest import mock

import pytest
import torch
from harness import raw
from tiny import engine, tiny_model
from torch._dynamo.utils import ReinplaceCounters, counters
from torch._inductor.exc import InductorError
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

from torch_replay import ops
from torch_replay.graphs.audit_code import clones_left
from torch_replay.graphs.passes import CacheCloned, NoCacheClones, settled, written_inputs
from torch_replay.models import cached
from torch_replay.states.replay_context import ReplayContext, StateGroup, StateLayer

_LIBRARY = torch.library.Library("torch_replay_passes", "FRAGMENT")
for _schema, _kernel in (
    ("bump(Tensor(a!) cache, Tensor x) -> ()", lambda cache, x: (cache.add_(x), None)[-1]),
    ("bump_both(Tensor(a!) one, Tensor(b!) two, Tensor x) -> ()",
     lambda one, two, x: (one.add_(x), two.add_(x), None)[-1]),
    ("bump_all(Tensor(a!)[] caches, Tensor x) -> ()", lambda caches, x: ([t.add_(x) for t in caches], None)[-1]),
):
    _LIBRARY.define(_schema)
    _LIBRARY.impl(_schema.split("(")[0], _kernel, "CPU")
    torch.library.register_fake(f"torch_replay_passes::{_schema.split('(')[0]}", lambda *args: None, lib=_LIBRARY)
bump, bump_both, bump_all = (getattr(torch.ops.torch_replay_passes, name) for name in ("bump", "bump_both", "bump_all"))

X = torch.arange(8.0)
BITS = torch.arange(8, dtype=torch.int32)


class Buffers(torch.nn.Module):
    """Caches as a module keeps them: a pool [L, S, 8] of its own storage for each of keys and values."""

    def __init__(self):
        super().__init__()
        self.register_buffer("pool", torch.zeros(3, 4, 8))
        self.kv = {"swa": torch.zeros(3, 4, 8), "full": torch.zeros(3, 4, 8)}
        packed = torch.zeros(3, 4, 8)
        self.sliced = [packed[0], packed[1]]
        woven = torch.zeros(8, 8)
        self.interleaved = [woven[::2], woven[1::2]]
        shared = torch.zeros(6, 8)
        self.overlapping = [shared[:3], shared[2:5]]
        self.inner = torch.nn.ModuleList([torch.nn.BatchNorm1d(8)])

    def tensors(self) -> list[torch.Tensor]:
        return [self.pool, *self.kv.values(), *self.sliced, *self.interleaved, *self.overlapping,
                self.inner[0].running_mean]


def compiled(fn, **options):
    """`fn`, with the pass, from no cache."""
    torch._dynamo.reset()
    return torch.compile(fn, fullgraph=True, options={"post_grad_custom_post_pass": NoCacheClones(**options)})


@pytest.fixture(autouse=True)
def no_caches():
    with (torch._inductor.config.patch(fx_graph_cache=False), torch.no_grad(),
          torch._functorch.config.patch(enable_autograd_cache=False)):
        yield


def three_writes(m):
    bump(m.pool, X)
    first = m.pool[0] + 1
    bump(m.pool[0], first)
    second = m.pool.sum(0)
    bump_both(m.pool[1], m.pool[2], second)
    return second


CLEAN = {
    "whole": lambda m: bump(m.pool, X),
    "select": lambda m: bump(m.pool[1], X),
    "slice": lambda m: bump(m.pool[1:2], X),
    "view": lambda m: bump(m.pool.view(-1, 8), X),
    "transposed": lambda m: bump(m.pool.transpose(0, 1)[2], X),
    "strided": lambda m: bump(m.pool.as_strided((2, 8), (8, 1), 8), X),
    "two views": lambda m: bump_both(m.pool[0], m.pool[2], X),
    "overlapping views": lambda m: bump_both(m.pool[:2], m.pool[1:], X),
    "one twice": lambda m: bump_both(m.pool, m.pool, X),
    "list of views": lambda m: bump_all([m.pool[0], m.pool[2]], X),
    "list of buffers": lambda m: bump_all([m.kv["swa"][1], m.kv["full"][1]], X),
    "reads between writes": three_writes,
    "view returned": lambda m: (bump(m.pool, X), m.pool[1])[-1],
    "one slice of two written": lambda m: bump(m.sliced[0], m.sliced[1]),
    "slices in two ops": lambda m: (bump(m.sliced[0], X), bump(m.sliced[1], X))[-1],
    "index_put": lambda m: m.pool.index_put_((torch.arange(2),), X)[0],
    "own clone": lambda m: (m.pool.clone(), bump(m.pool, X))[0],
    "pointwise": lambda m: m.inner[0].running_mean.add_(X).sum(),
}


def stale(m):
    row = m.kv["swa"][0]
    before = row + 1
    bump(m.kv["swa"], X)
    return row + before


def stale_overlap(m):
    """AOTAutograd makes one input of two that overlap."""
    one, two = m.overlapping
    row = one[0].clone()
    bump_both(one, two, X)
    return row + one[0] + two[0]


def stale_put(m):
    row = m.pool[0].clone()  # Inductor drops the clone
    m.pool.index_put_((torch.arange(2),), X)
    return row + m.pool[0]


# pattern -> (function, tensor, bytes). The clone of a slice begins where its storage begins; torch 2.11 clones, and so
# from there, what later versions copy onto itself.
CLONING = {
    "two slices": (lambda m: bump_both(*m.sliced, X), "m.sliced[1]", 2 * 128),
    "list of slices": (lambda m: bump_all(m.sliced, X), "m.sliced[1]", 2 * 128),
    "interleaved slices": (lambda m: bump_both(*m.interleaved, X), "m.interleaved[1]", 256),
    "stale": (stale, "m.kv['swa']", 384),
    "stale overlap": (stale_overlap, "m.overlapping[0] and m.overlapping[1]", 192),
    "dtype view": (lambda m: bump(m.pool.view(torch.int32), BITS), "m.pool", 384),
    "dtype view of a slice": (lambda m: bump(m.kv["full"][1].view(torch.int32), BITS), "m.kv['full']",
                              256 if torch.__version__ < "2.13" else 128),
    "narrow dtype": (lambda m: bump(m.pool.view(torch.uint8), torch.ones(32, dtype=torch.uint8)), "m.pool", 384),
    "stale index_put": (stale_put, "m.pool", 384),
    "scatter": (lambda m: m.pool.scatter_(0, torch.zeros(1, 4, 8, dtype=torch.int64), 1.0)[0], "m.pool", 384),
    "submodule": (lambda m: m.inner[0].running_mean.scatter_(0, torch.zeros(1, dtype=torch.int64), 1.0).sum(),
                  "m.inner[0].running_mean", 32),
}


class Stop(Exception):
    """Inductor has come as far as a test needs."""


def lowered(run, graph_pass=None) -> Graph:
    """The graph that Inductor would turn into code, where `run` compiles a function: it is not run, and no code made.

    graph_pass: None for the pass under test.
    """
    found = []

    def stop(lowering, *args):
        found.append(lowering.module.graph)
        raise Stop

    torch._dynamo.reset()
    with (torch._inductor.config.patch(post_grad_custom_post_pass=graph_pass or NoCacheClones()),
          mock.patch.object(GraphLowering, "run", stop), pytest.raises(InductorError, match="Stop")):
        run()
    return found[0]


def both_graphs(fn, m) -> tuple[Graph, Graph, list[str], int]:
    """The pass's own copy of the graph, settled; the one that Inductor would turn into code, the inputs that it writes,
    and how many tensors it counts as cloned by mistake."""
    found = []

    def look(graph):
        found.extend((settled(graph), [node.name for node in written_inputs(graph)]))

    final = lowered(lambda: torch.compile(fn, fullgraph=True)(m), look)
    missed = ReinplaceCounters.get_total_missed()
    return found[0], final, found[1], missed


@pytest.mark.parametrize("fn", CLEAN.values(), ids=CLEAN)
def test_clean(fn):
    """Patterns that are written in place compile, compute what they compute eagerly, and allocate no tensor's size."""
    eager, m = Buffers(), Buffers()
    (got, *_), [code] = run_and_get_code(lambda: (compiled(fn)(m),))
    want = fn(eager)
    assert (got is None) == (want is None) and (got is None or torch.equal(got, want))
    assert all(map(torch.equal, m.tensors(), eager.tensors()))
    own = fn is CLEAN["own clone"]
    assert sum("empty_strided_cpu((3, 4, 8)" in line for line in code.splitlines()) == own


@pytest.mark.parametrize("fn, tensor, size", CLONING.values(), ids=CLONING)
def test_cloning(fn, tensor, size):
    """Patterns that clone do not compile; the error names tensor, bytes and line."""
    with pytest.raises(InductorError) as error:
        compiled(fn)(Buffers())
    [message] = [line for line in str(error.value).splitlines() if CacheCloned.__name__ in line]
    assert f"{CacheCloned.__name__}: {tensor}: {size} bytes " in message, message
    assert " at every step" in message and f"from {__file__}:" in message and ";" not in message


@pytest.mark.parametrize("fn", [*CLEAN.values(), *(fn for fn, *_ in CLONING.values())], ids=[*CLEAN, *CLONING])
def test_same_as_inductor(fn):
    """The pass finds what is in the very graph that Inductor turns into code."""
    def clones(graph):
        return [(clone.message, clone.tensor, clone.bytes, clone.dtype) for clone in clones_left(graph, written)]

    mine, final, written, _ = both_graphs(fn, Buffers())
    found, expected = clones(mine), clones(final)
    assert found == expected
    assert bool(found) == (fn not in CLEAN.values() or fn is CLEAN["own clone"])


def test_counters():
    """Torch's counter of missed chances does not know of cloned slices, and the pass leaves it as it is."""
    counts = {name: both_graphs(CLONING[name][0], Buffers())[-1] for name in ("two slices", "stale")}
    assert counts == {"two slices": 0, "stale": 1}


def test_least():
    """Inputs below `least` bytes are no caches; several clones are all named."""
    scatter, stale_cache = CLONING["scatter"][0], CLONING["stale"][0]
    compiled(scatter, least=385)(Buffers())
    with pytest.raises(InductorError, match="CacheCloned"):
        compiled(scatter, least=384)(Buffers())
    with pytest.raises(InductorError, match=r"m.kv\['swa'\]: 384 .*; m.pool: 384 "):
        compiled(lambda m: (scatter(m), stale_cache(m)))(Buffers())


def test_symbolic_sizes():
    """A cache whose size is symbolic is judged by the size that it was traced with, and gets no guard from that."""
    def fine(cache):
        bump(cache[1:], X)

    def scatter(cache):
        return cache.scatter_(0, torch.zeros(1, 8, dtype=torch.int64), 1.0)[0]

    step = compiled(fine, least=100)
    step(torch.zeros(5, 8))
    step(torch.zeros(6, 8))  # from now on symbolic
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (7, 3, 50):
            step(torch.zeros(rows, 8))
    cache = torch.zeros(5, 8)
    torch._dynamo.mark_dynamic(cache, 0)
    with pytest.raises(InductorError, match="cache: 160 bytes"):
        compiled(scatter, least=100)(cache)


def test_names_without_dynamo():
    """Inputs of a graph that Dynamo did not trace are named as the graph names them."""
    cache = torch.zeros(5, 8)
    graph = make_fx(lambda cache: cache.scatter_(0, torch.zeros(1, 8, dtype=torch.int64), 1.0)[0])(cache)
    with pytest.raises(InductorError, match="CacheCloned: arg0_1: 160 bytes"):
        torch._inductor.compile(graph, [cache], options={"post_grad_custom_post_pass": NoCacheClones()})


def test_compile_cache():
    """A hit skips the pass, which passed what lies under its key; other settings, or no pass, have other keys."""
    calls = []
    call = NoCacheClones.__call__

    def counted(self, graph):
        calls.append(self.least)
        call(self, graph)

    def run(fn, **options):
        counters.clear()
        compiled(fn, **options)(Buffers())
        return counters["aot_autograd"]["autograd_cache_hit"]

    scatter = CLONING["scatter"][0]
    caching = torch._inductor.config.patch(fx_graph_cache=True)
    aot_caching = torch._functorch.config.patch(enable_autograd_cache=True)
    with fresh_cache(), caching, aot_caching, mock.patch.object(NoCacheClones, "__call__", counted):
        assert run(CLEAN["select"]) == 0 and calls == [0]
        assert run(CLEAN["select"]) == 1 and calls == [0]
        assert run(CLEAN["select"], least=7) == 0 and calls == [0, 7]
        torch._dynamo.reset()
        torch.compile(scatter, fullgraph=True)(Buffers())  # without the pass
        for _ in range(2):
            with pytest.raises(InductorError, match="CacheCloned"):
                run(scatter)
        assert calls == [0, 7, 0, 0]
    assert NoCacheClones().uuid() == NoCacheClones().uuid() != NoCacheClones(least=1).uuid()


STEPS = {
    "replay": (("mamba2", "gdn", "swa", "engram"), "greedy", {"num_spec": 2}),
    "plain": (("mamba2", "gdn"), "sampled", {"num_spec": 2, "replay": False}),
    "snapshots": (("mamba2", "gdn", "full"), "greedy", {"prefix_cache": True, "state_block_size": 3}),
}


def lower_decode_step(pattern, route, **options) -> Graph:
    runner = engine(tiny_model(pattern=pattern), compiled=True, **options)
    return lowered(lambda: runner.warm_up(sampling=route == "sampled", greedy=route == "greedy"))


@pytest.mark.parametrize("pattern, route, options", STEPS.values(), ids=STEPS)
def test_decode_step(pattern, route, options):
    """The engine's decode step writes every cache, cursor and table in place: no input at all is cloned."""
    graph = lower_decode_step(pattern, route, **options)
    assert len(graph.find_nodes(op="placeholder")) > 20


def lower_prefill_step(pattern, **options) -> Graph:
    runner = engine(tiny_model(pattern=pattern), compiled_prefill=True, **options)
    return lowered(lambda: runner.prefill_step([(1, [3, 4, 5]), (2, [6])], [[], []]))


def test_prefill_step():
    """So does a step of prompt chunks, with sizes that are symbols, the reset of new slots included."""
    graph = lower_prefill_step(("mamba2", "gdn", "swa"), prefix_cache=True, state_block_size=3)
    assert len(graph.find_nodes(op="placeholder")) > 20


def test_prefill_step_that_clones(monkeypatch):
    """Negative control: prefill that writes a slice of a pool does not compile."""
    def sliced(pool, place, slots, values):
        pool[place][slots] = values

    monkeypatch.setattr(cached, "_write_slots", sliced)
    with pytest.raises(AssertionError, match=r"CacheCloned: .*states.*state"):
        lower_prefill_step(("mamba2",))


def test_decode_step_that_clones(monkeypatch):
    """Negative control: a step that also writes its cache by scatter does not compile; the error names the cache."""
    write = ops.write_kv

    def broken(cache, k, v, slots):
        cache.view(-1).scatter_(0, torch.zeros(1, dtype=torch.int64), 0.0)
        write(cache, k, v, slots)

    monkeypatch.setattr(ops, "write_kv", broken)
    with pytest.raises(AssertionError, match=r"CacheCloned: self\.state\.memory\.kv.*cloned at every step"):
        lower_decode_step(("swa",), "greedy")


def context(family: str, dtype: torch.dtype) -> ReplayContext:
    """Two layers, with numbers in every pool, and three requests of two slots each."""
    layers = tuple(StateLayer(name, family, 4, 2, 8, 16, 32, max_tokens=2, window=4, ring_len=8, state_dtype=dtype)
                   for name in "ab")
    made = ReplayContext.create([StateGroup("g", layers, 4, "align")], 3, num_slots=9, columns=2)
    for pool in made.block_copy_tensors()[:-2]:
        pool.copy_(torch.arange(1, pool.numel() + 1).view(pool.shape) % 7)
    made.block_tables.copy_(torch.tensor([[[1, 2], [3, 4], [5, 6]]]))
    return made


def reset(states):
    states.reset_new_slots(torch.tensor([-1, 0, 0]), torch.tensor([1, 1, -1]))


def commit(states):
    rows = torch.tensor([2, 1, 0], dtype=torch.int32)
    states.postprocess(rows * 2, rows, rows == 0, torch.tensor([3]), query_lens=rows, live_cols=states.live_cols,
                       A=-torch.ones(2, 4) if states.family == "mamba2" else None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("family", ["mamba2", "gdn"])
@pytest.mark.parametrize("fn", [reset, commit])
def test_replay_context(fn, family, dtype):
    """Slots are reset, and a step is committed and its snapshots published, without a copy of any pool."""
    states = context(family, dtype)
    lowered(lambda: torch.compile(fn, fullgraph=True)(states))


def test_compiled_reset():
    """Compiled, a reset zeroes and copies the slots that it does in eager."""
    eager, states = context("gdn", torch.float8_e4m3fn), context("gdn", torch.float8_e4m3fn)
    reset(eager)
    compiled(reset)(states)
    assert not states.state[:, 2].view(torch.uint8).any() and states.state[:, 4].view(torch.uint8).any()
    for want, got in zip(eager.block_copy_tensors(), states.block_copy_tensors(), strict=True):
        assert torch.equal(raw(want), raw(got))
