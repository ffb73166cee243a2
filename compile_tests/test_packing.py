"""In a compiled function a packed module is a few graph inputs, which are never copied and give the same bits."""

import functools
import re

import pytest
import torch
from packing_examples import (
    ALONE,
    WIDTH,
    Counting,
    Everything,
    Layer,
    allocations,
    compiled,
    described,
    inputs_of,
    nothing,
    raw,
    stack,
)
from tiny import engine, tiny_model
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

from torch_replay import SamplingParams
from torch_replay.graphs import pack_parameters


def test_every_tensor_is_seen_inside():
    """With its bytes and strides, whatever its dtype: Everything's, in a compiled function."""
    module = Everything().requires_grad_(False)
    names = [name for name, value in module.state_dict(keep_vars=True).items() if name not in ALONE]
    names += [name for name, _ in module.named_buffers() if name not in ALONE and name not in names]

    def read():
        tensors = [functools.reduce(getattr, name.split("."), module) for name in names]
        return [tensor.clone() for tensor in tensors], [tensor.stride() for tensor in tensors]

    want, strides = read()
    got, compiled_strides = compiled(pack_parameters(module, call=nothing).bind(read), backend="aot_eager")()
    assert [raw(value) for value in got] == [raw(value) for value in want] and compiled_strides == strides


@pytest.mark.parametrize("trained", [False, True])
def test_models_compute_the_same_bits(trained):
    """As one FX graph run eagerly, and through Inductor; torch.matmul differs in its last bits for `requires_grad`."""
    torch.manual_seed(3)
    model = nn.Transformer(16, 2, 1, 1, 32, batch_first=True).eval().requires_grad_(trained)
    source, target = torch.randn(2, 5, 16), torch.randn(2, 3, 16)
    with torch.no_grad():
        want = [compiled(model.forward, backend=backend)(source, target) for backend in ("eager", "inductor")]
        eager = model(source, target)
        bound = pack_parameters(model).bind(model)
        assert torch.equal(bound(source, tgt=target), eager)
        got = [compiled(bound, backend=backend)(source, tgt=target) for backend in ("eager", "inductor")]
    torch.testing.assert_close(got, want, rtol=0, atol=2e-6 if trained else 0)
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


def test_one_input_per_flat_buffer():
    """However many layers there are; unpacked there are six a layer. Addresses and sizes of flat buffers are static."""
    x = torch.randn(3, WIDTH)
    assert len(inputs_of(stack(3).forward, x)) == 6 * 3 + 1
    for count, dynamic in ((3, False), (60, False), (1, True)):
        model = stack(count)
        packed = pack_parameters(model, call=nothing)
        assert sorted(str(flat.dtype) for flat in packed.flats) == ["torch.float32"] * 2 + ["torch.int64"]
        nodes = inputs_of(packed.bind(model), x, dynamic=dynamic)
        flats = [node for node in nodes if getattr(node.meta["example_value"], "ndim", 0) == 1]
        assert len(flats) == len(packed.flats)
        assert len(nodes) == len(flats) + 1 or dynamic  # which makes inputs of sizes and numbers
        for node in flats:
            assert node.meta["tensor_dict"]["_dynamo_static_input_type"] == "unguarded"
            assert all(isinstance(size, int) for size in node.meta["example_value"].shape)


def test_generated_code_copies_no_parameter():
    """It takes the flat buffers and x, and allocates nothing as large as a flat buffer or a parameter."""
    model, x = stack(4), torch.randn(5, WIDTH)
    packed = pack_parameters(model, call=nothing)
    with torch.no_grad():
        want = compiled(model.forward)(x)
        got, codes = run_and_get_code(compiled(packed.bind(model)), x)
    sizes = {value.numel() for value in model.state_dict().values()} | {flat.numel() for flat in packed.flats}
    found = allocations(codes)
    assert torch.equal(got, want) and found and not {size for _, size in found} & sizes
    assert len(re.search(r"((?:arg\d+_1, )+arg\d+_1) = args", codes[0])[1].split(", ")) == len(packed.flats) + 1


