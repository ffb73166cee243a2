"""What a model needs around its forward: the memory of each request, and a step's positions, slots and metadata.

What a host does, in this order; `DefaultModelState` checks it:

    state.add_request(request)              # it got an index
    state.update_requests(requests)         # before each step: lengths, blocks, snapshots
    state.fill(inputs, rows, prefilling)    # one upload
    batch = state.prepare_inputs(inputs)    # traceable, from here on
    state.prepare_attn(batch, inputs)
    ...                                     # the forward, sampling, acceptance of drafts
    state.commit(batch, inputs, accepted)   # cursors, snapshots, counters
    state.remove_request(index)             # it ended, or was put back

Where the traced part runs compiled, or is replayed, Python does not see its commit: `state.committed(inputs)` says so
after each run. A step that failed is given up with `state.abandon_step()`, and may then be filled again.
"""

import itertools
from collections.abc import Sequence
from typing import Optional

import numpy as np
import torch
from torch import Tensor

from .. import ops
from .batch import Batch, TailBatch, rows_of_tokens
from .builders import ReplayAttnMetadata, make_builder
from .groups import INNER_EDGES, KVGroup, by_name
from .protocols import Memory, RequestLike
from .replay_context import ReplayContext
from .request_state import Changes, InputBatch, RequestState
from .token_history import HostPrefetch


