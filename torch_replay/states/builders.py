"""Attention metadata builders, by the kind of a KV group's layers: what the layers of one group read in a step."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Optional

import torch
from torch import Tensor

from .. import ops
from .batch import AttnMetadata, Batch

if TYPE_CHECKING:
    from ..models.memory import ModelMemory


class FullAttentionBuilder:
    """Full attention reads the block table as it is.

    A builder is recordable if all that it does is device work on tensors, so that a CUDA graph may hold it.
    """

    recordable = True

    def __init__(self, memory: "ModelMemory", name: str = "full"):
        pass

    def build(self, batch: Batch, block_table: Tensor, slot_mapping: Tensor) -> AttnMetadata:
        return AttnMetadata(block_table, slot_mapping)


class SlidingWindowBuilder:
    """The slots that each token's window covers, worked out once for all layers of a group."""

    recordable = True

    def __init__(self, memory: "ModelMemory", name: str = "swa"):
        self.window, self.block_size, self.name = memory.attention_window, memory.config.block_size, name

    def build(self, batch: Batch, block_table: Tensor, slot_mapping: Tensor,
              replay_start: Optional[Tensor] = None) -> AttnMetadata:
        """replay_start: [B] int32, first position that each row may look at, 0: all."""
        tokens, device = batch.positions.shape[0], batch.positions.device
        indices = batch.allocate(f"{self.name}.indices", (tokens, self.window), torch.int32, device)
        lens = batch.allocate(f"{self.name}.lens", (tokens,), torch.int32, device)
        ops.swa_indices(indices, lens, batch.seq_lens, batch.query_start_loc, block_table, slot_mapping, replay_start,
                        batch.query_lens, window=self.window, block_size=self.block_size)
        return AttnMetadata(block_table, slot_mapping, indices, lens)


BUILDERS = {"full": FullAttentionBuilder, "swa": SlidingWindowBuilder}


@dataclass
class ReplayAttnMetadata:
    """replay_start [B] int32, for the builders of sliding windows and for no other."""

    replay_start: Tensor

    def extra_args(self, builder) -> dict:
        return {"replay_start": self.replay_start} if isinstance(builder, SlidingWindowBuilder) else {}
