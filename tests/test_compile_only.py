"""The Mamba-2 kernels compile for GPUs that are not here, within a thread's registers and without spills."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from triton_harness import requires_triton

SCRIPT = Path(__file__).with_name("compile_only_mamba2.py")


@requires_triton
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_registers_and_spills(arch):
    """Replay, update and materialise at Nemotron-H's geometry, T = 1 and 4, float32 and bfloat16 states."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, SCRIPT, str(arch)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(kernels) == 12
    for kernel in kernels:
        assert 0 < kernel["REG"] <= 255 and kernel["STACK"] == 0, kernel
