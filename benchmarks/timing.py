"""Clocks: CUDA-graph replays on a GPU, perf_counter on a CPU, and the memory bandwidth to hold times against.

This folder is the only place of the project that captures graphs by hand: kernels of a few microseconds would
otherwise be timed by how fast Python launches them.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

RUNS = 2  # the same measurement twice: differences below their spread are noise


@dataclass(frozen=True)
class Timing:
    """Microseconds of one launch: the median over all replays, and the median of each run."""

    us: float
    runs: tuple[float, ...]

    @property
    def spread(self) -> float:
        """Distance of the runs over their median."""
        return (max(self.runs) - min(self.runs)) / self.us


def measure(launches: list[Callable], device: torch.device, seconds: float) -> Timing:
    """Times `launches` one after the other, as a whole, several times over; the result is per launch.

    seconds: how long each run should take, about. All launches run once before anything is timed.
    """
    once = _graph_clock(launches) if device.type == "cuda" else _wall_clock(launches)
    first = once()
    repeats = max(3, min(50, round(seconds / max(first, 1e-9))))
    runs = [[once() / len(launches) * 1e6 for _ in range(repeats)] for _ in range(RUNS)]
    return Timing(statistics.median(sum(runs, [])), tuple(statistics.median(run) for run in runs))


def _wall_clock(launches: list[Callable]) -> Callable[[], float]:
    def once() -> float:
        begin = time.perf_counter()
        for launch in launches:
            launch()
        return time.perf_counter() - begin

    once()
    return once


def capture(launches: list[Callable]) -> torch.cuda.CUDAGraph:
    """The launches, each of which runs once before, as one CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # the inputs may still be on their way into memory
    with torch.cuda.stream(side):  # compiles, and lets libraries allocate, outside of the capture
        for launch in launches:
            launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    return graph


def _graph_clock(launches: list[Callable]) -> Callable[[], float]:
    graph = capture(launches)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def once() -> float:
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3

    for _ in range(2):
        once()
    return once


def bandwidth(device: torch.device, size: int = None) -> dict[str, float]:
    """GB/s of this device, in this run: `read` by the better of two reductions, `copy` counting both directions.

    size: bytes to read; default: far more than any cache of the device.
    """
    size = size or (4 << 30 if device.type == "cuda" else 8 << 20)
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    reads = [measure([reduce], device, 0.05).us for reduce in (source.sum, source.amax)]
    copied = measure([lambda: target.copy_(source)], device, 0.05).us
    return {"read": size / min(reads) * 1e-3, "copy": 2 * size / copied * 1e-3}


def cache_bytes(device: torch.device) -> int:
    """What rotating pools have to exceed: the L2 of a GPU; nothing on a CPU, whose times only show that things run."""
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
