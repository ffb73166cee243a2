"""What a model needs around its forward: the memory of each request, and a step's positions, slots and metadata.

An engine calls, in turn, `add_request` for a request that gets an index, `update_requests` before each step,
`prepare_inputs` and `prepare_attn` within it, and `remove_request` when the index is taken back. Everything that the
last two read is on the device, so that they trace into the compiled step.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Optional

import torch
from torch import Tensor

from . import ops
from .memory import ModelMemory
from .models.cached import AttnMetadata, Batch
from .replay_context import ReplayContext
from .request import Request

if TYPE_CHECKING:
    from .graphs.step import RequestState
    from .scheduler import KVGroup


@dataclass
class InputBatch:
    """What a step is given: B rows of T tokens each, row r's first `query_lens[r]` real."""

    input_ids: Tensor  # [B, T] int64
    query_lens: Tensor  # [B] int32, 0 for empty rows
    idx_mapping: Tensor  # [B] int32, request of each row, -1 for empty rows
    num_reqs: Tensor  # [1] int32, leading rows in use
    is_prefilling: Optional[Tensor] = None  # [B] bool; None: no row is

    @classmethod
    def empty(cls, rows: int, tokens: int, device) -> "InputBatch":
        """A batch whose rows are all empty."""
        return cls(torch.zeros(rows, tokens, dtype=torch.int64, device=device),
                   torch.zeros(rows, dtype=torch.int32, device=device),
                   torch.full((rows,), -1, dtype=torch.int32, device=device),
                   torch.zeros(1, dtype=torch.int32, device=device))

    def fill(self, rows: list[tuple[int, list[int]]]) -> None:
        """Overwrites the batch with `rows` of (request index, token ids); what they leave is empty."""
        count = len(rows)
        self.query_lens.zero_()
        self.idx_mapping.fill_(-1)
        self.num_reqs.fill_(count)
        ids = torch.zeros(self.input_ids.shape, dtype=torch.int64)
        for row, (_, tokens) in enumerate(rows):
            ids[row, : len(tokens)] = torch.tensor(tokens)
        self.input_ids.copy_(ids)
        self.query_lens[:count] = torch.tensor([len(tokens) for _, tokens in rows], dtype=torch.int32)
        self.idx_mapping[:count] = torch.tensor([index for index, _ in rows], dtype=torch.int32)


class FullAttentionBuilder:
    """Full attention reads the block table as it is."""

    def __init__(self, memory: ModelMemory):
        pass

    def build(self, batch: Batch, block_table: Tensor, slot_mapping: Tensor) -> AttnMetadata:
        return AttnMetadata(block_table, slot_mapping)


class SlidingWindowBuilder:
    """The slots that each token's window covers, worked out once for all layers."""

    def __init__(self, memory: ModelMemory):
        self.window, self.block_size = memory.attention_window, memory.config.block_size

    def build(self, batch: Batch, block_table: Tensor, slot_mapping: Tensor,
              replay_start: Optional[Tensor] = None) -> AttnMetadata:
        """replay_start: [B] int32, first position that each row may look at, 0: all."""
        tokens, device = batch.positions.shape[0], batch.positions.device
        indices = torch.empty(tokens, self.window, dtype=torch.int32, device=device)
        lens = torch.empty(tokens, dtype=torch.int32, device=device)
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