def test_writes_from_outside_reach_the_compiled_function():
    """An optimizer's step, load_state_dict and a write to a buffer are seen, and compile nothing anew."""
    model, other, x = stack(2), stack(2, seed=1), torch.randn(5, WIDTH)
    packed = pack_parameters(model, call=nothing)
    reference, step = compiled(model.forward), torch.compile(packed.bind(model), fullgraph=True, dynamic=False)
    results = []

    def compare():
        with torch.no_grad():
            results.append(step(x))
            assert torch.equal(results[-1], reference(x))

    compare()
    with torch._dynamo.config.patch(error_on_recompile=True):
        model(x).square().sum().backward()
        torch.optim.Adam(model.parameters(), 0.1).step()
        compare()
        model.load_state_dict(other.state_dict())
        compare()
        model[1].shift.fill_(2.0)
        compare()
    assert not any(torch.equal(first, second) for first, second in zip(results, results[1:]))
    packed.check()


@pytest.mark.parametrize("told", [True, False])
def test_written_buffers(told):
    """A counter, and what a custom op writes, left alone if `call` shows it: as without packing, and nothing is cloned.

    Where nobody told, they are written in the flat buffers, and no parameter is cloned.
    """
    x = torch.randn(5, WIDTH)
    plain, model = stack(3, Counting), stack(3, Counting)
    for _ in range(told):
        plain(x)
    packed = pack_parameters(model, call=(lambda: model(x)) if told else nothing)
    written = {f"{layer}.{name}" for layer in range(3) for name in ("count", "total")}
    assert set(packed.left_alone) == (written if told else set())
    reference, step = compiled(plain.forward), torch.compile(packed.bind(model), fullgraph=True, dynamic=False)
    with torch.no_grad():
        want = reference(x), reference(x)
        first, codes = run_and_get_code(step, x)
        assert torch.equal(first, want[0]) and torch.equal(step(x), want[1])
    assert model[2].count == 2 + told and described(model) == described(plain)
    sizes = {flat.numel() for flat in packed.flats} | {WIDTH}
    assert codes and not {size for _, size in allocations(codes)} & sizes
    packed.check()


def test_batch_norm():
    """Its schemas do not say what it writes: left alone where `call` trains it. Where `call` did not, still right."""
    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))

    x, plain, seen, unseen = torch.randn(4, 6), build(), build(), build()
    trained = pack_parameters(seen, call=lambda: seen(x))
    assert trained.left_alone == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    evaluated = pack_parameters(unseen.eval(), call=lambda: unseen(x))
    assert evaluated.left_alone == []
    unseen.train()
    for fn in (plain.forward, plain.forward, trained.bind(seen), evaluated.bind(unseen), evaluated.bind(unseen)):
        with torch.no_grad():
            compiled(fn, backend="aot_eager")(x)
    assert described(seen) == described(unseen) == described(plain)


def test_replaced_in_the_function():
    """An assignment would be lost with the views: `call` finds it, and without it the function raises."""
    class Averaging(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x):
            self.mean = 0.5 * self.mean + x
            return self.mean * 2

    for call in (nothing, None, "itself"):
        model = Averaging()
        packed = pack_parameters(model, call=(lambda model=model: model(torch.ones(3))) if call == "itself" else call)
        step = compiled(packed.bind(model), backend="eager")
        if call is nothing:
            with pytest.raises(RuntimeError, match="mean: got another tensor"):
                step(torch.ones(3))
            assert model.mean.tolist() == [0.0] * 3
        else:
            assert packed.left_alone == ["mean"]
            step(torch.ones(3))
            assert model.mean.tolist() == [1.0 if call is None else 1.5] * 3


def test_an_exception_leaves_the_module_as_it_was():
    model = stack(2)
    before = described(model)
    bound = pack_parameters(model).bind(model)
    with torch.no_grad():
        for step in (bound, compiled(bound, backend="eager")):
            with pytest.raises(RuntimeError, match="normalized_shape"):
                step(torch.zeros(2, WIDTH + 1))
    assert described(model) == before and type(model[0].linear.weight) is nn.Parameter


