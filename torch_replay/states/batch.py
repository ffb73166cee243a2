"""What a forward reads of a step: positions, lengths, state slots, and the attention metadata of each KV group."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Optional

import torch
from torch import Tensor


def fresh_tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype, device) -> Tensor:
    """A tensor of a step's own. Steps whose tensors stay in place take them elsewhere, by name and shape."""
    return torch.empty(shape, dtype=dtype, device=device)


def rows_of_tokens(input_ids: Tensor, query_start_loc: Tensor, query_lens: Tensor) -> tuple[Tensor, Tensor]:
    """The row of each token [tokens], int64, and whether it is one of its real ones; inputs [B, T], or packed [tokens]
    whose rows begin at query_start_loc [B + 1]."""
    device = input_ids.device
    if input_ids.dim() == 2:
        rows, tokens = input_ids.shape
        row = torch.arange(rows, device=device)[:, None].expand(rows, tokens).flatten()
        return row, (torch.arange(tokens, device=device) < query_lens[:, None]).flatten()
    place = torch.arange(input_ids.shape[0], dtype=torch.int32, device=device)
    row = torch.searchsorted(query_start_loc[1:], place, right=True).clamp(max=query_lens.shape[0] - 1)
    return row, (place >= query_start_loc[row]) & (place < query_start_loc[row] + query_lens[row])


@dataclass
class AttnMetadata:
    """What the layers of one KV kind read in a step."""

    block_table: Tensor  # [B, C] int32
    slot_mapping: Tensor  # [tokens] int64
    indices: Optional[Tensor] = None  # [tokens, window] int32, of sliding windows
    lens: Optional[Tensor] = None  # [tokens] int32


@dataclass
class Batch:
    """One step's tensors. B rows of T tokens each, tokens = B * T in row order; or packed rows of any lengths, row r's
    tokens from query_start_loc[r] on."""

    input_ids: Tensor  # [B, T] int32, or packed [tokens]
    positions: Tensor  # [tokens] int64
    first: Tensor  # [B] int64, position of each row's first token
    seq_lens: Tensor  # [B] int32
    query_start_loc: Tensor  # [B + 1] int32
    query_lens: Tensor  # [B] int32
    # by family, [G, B] int32, 0 for padded rows: layers of group g go through the slots of g
    conv_slots: dict[str, Tensor]
    state_slots: dict[str, Tensor]
    token_slots: dict[str, Optional[Tensor]]  # by family, [B, T] or None
    windows: dict[str, int] = field(default_factory=dict)  # by family that replays: W or 0, see `ReplayContext.windows`
    max_seq_len: int = 0  # host: no sequence is longer
    max_query_len: int = 0  # host: no row has more tokens
    is_prefilling: Optional[Tensor] = None  # [B] bool, None: no row is
    attn: dict[str, AttnMetadata] = field(default_factory=dict)  # by KV group
    engram: Optional[list[tuple[Tensor, Tensor]]] = None  # by engram layer, see token_history.py
    decay_rates: list[Tensor] = field(default_factory=list)  # by Mamba-2 layer, A [H], which the forward fills in
    allocate: Callable[..., Tensor] = fresh_tensor  # makes what is written for the step
    tail: Optional["TailBatch"] = None  # decoder-side replay, in steps that drop tokens
    # by row of a prefill, [B, E] int32: tokens after which a snapshot is taken inside the chunk; by family [G, B, E]:
    # its slots; 0: none
    edges: Optional[Tensor] = None
    edge_slots: Optional[dict[str, Tensor]] = None


@dataclass
class TailBatch:
    """The tokens that the last `decoder_replay_layers` sublayers run on."""

    rows: Tensor  # [kept] int64, which tokens of the whole batch
    batch: Batch  # of the kept tokens, one row after the other; has metadata for sliding windows alone
    rank_tokens: Optional[tuple[int, ...]] = None  # kept tokens by rank, for layers that exchange them; None: one rank
