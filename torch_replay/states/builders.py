"""Attention metadata builders, by the kind of a KV group's layers: what the layers of one group read in a step.

A host registers builders for kinds of its own, or another for a kind that is known:

    class MyBuilder:
        recordable = True

        def __init__(self, group: KVGroup): ...
        def build(self, batch, block_table, slot_mapping): ...

    register_builder("my_kind", MyBuilder)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Optional, Protocol

import torch
from torch import Tensor

from .. import ops
from .batch import AttnMetadata, Batch
from .groups import KVGroup


class Builder(Protocol):
    """Makes what the layers of one KV group read in a step.

    recordable, of the class: all that `build` does is device work on tensors, of sizes that the batch's shapes and
    `max_seq_len` fix, so that a CUDA graph may hold it. Where it is missing or False, metadata is built eagerly.
    """

    recordable: bool

    def build(self, batch: Batch, block_table: Tensor, slot_mapping: Tensor) -> Any:
        """block_table [B, C] int32 and slot_mapping [tokens] int64 of the group. The batch has positions and lengths,
        and for sizes on the host `max_seq_len` and `max_query_len`, which no row exceeds."""
        ...


class FullAttentionBuilder:
    """Full attention reads the block table as it is."""

    recordable = True

    def __init__(self, group: KVGroup):
        pass

    def build(self, batch: Batch, block_table: Tensor, slot_mapping: Tensor) -> AttnMetadata:
        return AttnMetadata(block_table, slot_mapping)


class SlidingWindowBuilder:
    """The slots that each token's window covers, worked out once for all layers of a group."""

    recordable = True

    def __init__(self, group: KVGroup):
        if group.sliding_window is None:
            raise ValueError(f"group {group.name}: sliding_window is None, expected tokens for its kind {group.kind!r}")
        self.window, self.block_size, self.name = group.sliding_window, group.block_size, group.name

    def build(self, batch: Batch, block_table: Tensor, slot_mapping: Tensor,
              replay_start: Optional[Tensor] = None) -> AttnMetadata:
        """replay_start: [B] int32, first position that each row may look at, 0: all."""
        tokens, device = batch.positions.shape[0], batch.positions.device
        indices = batch.allocate(f"{self.name}.indices", (tokens, self.window), torch.int32, device)
        lens = batch.allocate(f"{self.name}.lens", (tokens,), torch.int32, device)
        ops.swa_indices(indices, lens, batch.seq_lens, batch.query_start_loc, block_table, slot_mapping, replay_start,
                        batch.query_lens, window=self.window, block_size=self.block_size)
        return AttnMetadata(block_table, slot_mapping, indices, lens)


BUILDERS: dict[str, Callable[[KVGroup], Builder]] = {"full": FullAttentionBuilder, "swa": SlidingWindowBuilder}


def register_builder(kind: str, factory: Callable[[KVGroup], Builder]) -> None:
    """Model states made from now on build the metadata of groups of that kind by `factory(group)`."""
    BUILDERS[kind] = factory


def make_builder(group: KVGroup) -> Builder:
    """A builder of the group's kind. Raises ValueError for a kind that nobody registered."""
    if group.kind not in BUILDERS:
        raise ValueError(f"group {group.name}: kind is {group.kind!r}, expected one of "
                         f"{', '.join(sorted(BUILDERS))}, or register_builder(kind, factory)")
    return BUILDERS[group.kind](group)


def is_recordable(builder: Builder) -> bool:
    """Whether a CUDA graph may hold what the builder does: its class says so."""
    return bool(getattr(type(builder), "recordable", False))


@dataclass
class ReplayAttnMetadata:
    """replay_start [B] int32, for the builders of sliding windows and for no other."""

    replay_start: Tensor

    def extra_args(self, builder: Builder) -> dict:
        return {"replay_start": self.replay_start} if isinstance(builder, SlidingWindowBuilder) else {}
