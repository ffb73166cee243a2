"""The README keeps its word: its example runs as printed, and its test command is the one that CI runs."""

import re
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_example_runs():
    """The Python block compiles fullgraph and gives finite output of the right shape."""
    code = re.search(r"```python\n(.*?)```", README, re.S).group(1)
    assert len(code.splitlines()) <= 20
    scope: dict = {}
    torch.manual_seed(0)
    exec(compile(code, "README.md", "exec"), scope)
    assert scope["y"].shape == (2, 1, 8, 64) and scope["y"].isfinite().all() and scope["y"].any()
    assert scope["x_ring"][3].any() and scope["x_ring"][7].any() and not scope["x_ring"][[0, 1, 2, 4, 5, 6, 8]].any()


def test_commands_are_complete():
    """Both commands start from nothing and pin what was tested."""
    commands = re.findall(r"```\n(python3 -m venv .*?)\n```", README, re.S)
    assert len(commands) == 2
    assert all("-c constraints.txt" in command for command in commands)
    assert "torch-replay generate" in commands[0] and ".venv/bin/python -m pytest" in commands[1]
