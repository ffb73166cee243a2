"""Launches of the Triton kernels at more rows than the second and third axis of a grid can count. No GPU is needed."""

import contextlib
import importlib

import pytest
import torch
from harness import named
from triton_harness import requires_triton

from torch_replay.ops.check import Shapes
from torch_replay.ops.registry import OPS
from torch_replay.ops.samples import samples

pytestmark = requires_triton
ROWS = 70_000
LIMITS = (2**31 - 1, 65_535, 65_535)  # programs on the axes of a CUDA grid
GROWN = {"B": ROWS, "B+1": ROWS + 1, "tokens": ROWS, "rows": ROWS, "reqs": ROWS}
KEPT_TOKENS = {"gather_replay_rows": {"n": ROWS}}  # a letter that means groups or orders elsewhere
MODULES = [f"torch_replay.ops.{name}" for name in (
    "attention.kernels", "conv.kernels", "engram.kernels", "gdn.kernels", "gdn.materialize_kernels",
    "gdn.replay_kernels", "mamba2.kernels", "mamba2.materialize_kernels", "ring.kernels", "tokens.kernels")]
TRITON_OPS = [op.name for op in OPS.values() if isinstance(op.kernels["cuda"], str)]


class Probe:
    """Stands for a kernel: notes the grids that it is launched on."""

    def __init__(self):
        self.grids = []

    def __getitem__(self, grid):
        self.grids.append(grid)
        return lambda *args, **kwargs: None


@contextlib.contextmanager
def probes(monkeypatch):
    """Within the context no kernel runs; yields a probe for each, by name."""
    found = {}
    with monkeypatch.context() as patch:
        for module in map(importlib.import_module, MODULES):
            for name in [name for name in vars(module) if name.endswith("_kernel")]:
                patch.setattr(module, name, found.setdefault(name, Probe()))
        yield found


def grown(op: str, arguments: dict, monkeypatch) -> dict:
    """The arguments without data, with ROWS rows and tokens. The op's checks tell what a dimension counts."""
    letters, check = {}, Shapes.__call__

    def note(self, argument, tensor, names, dtypes):
        letters[argument] = names.split()
        check(self, argument, tensor, names, dtypes)

    with monkeypatch.context() as patch:
        patch.setattr(Shapes, "__call__", note)
        OPS[op].body(**arguments)
    sizes = GROWN | KEPT_TOKENS.get(op, {})
    large = {}

    def like(tensor, names):
        return torch.empty([sizes.get(letter, size) for letter, size in zip(names, tensor.shape, strict=True)],
                           dtype=tensor.dtype, device="meta")

    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            value = like(value, letters[name][-value.dim() :] if name in letters else [""] * value.dim())
        elif isinstance(value, list):
            value = [like(layer, [""] * layer.dim()) for layer in value]
        large[name] = value
    return large


def launches(sample, monkeypatch) -> list[tuple[str, tuple]]:
    arguments = grown(sample.op, named(sample.op, *sample.make()), monkeypatch)
    out = OPS[sample.op].body(**arguments)
    with probes(monkeypatch) as found:
        OPS[sample.op].kernel("cuda")(**arguments, **({} if out is None else {"out": out}))
    return [(name, grid) for name, probe in found.items() for grid in probe.grids]


def too_large(grid: tuple) -> bool:
    return any(programs > limit for programs, limit in zip(grid, LIMITS))


@pytest.mark.parametrize("op", TRITON_OPS)
def test_many_rows(op, monkeypatch):
    """Calls like every sample at 70,000 rows and tokens launch kernels on grids that CUDA accepts."""
    found = [launch for sample in samples(op) for launch in launches(sample, monkeypatch)]
    assert found and not [launch for launch in found if too_large(launch[1])]


def test_rows_on_the_second_axis_are_seen():
    """Negative control: a grid is too large by any of its axes."""
    assert too_large((4, ROWS)) and too_large((4, 1, ROWS)) and too_large((2**31,))
    assert not too_large((ROWS, 4, 1))
