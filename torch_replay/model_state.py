"""What a model needs around its forward: the memory of each request, and a step's positions, slots and metadata.

An engine calls, in turn, `add_request` for a request that gets an index, `update_requests` before each step,
`prepare_inputs` and `prepare_attn` within it, and `remove_request` when the index is taken back. Everything that the
last two read is on the device, so that they trace into the compiled step.
"""

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Optional

import torch
from torch import Tensor

from . import ops
from .memory import ModelMemory
from .models.cached import AttnMetadata, Batch, TailBatch
from .replay_context import ReplayContext
from .request import Request

if TYPE_CHECKING:
    from .graphs.step import RequestState
    from .parallel import Agreed
    from .scheduler import KVGroup


@dataclass
class InputBatch:
    """What a step is given: B rows of T tokens each, row r's first `query_lens[r]` real."""

    input_ids: Tensor  # [B, T] int64
    query_lens: Tensor  # [B] int32, 0 for empty rows
    idx_mapping: Tensor  # [B] int32, request of each row, -1 for empty rows
    num_reqs: Tensor  # [1] int32, leading rows in use
    is_prefilling: Optional[Tensor] = None  # [B] bool; None: no row is
    rows: list[tuple[int, int, bool]] = field(default_factory=list)  # host: request, tokens, prefilling; those in use
    agreed: Optional["Agreed"] = None  # what the step does on all ranks; None: no ranks that agree

    @classmethod
    def empty(cls, rows: int, tokens: int, device) -> "InputBatch":
        """A batch whose rows are all empty."""
        return cls(torch.zeros(rows, tokens, dtype=torch.int64, device=device),
                   torch.zeros(rows, dtype=torch.int32, device=device),
                   torch.full((rows,), -1, dtype=torch.int32, device=device),
                   torch.zeros(1, dtype=torch.int32, device=device))

    def fill(self, rows: list[tuple[int, list[int]]], prefilling: Optional[list[bool]] = None) -> None:
        """Overwrites the batch with `rows` of (request index, token ids); what they leave is empty.

        prefilling: which of them prefill, None: none."""
        count = len(rows)
        flags = [False] * count if prefilling is None else prefilling
        self.rows = [(index, len(tokens), flag) for (index, tokens), flag in zip(rows, flags, strict=True)]
        self.is_prefilling = None
        if prefilling is not None:
            padded = flags + [False] * (len(self.query_lens) - count)
            self.is_prefilling = torch.tensor(padded, device=self.query_lens.device)
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
    """Positions, state slots and attention metadata of a model without prefix replay.

    joins_prefills: whether a rank without prompts runs a prefill of padding while another rank has some.
    """

    joins_prefills = False

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
        """Uploads what a step reads of its requests: lengths, block tables, the tokens before a prompt chunk, and which
        slots their states go through.

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
        for request in requests if state.history is not None else ():
            if not request.is_decoding:
                state.history.upload(request.index, request.tokens, request.num_computed)
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

    def kept_counts(self, rows: list[tuple[int, int, bool]]) -> list[int]:
        """How many last tokens of each of `InputBatch.rows` the model's tail runs on: all."""
        return [count for _, count, _ in rows]

    def prepare_inputs(self, inputs: InputBatch) -> Batch:
        """Positions, lengths, state slots and n-gram entries of a step in the uniform layout. Writes the contexts'
        `block_tables` and the token history."""
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
        batch = Batch(positions, positions.view(rows, tokens)[:, 0], seq_lens, query_start_loc, inputs.query_lens,
                      conv_slots, state_slots, token_slots)
        if self.requests.history is not None:
            batch.engram = self.requests.history.contexts(inputs.input_ids, batch, idx_mapping, inputs.num_reqs)
        return batch

    def prepare_dummy_inputs(self, rows: int, tokens: int) -> InputBatch:
        """A batch of rows of padding: it reads no request's memory and changes no state."""
        return InputBatch.empty(rows, tokens, self.memory.device)

    def prepare_attn(self, batch: Batch, inputs: InputBatch) -> None:
        """Fills `batch.attn`: block tables, slot mappings, then each kind's metadata by its builder."""
        if self.memory.kv:
            self._build(batch, *self._slots(batch, inputs))

    def _slots(self, batch: Batch, inputs: InputBatch) -> tuple[Tensor, Tensor]:
        """Block tables [kinds, B, C] and slot mappings [kinds, tokens] of a step."""
        kinds, rows, device = len(self.memory.kv), inputs.idx_mapping.shape[0], batch.positions.device
        state = self.requests
        tables = torch.empty(kinds, rows, state.kv_tables.shape[2], dtype=torch.int32, device=device)
        ops.gather_block_tables(tables, state.kv_tables, inputs.idx_mapping, inputs.num_reqs)
        mappings = torch.empty(kinds, batch.positions.shape[0], dtype=torch.int64, device=device)
        ops.compute_slot_mappings(mappings, tables, batch.query_start_loc, batch.positions, state.block_sizes,
                                  inputs.query_lens)
        return tables, mappings

    def _build(self, batch: Batch, tables: Tensor, mappings: Tensor,
               extra: Optional[ReplayAttnMetadata] = None) -> None:
        for group, (kind, builder) in enumerate(self.builders.items()):
            arguments = extra.extra_args(builder) if extra is not None else {}
            batch.attn[kind] = builder.build(batch, tables[group], mappings[group], **arguments)


