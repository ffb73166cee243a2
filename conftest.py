"""Without a GPU the Triton kernels run under the interpreter, chosen before Triton is first imported. One thread a
process: the tensors are small, and processes that share cores spend most of their time in waits for one another's
threads. No test but its own uses the start-up cache, which would outlive the test."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; the processes that tests start inherit it

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
os.environ["TORCH_REPLAY_STARTUP_CACHE"] = "0"
