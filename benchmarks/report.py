"""What the benchmark hands back: rows with their ratios, one JSON object, one text table, a plot where there is
matplotlib."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch

PACKAGES = ("torch", "triton", "flashinfer-python", "fla-core", "vllm")
PEER_COLUMNS = ("plain", "plain tile", "vllm", "vllm update", "flashinfer", "fla")
REPLAYS, UPDATES = ("mamba2_replay", "gdn_replay"), ("mamba2_update", "gdn_update")
ROW_FIELDS = ("op", "geometry", "contestant", "kernel", "batch", "tokens", "state_dtype", "ring_dtype", "mode",
              "status", "us", "us_runs", "spread", "bytes", "gb_per_s", "of_read", "of_copy", "flush_fraction", "error",
              "times_as_fast")


def environment(device: torch.device) -> dict:
    """Device, versions and commit of this run."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {"device": {"type": device.type, "name": name}, "commit": _commit(), "python": platform.python_version(),
            "versions": {package: _version(package) for package in PACKAGES}}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Of the clone, with a plus sign where files have changed since; TORCH_REPLAY_COMMIT where git is not at hand."""
    folder = Path(__file__).resolve().parent
    try:
        run = dict(cwd=folder, capture_output=True, text=True, check=True)
        head = subprocess.run(["git", "rev-parse", "HEAD"], **run).stdout.strip()
        changed = subprocess.run(["git", "status", "--porcelain", "--untracked-files=no"], **run).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("TORCH_REPLAY_COMMIT")
    return head + ("+" if changed else "")


def add_bandwidth(row: dict, ceilings: dict[str, float]) -> None:
    """GB/s of a timed row, and what share of the measured ceilings that is."""
    row["gb_per_s"] = row["bytes"] / row["us"] * 1e-3
    row["of_read"], row["of_copy"] = (row["gb_per_s"] / ceilings[name] for name in ("read", "copy"))


def add_ratios(rows: list[dict]) -> None:
    """times_as_fast of torch_replay's rows: a peer's time over ours, for peers measured on the same task.

    A replay row meets other replay kernels in its own mode, and plain updates whatever the mode: they have none.
    """
    def task(row):
        return row["geometry"], row["batch"], row["tokens"], row["state_dtype"]

    timed = [row for row in rows if row["us"] is not None]
    for row in timed:
        if row["contestant"] != "torch_replay":
            continue
        for other in timed:
            if other is row or task(other) != task(row):
                continue
            name = _column(row, other)
            if name:
                row["times_as_fast"][name] = other["us"] / row["us"]


def _column(row: dict, other: dict) -> str | None:
    """Which column of `row` the other row fills, if any."""
    against_update = row["op"] in REPLAYS and other["op"] in UPDATES
    if other["contestant"] == "torch_replay":
        return "plain" if against_update else None
    if against_update or (other["op"] == row["op"] and other["mode"] == row["mode"]):
        return "vllm update" if other["contestant"] == "vllm" and other["op"] in UPDATES else other["contestant"]
    return None


def table(result: dict) -> str:
    """The rows as text, peers as "how many times as fast torch_replay is"."""
    head = ["op", "of", "batch", "T", "state", "mode", "us", "+-%", "MB", "of read", "of copy", *PEER_COLUMNS]
    lines = [head]
    for row in result["rows"]:
        if row["contestant"] == "torch_replay":
            lines.append(_cells(row))
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = ["  ".join(cell.ljust(w) if i in (0, 1, 4, 5) else cell.rjust(w)
                      for i, (cell, w) in enumerate(zip(line, widths))).rstrip() for line in lines]
    bandwidth = result["bandwidth_gb_per_s"]
    text.insert(0, f"{result['device']['name']}: reads {bandwidth['read']:,.0f} GB/s, copies {bandwidth['copy']:,.0f} "
                   "GB/s (both directions). Right: how many times as fast torch_replay is as")
    text += ["", *(f"{name}: {state}" for name, state in result["peers"].items())]
    failed = [row for row in result["rows"] if row["status"] != "ok"]
    seen = dict.fromkeys(f"{row['contestant']} {row['op']} {row['state_dtype']} T={row['tokens']}: {row['status']}"
                         for row in failed)
    return "\n".join(text + ([f"no number for {line}" for line in seen] if seen else []))


def _cells(row: dict) -> list[str]:
    cells = [row["op"], row["geometry"], str(row["batch"]), str(row["tokens"]), row["state_dtype"], row["mode"]]
    if row["us"] is None:
        return cells + ["-"] * (5 + len(PEER_COLUMNS))
    cells += [f"{row['us']:.1f}", f"{row['spread']:.1%}"[:-1], f"{row['bytes'] / 1e6:,.2f}", f"{row['of_read']:.0%}",
              f"{row['of_copy']:.0%}"]
    ratios = row["times_as_fast"]
    return cells + [f"{ratios[name]:.2f}" if name in ratios else "-" for name in PEER_COLUMNS]


def plot(result: dict, path: Path) -> bool:
    """Microseconds of a launch over the batch size, one panel a model, token count and state dtype, replays over whole
    flush cycles; dashed: what replay's bytes would take at the measured read bandwidth. False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels: dict[tuple, dict[str, list]] = {}
    for row in result["rows"]:
        if row["us"] is None or row["op"] not in REPLAYS + UPDATES or row["mode"] == "no flush":
            continue
        lines = panels.setdefault((row["geometry"], row["tokens"], row["state_dtype"]), {})
        kind = "replay" if row["op"] in REPLAYS else "plain update"
        lines.setdefault(f"{row['contestant']} {kind}", []).append((row["batch"], row["us"]))
        if row["contestant"] == "torch_replay" and row["op"] in REPLAYS:
            bound = row["bytes"] / result["bandwidth_gb_per_s"]["read"] * 1e-3
            lines.setdefault("replay's bytes", []).append((row["batch"], bound))
    columns = max(1, len(panels) // len({geometry for geometry, *_ in panels}))
    ordered = sorted(panels.items(), key=lambda item: (item[0][0], item[0][2] != "float32", item[0][1]))
    figure, axes = pyplot.subplots(-(-len(ordered) // columns), columns, squeeze=False, sharex=True,
                                   figsize=(4 * columns, 7))
    colors = {name: f"C{i}" for i, name in enumerate(sorted({name for lines in panels.values() for name in lines}))}
    for axis, ((geometry, tokens, dtype), lines) in zip(axes.flat, ordered):
        for name, points in lines.items():
            axis.plot(*zip(*sorted(points)), "--" if name == "replay's bytes" else "o-", label=name, markersize=4,
                      color=colors[name])
        axis.set(xscale="log", yscale="log", title=f"{geometry}, T={tokens}, {dtype} state", xlabel="batch",
                 ylabel="microseconds")
        axis.legend(fontsize=7)
    figure.suptitle(result["device"]["name"])
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    return True
