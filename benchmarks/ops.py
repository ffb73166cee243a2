"""`torch-replay bench ops`: every decode op over full flush cycles, beside its peers.

Each kernel has to be right before it is timed (`contestants.check`), pools rotate through more than the cache holds,
inputs are random, and a number is the median of CUDA-graph replays taken in two runs.
"""

import contextlib
import itertools
import sys
import time
from collections.abc import Callable

import torch
from tqdm import tqdm

from torch_replay.ops import backends
from torch_replay.ops.registry import OPS

from . import peers, report
from .contestants import CHECK_ROWS, WINDOW, Case, Contestant, Replay, Update, check, tolerance
from .families import ACTIVATIONS, GEOMETRIES, Draw
from .small_ops import KINDS, Task, check_task, reference_of
from .timing import bandwidth, measure

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def run(options) -> dict:
    """options: the parsed arguments of the command line. Returns what `--json` prints."""
    device = torch.device(options.device)
    began = time.monotonic()
    geometries = options.geometry or (["nemotron-h", "qwen3-next"] if device.type == "cuda"
                                      else ["tiny-mamba2", "tiny-gdn"])
    families = [GEOMETRIES[name] for name in geometries]
    found = peers.available()
    ceilings = bandwidth(device)
    jobs = plan(options, families, found, device)
    rows, checked = [], {}
    with torch.no_grad(), _pinned_backend(device):
        for job in tqdm(jobs, unit="kernel", file=sys.stderr, disable=options.quiet):
            late = options.time_limit is not None and time.monotonic() - began > options.time_limit
            rows.append(skipped(job, "out of time") if late else measure_job(job, checked, options.seconds))
            if rows[-1]["us"] is not None:
                report.add_bandwidth(rows[-1], ceilings)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    report.add_ratios(rows)
    return {"benchmark": "ops", **report.environment(device), "command": options.command,
            "method": "median of CUDA-graph replays of whole flush cycles, per launch, gaps between kernels included"
                      if device.type == "cuda" else "perf_counter around whole flush cycles, per launch",
            "bandwidth_gb_per_s": ceilings, "window": WINDOW, "peers": found, "seconds": time.monotonic() - began,
            "rows": rows}


def _pinned_backend(device: torch.device):
    """torch_replay's rows are its own kernels, also where its back-end choice would call a peer."""
    if device.type != "cuda" or not backends.installed("triton"):
        return contextlib.nullcontext()
    return backends.set_backend("triton")


def plan(options, families, found: dict[str, str], device: torch.device) -> list[tuple]:
    """(case or task, maker) of every row. A time limit cuts the end off: float32 states come first."""
    tokens = (1,) if options.quick else (1, 4)
    dtypes = [DTYPES[name] for name in (["float32"] if options.quick else ["float32", "bfloat16"])]
    jobs = []
    for dtype in dtypes:
        for T, family, batch in itertools.product(tokens, families, options.batch):
            for mode in ("cycle", "no flush", "plain"):
                case = Case(family, mode, batch, T, dtype, device)
                jobs += _with_peers(case, Update if mode == "plain" else Replay, peers.PEERS, found)
        for family, batch, variant in itertools.product(families, options.batch, ("all rows", "idle")):
            task = Task(f"{family.family}_materialize", family, batch, 1, dtype, device, variant)
            jobs += _with_peers(task, KINDS[task.op], peers.TASK_PEERS, found)
        if dtype is dtypes[0]:
            tasks = [Task("ring_commit", families[0], batch, tokens[-1], torch.int32, device)
                     for batch in options.batch]
            tasks += [Task("conv_replay", family, batch, T, ACTIVATIONS, device)
                      for family, batch, T in itertools.product(families, options.batch, tokens)]
            jobs += [(task, KINDS[task.op]) for task in tasks]
    return jobs


def _with_peers(subject: Case | Task, own: type, others: tuple[type, ...], found: dict[str, str]) -> list[tuple]:
    return [(subject, own)] + [(subject, peer) for peer in others
                               if peer.supports(subject) and found[peer.name] == "present"]


def skipped(job: tuple, why: str) -> dict:
    """A row without a number."""
    subject, maker = job
    task = isinstance(subject, Task)
    kernel = kernel_of(subject) if maker.name == "torch_replay" else maker.name
    values = dict(op=subject.op, geometry=subject.family.name, contestant=maker.name,
                  kernel=kernel, batch=subject.batch, tokens=subject.tokens, state_dtype=_short(subject.state_dtype),
                  ring_dtype=_short(ACTIVATIONS), mode=subject.variant if task else subject.mode, status=why,
                  times_as_fast={})
    return {field: values.get(field) for field in report.ROW_FIELDS}


def measure_job(job: tuple, checked: dict, seconds: float) -> dict:
    """Checks the kernel once for all batch sizes, and times it only if it is right."""
    subject, maker = job
    task = isinstance(subject, Task)
    if subject.device.type == "cuda" and maker.name == "torch_replay" and "reference" in kernel_of(subject):
        return skipped(job, "has no CUDA kernel, only the reference")
    row = skipped(job, "ok")
    key = (row["contestant"], row["op"], row["geometry"], row["tokens"], row["state_dtype"], task and subject.variant)
    try:
        if key not in checked:
            checked[key] = _task_error(subject, maker) if task else (check(maker, subject), tolerance(subject))
        row["error"], limit = checked[key]
        if not row["error"] <= limit:
            return {**row, "status": f"wrong: RMS ratio {row['error']:.3g}, expected at most {limit:g}"}
        contestant = maker(subject if task else subject.rotating(), Draw(subject.device, 1))
        _time(row, contestant, subject.device, seconds)
    except Exception as error:  # one kernel that breaks must not cost the numbers of the others
        return {**skipped(job, f"failed: {type(error).__name__}: {error}".splitlines()[0][:200]), "error": row["error"]}
    return row


def _time(row: dict, contestant: Contestant, device: torch.device, seconds: float) -> None:
    if isinstance(contestant, Replay):
        share = contestant.schedule.flush_fraction
        want = contestant.case.accepted / contestant.case.window if row["mode"] == "cycle" else 0.0
        assert abs(share - want) < 1e-9, f"{share} of the rows flush, expected {want}"
        row["flush_fraction"] = share
    timing = measure(contestant.launches(), device, seconds)
    row.update(us=timing.us, us_runs=list(timing.runs), spread=timing.spread, bytes=contestant.bytes())


def _task_error(task: Task, maker: type) -> tuple[float, float]:
    small = Task(task.op, task.family, CHECK_ROWS, task.tokens, task.state_dtype, task.device, task.variant)
    limit = 0.0 if task.variant == "idle" else 1e-2
    return check_task(maker, small, reference_of(task.op)), limit


def kernel_of(subject) -> str:
    """Module of the kernel that this op runs on the subject's device."""
    found: str | Callable = OPS[subject.op].kernels[subject.device.type]
    module = found if isinstance(found, str) else found.__module__
    return "reference (torch)" if module.endswith(".naive") else module


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
