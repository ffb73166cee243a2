"""What surrounds a call must not change it: autocast and gradient recording, on every route into an op."""

import pytest
import torch
from harness import clone, named, raw
from torch.fx.experimental.proxy_tensor import make_fx

from torch_replay import ops
from torch_replay.ops.registry import OPS
from torch_replay.ops.samples import samples

SAMPLES = samples()
FIRST = {sample.op: named(sample.op, *sample.make()) for sample in reversed(SAMPLES)}  # an op's first sample
FLOATS = {op: [name for name, value in arguments.items() if torch.is_tensor(value) and value.is_floating_point()]
          for op, arguments in FIRST.items()}
DIFFERENTIABLE = [op for op, names in FLOATS.items() if names]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def copies(arguments: dict) -> dict:
    return {name: clone(value) for name, value in arguments.items()}


def results(out, arguments: dict) -> list[torch.Tensor]:
    """What a call returned and what its arguments hold now, as bytes."""
    out = () if out is None else out if isinstance(out, tuple) else (out,)
    return [raw(value) for value in (*out, *arguments.values()) if isinstance(value, (torch.Tensor, list))]


def equal(got: list, want: list) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


# Autocast.


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
@torch.no_grad()
def test_autocast(sample):
    """Bit for bit what the op gives without, whatever it returns or writes."""
    arguments = named(sample.op, *sample.make())
    other = copies(arguments)
    want = results(OPS[sample.op].overload_of(arguments)(**arguments), arguments)
    with torch.autocast("cpu", torch.bfloat16):
        got = results(OPS[sample.op].wrapper(**other), other)
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16  # it is on again, or still
    assert equal(got, want)


def run_all(many: dict[str, dict]) -> tuple[list, torch.Tensor]:
    """Every op on its arguments, and a product that shows whether autocast is on."""
    return [OPS[op].wrapper(**arguments) for op, arguments in many.items()], torch.ones(2, 2) @ torch.ones(2, 2)