def test_gradients_are_refused():
    """By what is compiled; eagerly, gradients are those of the module."""
    model, x = stack(1), torch.randn(2, WIDTH)
    bound = pack_parameters(model).bind(model)
    bound(x).sum().backward()
    assert model[0].linear.weight.grad is not None
    with pytest.raises(RuntimeError, match="no gradients"):
        compiled(bound, backend="eager")(x)
    with torch.inference_mode():
        compiled(bound, backend="eager")(x)
    frozen = stack(1).requires_grad_(False)
    step = compiled(pack_parameters(frozen).bind(frozen), backend="eager")
    assert torch.equal(step(x), frozen(x))


def test_code_objects_of_their_own():
    """With all guards dropped, two functions of one packed module, or of two, are not mistaken for one another."""
    first, second, x = stack(1), stack(1, seed=1), torch.randn(2, WIDTH)
    functions = [pack_parameters(first).bind(first), pack_parameters(second).bind(second)]
    functions.append(pack_parameters(first).bind(lambda x: first(x) * 2))
    options = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    torch._dynamo.reset()
    with torch.no_grad():
        steps = [torch.compile(fn, fullgraph=True, dynamic=False, options=options) for fn in functions]
        results = [step(x) for step in steps]
        for got, want in zip(results, (first(x), second(x), first(x) * 2)):
            torch.testing.assert_close(got, want)
        assert all(torch.equal(step(x), result) for step, result in zip(steps, results))


def test_decode_step():
    """The engine's step, a bound method of another object: fewer inputs, one graph, no recompile, the eager text."""
    model = tiny_model(5, pattern=("mamba2", "gdn", "full", "kda"))
    prompts = [torch.randint(1, 61, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 1, 20)]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    want = [output.token_ids for output in engine(model, num_spec=2).generate(prompts, params)]
    runner = engine(model, num_spec=2)
    step = runner.decode.greedy_step
    unpacked = len(inputs_of(step))
    packed = pack_parameters(model, call=nothing)
    bound = packed.bind(step)
    assert len(inputs_of(bound)) == unpacked - len(list(model.parameters())) - len(list(model.buffers())) + 2
    runner = engine(model, num_spec=2)
    runner.decode.run["greedy"] = compiled(packed.bind(runner.decode.greedy_step), backend="aot_eager")
    runner.warm_up(sampling=False)
    counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert [output.token_ids for output in runner.generate(prompts, params)] == want
    assert not counters["graph_break"]


def test_a_broken_offset_is_noticed(monkeypatch):
    """Negative control: views one element off are refused by bind, and would compute something else."""
    model, x = stack(1), torch.randn(2, WIDTH)
    packed = pack_parameters(model)
    slot, place = packed._places[2]
    packed._places[2] = slot, place._replace(start=place.start + 1)
    with pytest.raises(RuntimeError, match=slot.name):
        packed.bind(model)
    monkeypatch.setattr(packed, "check", nothing)
    with torch.no_grad():
        assert not torch.allclose(compiled(packed.bind(model), backend="eager")(x), model(x))


def test_a_clone_is_noticed():
    """Negative control of `allocations`: some writes do clone the flat buffer of buffers, but not of parameters."""
    class Exchanging(Layer):
        def forward(self, x):
            old = self.shift.clone()
            self.shift.copy_(self.bound)
            self.bound.copy_(old)
            return super().forward(x) * self.bound

        def __init__(self):
            super().__init__()
            self.register_buffer("bound", torch.randn(WIDTH))

    model, x = stack(2, Exchanging), torch.randn(5, WIDTH)
    packed = pack_parameters(model, call=nothing)
    with torch.no_grad():
        _, codes = run_and_get_code(compiled(packed.bind(model)), x)
    cloned = {size for _, size in allocations(codes)} & {flat.numel() for flat in packed.flats}
    holds_parameters = {place.flat for slot, place in packed._places if isinstance(slot.tensor, nn.Parameter)}
    assert cloned and not cloned & {packed.flats[flat].numel() for flat in holds_parameters}
