"""Custom ops of torch_replay, registered under `torch.ops.torch_replay` when this package is imported.

The functions below are Python wrappers of the same names: they check argument types, and validation behind them names
the argument at fault. Nothing here imports Triton or FlashInfer.
"""

from .mamba2.op import mamba2_materialize, mamba2_replay, mamba2_update
from .registry import OPS

__all__ = ["OPS", "mamba2_materialize", "mamba2_replay", "mamba2_update"]
