"""All memory that a model's layers keep between steps: state pools, conv rings, paged key-value caches."""

from dataclasses import dataclass
from typing import Optional

import torch

from ..states.groups import KVGroup
from ..states.replay_context import PlainStates, ReplayContext, StateGroup, StateLayer
from . import HybridConfig, HybridModel

STATE_KINDS = ("mamba2", "gdn", "kda")
KV_KINDS = ("full", "swa")
PHILOX_ROUNDS = 10  # as published


@dataclass(frozen=True)
class MemoryConfig:
    """Sizes of a model's memory. Lengths are in tokens, `num_blocks` counts the null block."""

    max_num_seqs: int
    max_tokens: int  # T, tokens of a decode row
    block_size: int
    num_blocks: dict[str, int]  # by KV kind
    window: int = 16  # W
    ring_len: Optional[int] = None  # R, default W + T
    replay: bool = True
    num_snapshots: int = 0  # states kept for other requests, at multiples of state_block_size up to max_model_len
    state_block_size: int = 16
    max_model_len: int = 0
    state_dtype: torch.dtype = torch.float32
    dtype: torch.dtype = torch.float32  # activations: conv rings and KV caches
    ring_dtype: Optional[torch.dtype] = None  # default: `default_ring_dtype`
    stochastic_rounding: bool = False  # of checkpoints that are rewritten


class ModelMemory:
    """The pools of a model, and which of them each layer uses.

    Attributes:
        states: family -> ReplayContext, or PlainStates without replay. One context per family, one group in each.
        groups: KV groups, here one for each kind of attention, of its name. kv: by group, the caches of its layers in
            one tensor [layers, blocks, block_size, 2, KVH, D], so that a compiled step has one input for all of them.
        max_num_seqs, num_snapshots: of the config. engram: the model's `EngramStore`, or None.
        place: for each sublayer, its index among the layers of its kind.
    """

    def __init__(self, model: HybridModel, config: MemoryConfig, device="cpu"):
        self.config, self.device = config, torch.device(device)
        pattern = model.config.pattern
        self.place = [pattern[:i].count(kind) for i, kind in enumerate(pattern)]
        self.max_num_seqs, self.num_snapshots = config.max_num_seqs, config.num_snapshots
        self.engram = model.engram
        self.states, self.kv, self.groups = {}, {}, []
        for family in STATE_KINDS:
            layers = [state_layer(model.config, config, family, i) for i, kind in enumerate(pattern) if kind == family]
            if layers and config.replay:
                self.states[family] = replay_context(family, layers, config, self.device)
            elif layers:
                self.states[family] = PlainStates(layers, config.max_num_seqs, device)
        for kind in KV_KINDS:
            shape = (pattern.count(kind), config.num_blocks.get(kind, 0), config.block_size, 2,
                     model.config.num_kv_heads, model.config.head_dim)
            if kind in pattern:
                window = model.config.sliding_window if kind == "swa" else None
                self.groups.append(KVGroup(kind, config.num_blocks[kind], window, config.block_size, kind))
                self.kv[kind] = torch.zeros(shape, dtype=config.dtype, device=device)

    def snapshot_slots(self, snapshot: int) -> list[int]:
        """Slots of a snapshot, numbered from 1: the same in the pools of every group and family."""
        groups = sum(len(states.groups) for states in self.states.values() if isinstance(states, ReplayContext))
        return [self.max_num_seqs + snapshot] * groups


def replay_context(family: str, layers: list[StateLayer], config: MemoryConfig, device) -> ReplayContext:
    """A context in which request i lives in slot i + 1 for good, and snapshots take the slots behind.

    In mode align the columns of a table are the edges at which a state may be published; the live slot has a column of
    its own behind them, so that a live state never moves and a publishing step makes one copy. There is room for a
    request more than can be, see `ReplayContext.create`.
    """
    align = config.num_snapshots > 0
    group = StateGroup(family, tuple(layers), config.state_block_size, "align" if align else "none")
    states = ReplayContext.create(
        [group], config.max_num_seqs + 1, num_slots=1 + config.max_num_seqs + config.num_snapshots,
        columns=config.max_model_len // config.state_block_size + 1 if align else 1, device=device)
    states.request_tables[:, :-1, states.live_col] = torch.arange(1, 1 + config.max_num_seqs, device=device)
    return states


def state_layer(model: HybridConfig, memory: MemoryConfig, family: str, index: int) -> StateLayer:
    """The memory of sublayer `index`, of kind `family`."""
    if family == "mamba2":
        sizes = (model.mamba_heads, model.mamba_groups, model.mamba_head_dim, model.mamba_state_dim,
                 model.mamba_conv_dim)
    elif family == "kda":
        sizes = (model.kda_heads, model.kda_heads, model.kda_head_dim, model.kda_head_dim, model.kda_conv_dim)
    else:
        sizes = (model.gdn_value_heads, model.gdn_key_heads, model.gdn_value_dim, model.gdn_key_dim, model.gdn_conv_dim)
    ring_len = memory.window + memory.max_tokens if memory.ring_len is None else memory.ring_len
    return StateLayer(f"{index}.{family}", family, *sizes, conv_width=model.conv_width, window=memory.window,
                      ring_len=ring_len, max_tokens=memory.max_tokens, state_dtype=memory.state_dtype,
                      ring_dtype=memory.ring_dtype or default_ring_dtype(family, memory.dtype),
                      conv_dtype=memory.dtype, philox_rounds=PHILOX_ROUNDS if memory.stochastic_rounding else 0)


def default_ring_dtype(family: str, dtype: torch.dtype) -> torch.dtype:
    """The ring dtype of a family for activations of `dtype`, by what `torch-replay bench drift` found.

    float32 activations keep float32 rings. In 16 bits a Mamba-2 ring holds x and B as the model made them, so their own
    dtype adds no error to the state (and FlashInfer takes bfloat16 only). Keys and corrected updates of the delta rule
    are float32 results of about unit size: float16 leaves an eighth of bfloat16's error there (3.7e-4 of the state
    against 3.0e-3, measured for GDN). Updates beyond 65,504 would overflow it; a model that has such values sets
    `ring_dtype`.
    """
    return torch.float16 if family != "mamba2" and dtype != torch.float32 else dtype
