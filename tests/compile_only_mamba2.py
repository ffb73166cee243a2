"""Compiles the Mamba-2 kernels for GPUs that are not here: registers and bytes of stack (spills) of each launch.

Run as a script, in a process without TRITON_INTERPRET: `python tests/compile_only_mamba2.py 80 90 100` prints one JSON
object a kernel. The launchers build the arguments; `capture` takes them in place of the launch, and `compile_launch`
specialises them as Triton's launcher would.
"""

import contextlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int8: "i8", torch.uint8: "u8",
         torch.int32: "i32", torch.int64: "i64"}


@contextlib.contextmanager
def capture(module, name):
    """Within the context, `module.name[grid](...)` records (kernel, args, kwargs) in the list and runs nothing."""
    kernel, calls = getattr(module, name), []

    class Recorder:
        def __getitem__(self, grid):
            return lambda *args, **kwargs: calls.append((kernel, args, kwargs))

    setattr(module, name, Recorder())
    try:
        yield calls
    finally:
        setattr(module, name, kernel)


def compile_launch(kernel, args, kwargs, arch: int):
    """The kernel compiled for compute capability `arch` (90 is Hopper), with aligned pointers."""
    values = dict(zip(kernel.arg_names, args), **kwargs)
    options = {key: values.pop(key) for key in list(values) if key not in kernel.arg_names}
    signature, constants, attributes = {}, {}, {}
    for index, (name, param) in enumerate(zip(kernel.arg_names, kernel.params)):
        value = values[name]
        integer = isinstance(value, int) and not param.do_not_specialize
        if param.is_constexpr or value is None or (integer and value == 1):
            signature[name], constants[index,] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + NAMES[value.dtype]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32" if abs(value) < 2**31 else "i64"
        if isinstance(value, torch.Tensor) or (integer and value % 16 == 0 and signature[name] != "constexpr"):
            attributes[index,] = [["tt.divisibility", 16]]
    return triton.compile(ASTSource(kernel, signature, constants, attributes), target=GPUTarget("cuda", arch, 32),
                          options=options)


def usage(compiled) -> dict[str, int]:
    """{"REG": registers a thread, "STACK": bytes a thread, which is 0 without spills, ...} of a compiled kernel."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {key: int(value) for key, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", text)}


def launches(tokens=1, state_dtype=torch.float32, dtype=torch.bfloat16, rounds=0, heads=128, dim=64, state_dim=128,
             groups=8, window=16):
    """(kernel name, captured launch) of the three ops at Nemotron-H's geometry."""
    from torch_replay.ops.mamba2 import kernels, materialize_kernels, samples
    from torch_replay.ops.samples import Rng

    geometry = dict(heads=heads, dim=dim, state_dim=state_dim)
    rng = Rng(0, "cpu", dtype)
    args, kwargs = samples.replay(rng, rows=1, tokens=tokens, groups=groups, window=window, slots=2,
                                  state_dtype=state_dtype, rounds=rounds, strided=True, ragged=True, **geometry)
    with capture(kernels, "_replay_tokens_kernel") as calls:
        kernels.mamba2_replay(*args, **kwargs, out=args[6].new_empty(args[6].shape))
    if state_dtype.itemsize > 1 and not rounds:
        with capture(kernels, "_update_state_kernel") as more:
            kernels.mamba2_update(args[0], *args[6:16], out=args[6].new_empty(args[6].shape))
        calls += more
    args, kwargs = samples.materialize(rng, layers=1, groups=1, rows=1, state_groups=groups, window=window,
                                       ring_len=window + tokens, state_dtype=state_dtype, rounds=rounds, **geometry)
    with capture(materialize_kernels, "_materialize_states_kernel") as more:
        materialize_kernels.mamba2_materialize(*args, **kwargs)
    return [(kernel.__name__, call) for call in calls + more for kernel in call[:1]]


CASES = [dict(tokens=tokens, state_dtype=dtype) for tokens in (1, 4) for dtype in (torch.float32, torch.bfloat16)]

if __name__ == "__main__":
    for arch in map(int, sys.argv[1:] or (80, 90, 100)):
        for case in CASES:
            for name, call in launches(**case):
                print(json.dumps(dict(arch=arch, kernel=name, tokens=case["tokens"], state=str(case["state_dtype"]),
                                      **usage(compile_launch(*call, arch)))), flush=True)