class ReplayModelState(DefaultModelState):
    """Also replays the window before a prefix hit, and runs the model's tail on the last tokens of prompts alone.

    Encoder side: tokens before a hit are computed again, and written to no shared block. Decoder side: in the last
    `decoder_replay_layers` sublayers a prefilling row keeps its last tokens, as many as the attention window; with
    `exact` as many as give what all of them would, `window + (n - 1) (window - 1)` for n window layers. A row whose
    every output is read (prompt logprobs) keeps all, and so does a decoding row. Nothing of a step outlives it. Where
    ranks agree on a step, each drops tokens, or runs the tail on all it has as a sub-batch, if any rank drops some.

    groups: the scheduler's KV groups, in the order of `memory.kv`. tail_windows: n, sliding-window layers in the
    model's tail, 0: no decoder-side replay. By request: `replay_start` [max_reqs] int32, 0: no replay, and on the
    host `keeps_rows`.
    """

    def __init__(self, memory: ModelMemory, requests: "RequestState", groups: list["KVGroup"], tail_windows: int = 0,
                 exact: bool = False):
        super().__init__(memory, requests)
        self.replay_window = max((group.prefix_replay_tokens for group in groups), default=0)
        cacheable = [i for i, group in enumerate(groups) if group.prefix_cacheable]
        self.cacheable_groups = torch.tensor(cacheable, dtype=torch.int32, device=memory.device)
        self.replay_start = torch.zeros_like(requests.num_computed)
        self.keeps_rows = [False] * len(requests.num_computed)
        window = memory.attention_window
        self.tail_windows = tail_windows
        self.joins_prefills = tail_windows > 0
        self.kept_tokens = window + (tail_windows - 1) * (window - 1) if exact else window

    def initialize_kv_cache(self, memory: ModelMemory) -> None:
        super().initialize_kv_cache(memory)
        self.tail_builder = SlidingWindowBuilder(memory)  # of its own, for a builder may keep what it built

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        self.replay_start[request.index] = request.replay_start
        self.keeps_rows[request.index] = request.params.prompt_logprobs

    def remove_request(self, index: int) -> None:
        super().remove_request(index)
        self.replay_start[index] = 0
        self.keeps_rows[index] = False

    def replay_starts(self, inputs: InputBatch) -> Tensor:
        """replay_start by row, [B] int32: of prefilling rows alone. A decoding row is past its replay, and a row of
        padding must not see what a request left in the buffer."""
        replays = inputs.is_prefilling & (inputs.idx_mapping >= 0)
        return torch.where(replays, self.replay_start[inputs.idx_mapping.clamp(min=0).long()], 0)

    def kept_counts(self, rows: list[tuple[int, int, bool]]) -> list[int]:
        if not self.tail_windows:
            return super().kept_counts(rows)
        return [min(count, self.kept_tokens) if prefilling and not self.keeps_rows[index] else count
                for index, count, prefilling in rows]

    def prepare_attn(self, batch: Batch, inputs: InputBatch) -> None:
        """As the base class; prefilling rows get their replay and, if one drops tokens, the step gets `batch.tail`."""
        if inputs.is_prefilling is None or not self.memory.kv:
            super().prepare_attn(batch, inputs)
            return
        tables, mappings = self._slots(batch, inputs)
        starts = self.replay_starts(inputs)
        if self.replay_window:
            ops.pad_replayed_slots(mappings, self.cacheable_groups, batch.query_start_loc, batch.positions, starts,
                                   inputs.query_lens, window=self.replay_window)
        self._build(batch, tables, mappings, ReplayAttnMetadata(starts))
        kept, agreed = self.kept_counts(inputs.rows), inputs.agreed
        trims = agreed.trims if agreed is not None else kept != [count for _, count, _ in inputs.rows]
        if self.tail_windows and trims:
            batch.tail = self._tail(batch, inputs, kept, tables, mappings, starts)
            batch.tail.rank_tokens = agreed.kept_tokens if agreed is not None else None

    def _tail(self, batch: Batch, inputs: InputBatch, kept: list[int], tables, mappings, starts) -> TailBatch:
        """The sub-batch of the last `kept` tokens of each row, with metadata of its own."""
        (padded, tokens), device = inputs.input_ids.shape, batch.positions.device
        ends = list(itertools.accumulate(kept + [0] * (padded - len(kept)), initial=0))
        dropped = torch.tensor([row * tokens - end for row, end in enumerate(ends)], dtype=torch.int32, device=device)
        group = list(self.memory.kv).index("swa")
        rows, positions = torch.empty(2, ends[-1], dtype=torch.int64, device=device).unbind()
        slots = torch.empty(1, ends[-1], dtype=torch.int64, device=device)
        query_start_loc, lowest = torch.empty_like(batch.query_start_loc), torch.empty_like(starts)
        ops.gather_replay_rows(
            rows, query_start_loc, positions, slots, lowest, batch.query_start_loc, dropped, batch.seq_lens, starts,
            batch.positions, mappings[group : group + 1], inputs.query_lens, window=self.kept_tokens)
        tail = Batch(positions, batch.first, batch.seq_lens, query_start_loc, None, {}, {}, {})
        tail.attn["swa"] = self.tail_builder.build(tail, tables[group], slots[0], replay_start=lowest)
        return TailBatch(rows, tail)
