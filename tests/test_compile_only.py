"""The Triton kernels compile for GPUs that are not here, in the registers and shared memory there, without spills."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from triton_harness import requires_triton

from torch_replay.ops.registry import OPS

SCRIPT = Path(__file__).with_name("compile_only.py")
ARCHES = (80, 90, 100)
# two processes of about equal length: compiling takes a core each
HALVES = (["hoard", "mamba2", "attention"], ["gdn", "kda", "conv", "ring", "tokens", "engram"])
FILE_REGISTERS = 65536  # of a multiprocessor
SHARED = 99 * 1024  # bytes that the smallest GPU since sm_80 gives to a program
SLACK = 64  # bytes of stack a thread that sizes of no model may take
CONTROL = "_hoard_tile_kernel"


@pytest.fixture(scope="module", name="kernels")
def compile_everything() -> list[dict]:
    """What tests/compile_only.py says of every kernel on every architecture."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TRITON_DISABLE_LINE_INFO": "1"}
    command = [sys.executable, SCRIPT, ",".join(map(str, ARCHES))]
    processes = [subprocess.Popen(command + half, env=environment, text=True, stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE) for half in HALVES]
    results = [process.communicate() for process in processes]
    for process, (_, errors) in zip(processes, results):
        assert process.returncode == 0, errors[-2000:]
    return [json.loads(line) for output, _ in results for line in output.splitlines()]


def complaints(kernel: dict) -> list[str]:
    """What is wrong with a compiled kernel; empty if nothing is."""
    found = []
    if kernel["stack"] > (0 if kernel["usual"] else SLACK):
        found.append(f"spills {kernel['stack']} bytes a thread")
    if not 0 < kernel["registers"] * kernel["threads"] <= FILE_REGISTERS:
        found.append(f"needs {kernel['registers']} registers in each of {kernel['threads']} threads")
    if kernel["shared"] > SHARED:
        found.append(f"needs {kernel['shared']} bytes of shared memory")
    return found


@requires_triton
@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
def test_registers_and_spills(kernels, arch):
    """Every op with a Triton kernel, at the sizes of public models and odd ones (see compile_only_cases.py)."""
    ours = [kernel for kernel in kernels if kernel["arch"] == arch and kernel["kernel"] != CONTROL]
    assert {kernel["op"] for kernel in ours} == {op.name for op in OPS.values() if isinstance(op.kernels["cuda"], str)}
    assert not [(kernel, found) for kernel in ours if (found := complaints(kernel))]


@requires_triton
def test_spills_are_seen(kernels):
    """A kernel that holds more than the registers of its threads is found out, on every architecture."""
    for kernel in (kernel for kernel in kernels if kernel["kernel"] == CONTROL):
        assert [found for found in complaints(kernel) if "spills" in found], kernel
    fits = dict(usual=True, registers=255, threads=256, stack=0, shared=SHARED)
    assert not complaints(fits)
    for wrong in (dict(registers=129, threads=512), dict(shared=SHARED + 1), dict(stack=8)):
        assert len(complaints(fits | wrong)) == 1
