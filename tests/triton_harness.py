"""Runs Triton kernels where there is a GPU, and under the interpreter (see conftest.py) where there is none."""

import contextlib
import dataclasses
import importlib
import importlib.util

import pytest
import torch

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
requires_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
# what runs on the GPU machine with `-m gpu`, and in the interpreter elsewhere
on_device = [requires_triton, pytest.mark.gpu] if GPU else [requires_triton]
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if GPU else [torch.float32]


@contextlib.contextmanager
def triton_kernel(op: str):
    """Within the context `op` runs its Triton kernel on DEVICE; an op without one runs its reference kernel there."""
    from torch_replay.ops.registry import OPS, override_kernel

    if OPS[op].kernels["cuda"] is OPS[op].kernels["cpu"]:
        yield
        return
    family = OPS[op].body.__module__.rsplit(".", 1)[0]
    kernel = getattr(importlib.import_module(f"{family}.kernels"), op)
    with override_kernel(op, DEVICE, kernel):
        yield


def hasten_interpreter() -> None:
    """Leaves out what Triton's interpreter does without effect, half of its time.

    It computes every sum and product of integers again in int64, to see whether it overflows, and then says so in debug
    mode alone. And it patches triton.language, for a launch done already, at every call of a device function.
    """
    from triton.runtime import interpreter

    builder, patch, patched = interpreter.interpreter_builder, interpreter._patch_lang, set()
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    class Scope:
        """What the launch, alone, restores at its end."""

        def __init__(self, function):
            self.scope = patch(function)

        def restore(self):
            patched.clear()
            self.scope.restore()

    def patch_once(function):
        module = id(function.__globals__)
        if module in patched:
            return None
        patched.add(module)
        return Scope(function)

    interpreter._patch_lang = patch_once


if not GPU and importlib.util.find_spec("triton") is not None:
    hasten_interpreter()
