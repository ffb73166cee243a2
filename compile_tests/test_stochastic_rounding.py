"""Stochastic rounding in compiled steps: the step counts its seed up, a buffer, so that every replay draws anew."""

import pytest
import torch
from harness import named, raw

from torch_replay.ops.registry import OPS
from torch_replay.ops.samples import samples

STEPS = 32
SAMPLES = [sample for sample in samples() if sample.id == "state_fp16_stochastic"]
GPU_MARKS = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
# the reference is slow, and a CPU shows the same with every op: one that flushes and one that folds to snapshots do
CASES = [pytest.param(sample, "cpu", id=f"{sample}-cpu") for sample in SAMPLES
         if sample.op in ("mamba2_replay", "gdn_materialize")]
CASES += [pytest.param(sample, "cuda", id=f"{sample}-cuda", marks=GPU_MARKS) for sample in SAMPLES]


class Step(torch.nn.Module):
    """Folds the same rings into the same checkpoints at each call, with the next seed. Buffers: static addresses."""

    def __init__(self, sample, device: str):
        super().__init__()
        self.op = OPS[sample.op]
        arguments = named(sample.op, *sample.make(device))
        self.tensors = [name for name, value in arguments.items() if isinstance(value, torch.Tensor)]
        self.others = {name: value for name, value in arguments.items() if name not in self.tensors}
        self.restored = [name for name in self.op.mutates if name in self.tensors]
        for name in self.tensors:
            self.register_buffer(name, arguments[name])
        for name in self.restored:
            self.register_buffer(f"first_{name}", arguments[name].clone())

    def forward(self) -> torch.Tensor:
        for name in self.restored:
            getattr(self, name).copy_(getattr(self, f"first_{name}"))
        self.op.overload(**{name: getattr(self, name) for name in self.tensors}, **self.others)
        self.seed.add_(1)
        return self.seed.clone()

    def exact(self) -> torch.Tensor:
        """What is rounded: the same with float32 checkpoints."""
        arguments = {name: getattr(self, name).clone() for name in self.tensors if name != "seed"}
        arguments.update({name: getattr(self, f"first_{name}").clone() for name in self.restored})
        arguments["state"] = arguments["state"].float()
        self.op.overload(**arguments, **self.others | dict(philox_rounds=0))
        return arguments["state"]


def draws(step, module: Step) -> torch.Tensor:
    """[STEPS, ...] states after each call."""
    found = []
    for _ in range(STEPS):
        step()
        found.append(module.state.clone())
    return torch.stack(found)


def graph_launches(step, calls: int) -> int:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(calls):
            step()
        torch.cuda.synchronize()
    return sum(event.count for event in profile.key_averages() if event.key == "cudaGraphLaunch")


@pytest.mark.parametrize("sample, device", CASES)
@torch.no_grad()
def test_every_replay_draws_anew(sample, device):
    """Compiled steps, on a GPU replays of one CUDA graph: no two alike, all as in eager, right on average."""
    eager, module = Step(sample, device), Step(sample, device)
    torch._dynamo.reset()
    strict = {"triton.cudagraph_or_error": True, "graph_partition": False} if device == "cuda" else {}
    with torch._inductor.config.patch(strict):
        step = torch.compile(module, fullgraph=True, mode="reduce-overhead" if device == "cuda" else None)
        first = int(module.seed)
        for _ in range(3):  # eager in the graph's memory pool, recording, replay
            step()
        assert int(module.seed) == first + 3
        if device == "cuda":
            assert graph_launches(step, 4) == 4
        module.seed.fill_(first)
        got = draws(step, module)
    assert torch.equal(raw(got), raw(draws(eager, eager)))

    exact = eager.exact()
    untouched = (exact == eager.first_state) | (exact.isnan() & eager.first_state.isnan())  # poison among it
    rounded = ~untouched & (got.float() != exact).any(0)
    assert rounded.sum() > 1000
    flat = got[:, rounded]
    assert all((flat[i] != flat[i - 1]).any() for i in range(STEPS))
    error = flat.float() - exact[rounded]
    single, few, all_ = (rms_of(error[:count].mean(0)) for count in (1, STEPS // 4, STEPS))
    assert few < 0.5 * single and all_ < 0.25 * single, (single, few, all_)  # 1 / sqrt(calls): 0.35 and 0.18


def rms_of(error: torch.Tensor) -> float:
    return error.square().mean().sqrt().item()
