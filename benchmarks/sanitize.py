"""compute-sanitizer over every op's Triton kernels: `python3 -m benchmarks.sanitize` from a clone's root, on a GPU.

Each family of ops runs in a process of its own, once under each tool, and a table sums up: family, tool, exit status,
errors. Of a process with another status than 0 the whole log follows. `--family F` makes the calls of one family,
without a sanitizer: what the processes do.
"""

import argparse
import concurrent.futures
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import torch

from torch_replay.ops import backends
from torch_replay.ops.registry import OPS
from torch_replay.ops.samples import FAMILIES, Sample, samples

TOOLS = ("memcheck", "racecheck")
FOUND = 9  # the status that the sanitizer gives a process in which it found errors
TIMED_OUT = 124


@dataclass
class Outcome:
    family: str
    tool: str
    status: int
    errors: str
    seconds: float
    log: str


def calls(family: str) -> list[Sample]:
    """Samples of each op of a family: its first, which is the usual one, one of few rows or odd sizes, and lists."""
    found = []
    for op in OPS.values():
        if op.body.__module__.split(".")[-2] == family:
            first, *others = samples(op.name)
            found += [first] + [sample for sample in others if re.match("odd|one_", sample.id)][:1]
            found += [sample for sample in others if sample.id == "layers"]
    return found


def run_family(family: str, device: str) -> None:
    with backends.set_backend("triton"):
        for sample in calls(family):
            args, kwargs = sample.make(device)
            OPS[sample.op].wrapper(*args, **kwargs)
            if device == "cuda":
                torch.cuda.synchronize()
            print(f"ran {sample}", flush=True)


def command_of(family: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.sanitize", "--family", family]


def sanitize(family: str, tool: str, deadline: float) -> Outcome:
    """One family under one tool, until `deadline` on time.monotonic's clock."""
    began = time.monotonic()
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(FOUND), *command_of(family)]
    # each tensor an allocation of its own: in the caching allocator's blocks a read past the end goes unseen
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    # a session of its own: the sanitizer's child has to end with it
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               start_new_session=True)
    try:
        log, _ = process.communicate(timeout=max(1.0, deadline - began))
        status = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        log, _ = process.communicate()
        status = TIMED_OUT
    return Outcome(family, tool, *verdict(family, status, log), time.monotonic() - began, log)


def verdict(family: str, status: int, log: str) -> tuple[int, str]:
    """Exit status and number of errors; a process that did not make all of its calls has failed, whatever it says."""
    summary = re.search(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) error", log)
    errors = next(filter(None, summary.groups())) if summary else "unknown"
    ran = set(re.findall(r"^ran (\S+)$", log, re.MULTILINE))
    if status == 0 and (errors != "0" or ran != {str(sample) for sample in calls(family)}):
        status = 1
    return status, errors


def report(outcomes: list[Outcome]) -> str:
    lines = [f"{'family':12}{'tool':12}{'exit status':>12}{'errors':>10}{'seconds':>10}"]
    lines += [f"{o.family:12}{o.tool:12}{o.status:>12}{o.errors:>10}{o.seconds:>10.0f}" for o in outcomes]
    lines.append("families: " + "; ".join(f"{family} = {', '.join(dict.fromkeys(s.op for s in calls(family)))}"
                                          for family in dict.fromkeys(o.family for o in outcomes)))
    for outcome in outcomes:
        if outcome.status:
            lines.append(f"\n{outcome.family} under {outcome.tool}, exit status {outcome.status}:\n{outcome.log}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", choices=FAMILIES, help="make the calls of one family, without a sanitizer")
    parser.add_argument("--device", default="cuda", help="for --family (cuda)")
    parser.add_argument("--time-limit", type=float, default=540.0, help="seconds for everything (540)")
    parser.add_argument("--jobs", type=int, default=4, help="processes at a time (4)")
    options = parser.parse_args()
    if options.family:
        run_family(options.family, options.device)
        return 0
    deadline = time.monotonic() + options.time_limit
    if not shutil.which("compute-sanitizer"):
        print("compute-sanitizer is not on the PATH", file=sys.stderr)
        return 1
    for family in FAMILIES:  # compiles the kernels: that takes many times longer under a sanitizer
        subprocess.run(command_of(family), check=True, timeout=max(1.0, deadline - time.monotonic()))
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        jobs = [pool.submit(sanitize, family, tool, deadline) for tool in TOOLS for family in FAMILIES]
        outcomes = [job.result() for job in jobs]
    print(report(outcomes))
    return any(outcome.status for outcome in outcomes)


if __name__ == "__main__":
    sys.exit(main())
