"""Compiles the Triton kernels for GPUs that are not here: registers, bytes of stack (spills) and shared memory of each.

Run as a script, in a process without TRITON_INTERPRET: `python tests/compile_only.py 80,90 gdn kda` prints one JSON
object for each kernel that the ops of these families launch, on compute capabilities 8.0 and 9.0. The ops' own
launchers choose the configurations; Triton specialises and compiles as for any launch, only that nothing is launched.
"""

import importlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
import triton.language as tl
from compile_only_cases import CASES
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from torch_replay.ops.registry import OPS
from torch_replay.ops.samples import Rng


class Elsewhere:
    """Stands in for Triton's driver: what a compilation asks of a device of compute capability `arch`."""

    def __init__(self, arch: int):
        self.arch = arch

    def get_current_device(self) -> int:
        return self.arch  # a number of its own, by which Triton keeps what it compiled

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)


def compile_launches() -> list[tuple]:
    """From here on `kernel[grid](...)` only compiles, and adds (name, compiled kernel) to the list returned."""
    launch, compiled = JITFunction.run, []

    def compile_launch(kernel, *args, grid, warmup, **kwargs):
        compiled.append((kernel.__name__, launch(kernel, *args, grid=grid, warmup=True, **kwargs)))

    JITFunction.run = compile_launch
    return compiled


def usage(compiled) -> dict[str, int]:
    """Registers and stack (bytes; 0 without spills) of a thread, threads of a program and its shared memory (bytes)."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{key}:(\d+)", text)[1]) for key in ("REG", "STACK"))
    return dict(registers=registers, stack=stack, threads=32 * compiled.metadata.num_warps,
                shared=compiled.metadata.shared)


def launch(name: str, builder, options: dict, dtype: torch.dtype) -> None:
    """What the CUDA implementation of an op does, with CPU tensors."""
    op = OPS[name]
    args, kwargs = builder(Rng(0, "cpu", dtype), **options)
    out = op.body(*args, **kwargs)
    kernels = importlib.import_module(op.kernels["cuda"])
    getattr(kernels, name)(*args, **kwargs, **({} if out is None else {"out": out}))


@triton.jit
def _hoard_tile_kernel(p_tile, SIZE: tl.constexpr):
    """A tile of many times the registers of its one warp, of which nothing can be stored before all is loaded."""
    o = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    b_tile = tl.load(p_tile + o)
    tl.store(p_tile + o, b_tile * tl.sum(b_tile))


def cases_of(family: str, arch: int) -> list[tuple]:
    """All cases of the family on 9.0; on the others in turn an op's first, third ... or second, fourth ... ones, or its
    only one: each case is compiled for two architectures, and each op for all of them."""
    found = []
    for op in dict.fromkeys(case[0] for case in CASES[family]):
        ours = [case for case in CASES[family] if case[0] == op]
        found += ours if arch == 90 else ours[arch > 90 :: 2] or ours
    return found


def compile_family(family: str, compiled: list[tuple], arch: int) -> list[dict]:
    """What each kernel of a family takes; "hoard", the negative control, is one too."""
    compiled.clear()
    if family == "hoard":
        _hoard_tile_kernel[(1,)](torch.zeros(128, 128), SIZE=128, num_warps=1)
        return [dict(kernel="_hoard_tile_kernel", usual=True, **usage(compiled[0][1]))]
    found = []
    for *case, usual in cases_of(family, arch):
        compiled.clear()
        launch(*case)
        found += [dict(kernel=name, op=case[0], usual=usual, **usage(kernel)) for name, kernel in compiled]
    return found


if __name__ == "__main__":
    launched = compile_launches()
    for arch in map(int, sys.argv[1].split(",")):
        triton.runtime.driver.set_active(Elsewhere(arch))
        for name in sys.argv[2:]:
            for row in compile_family(name, launched, arch):
                print(json.dumps(dict(arch=arch, **row)), flush=True)
