"""Without a GPU the Triton kernels run under the interpreter, chosen before Triton is first imported. One thread a
process: the tensors are small, and processes that share cores spend most of their time in waits for one another's
threads; and no processes that compile beside them, each of which would first import torch. No test but its own uses the
start-up cache, which would outlive the test. Files that compile or hold a slow test come first, so that processes that
take file by file end at about the same time."""

import gc
import os
from collections import Counter

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; the processes that tests start inherit it
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
os.environ["TORCH_REPLAY_STARTUP_CACHE"] = "0"


def pytest_configure(config):
    config.option.loadscopereorder = False  # xdist's own order: files of many tests first


def pytest_collection_modifyitems(items):
    tests = Counter(item.path for item in items)
    slow = {item.path for item in items if item.get_closest_marker("slow") or item.path.parent.name == "compile_tests"}
    items.sort(key=lambda item: (item.path not in slow, -tests[item.path], str(item.path)))


def pytest_collection_finish():
    gc.collect()
    gc.set_threshold(20_000)
    gc.freeze()  # modules and tests stay; the collector need not walk them again and again