class DefaultModelState:
    """Positions, state slots and attention metadata of a model without prefix replay.

    joins_prefills: whether a rank without prompts runs a prefill of padding while another rank has some.

    Raises ValueError, before anything is written, for a step that begins while the last one is not committed.
    """

    joins_prefills = False

    def __init__(self, memory: Memory, requests: RequestState):
        self.requests, self.memory = requests, None
        self._open: Optional[InputBatch] = None  # filled, and not committed
        self.no_prefill = torch.zeros(requests.size + 1, dtype=torch.bool, device=memory.device)
        self.initialize_kv_cache(memory)

    def initialize_kv_cache(self, memory: Memory) -> None:
        """Takes the pools to read and write. Builders are made anew, and if pools take the place of others, so are the
        block tables: they come again with `update_requests`."""
        groups = by_name(memory.groups)
        builders = {name: make_builder(group) for name, group in groups.items()}
        if self.memory is not None:
            self.requests.initialize_tables(memory)
        self.memory, self.groups, self.builders = memory, groups, builders

    @property
    def owners(self) -> list:
        """All that holds tensors which steps read or write in place; see `graphs.compiled.mark_static`."""
        history = [] if self.requests.history is None else [self.requests.history]
        return [self, self.requests, self.memory, *self.memory.states.values(), *history]

    def add_request(self, request: RequestLike, begun: bool = False) -> None:
        """A request got `request.index`: overwrites whatever the last one left there. May be called again where it was
        interrupted.

        Its recurrent state starts with its first step, from the snapshot `request.source` or from nothing, unless
        `begun`: then its slots hold it already (computed elsewhere, see `ReplayContext.import_slot`). Of a request with
        tokens computed before, `request.token_ids` are asked for if there are n-gram layers.
        """
        state, index, params = self.requests, request.index, request.params
        if not 0 <= index < state.size:
            raise ValueError(f"add_request: index is {index}, expected 0 to {state.size - 1}")
        state.temperature[index], state.top_p[index] = params.temperature, params.top_p
        state.top_k[index], state.seeds[index] = params.top_k, params.seed
        state.host.admit(index)
        state.host.fresh.pop(index, None)
        if not begun:
            state.host.fresh[index] = request.source
        if state.device_counters:
            state.num_computed[index] = request.num_computed
        if state.history is not None and request.num_computed:
            state.history.admit(index, request.token_ids[: request.num_computed])

    def remove_request(self, index: int) -> None:
        """The request at `index` has ended or was put back."""

    def update_requests(self, requests: list[RequestLike]) -> None:
        """Notes what a step will read of its requests: lengths, block tables, and which slots their states go through.

        Host work alone: the step's own input batch brings it to the device.
        """
        for request in requests:
            self.requests.host.update(request)
            if self.memory.num_snapshots:
                self.requests.host.snapshots[request.index] = self._snapshots_of(request)

    def _snapshots_of(self, request: RequestLike) -> dict[int, int]:
        """Snapshots by edge, of which the step may read the source and publish the others."""
        source = {request.num_computed: request.source} if request.source else {}
        return {**request.snapshots, **source}

    def decode_inputs(self, rows: int, tokens: int) -> InputBatch:
        """Persistent inputs of decode steps of that shape. A step's tokens may need a few blocks more than the last
        step's, and may cross an edge or several where a state is published."""
        edges = -(-tokens // self._edge_step) if self._publishing else 0
        smallest = min((group.block_size for group in self.groups.values()), default=1)
        counters = not self.requests.device_counters
        if edges and not counters:  # the host does not know at which of them a row stands
            edges = max(states.live_col for states in self._publishing)
        return InputBatch.empty(rows, tokens, self.memory.device, Changes(
            len(self.groups), tokens // smallest + 2, edges, slots=self._slots_each, counters=counters))

    def prefill_inputs(self, rows: int, tokens: int, inner: Optional[int] = None) -> InputBatch:
        """Inputs of prompt chunks: they bring all that the device is to know of their requests.

        inner: snapshots that a row publishes inside its chunk at most, None: as many as the scheduler ever asks for.
        """
        history = self.requests.history
        if inner is None:
            inner = INNER_EDGES if self._publishing else 0
        changes = Changes(len(self.groups), self.requests.kv_tables.shape[2],
                          max((states.live_col for states in self._publishing), default=0), True,
                          history.lookback_depth if history is not None else 0, inner, self._slots_each,
                          not self.requests.device_counters)
        return InputBatch.empty(rows, tokens, self.memory.device, changes)

    def ragged_inputs(self, rows: int, tokens: int) -> InputBatch:
        """Persistent inputs of steps that mix prompt chunks, decodes and drafts of any lengths, `tokens` in all, packed
        one row after the other. They publish at a row's last edge alone."""
        if isinstance(self.requests.history, HostPrefetch):
            raise ValueError("ragged_inputs: the n-gram table is read by the host, expected one that the device reads")
        inputs = self.prefill_inputs(rows, 1, inner=0)
        return InputBatch.empty(rows, tokens, self.memory.device, inputs.changes, ragged=True)

    def inner_edges(self, rows: list[tuple[int, list[int]]]) -> list[dict[int, int]]:
        """For rows of (request index, token ids), the snapshots that each publishes inside its chunk, by the number of
        its tokens before them."""
        host, found = self.requests.host, []
        for request, tokens in rows:
            first = int(host.num_computed[request])
            found.append({edge - first: snapshot for edge, snapshot in host.snapshots[request].items()
                          if first < edge < first + len(tokens)})
        return found

    @property
    def _publishing(self) -> list[ReplayContext]:
        return [states for states in self.memory.states.values()
                if isinstance(states, ReplayContext) and states.mode == "align"]

    @property
    def _edge_step(self) -> int:
        """Tokens between two edges at which a state may be published; one for all contexts."""
        return self._publishing[0].block_size

    @property
    def _slots_each(self) -> int:
        """Slots that a snapshot has: one for each group of each context."""
        return sum(len(states.groups) for states in self._publishing)

    def fill(self, inputs: InputBatch, rows: list[tuple[int, list[int]]], prefilling: Optional[list[bool]] = None,
             before: Optional[list[list[int]]] = None) -> None:
        """Fills a batch with `rows` of (request index, token ids) and what has changed of their requests, and sends it.

        before: for prompt chunks of a model with n-grams, all tokens of each row's request before its first; None: no
        tokens. Raises ValueError, having written nothing: see `InputBatch.check`; a step that is not committed.
        """
        history, changes = self.requests.history, inputs.changes
        if self._open is not None:
            raise ValueError(f"fill: the step of requests {self._open.started} was not committed, expected commit (or "
                             "committed, of a compiled step) before the next")
        inputs.check(rows, prefilling)
        for index, _ in rows:
            if index >= self.requests.size:
                raise ValueError(f"fill: request index is {index}, expected at most {self.requests.size - 1}")
        if not changes.whole:
            self._begin_now([index for index, _ in rows if index in self.requests.host.fresh])
        if changes.whole and before is None:
            before = [[] for _ in rows]
        def more(arrays, index):
            self._fill_changes(changes, arrays, index, before)
            if changes.inner:
                arrays["inner_ends"].fill(0)
                arrays["inner_slots"].fill(0)
                for row, edges in enumerate(self.inner_edges(rows)):
                    arrays["inner_ends"][row, : len(edges)] = list(edges)
                    for place, snapshot in enumerate(edges.values()):
                        arrays["inner_slots"][row, place] = self.memory.snapshot_slots(snapshot)

        inputs.fill(rows, prefilling, more)
        if self.requests.device_counters or self.memory.states:
            self._open = inputs
        if history is not None:
            places = inputs.upload.places
            history.prefetch(rows, self.requests.host.num_computed, before if changes.whole else None,
                             places["rows"][1][0], places["input_ids"][1][-1])

    def _fill_changes(self, changes: Changes, arrays: dict[str, np.ndarray], index: np.ndarray, before) -> None:
        host, count = self.requests.host, len(index)
        if changes.counters:
            arrays["num_computed"][:count] = host.num_computed[index]
        if changes.groups:
            self._fill_tables(changes, arrays, index)
        if changes.edges:
            self._fill_snapshots(changes, arrays, index)
        if changes.whole:
            arrays["src_cols"].fill(-1)
            arrays["begins"].fill(0)
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
        everything = changes.whole or not changes.counters
        first = 0 if everything else host.num_computed[index, None] // states.block_size
        wanted = np.broadcast_to(first + np.arange(changes.edges), (len(index), changes.edges))
        beyond = wanted >= states.live_col
        cols[: len(index)] = np.where(beyond, states.live_col, wanted)
        slots[: len(index)] = np.where(beyond, -1, 0)[..., None]
        for row, request in enumerate(index.tolist()):
            for edge, snapshot in host.snapshots[request].items():
                slots[row][cols[row] == edge // states.block_size - 1] = self.memory.snapshot_slots(snapshot)

    def _begin_now(self, indices: list[int]) -> None:
        """States that start with a decode step, which brings no moves along: eagerly, before it. Rare."""
        host, device = self.requests.host, self.memory.device
        for index in indices:
            for family, states in self.memory.states.items():
                if isinstance(states, ReplayContext):
                    table = states.request_tables[:, index : index + 1]
                    source = host.fresh[index]
                    src = host.num_computed[index] // states.block_size - 1 if source and states.mode == "align" else -1
                    if source:
                        self._write_source(states, family, index, int(src), source)
                    states.block_tables[:, :1].copy_(table)
                    states.reset_new_slots(*(torch.tensor([col], dtype=torch.int32, device=device)
                                             for col in (src, states.live_col)))
                else:
                    states.state[:, states.own_slots[index, 0]] = 0
            del host.fresh[index]

    def _write_source(self, states: ReplayContext, family: str, index: int, col: int, snapshot: int) -> None:
        """A snapshot's slots enter the request's tables of one context."""
        first = 0
        for each in self._publishing:
            if each is states:
                slots = self.memory.snapshot_slots(snapshot)[first : first + len(states.groups)]
                states.request_tables[:, index, col] = torch.tensor(slots, dtype=torch.int32)
            first += len(each.groups)

    def _fill_move(self, arrays: dict[str, np.ndarray], row: int, request: int) -> None:
        """A state that starts with this step: copied from a snapshot into the live column, or zeroed there."""
        source = self.requests.host.fresh[request]
        arrays["begins"][row] = 1
        if source:
            arrays["src_cols"][row] = self.requests.host.num_computed[request] // self._edge_step - 1

    def kept_counts(self, rows: list[tuple[int, int, bool]]) -> list[int]:
        """How many last tokens of each of `InputBatch.rows` the model's tail runs on: all."""
        return [count for _, count, _ in rows]

    def apply_changes(self, inputs: InputBatch) -> None:
        """Writes what the batch brings along to the per-request buffers. Traceable."""
        changes, requests = inputs.changes, self.requests
        idx_mapping, device = inputs.idx_mapping, inputs.idx_mapping.device
        req = torch.where(idx_mapping >= 0, idx_mapping, requests.size).long()
        if changes.counters:
            requests.num_computed.index_put_((req,), inputs.view("num_computed"))
        if changes.groups:
            groups, first = torch.arange(changes.groups, device=device)[:, None], inputs.view("first_cols")
            rows = torch.where(first >= 0, req[:, None], requests.size)[..., None]
            cols = first.clamp(min=0)[..., None] + torch.arange(changes.blocks, device=device)
            cols = cols.clamp(max=requests.kv_tables.shape[2] - 1)
            requests.kv_tables.index_put_((groups, rows, cols), inputs.view("blocks"))
        first = 0
        for states in self._publishing if changes.edges else ():
            count = len(states.groups)
            groups = torch.arange(count, device=device)[:, None, None]
            rows = torch.where(idx_mapping >= 0, idx_mapping, 0).long()[:, None]
            slots = inputs.view("snapshot_slots")[..., first : first + count].permute(2, 0, 1)
            at, first = (groups, rows, inputs.view("snapshot_cols").long()), first + count
            states.request_tables.index_put_(at, torch.where(slots >= 0, slots, states.request_tables[at]))
        if changes.lookback:
            requests.history.write_lookback(req, inputs.view("num_computed"), inputs.view("lookback"))

    def prepare_inputs(self, inputs: InputBatch) -> Batch:
        """Positions, lengths, state slots and n-gram entries of a step. Traceable.

        Writes the per-request buffers that the batch brings changes for, the contexts' `block_tables`, the slots of
        states that start with this step, and the token history.
        """
        memory, idx_mapping, query_lens = self.memory, inputs.idx_mapping, inputs.query_lens
        if inputs.changes is not None:
            self.apply_changes(inputs)
        input_ids, query_start_loc = inputs.input_ids, inputs.query_start_loc
        rows, tokens, device = idx_mapping.shape[0], input_ids.shape[-1], idx_mapping.device
        req = idx_mapping.clamp(min=0).long()
        known = self.requests.last_token[req]
        if inputs.ragged:
            known = known[rows_of_tokens(input_ids, query_start_loc, query_lens)[0]]
        else:
            known = known[:, None]
        input_ids = torch.where(input_ids < 0, known, input_ids)
        positions = inputs.allocate("positions", (input_ids.numel(),), torch.int64, device)
        seq_lens = inputs.allocate("seq_lens", (rows,), torch.int32, device)
        ops.prepare_positions(positions, seq_lens, idx_mapping, query_start_loc, self.requests.num_computed, query_lens)
        if inputs.pads:
            seq_lens.copy_(torch.where(query_lens > 0, seq_lens, inputs.padding_len))
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
        most = self.requests.max_model_len if inputs.max_seq_len is None else inputs.max_seq_len
        if inputs.ragged:
            first = torch.where(idx_mapping >= 0, self.requests.num_computed[req], 0).long()
        else:
            first = positions.view(rows, tokens)[:, 0]
        batch = Batch(input_ids, positions, first, seq_lens, query_start_loc, query_lens, conv_slots, state_slots,
                      token_slots, windows, most, tokens, inputs.is_prefilling, allocate=inputs.allocate)
        if inputs.changes is not None and inputs.changes.whole:
            row, begins = torch.arange(rows, device=device), inputs.view("begins") > 0
            for states in memory.states.values():
                # a prompt without snapshots starts at position 0, which its chunk sees
                if isinstance(states, ReplayContext) and (states.mode == "align" or inputs.ragged):
                    src = inputs.view("src_cols") if states.mode == "align" else torch.full_like(row, -1)
                    states.reset_new_slots(src, torch.where(begins, states.live_col, -1), row)
        if inputs.changes is not None and inputs.changes.inner:
            batch.edges, batch.edge_slots, first = inputs.view("inner_ends"), {}, 0
            for family, states in memory.states.items():
                if states in self._publishing:
                    batch.edge_slots[family] = inputs.view("inner_slots")[..., first : first + len(states.groups)]
                    batch.edge_slots[family] = batch.edge_slots[family].permute(2, 0, 1)
                    first += len(states.groups)
        if self.requests.history is not None:
            batch.engram = self.requests.history.contexts(input_ids, batch, idx_mapping, inputs.num_reqs)
        return batch

    def commit(self, batch: Batch, inputs: InputBatch, accepted: Tensor) -> None:
        """Moves cursors (or, without replay, current slots) by the accepted tokens of each row, publishes snapshots,
        and with `device_counters` advances `num_computed`. Traceable; outside of a traced function it ends the step.

        accepted: [B] int32, of a decoding row; a prefilling row keeps all of its tokens.
        """
        prefilling = inputs.is_prefilling
        if prefilling is None:
            prefilling = self.no_prefill[: len(accepted)]
        for states in self.memory.states.values():
            if isinstance(states, ReplayContext):
                # of this very step: what is kept beside a parameter would be stale once the parameter changes
                decays = states.family == "mamba2" and states.mode == "align"
                # lengths and acceptance are known by row: the row stands for its request; all live columns are alike
                states.postprocess(batch.first, accepted, prefilling, query_lens=batch.query_lens,
                                   live_cols=states.live_cols[: len(accepted)], idx_mapping=inputs.by_row,
                                   window=batch.windows[states.family],
                                   A=torch.stack(batch.decay_rates) if decays else None)
            else:
                # a prefill leaves its state in the current slot
                states.accept(inputs.idx_mapping, torch.where(prefilling, 0, accepted))
        if self.requests.device_counters:
            kept = torch.where(prefilling, batch.query_lens, torch.minimum(accepted.clamp(min=0), batch.query_lens))
            req = torch.where(inputs.idx_mapping >= 0, inputs.idx_mapping, self.requests.size).long()
            self.requests.num_computed.index_add_(0, req, kept.int())
        if not torch.compiler.is_compiling():
            self.committed(inputs)

    def committed(self, inputs: InputBatch) -> None:
        """The step of `inputs` ran, its commit included: states of its requests have begun."""
        for index in inputs.started:
            self.requests.host.fresh.pop(index, None)
        self._open = None

    def abandon_step(self) -> None:
        """The last step that was filled did not run, or failed: another may be filled."""
        self._open = None

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
        """Fills `batch.attn`: block tables, slot mappings, then each group's metadata by its builder."""
        if self.groups:
            self._build(batch, *self._slots(batch, inputs))

    def _slots(self, batch: Batch, inputs: InputBatch) -> tuple[Tensor, Tensor]:
        """Block tables [groups, B, C] and slot mappings [groups, tokens] of a step."""
        groups, rows, device = len(self.groups), inputs.idx_mapping.shape[0], batch.positions.device
        state = self.requests
        tables = inputs.allocate("tables", (groups, rows, state.kv_tables.shape[2]), torch.int32, device)
        ops.gather_block_tables(tables, state.kv_tables, inputs.idx_mapping, inputs.num_reqs)
        mappings = inputs.allocate("mappings", (groups, batch.positions.shape[0]), torch.int64, device)
        ops.compute_slot_mappings(mappings, tables, batch.query_start_loc, batch.positions, state.block_sizes,
                                  inputs.query_lens)
        return tables, mappings

    def _build(self, batch: Batch, tables: Tensor, mappings: Tensor,
               extra: Optional[ReplayAttnMetadata] = None) -> None:
        for group, (name, builder) in enumerate(self.builders.items()):
            arguments = extra.extra_args(builder) if extra is not None else {}
            batch.attn[name] = builder.build(batch, tables[group], mappings[group], **arguments)


class ReplayModelState(DefaultModelState):
    """Also replays the window before a prefix hit, and runs the model's tail on the last tokens of prompts alone.

    Encoder side: tokens before a hit are computed again, and written to no shared block. Decoder side: in the last
    `decoder_replay_layers` sublayers a prefilling row keeps its last tokens, as many as the attention window; with
    `exact` as many as give what all of them would, `window + (n - 1) (window - 1)` for n window layers. A row whose
    every output is read (prompt logprobs) keeps all, and so does a decoding row. Nothing of a step outlives it. Where
    ranks agree on a step, each drops tokens, or runs the tail on all it has as a sub-batch, if any rank drops some.

    groups: KV groups, None: the memory's; if given, those of the same names and windows, in any order. tail_windows: n,
    sliding-window layers in the model's tail, 0: no decoder-side replay; the tail's metadata has every group with a
    window. By request: `replay_start` [max_reqs] int32, 0: no replay, and on the host `keeps_rows`.

    Raises ValueError for groups that are not the memory's; a tail without a group that has a window.
    """

    def __init__(self, memory: Memory, requests: RequestState, groups: Optional[Sequence[KVGroup]] = None,
                 tail_windows: int = 0, exact: bool = False):
        self.tail_windows, self.exact = tail_windows, exact
        if groups is not None:
            given, own = ({name: group.sliding_window for name, group in by_name(each).items()}
                          for each in (groups, memory.groups))
            if given != own:
                raise ValueError(f"groups has windows {given}, expected those of the memory's groups, {own}")
        super().__init__(memory, requests)
        self.replay_start = torch.zeros(requests.size, dtype=torch.int32, device=memory.device)
        self.keeps_rows = [False] * requests.size
        self.joins_prefills = tail_windows > 0

    def initialize_kv_cache(self, memory: Memory) -> None:
        windows = [group for group in memory.groups if group.sliding_window is not None]
        if self.tail_windows and not windows:
            raise ValueError(f"tail_windows is {self.tail_windows}, expected 0, for no group has a sliding window")
        super().initialize_kv_cache(memory)
        groups = list(self.groups.values())
        self.replay_window = max((group.prefix_replay_tokens for group in groups), default=0)
        cacheable = [place for place, group in enumerate(groups) if group.prefix_cacheable]
        self.cacheable_groups = torch.tensor(cacheable, dtype=torch.int32, device=memory.device)
        window = max((group.sliding_window for group in windows), default=0)
        self.kept_tokens = window + (self.tail_windows - 1) * (window - 1) if self.exact else window
        # of its own, for a builder may keep what it built
        self.tail_builders = {group.name: make_builder(group) for group in windows} if self.tail_windows else {}

    def add_request(self, request: RequestLike) -> None:
        super().add_request(request)
        self.replay_start[request.index] = request.replay_start
        wanted = request.params.prompt_logprobs
        self.keeps_rows[request.index] = wanted is not None and wanted is not False  # 0 alternatives are some

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
        if inputs.is_prefilling is None or not self.groups:
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
        groups = [place for place, name in enumerate(self.groups) if name in self.tail_builders]
        rows, positions = torch.empty(2, ends[-1], dtype=torch.int64, device=device).unbind()
        slots = torch.empty(len(groups), ends[-1], dtype=torch.int64, device=device)
        query_start_loc, lowest = torch.empty_like(batch.query_start_loc), torch.empty_like(starts)
        ops.gather_replay_rows(
            rows, query_start_loc, positions, slots, lowest, batch.query_start_loc, dropped, batch.seq_lens, starts,
            batch.positions, mappings[groups], inputs.query_lens, window=self.kept_tokens)
        input_ids = batch.input_ids.flatten()[rows]
        tail = Batch(input_ids, positions, batch.first, batch.seq_lens, query_start_loc, None, {}, {}, {})
        tail.max_seq_len, tail.max_query_len = batch.max_seq_len, max(kept, default=0)
        for own, (group, (name, builder)) in zip(slots, zip(groups, self.tail_builders.items(), strict=True)):
            extra = ReplayAttnMetadata(lowest).extra_args(builder)
            tail.attn[name] = builder.build(tail, tables[group], own, **extra)
        return TailBatch(rows, tail)
