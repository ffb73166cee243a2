"""The README keeps its word: its example is right as printed, and its test command is the one that CI runs."""

import re
from pathlib import Path

import pytest
import torch
from harness import assert_close
from truth_mamba2 import mamba2_update

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_example_is_right():
    """The Python block, a prompt and a loop of one compiled step, gives what the plain recurrence gives, at every token
    and through flushes of the ring. Without the commits, the second step is refused."""
    code = re.search(r"```python\n(.*?)```", README, re.S).group(1)
    assert len(code.splitlines()) <= 22
    scope: dict = {}
    torch.manual_seed(0)
    exec(compile(code, "README.md", "exec"), scope)
    x, dt, B, C = (t.double() for t in scope["tokens"])
    state = torch.zeros(9, *scope["cache"].state.shape[2:], dtype=torch.float64)
    truth = mamba2_update(state, x, dt, scope["A"].double(), B, C, None, None, None, scope["slots"], None, None, True,
                          0.0, None)
    assert_close("y", torch.cat(scope["y"], 1), truth, 1e-5)
    assert scope["cache"].ring_start.any() and scope["cache"].positions.tolist() == [-1, -1, -1, 60, -1, -1, -1, 60, -1]
    with pytest.raises(ValueError, match="not committed"):
        exec(re.sub(r" *cache.commit.*", "    pass", code.replace("\ncache.commit()", ""))
             .replace("@torch.compile(fullgraph=True)", ""), {})


def test_commands_are_complete():
    """Both commands start from nothing and pin what was tested."""
    commands = re.findall(r"```\n(python3 -m venv .*?)\n```", README, re.S)
    assert len(commands) == 2
    assert all("-c constraints.txt" in command for command in commands)
    assert "torch-replay generate" in commands[0] and ".venv/bin/python -m pytest" in commands[1]


def test_source_distribution_has_what_tests_need():
    """What the tests import beside the packages is named for a source distribution; types are marked as such."""
    manifest = (ROOT / "MANIFEST.in").read_text().split()
    assert {"tests", "compile_tests", "benchmarks", "conftest.py", "constraints.txt"} <= set(manifest)
    assert (ROOT / "torch_replay" / "py.typed").exists() and "py.typed" in (ROOT / "setup.cfg").read_text()


def test_drawing_of_the_layers():
    """README draws the layers that .importlinter checks, in their order."""
    drawn = re.findall(r"^    (\w+) {2,}\S", README.split("## Layout")[1], re.M)
    contract = (ROOT / ".importlinter").read_text().split("layers =")[1].split("[")[0]
    assert drawn == re.findall(r"torch_replay\.(\w+)", contract)
