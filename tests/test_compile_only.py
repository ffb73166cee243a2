"""Kernels compile for GPUs that are not here, within a thread's registers and without spills."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from triton_harness import requires_triton


def compile_all(script, arch):
    """What a compile-only script prints, one dict a kernel; the interpreter must be off where it runs."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, Path(__file__).with_name(script), str(arch)], env=environment,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@requires_triton
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_registers_and_spills(arch):
    """Replay, update and materialise at Nemotron-H's geometry, T = 1 and 4, float32 and bfloat16 states."""
    kernels = compile_all("compile_only_mamba2.py", arch)
    assert len(kernels) == 12
    for kernel in kernels:
        assert 0 < kernel["REG"] <= 255 and kernel["STACK"] == 0, kernel


@requires_triton
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_engram_kernels(arch):
    """Every sample of the engram ops that launches: dense and strided, 16-bit and float8 tables."""
    kernels = compile_all("compile_only_engram.py", arch)
    assert len(kernels) == 25
    for kernel in kernels:
        assert 0 < kernel["REG"] <= 255 and kernel["STACK"] == 0, kernel