class DefaultModelState:
    """Positions, state slots and attention metadata of a model without prefix replay."""

    def __init__(self, memory: ModelMemory, requests: "RequestState"):
        self.requests = requests
        self.initialize_kv_cache(memory)

    def initialize_kv_cache(self, memory: ModelMemory) -> None:
        """Takes the pools to read and write; builders are made anew."""
        self.memory = memory
        self.builders = {kind: BUILDERS[kind](memory) for kind in memory.kv}

    def add_request(self, request: Request) -> None:
        """A request got `request.index`: overwrites whatever the last one left there."""
        state, index, params = self.requests, request.index, request.params
        state.temperature[index], state.top_p[index] = params.temperature, params.top_p
        state.top_k[index], state.seeds[index] = params.top_k, params.seed

    def remove_request(self, index: int) -> None:
        """The request at `index` has ended or was put back."""

    def update_requests(self, requests: list[Request], admitted: list[Request]) -> None:
        """Uploads what a step reads of its requests: lengths, block tables, and which slots their states go through.

        admitted: those of them whose state starts with this step, from a snapshot or from nothing.
        """
        if not requests:
            return
        state, device = self.requests, self.memory.device
        index = torch.tensor([request.index for request in requests], device=device)
        computed = torch.tensor([request.num_computed for request in requests], dtype=torch.int32)
        state.num_computed[index] = computed.to(device)
        tables = torch.zeros(len(self.memory.kv), len(requests), state.kv_tables.shape[2], dtype=torch.int32)
        for group, kind in enumerate(self.memory.kv):
            for row, request in enumerate(requests):
                table = request.tables[kind]
                tables[group, row, : len(table)] = torch.tensor(table, dtype=torch.int32)
        state.kv_tables[:, index] = tables.to(device)
        for states in self.memory.states.values():
            if isinstance(states, ReplayContext) and states.mode == "align":
                self._update_slots(states, index, requests, admitted)

    def _update_slots(self, states: ReplayContext, index: Tensor, requests, admitted) -> None:
        """Snapshot columns of the requests' tables: what this step reads or publishes, all others null."""
        columns = torch.zeros(len(requests), states.live_col, dtype=torch.int32)
        moves = torch.full((2, len(requests)), -1, dtype=torch.int32)
        for row, request in enumerate(requests):
            snapshots = dict(request.snapshots)
            if request in admitted:
                moves[1, row] = states.live_col
                if request.source:
                    snapshots[request.num_computed] = request.source
                    moves[0, row] = request.num_computed // states.block_size - 1
            for edge, snapshot in snapshots.items():
                columns[row, edge // states.block_size - 1] = self.memory.snapshot_slot(snapshot)
        states.request_tables[:, index, :-1] = columns.to(index.device)
        states.src_cols[index], states.dst_cols[index] = moves.to(index.device)

    def prepare_inputs(self, inputs: InputBatch) -> Batch:
        """Positions, lengths and state slots of a step in the uniform layout. Writes the contexts' `block_tables`."""
        memory, idx_mapping = self.memory, inputs.idx_mapping
        (rows, tokens), device = inputs.input_ids.shape, idx_mapping.device
        query_start_loc = torch.arange(rows + 1, dtype=torch.int32, device=device) * tokens
        positions = torch.empty(rows * tokens, dtype=torch.int64, device=device)
        seq_lens = torch.empty(rows, dtype=torch.int32, device=device)
        ops.prepare_positions(positions, seq_lens, idx_mapping, query_start_loc, self.requests.num_computed,
                              inputs.query_lens)
        state_slots, conv_slots, token_slots = {}, {}, {}
        for family, states in memory.states.items():
            if isinstance(states, ReplayContext):
                table = states.block_tables[:, :rows]
                ops.gather_block_tables(table, states.request_tables, idx_mapping, inputs.num_reqs)
                state_slots[family] = conv_slots[family] = table[0, :, states.live_col]
                token_slots[family] = None
            else:
                state_slots[family], token_slots[family] = states.step_slots(idx_mapping)
                conv_slots[family] = torch.where(idx_mapping >= 0, idx_mapping + 1, 0)
        return Batch(positions, positions.view(rows, tokens)[:, 0], seq_lens, query_start_loc, inputs.query_lens,
                     conv_slots, state_slots, token_slots)

    def prepare_dummy_inputs(self, rows: int, tokens: int) -> InputBatch:
        """A batch of rows of padding: it reads no request's memory and changes no state."""
        return InputBatch.empty(rows, tokens, self.memory.device)

    def prepare_attn(self, batch: Batch, inputs: InputBatch) -> None:
        """Fills `batch.attn`: block tables, slot mappings, then each kind's metadata by its builder."""
        if not self.memory.kv:
            return
        kinds, rows, device = len(self.memory.kv), inputs.idx_mapping.shape[0], batch.positions.device
        state = self.requests
        tables = torch.empty(kinds, rows, state.kv_tables.shape[2], dtype=torch.int32, device=device)
        ops.gather_block_tables(tables, state.kv_tables, inputs.idx_mapping, inputs.num_reqs)
        mappings = torch.empty(kinds, batch.positions.shape[0], dtype=torch.int64, device=device)
        ops.compute_slot_mappings(mappings, tables, batch.query_start_loc, batch.positions, state.block_sizes,
                                  inputs.query_lens)
        extra = self._replay(batch, inputs, mappings)
        for group, (kind, builder) in enumerate(self.builders.items()):
            arguments = extra.extra_args(builder) if extra is not None else {}
            batch.attn[kind] = builder.build(batch, tables[group], mappings[group], **arguments)

    def _replay(self, batch: Batch, inputs: InputBatch, mappings: Tensor) -> Optional[ReplayAttnMetadata]:
        return None


class ReplayModelState(DefaultModelState):
    """Also replays the window before a prefix hit: those tokens are computed again, and written to no shared block.

    groups: the scheduler's KV groups, in the order of `memory.kv`. `replay_start` [max_reqs] int32 by request, 0: no
    replay.
    """

    def __init__(self, memory: ModelMemory, requests: "RequestState", groups: list["KVGroup"]):
        super().__init__(memory, requests)
        device = memory.device
        self.replay_window = max((group.prefix_replay_tokens for group in groups), default=0)
        cacheable = [i for i, group in enumerate(groups) if group.prefix_cacheable]
        self.cacheable_groups = torch.tensor(cacheable, dtype=torch.int32, device=device)
        self.replay_start = torch.zeros_like(requests.num_computed)

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        self.replay_start[request.index] = request.replay_start

    def remove_request(self, index: int) -> None:
        super().remove_request(index)
        self.replay_start[index] = 0

    def replay_starts(self, inputs: InputBatch) -> Tensor:
        """replay_start by row, [B] int32: of prefilling rows alone. A decoding row is past its replay, and a row of
        padding must not see what a request left in the buffer."""
        replays = inputs.is_prefilling & (inputs.idx_mapping >= 0)
        return torch.where(replays, self.replay_start[inputs.idx_mapping.clamp(min=0).long()], 0)

    def _replay(self, batch: Batch, inputs: InputBatch, mappings: Tensor) -> Optional[ReplayAttnMetadata]:
        if inputs.is_prefilling is None or not self.replay_window:
            return None
        starts = self.replay_starts(inputs)
        ops.pad_replayed_slots(mappings, self.cacheable_groups, batch.query_start_loc, batch.positions, starts,
                               inputs.query_lens, window=self.replay_window)
        return ReplayAttnMetadata(starts)
