"""benchmarks/gpu_check.sh and benchmarks/sanitize.py, with stand-ins for what needs a GPU."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torch_replay.command.bench import load
from torch_replay.ops import OPS
from torch_replay.ops.samples import FAMILIES

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("gpu-tests", "cpu-tests", "generate", "bench", "sanitize")
sanitize = load("sanitize")


def program(folder: Path, name: str, text: str) -> None:
    """Writes an executable script."""
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)


def check(tmp_path, *arguments, python: str, **environment):
    """Runs gpu_check.sh with `python` in place of python3."""
    program(tmp_path, "python3", f"#!/bin/bash\n{python}\n")
    path = f"{tmp_path}:{os.environ['PATH']}"
    return subprocess.run(["bash", ROOT / "benchmarks/gpu_check.sh", *arguments], cwd=tmp_path, text=True,
                          env=os.environ | {"PATH": path} | environment, capture_output=True)


def test_one_log_a_part(tmp_path):
    """Every part leaves one log, which ends with its status; one that fails decides the exit status."""
    out = tmp_path / "out"
    text = {"requests": [{"token_ids": [1]}], "stats": {"graphs": 1, "graph_breaks": 0, "recompiles": 0}}
    fake = f'''case "$*" in
      -\\ *) exec {sys.executable} "$@" ;;
      *generate*) echo '{json.dumps(text)}' ;;
      *"bench ops"*) echo "{{}}" > "${{@: -1}}" ;;
      *"-m gpu"*) echo "1 failed"; exit 1 ;;
      *) echo "ran $*" ;;
    esac'''
    done = check(tmp_path, out, *PARTS, python=fake)
    assert sorted(path.name for path in out.iterdir()) == sorted(["generate.json", *(f"{part}.log" for part in PARTS)])
    record = json.loads((out / "generate.json").read_text())
    assert record["command"] in (ROOT / "README.md").read_text() and record["command"].endswith("--device cuda")
    assert record["equals_cpu"] == {"1 row": [True], "2 rows": [True], "all rows": [True]}
    assert done.returncode == 1
    for part in PARTS:
        last = (out / f"{part}.log").read_text().splitlines()[-1]
        assert last.startswith(f"{part}: exit status {int(part == 'gpu-tests')} after"), last
        assert last in done.stdout
    assert "equals the CPU's: [True]" in (out / "generate.log").read_text()
    assert "--time-limit 540" in (out / "sanitize.log").read_text()
    done = check(tmp_path, out, "cpu-tests", "bench", python=fake)
    assert done.returncode == 0, done.stdout


def test_other_text_fails(tmp_path):
    """Negative control: one row's text differs from the CPU's."""
    text = '{"requests": [{"token_ids": [%s]}], "stats": {"graphs": 1, "graph_breaks": 0, "recompiles": 0}}'
    fake = f'''case "$*" in
      -\\ *) exec {sys.executable} "$@" ;; *"--batch 2"*) echo '{text % 2}' ;; *) echo '{text % 1}' ;;
    esac'''
    done = check(tmp_path, tmp_path / "out", "generate", python=fake)
    assert done.returncode == 1 and "[True] [False] [True]" in (tmp_path / "out/generate.log").read_text()


def test_limits(tmp_path):
    """A part ends at its limit, what it wrote is kept, and the next one runs."""
    done = check(tmp_path, tmp_path / "out", "sanitize", "gpu-tests", SANITIZE_SECONDS="1",
                 python='echo began; case "$*" in *sanitize*) exec sleep 60 ;; esac')
    assert "sanitize: exit status 124" in done.stdout and "gpu-tests: exit status 0" in done.stdout
    assert (tmp_path / "out/sanitize.log").read_text().startswith("began\n")


@pytest.mark.parametrize("arguments", [(), ("out",), ("out", "everything"), ("out", "bench", "benchmark")])
def test_usage(tmp_path, arguments):
    """Without a known part nothing runs."""
    done = check(tmp_path, *arguments, python="touch ran")
    assert done.returncode == 2 and "usage" in done.stderr and not (tmp_path / "ran").exists()


def test_sanitizer_covers_every_op():
    """Each op is called in the process of its family, and the process says so."""
    assert {sample.op for family in FAMILIES for sample in sanitize.calls(family)} == set(OPS)
    command = sanitize.command_of("tokens") + ["--device", "cpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    clean = "========= ERROR SUMMARY: 0 errors\n"
    assert sanitize.verdict("tokens", 0, done.stdout + clean) == (0, "0")
    assert sanitize.verdict("tokens", 0, done.stdout.replace("ran write_kv-typical\n", "") + clean) == (1, "0")
    assert sanitize.verdict("tokens", 0, done.stdout) == (1, "unknown")
    races = "========= RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)\n"
    assert sanitize.verdict("tokens", 9, done.stdout + races) == (9, "2")


def test_sanitizer_keeps_logs_of_failures(tmp_path, monkeypatch):
    """The table has a row for each process; logs follow of those that failed or ran out of time, and only of these."""
    lines = {family: "".join(f"ran {sample}\\n" for sample in sanitize.calls(family)) for family in ("conv", "ring")}
    races = "hazard in _copy_slots_kernel\\nRACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\\n"
    program(tmp_path, "compute-sanitizer", f'''#!/bin/bash
    case "$*" in
      *racecheck*conv) printf "{races}"; exit 9 ;;
      *conv) printf "quiet\\n{lines['conv']}ERROR SUMMARY: 0 errors\\n" ;;
      *) echo slow; sleep 60 ;;
    esac
    ''')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    soon = time.monotonic() + 1
    found = [sanitize.sanitize("conv", tool, soon + 60) for tool in sanitize.TOOLS]
    found.append(sanitize.sanitize("ring", "memcheck", soon))
    assert [(o.status, o.errors) for o in found] == [(0, "0"), (9, "1"), (124, "unknown")]
    assert found[2].seconds < 20
    text = sanitize.report(found)
    assert [line.split()[:4] for line in text.splitlines()[1:4]] == [
        ["conv", "memcheck", "0", "0"], ["conv", "racecheck", "9", "1"], ["ring", "memcheck", "124", "unknown"]]
    assert "hazard in _copy_slots_kernel" in text and "slow" in text and "quiet" not in text
    assert "conv = conv_replay, copy_slots" in text
