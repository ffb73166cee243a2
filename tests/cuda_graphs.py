"""What tests of CUDA-graph trees share: no silent fallback, recordings made, and calls of the CUDA runtime."""

import contextlib
from unittest import mock

import torch

# every reason not to record is an error, and so is a part of the graph that cannot be recorded
STRICT = {"triton.cudagraph_or_error": True}


@contextlib.contextmanager
def recordings():
    """A list that grows with every CUDA graph that the trees record."""
    from torch._inductor import cudagraph_trees

    made, record = [], cudagraph_trees.CUDAGraphTreeManager.record_function

    def counted(manager, *args, **kwargs):
        made.append(args)
        return record(manager, *args, **kwargs)

    with mock.patch.object(cudagraph_trees.CUDAGraphTreeManager, "record_function", counted):
        yield made


def device_calls(work) -> dict[str, int]:
    """How often `work` called each function of the CUDA runtime."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        work()
        torch.cuda.synchronize()
    return {event.key: event.count for event in profile.key_averages() if event.key.startswith("cu")}
