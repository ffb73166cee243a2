"""What a model needs around its forward: the memory of each request, and a step's positions, slots and metadata.

An engine calls, in turn, `add_request` for a request that gets an index, `update_requests` before each step,
`prepare_inputs` and `prepare_attn` within it, and `remove_request` when the index is taken back. Everything that the
last two read is on the device, so that they trace into the compiled step.
"""

import itertools
from typing import TYPE_CHECKING, Optional

import numpy as np
import torch
from torch import Tensor

from .. import ops
from .batch import Batch, TailBatch
from .builders import BUILDERS, ReplayAttnMetadata, SlidingWindowBuilder
from .groups import INNER_EDGES, KVGroup
from .replay_context import ReplayContext
from .request_state import Changes, InputBatch, RequestState

if TYPE_CHECKING:
    from ..engine.request import Request
    from ..models.memory import ModelMemory


class DefaultModelState:
    """Positions, state slots and attention metadata of a model without prefix replay.

    joins_prefills: whether a rank without prompts runs a prefill of padding while another rank has some.
    """

    joins_prefills = False

    def __init__(self, memory: "ModelMemory", requests: RequestState):
        self.requests = requests
        self.initialize_kv_cache(memory)

    def initialize_kv_cache(self, memory: "ModelMemory") -> None:
        """Takes the pools to read and write; builders are made anew."""
        self.memory = memory
        self.builders = {name: BUILDERS[memory.kv_kinds[name]](memory, name) for name in memory.kv}

    @property
    def owners(self) -> list:
        """All that holds tensors which steps read or write in place; see `graphs.compiled.mark_static`."""
        history = [] if self.requests.history is None else [self.requests.history]
        return [self, self.requests, self.memory, *self.memory.states.values(), *history]

    def add_request(self, request: "Request") -> None:
        """A request got `request.index`: overwrites whatever the last one left there. Its state starts with its next
        step, from a snapshot or from nothing. May be called again where it was interrupted."""
        state, index, params = self.requests, request.index, request.params
        state.temperature[index], state.top_p[index] = params.temperature, params.top_p
        state.top_k[index], state.seeds[index] = params.top_k, params.seed
        state.host.admit(index)
        state.host.fresh[index] = request.source

    def remove_request(self, index: int) -> None:
        """The request at `index` has ended or was put back."""

    def update_requests(self, requests: list["Request"]) -> None:
        """Notes what a step will read of its requests: lengths, block tables, and which slots their states go through.

        Host work alone: the step's own input batch brings it to the device.
        """
        host, kinds = self.requests.host, list(self.memory.kv)
        for request in requests:
            host.update(request, kinds)
            if self.memory.config.num_snapshots:
                host.snapshots[request.index] = self._snapshot_slots(request)

    def _snapshot_slots(self, request: "Request") -> dict[int, int]:
        slots = {edge: self.memory.snapshot_slot(snapshot) for edge, snapshot in request.snapshots.items()}
        if request.source:
            slots[request.num_computed] = self.memory.snapshot_slot(request.source)
        return slots

    def decode_inputs(self, rows: int, tokens: int) -> InputBatch:
        """Persistent inputs of decode steps of that shape. A step's tokens may need a few blocks more than the last
        step's, and may cross an edge or several where a state is published."""
        config = self.memory.config
        edges = -(-tokens // config.state_block_size) if self._publishing else 0
        return InputBatch.empty(rows, tokens, self.memory.device,
                                Changes(len(self.memory.kv), tokens // config.block_size + 2, edges))

    def prefill_inputs(self, rows: int, tokens: int, inner: Optional[int] = None) -> InputBatch:
        """Inputs of prompt chunks: they bring all that the device is to know of their requests.

        inner: snapshots that a row publishes inside its chunk at most, None: as many as the scheduler ever asks for.
        """
        history = self.requests.history
        if inner is None:
            inner = INNER_EDGES if self._publishing else 0
        changes = Changes(len(self.memory.kv), self.requests.kv_tables.shape[2],
                          max((states.live_col for states in self._publishing), default=0), True,
                          history.lookback_depth if history is not None else 0, inner)
        return InputBatch.empty(rows, tokens, self.memory.device, changes)

    def inner_edges(self, rows: list[tuple[int, list[int]]]) -> list[dict[int, int]]:
        """For rows of (request index, token ids), slots of the snapshots that each publishes inside its chunk, by the
        number of its tokens before them."""
        host, found = self.requests.host, []
        for request, tokens in rows:
            first = int(host.num_computed[request])
            found.append({edge - first: slot for edge, slot in host.snapshots[request].items()
                          if first < edge < first + len(tokens)})
        return found

    @property
    def _publishing(self) -> list[ReplayContext]:
        return [states for states in self.memory.states.values()
                if isinstance(states, ReplayContext) and states.mode == "align"]

    def fill(self, inputs: InputBatch, rows: list[tuple[int, list[int]]], prefilling: Optional[list[bool]] = None,
             before: Optional[list[list[int]]] = None) -> None:
        """Fills a batch with `rows` of (request index, token ids) and what has changed of their requests, and sends it.

        before: for prompt chunks of a model with n-grams, all tokens of each row's request before its first; None: no
        tokens.
        """
        history, changes = self.requests.history, inputs.changes
        if changes.whole and before is None:
            before = [[] for _ in rows]
        def more(arrays, index):
            self._fill_changes(changes, arrays, index, before)
            if changes.inner:
                arrays["inner_ends"].fill(0)
                arrays["inner_slots"].fill(0)
                for row, edges in enumerate(self.inner_edges(rows)):
                    arrays["inner_ends"][row, : len(edges)] = list(edges)
                    arrays["inner_slots"][row, : len(edges)] = list(edges.values())

        inputs.fill(rows, prefilling, more)
        if history is not None:
            history.prefetch(rows, self.requests.host.num_computed, before if changes.whole else None,
                             *inputs.upload.places["input_ids"][1])

    def _fill_changes(self, changes: Changes, arrays: dict[str, np.ndarray], index: np.ndarray, before) -> None:
        host, count = self.requests.host, len(index)
        arrays["num_computed"][:count] = host.num_computed[index]
        if changes.groups:
            self._fill_tables(changes, arrays, index)
        if changes.edges:
            self._fill_snapshots(changes, arrays, index)
        if changes.whole:
            arrays["src_cols"].fill(-1)
            arrays["dst_cols"].fill(-1)
            for row, request in enumerate(index.tolist()):
                if request in host.fresh:
                    self._fill_move(arrays, row, request)
        if changes.lookback:
            arrays["lookback"].fill(-1)
            for row, tokens in enumerate(before):
                newest = tokens[: -changes.lookback - 1 : -1]
                arrays["lookback"][row, : len(newest)] = newest

    def _fill_tables(self, changes: Changes, arrays: dict[str, np.ndarray], index: np.ndarray) -> None:
        """Columns that the tables gained, mostly none."""
        host, last = self.requests.host, self.requests.host.tables.shape[2] - 1
        arrays["first_cols"].fill(-1)
        if not (host.grown or changes.whole):
            return
        sent, filled = host.sent[:, index], host.filled[:, index]
        gained = np.ones_like(sent, bool) if changes.whole else filled > sent
        first = np.zeros_like(sent) if changes.whole else sent
        for request in index[(filled - first > changes.blocks).any(0)]:  # the prompt was computed elsewhere
            self.requests.kv_tables[:, request].copy_(torch.from_numpy(host.tables[:, request]))
        group, row = gained.nonzero()
        begin = first[group, row]
        cols = np.minimum(begin[:, None] + np.arange(changes.blocks), last)
        arrays["first_cols"][row, group] = begin
        arrays["blocks"][row, group] = host.tables[group[:, None], index[row][:, None], cols]
        host.sent[:, index] = filled
        host.grown = bool((host.filled > host.sent).any())

    def _fill_snapshots(self, changes: Changes, arrays: dict[str, np.ndarray], index: np.ndarray) -> None:
        """Snapshot columns that the step may read or publish, null where there is no snapshot. Beyond a table's end,
        and in rows of padding, -1: the live column of some request stays what it is."""
        host, states = self.requests.host, self._publishing[0]
        cols, slots = arrays["snapshot_cols"], arrays["snapshot_slots"]
        cols[len(index) :], slots[len(index) :] = states.live_col, -1
        first = 0 if changes.whole else host.num_computed[index, None] // states.block_size
        wanted = np.broadcast_to(first + np.arange(changes.edges), (len(index), changes.edges))
        beyond = wanted >= states.live_col
        cols[: len(index)] = np.where(beyond, states.live_col, wanted)
        slots[: len(index)] = np.where(beyond, -1, 0)
        for row, request in enumerate(index.tolist()):
            for edge, slot in host.snapshots[request].items():
                slots[row][cols[row] == edge // states.block_size - 1] = slot

    def _fill_move(self, arrays: dict[str, np.ndarray], row: int, request: int) -> None:
        """A state that starts with this step: copied from a snapshot into the live column, or zeroed there."""
        source = self.requests.host.fresh[request]
        for states in self._publishing:
            arrays["dst_cols"][row] = states.live_col
            if source:
                arrays["src_cols"][row] = self.requests.host.num_computed[request] // states.block_size - 1

    def kept_counts(self, rows: list[tuple[int, int, bool]]) -> list[int]:
        """How many last tokens of each of `InputBatch.rows` the model's tail runs on: all."""
        return [count for _, count, _ in rows]

    def apply_changes(self, inputs: InputBatch) -> None:
        """Writes what the batch brings along to the per-request buffers. Traceable."""
        changes, requests = inputs.changes, self.requests
        idx_mapping, device = inputs.idx_mapping, inputs.idx_mapping.device
        req = torch.where(idx_mapping >= 0, idx_mapping, requests.size).long()
        requests.num_computed.index_put_((req,), inputs.view("num_computed"))
        if changes.groups:
            groups, first = torch.arange(changes.groups, device=device)[:, None], inputs.view("first_cols")
            rows = torch.where(first >= 0, req[:, None], requests.size)[..., None]
            cols = first.clamp(min=0)[..., None] + torch.arange(changes.blocks, device=device)
            cols = cols.clamp(max=requests.kv_tables.shape[2] - 1)
            requests.kv_tables.index_put_((groups, rows, cols), inputs.view("blocks"))
        for states in self._publishing if changes.edges else ():
            groups = torch.arange(len(states.groups), device=device)[:, None, None]
            rows = torch.where(idx_mapping >= 0, idx_mapping, 0).long()[:, None]
            at, slots = (groups, rows, inputs.view("snapshot_cols").long()), inputs.view("snapshot_slots")
            states.request_tables.index_put_(at, torch.where(slots >= 0, slots, states.request_tables[at]))
        if changes.lookback:
            requests.history.write_lookback(req, inputs.view("num_computed"), inputs.view("lookback"))

    def prepare_inputs(self, inputs: InputBatch) -> Batch:
        """Positions, lengths, state slots and n-gram entries of a step in the uniform layout.

        Writes the per-request buffers that the batch brings changes for, the contexts' `block_tables`, and the token
        history.
        """
        memory, idx_mapping, query_lens = self.memory, inputs.idx_mapping, inputs.query_lens
        if inputs.changes is not None:
            self.apply_changes(inputs)
        input_ids = inputs.input_ids
        (rows, tokens), device = input_ids.shape, idx_mapping.device
        known = self.requests.last_token[idx_mapping.clamp(min=0).long()]
        input_ids = torch.where(input_ids < 0, known[:, None], input_ids)
        query_start_loc = inputs.query_start_loc
        positions = inputs.allocate("positions", (rows * tokens,), torch.int64, device)
        seq_lens = inputs.allocate("seq_lens", (rows,), torch.int32, device)
        ops.prepare_positions(positions, seq_lens, idx_mapping, query_start_loc, self.requests.num_computed, query_lens)
        state_slots, conv_slots, token_slots, windows = {}, {}, {}, {}
        for family, states in memory.states.items():
            if isinstance(states, ReplayContext):
                table = states.block_tables[:, :rows]
                ops.gather_block_tables(table, states.request_tables, idx_mapping, inputs.num_reqs)
                state_slots[family] = conv_slots[family] = table[:, :, states.live_col]
                token_slots[family] = None
                # prefill leaves no tokens in the ring, and its sizes are symbols, which no dict knows
                windows[family] = states.window_of(rows, tokens) if inputs.is_prefilling is None else states.window
            else:
                by_token = tokens if inputs.is_prefilling is None else None
                slots, token_slots[family] = states.step_slots(idx_mapping, by_token)
                state_slots[family] = slots[None]
                conv_slots[family] = torch.where(idx_mapping >= 0, idx_mapping + 1, 0)[None]
        batch = Batch(input_ids, positions, positions.view(rows, tokens)[:, 0], seq_lens, query_start_loc, query_lens,
                      conv_slots, state_slots, token_slots, windows, allocate=inputs.allocate)
        if inputs.changes is not None and inputs.changes.inner:
            batch.edges, batch.edge_slots = inputs.view("inner_ends"), inputs.view("inner_slots")
        if self.requests.history is not None:
            batch.engram = self.requests.history.contexts(input_ids, batch, idx_mapping, inputs.num_reqs)
        return batch

    @property
    def lookback(self) -> Optional[Tensor]:
        """[max rows + 1, depth] int32: the ids before each row's first token in the last step, newest first, -1 for
        none and in all that no step has written. None for a model without n-grams on the device."""
        return getattr(self.requests.history, "lookback", None)

    def prepare_dummy_inputs(self, rows: int, tokens: int) -> InputBatch:
        """A batch of rows of padding: it reads no request's memory and changes no state. Clears the lookback."""
        if self.lookback is not None:
            self.lookback.fill_(-1)
        return InputBatch.empty(rows, tokens, self.memory.device)

    def prepare_attn(self, batch: Batch, inputs: InputBatch) -> None:
        """Fills `batch.attn`: block tables, slot mappings, then each kind's metadata by its builder."""
        if self.memory.kv:
            self._build(batch, *self._slots(batch, inputs))

    def _slots(self, batch: Batch, inputs: InputBatch) -> tuple[Tensor, Tensor]:
        """Block tables [kinds, B, C] and slot mappings [kinds, tokens] of a step."""
        kinds, rows, device = len(self.memory.kv), inputs.idx_mapping.shape[0], batch.positions.device
        state = self.requests
        tables = inputs.allocate("tables", (kinds, rows, state.kv_tables.shape[2]), torch.int32, device)
        ops.gather_block_tables(tables, state.kv_tables, inputs.idx_mapping, inputs.num_reqs)
        mappings = inputs.allocate("mappings", (kinds, batch.positions.shape[0]), torch.int64, device)
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

    def __init__(self, memory: "ModelMemory", requests: RequestState, groups: list[KVGroup], tail_windows: int = 0,
                 exact: bool = False):
        super().__init__(memory, requests)
        self.replay_window = max((group.prefix_replay_tokens for group in groups), default=0)
        cacheable = [i for i, group in enumerate(groups) if group.prefix_cacheable]
        self.cacheable_groups = torch.tensor(cacheable, dtype=torch.int32, device=memory.device)
        self.replay_start = torch.zeros(requests.size, dtype=torch.int32, device=memory.device)
        self.keeps_rows = [False] * requests.size
        window = memory.attention_window
        self.tail_windows = tail_windows
        self.joins_prefills = tail_windows > 0
        self.kept_tokens = window + (tail_windows - 1) * (window - 1) if exact else window

    def initialize_kv_cache(self, memory: "ModelMemory") -> None:
        super().initialize_kv_cache(memory)
        self.tail_builder = SlidingWindowBuilder(memory)  # of its own, for a builder may keep what it built

    def add_request(self, request: "Request") -> None:
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
        input_ids = batch.input_ids.flatten()[rows]
        tail = Batch(input_ids, positions, batch.first, batch.seq_lens, query_start_loc, None, {}, {}, {})
        tail.attn["swa"] = self.tail_builder.build(tail, tables[group], slots[0], replay_start=lowest)
        return TailBatch(rows, tail)
