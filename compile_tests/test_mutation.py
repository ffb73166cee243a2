"""What compiled code does with the tensors that ops write: in order, in place, at no cost that grows."""

import time

import pytest
import torch
from harness import clone, named, raw
from tiny import engine, tiny_model
from torch._dynamo.utils import ReinplaceCounters
from torch._inductor.utils import run_and_get_code

import torch_replay.ops
from torch_replay import ops
from torch_replay.ops.registry import OPS
from torch_replay.ops.samples import samples

OPTIONAL = {name: [a.name for a in op.overload._schema.arguments if str(a.type) == "Optional[Tensor]"]
            for name, op in OPS.items()}


@pytest.fixture(autouse=True)
def fresh():
    """Code is generated anew, for the tests look at what happens then."""
    torch._dynamo.reset()
    with (torch._inductor.config.patch(fx_graph_cache=False), torch.no_grad(),
          torch._functorch.config.patch(enable_autograd_cache=False)):
        yield


def tokens(*shape, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# Order. Each function returns what it read between its writes. Sums would round otherwise than in eager.


def keys_and_values(cache, q, k):
    """Attention sees what was written before it, and nothing of what is written after."""
    slots, indices = torch.tensor([5, 9, 6]), torch.tensor([[5, 9, 6]] * 3, dtype=torch.int32)
    read = []
    for scale in (1.0, -2.0):
        ops.write_kv(cache, k * scale, k + scale, slots)
        read += [ops.swa_attention(q, cache, indices, indices[0] * 0 + 3, scale=0.3), cache[2, 1] + 1]
    return tuple(read)


def cursors(start, committed, *plan):
    """Cursors are read before, between and after two commits."""
    lens, tables = torch.tensor([2, 1], dtype=torch.int32), torch.tensor([[[1], [2]]], dtype=torch.int32)
    read = [start + committed]
    for _ in range(2):
        ops.ring_commit(start, committed, *plan, tables, None, lens, lens * 0, lens, lens > 9, None, None, block_size=4,
                        window=2, ring_len=5, post_step=False, materialize=False)
        read.append(start + committed)
    return tuple(read)


def chain(pool):
    """Slot 1 moves to 2, 2 to 3, and 3 back to 1: each copy sees the one before."""
    rows, group = torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    read = []
    for src, dst in ((1, 2), (2, 3), (3, 1)):
        read.append(pool[1] + 1)
        pool[:, 1].mul_(2)
        ops.copy_slots(pool, torch.tensor([[src]]), torch.tensor([[dst]]), group, rows)
    return tuple(read)


def convolution(ring, x, weight):
    """A convolution reads the inputs that the one before left in the ring, also those it overwrites."""
    read = [ring[1] + 1]
    for step in range(3):
        positions, slots = torch.tensor([2 * step, 7]), torch.tensor([2, 1])
        read.append(ops.conv_replay(ring, x[step], weight, None, positions, slots, silu=False))
    return *read, ring[1] + 1


ORDERS = {
    "keys and values": (keys_and_values, lambda: [torch.zeros(3, 4, 2, 2, 8), tokens(3, 2, 8), tokens(3, 2, 8)]),
    "cursors": (cursors, lambda: [torch.tensor([[0, 4, 3]], dtype=torch.int32),
                                  torch.tensor([[0, 1, 2]], dtype=torch.int32),
                                  *(torch.zeros(1, 2, dtype=torch.int32) for _ in range(4))]),
    "chain of copies": (chain, lambda: [tokens(2, 5, 3)]),
    "conv ring": (convolution, lambda: [tokens(3, 6, 4), tokens(3, 2, 2, 6), tokens(6, 3)]),
}


@pytest.mark.parametrize("fn, make", ORDERS.values(), ids=ORDERS)
def test_order(fn, make):
    """Writes and reads of one tensor in one graph give the eager bits, in what is read and in what is left."""
    eager, tensors = make(), make()
    want, got = fn(*eager), torch.compile(fn, fullgraph=True)(*tensors)
    for expected, found in zip((*want, *eager), (*got, *tensors), strict=True):
        assert torch.equal(raw(found), raw(expected))
    assert not all(torch.equal(value, want[-1]) for value in want if value.shape == want[-1].shape)


def test_order_of_an_undeclared_write():
    """Negative control: a write that the schema hides is lost, and the comparison shows it."""
    library = torch.library.Library("torch_replay_mutation", "FRAGMENT")
    library.define("hidden(Tensor pool) -> ()")
    library.impl("hidden", lambda pool: (pool.add_(1), None)[-1], "CPU")
    torch.library.register_fake("torch_replay_mutation::hidden", lambda pool: None, lib=library)

    def step(pool):
        torch.ops.torch_replay_mutation.hidden(pool)
        return pool.sum()

    want, got = step(torch.zeros(3)), torch.compile(step, fullgraph=True)(torch.zeros(3))
    assert not torch.equal(got, want)


# In place.


def allocations(fn, *args) -> tuple[list[str], int]:
    """Allocations in the generated code, and bytes that torch could not write in place."""
    ReinplaceCounters.clear()
    _, codes = run_and_get_code(torch.compile(fn, fullgraph=True), *args)
    assert len(codes) == 1
    return [line for line in codes[0].splitlines() if "= empty_strided" in line], (
        ReinplaceCounters.get_total_missed_bytes())


@pytest.mark.parametrize("op", [name for name, op in OPS.items() if op.mutates])
def test_slices_of_stacked_pools(op):
    """What an op writes may be one layer's slice of a pool [L, ...]: it is written there, the other layers are left
    alone, the code allocates nothing and torch misses no chance."""
    arguments = named(op, *samples(op)[0].make())
    pools = {name: torch.stack([clone(arguments[name]) for _ in range(3)]) for name in OPS[op].mutates
             if arguments[name] is not None}
    before = {name: pool.clone() for name, pool in pools.items()}
    others = {name: value for name, value in arguments.items() if name not in pools}

    def step(pools, others):
        OPS[op].overload(**{name: pool[1] for name, pool in pools.items()}, **others)

    assert allocations(step, pools, others) == ([], 0)
    OPS[op].overload(**arguments)
    for name, pool in pools.items():
        assert torch.equal(raw(pool[1]), raw(arguments[name]))
        assert torch.equal(raw(pool[::2]), raw(before[name][::2]))


LISTS = [name for name, op in OPS.items() if op.pools]


@pytest.mark.parametrize("op", LISTS)
@pytest.mark.parametrize("form", ["storages", "slices"])
def test_lists_of_layers(op, form):
    """A list of layers is written in place: of layers that have a storage each, and of slices of what is stacked."""
    want = named(op, *layers_of(op).make())
    lists = {name: value for name, value in want.items() if isinstance(value, list)}
    pools = {name: clone(layers) if form == "storages" else torch.stack(layers) for name, layers in lists.items()}
    others = {name: value for name, value in want.items() if name not in pools}

    def step(pools, others):
        OPS[op].wrapper(**{name: [*pool] for name, pool in pools.items()}, **others)

    assert allocations(step, pools, others) == ([], 0)
    OPS[op].wrapper(**want)
    for name in set(OPS[op].mutates) & set(pools):
        assert torch.equal(raw(pools[name]), raw(want[name])), name


def layers_of(op):
    return next(sample for sample in samples(op) if sample.id == "layers")


def test_layers_of_one_storage():
    """Negative control: layers of one storage that come in one by one are cloned, as ops/layers.py says."""
    arguments = named("copy_slots", *layers_of("copy_slots").make())
    lines, missed = allocations(lambda given: OPS["copy_slots"].wrapper(**given), arguments)
    assert len(lines) > 1 and missed == 0


def test_slices_of_one_storage():
    """Negative control: slices that come in one by one are cloned, and torch does not count it."""
    pools = torch.zeros(2, 4, 3, dtype=torch.int32)
    tables, cols = torch.ones(4, 1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    lines, missed = allocations(ops.ring_reset, *pools, tables, cols, cols)
    assert len(lines) == 1 and missed == 0


@pytest.mark.parametrize("options", [{}, {"replay": False}, {"prefix_cache": True, "state_block_size": 3}], ids=str)
def test_one_storage_each(options):
    """Every pool of a model's memory has a storage of its own."""
    memory = engine(tiny_model(pattern=("mamba2", "gdn", "swa", "full")), num_spec=2, **options).memory
    pools = list(memory.kv.values())
    for states in memory.states.values():
        pools += [value for value in vars(states).values() if isinstance(value, torch.Tensor)]
        pools += getattr(states, "rings", ())
    assert len({pool.untyped_storage().data_ptr() for pool in pools}) == len(pools) > 6


def test_chain_of_200_ops():
    """Compile time grows with the graph: 200 ops take four times as long as 50, sixteen times if it were squared."""
    def compile_chain(count: int) -> float:
        def step(pool, k, slots):
            for i in range(count):
                ops.write_kv(pool[i % 4], k, k, slots)

        torch._dynamo.reset()
        begin = time.process_time()
        torch.compile(step, fullgraph=True)(torch.zeros(4, 3, 4, 2, 1, 8), tokens(2, 1, 8), torch.tensor([5, 9]))
        return time.process_time() - begin

    compile_chain(2)
    assert compile_chain(200) < 8 * compile_chain(50)


# Arguments and outputs.


@pytest.mark.parametrize("op", OPS)
def test_optional_arguments(op):
    """Each optional tensor is None in one sample and given in another, so that tests of all samples compile either;
    and what has a default can be left out, eagerly and compiled."""
    cases = [named(op, *sample.make()) for sample in samples(op)]
    for name in OPTIONAL[op]:
        assert {case[name] is None for case in cases} == {True, False}, name
    defaults = {name: parameter.default for name, parameter in OPS[op].signature.parameters.items()}
    short = {name: value for name, value in cases[0].items()
             if defaults[name] is OPS[op].signature.empty or value is not defaults[name]}
    results = []
    for run in (OPS[op].overload, torch.compile(OPS[op].overload, fullgraph=True, backend="aot_eager")):
        arguments = {name: clone(value) for name, value in short.items()}
        out = run(**arguments)
        out = () if out is None else out if isinstance(out, tuple) else (out,)
        results.append([*out, *(arguments[name] for name in OPS[op].mutates if name in arguments)])
    assert all(torch.equal(raw(a), raw(b)) for a, b in zip(*results, strict=True))


ENTRY_POINTS = [name for name in torch_replay.ops.__all__ if name in OPS]


@pytest.mark.parametrize("op", ENTRY_POINTS)
def test_entry_points(op):
    """The public functions, with their checks of types, are one graph when nothing of them has run before."""
    args, kwargs = samples(op)[0].make()
    torch.compile(getattr(ops, op), fullgraph=True, backend="eager")(*args, **kwargs)


def test_entry_points_are_all_ops():
    """Each op has a public function; what else is public moves states between hosts and is no part of a step."""
    assert set(ENTRY_POINTS) == set(OPS)
    assert set(torch_replay.ops.__all__) - set(OPS) == {"OPS", "ring_export", "ring_import"}


@pytest.mark.parametrize("op", [name for name, op in OPS.items() if op.overload._schema.returns])
def test_outputs_are_contiguous(op):
    """Outputs are contiguous, whatever the strides of the inputs: Inductor has read past others."""
    for sample in samples(op):
        args, kwargs = sample.make()
        out = OPS[op].overload(*args, **kwargs)
        assert all(value.is_contiguous() for value in (out if isinstance(out, tuple) else (out,)))
