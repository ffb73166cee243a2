"""How steps are compiled: variants of their own, without guards, past Dynamo, and forgotten again."""

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from torch_replay import ops
from torch_replay.graphs.compiled import compile_alone, forget_compiled, mark_static


class Step:
    """A step with a cache, an input and a Python number."""

    def __init__(self, factor: float = 2.0):
        self.cache, self.value, self.factor = torch.zeros(8), torch.ones(8), factor

    def run(self) -> torch.Tensor:
        self.cache.add_(self.value * self.factor)
        return self.cache * 1

    def silent(self) -> None:
        self.cache.add_(self.value * self.factor)


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def entries(compiled) -> int:
    code = torch._dynamo.eval_frame.innermost_fn(compiled).__code__
    return len(torch._C._dynamo.eval_frame._debug_get_cache_entry_list(code))


def test_more_steps_than_variants():
    """Twelve steps, each with a number of its own, compile once each: one code object has room for eight."""
    steps = [Step(float(factor)) for factor in range(12)]
    compiled = [compile_alone(step.run, backend="eager") for step in steps]
    for _ in range(2):
        got = [run() for run in compiled]
    assert [value[0].item() for value in got] == [2.0 * factor for factor in range(12)]
    assert [entries(run) for run in compiled] == [1] * 12


def test_without_guards():
    """Another tensor of the same kind is read, and nothing is compiled anew; what Python numbers were stays."""
    step = Step()
    run = compile_alone(step.run, backend="eager", guarded=False)
    run()
    step.value, step.factor = torch.full((8,), 10.0), 7.0
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert run()[0] == 2 + 20
    guarded = compile_alone(step.run, backend="eager")
    guarded()
    step.factor = 9.0
    with torch._dynamo.config.patch(error_on_recompile=True), pytest.raises(Exception, match="Recompiling"):
        guarded()


def test_direct():
    """After its first call the same tensors go to the same code, without Dynamo; a method may return nothing."""
    step = Step()
    run = compile_alone(step.run, guarded=False, direct=True)
    assert run()[0] == 2
    with torch.compiler.set_stance("fail_on_recompile"):
        step.value.fill_(3.0)
        assert run()[0] == 2 + 6 and torch.equal(step.cache, torch.full((8,), 8.0))
    kept, step.value = step.value, torch.full((8,), 100.0)
    assert run()[0] == 8 + 6, "a tensor that was replaced is not seen"
    step.value = kept
    silent = compile_alone(step.silent, guarded=False, direct=True)
    assert silent() is None and silent() is None
    assert step.cache[0] == 14 + 12


@pytest.mark.parametrize("direct", [False, True])
def test_forget(direct):
    """What was compiled is dropped; the next call compiles again, with what is there by then."""
    step = Step()
    run = compile_alone(step.run, guarded=False, direct=direct)
    run()
    compiled = run.compiled if direct else run
    assert entries(compiled) == 1
    forget_compiled(run)
    assert entries(compiled) == 0
    step.value, step.factor = torch.full((8,), 10.0), 7.0
    assert run()[0] == 2 + 70


def test_cache_clones_are_refused():
    """The pass is part of every compiled step: a cache that would be copied each time fails compilation, by name."""
    class Cloning(Step):
        def run(self):
            slots = torch.arange(1, 2, dtype=torch.int32)
            ops.copy_slots(self.cache.view(torch.int32).view(1, 2, 4), slots[None], slots[None], slots - 1, slots - 1)
            return self.cache + 1

    with pytest.raises(Exception, match="cache"):
        compile_alone(Cloning().run)()
    _, codes = run_and_get_code(compile_alone(Step().run))
    assert codes, "and the same step without it compiles"


def test_mark_static():
    """Tensors among attributes, in lists and dicts too, are marked; others are left alone."""
    class Owner:
        pass

    owner, inner = Owner(), torch.zeros(2)
    owner.tensor, owner.listed, owner.named, owner.number = torch.zeros(2), [inner, 3], {"a": torch.zeros(2)}, 5
    mark_static(owner)
    for tensor in (owner.tensor, inner, owner.named["a"]):
        assert tensor._dynamo_static_input_type == "unguarded"
    assert not hasattr(torch.zeros(2), "_dynamo_static_input_type")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_misaligned_tensor_is_refused():
    """A tensor that CUDA graphs would copy at every step is named at once."""
    step = Step()
    step.cache = torch.zeros(9, device="cuda")[1:]
    with pytest.raises(ValueError, match=r"Step: cache \[8\] begins 4 bytes past a multiple of 16"):
        mark_static(step)
