"""Without a GPU the Triton kernels run under the interpreter, chosen before Triton is first imported. No test but its
own uses the start-up cache, which would outlive the test."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
os.environ["TORCH_REPLAY_STARTUP_CACHE"] = "0"
