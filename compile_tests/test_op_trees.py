"""Every op inside a CUDA graph: recorded and replayed by CUDA-graph trees it gives what it gives eagerly."""

import pytest
import torch
from cuda_graphs import STRICT, device_calls
from harness import clone, named, raw

from torch_replay.graphs.compiled import compile_alone, mark_static
from torch_replay.ops.registry import OPS
from torch_replay.ops.samples import samples

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
FIRST = {sample.op: sample for sample in reversed(samples())}


class Call:
    """One call of an op on tensors that stay where they are; results go to tensors of their own."""

    def __init__(self, sample):
        arguments = named(sample.op, *sample.make("cuda"))
        self.op = OPS[sample.op]
        # copies begin at the start of their storage, where samples may cut columns out of the middle of another
        self.arguments = {name: value.clone() if isinstance(value, torch.Tensor) else value
                          for name, value in arguments.items()}
        out = self.op.overload(**{name: clone(value) for name, value in self.arguments.items()})
        outs = () if out is None else out if isinstance(out, tuple) else (out,)
        self.results = [torch.zeros_like(value) for value in outs]
        self.mutated = [name for name in self.op.mutates if isinstance(self.arguments[name], torch.Tensor)]
        self.first = {name: self.arguments[name].clone() for name in self.mutated}

    def run(self) -> None:
        for name in self.mutated:
            self.arguments[name].copy_(self.first[name])
        out = self.op.overload(**self.arguments)
        for result, value in zip(self.results, () if out is None else out if isinstance(out, tuple) else (out,)):
            result.copy_(value)

    def bits(self) -> list[torch.Tensor]:
        return [raw(value).clone() for value in [*self.results, *(self.arguments[name] for name in self.mutated)]]


@pytest.mark.parametrize("sample", FIRST.values(), ids=str)
@torch.no_grad()
def test_replay_equals_eager(sample):
    """The first sample of each op: one graph launch a call, nothing beside it, bitwise the eager result."""
    call = Call(sample)
    call.run()
    want = call.bits()
    mark_static(call)
    torch._dynamo.reset()
    with torch._inductor.config.patch(STRICT):
        run = compile_alone(call.run, cuda=True, guarded=False, direct=True)
        for _ in range(3):
            run()
    for value in [*call.results, *(call.arguments[name] for name in call.mutated)]:
        value.copy_(torch.zeros_like(value))
    calls = device_calls(run)
    assert calls["cudaGraphLaunch"] == 1 and not [name for name in calls if "LaunchKernel" in name], calls
    for got, value in zip(call.bits(), want, strict=True):
        assert torch.equal(got, value)