def run_all_under_autocast(many: dict[str, dict]) -> tuple[list, torch.Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        return run_all(many)


@pytest.mark.slow
@pytest.mark.parametrize("around, backend", [(True, "inductor"), (False, "aot_eager")], ids=["around", "inside"])
@torch.no_grad()
def test_compiled_under_autocast(around, backend):
    """All ops in one graph, with autocast around the compiled call or inside it. None is traced as plain torch."""
    many, want = ({op: copies(arguments) for op, arguments in FIRST.items()} for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16, enabled=around):
        step = torch.compile(run_all if around else run_all_under_autocast, fullgraph=True, backend=backend)
        outs, product = step(many)
    assert product.dtype == torch.bfloat16
    for (op, arguments), out in zip(many.items(), outs, strict=True):
        assert equal(results(out, arguments), results(OPS[op].overload(**want[op]), want[op])), op


# Gradients.


def recording(op: str) -> list[tuple[str, dict]]:
    """By float argument: its name, and the arguments with this one recorded."""
    return [(name, {**FIRST[op], name: FIRST[op][name].detach().requires_grad_()}) for name in FLOATS[op]]


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_gradients_are_refused(op):
    """By the public function and by the overload, for leaves and for what was computed from them."""
    for name, arguments in recording(op):
        computed = {**arguments, name: arguments[name] * 1}
        for run in (OPS[op].wrapper, OPS[op].overload):
            for given in (arguments, computed):
                with pytest.raises(ValueError, match=f"^{op}: {name} requires a gradient, expected inference"):
                    run(**given)


@pytest.mark.parametrize("route", ["wrapper", "overload"])
@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_gradients_are_refused_while_tracing(op, route):
    """No graph is made that would lose them, through the function or the overload, with leaves or what came of them."""
    run = getattr(OPS[op], route)
    name, arguments = recording(op)[-1]

    def step(scale):
        return run(**{**arguments, name: arguments[name] * scale})

    with pytest.raises(Exception, match=f"{op}: {name} requires a gradient, expected inference"):
        torch.compile(step, backend="eager", fullgraph=True)(1)
    with pytest.raises(ValueError, match=f"^{op}: {name} requires a gradient, expected inference"):
        make_fx(lambda given: run(**given), tracing_mode="fake")(arguments)


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_recorded_tensors_in_inference(op):
    """Where nothing is recorded, parameters are tensors like others."""
    want = {name: clone(value) for name, value in FIRST[op].items()}
    given = {name: clone(value) for name, value in FIRST[op].items()}
    for name in FLOATS[op]:
        given[name].requires_grad_()
    with torch.no_grad():
        assert equal(results(OPS[op].wrapper(**given), given), results(OPS[op].overload(**want), want))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_ops_beside_what_is_trained(backend):
    """A compiled graph may record elsewhere: an op without gradients, or on detached inputs, is part of it."""
    arguments = copies(FIRST["mamba2_replay"])
    arguments["A"].requires_grad_()
    weight = torch.ones(arguments["x"].shape[-1], requires_grad=True)

    def step(arguments, weight):
        y = ops.mamba2_replay(**{**arguments, "A": arguments["A"].detach()})
        with torch.no_grad():
            z = ops.mamba2_replay(**arguments)
        return ((y + z) * weight).sum()

    eager = copies(arguments)
    step(eager, weight).backward()
    want, weight.grad = weight.grad, None
    torch.compile(step, fullgraph=True, backend=backend)(arguments, weight).backward()
    assert torch.equal(weight.grad, want) and arguments["A"].grad is None


def test_gradient_transforms_are_refused():
    """torch.func, by the public function; an overload cannot see it, and torch warns."""
    arguments = FIRST["mamba2_update"]
    with pytest.raises(ValueError, match="mamba2_update: A requires a gradient"):
        torch.func.grad(lambda A: ops.mamba2_update(**{**arguments, "A": A}).sum())(arguments["A"])


# Types that a schema lets through.


@pytest.mark.parametrize("op", OPS)
def test_missing_tensors(op):
    """None for a tensor that has no default is named, by the overload too, and in a compiled call."""
    given = {argument.name for argument in OPS[op].overload._schema.arguments if str(argument.type) == "Tensor"}
    for name in given:
        with pytest.raises(ValueError, match=f"^{op}: {name} is None, expected a tensor"):
            OPS[op].overload(**{**FIRST[op], name: None})
    with pytest.raises(Exception, match=f"{op}: {name} is None, expected a tensor"):
        torch.compile(OPS[op].wrapper, backend="eager", fullgraph=True)(**{**FIRST[op], name: None})


def test_flags_for_numbers():
    """True is no window, eagerly and compiled."""
    counts = [(op, name) for op in OPS for name, parameter in OPS[op].signature.parameters.items()
              if parameter.annotation in (int, float)]
    assert ("mamba2_replay", "window") in counts
    for op, name in counts:
        given = {**FIRST[op], name: True}
        with pytest.raises(TypeError, match=f"^{op}: {name} is bool"):
            OPS[op].wrapper(**given)
        with pytest.raises(Exception, match=f"{op}: {name} is bool"):
            torch.compile(OPS[op].wrapper, backend="eager", fullgraph=True)(**given)


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_tangents_are_refused(op):
    """Forward-mode differentiation, by the public function and by the overload, also where nothing is recorded."""
    name = FLOATS[op][0]
    value, refusal = FIRST[op][name], f"^{op}: called in forward-mode differentiation"
    for run in (OPS[op].wrapper, OPS[op].overload):
        for recorded in (True, False):
            with torch.set_grad_enabled(recorded), pytest.raises(ValueError, match=refusal):
                torch.func.jvp(lambda given, run=run: run(**{**FIRST[op], name: given}), (value,),
                               (torch.ones_like(value),))
        with pytest.raises(ValueError, match=refusal), torch.autograd.forward_ad.dual_level():
            run(**FIRST[op])


def test_tangents_are_refused_while_tracing():
    """No graph is made that would lose them."""
    arguments = FIRST["mamba2_replay"]

    def step(x):
        return torch.func.jvp(lambda x: ops.mamba2_replay(**{**arguments, "x": x}), (x,), (torch.ones_like(x),))

    with pytest.raises(Exception, match="mamba2_replay: called in forward-mode differentiation"):
        torch.compile(step, backend="eager", fullgraph=True)(arguments["x"])
