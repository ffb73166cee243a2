"""Without a GPU the Triton kernels run under the interpreter, chosen before Triton is first imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
