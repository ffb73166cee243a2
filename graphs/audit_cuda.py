"""The audit's rules about CUDA graphs, read from Inductor's counters, its skip messages, and a profile of one sweep."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch._dynamo.utils import counters
from torch._inductor import cudagraph_trees, cudagraph_utils

from .audit_finding import Finding, first_line, last_place


class CudaWatch:
    """Counts what CUDA-graph trees do between its start and now."""

    def __init__(self):
        self.skips: list[Finding] = []
        self.partitions, self.recordings = 1, 0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Around all compiled calls."""
        handler = _Skips(self.skips)
        record = cudagraph_trees.CUDAGraphTreeManager.record_function

        def counted(manager, *args, **kwargs):
            self.recordings += 1
            return record(manager, *args, **kwargs)

        self._copied = counters["inductor"]["cudagraph_recorded_non_static_inputs"]
        cudagraph_utils.cudagraphs_log.addHandler(handler)
        try:
            with mock.patch.object(cudagraph_trees.CUDAGraphTreeManager, "record_function", counted):
                yield
        finally:
            cudagraph_utils.cudagraphs_log.removeHandler(handler)

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Around the compilation of one graph: Inductor counts its partitions if there is more than one."""
        before = counters["inductor"]["cudagraph_partitions"]
        yield
        self.partitions = max(self.partitions, counters["inductor"]["cudagraph_partitions"] - before)

    def observe(self, sweep: Callable[[], object], calls: int, graphs: int) -> dict[str, tuple[int, list[Finding]]]:
        """Values by rule, once two sweeps have warmed up and recorded.

        `sweep` makes `calls` calls, for which `graphs` graphs were compiled.
        """
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA,
                                                torch.profiler.ProfilerActivity.CPU]) as profile:
            sweep()
            torch.cuda.synchronize()
        launches = sum(event.count for event in profile.key_averages() if event.key == "cudaGraphLaunch")
        copied = counters["inductor"]["cudagraph_recorded_non_static_inputs"] - self._copied
        # rounded up: a recording too many anywhere must not vanish in an average
        return {
            "skips": (len(self.skips), self.skips),
            "partitions": (self.partitions, []),
            "copied": (-(-copied // max(self.recordings, 1)), []),
            "recordings": (-(-self.recordings // max(graphs, 1)), []),
            "launches": (-(-launches // max(calls, 1)), [] if launches else [Finding("no CUDA graph was launched")]),
        }


class _Skips(logging.Handler):
    def __init__(self, skips: list[Finding]):
        super().__init__()
        self.skips = skips

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if "skipping" in message:
            self.skips.append(Finding.at(first_line(message), *last_place(message)))
