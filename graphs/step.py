"""The steps of serving: a uniform decode step as one compiled graph, and the prefill of prompt chunks.

A decode step runs from token ids to committed cursors: block tables, positions, slot mappings and window indices, the
forward, sampling, acceptance of drafts, commit. Everything that changes from step to step is a tensor, so one graph
serves every step; the Python around it only schedules.
"""

import itertools
import types
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from ..memory import ModelMemory
from ..models import HybridModel
from ..models.cached import Batch, forward_hidden
from ..replay_context import ReplayContext
from ..sampling import count_accepted, sample_tokens
from .engram import token_history

_serial = itertools.count()


class RequestState:
    """Persistent per-request buffers, by request index: lengths, sampling parameters and block tables.

    num_computed, top_k: [max_reqs] int32. temperature, top_p: [max_reqs] float32. seeds: [max_reqs] int64.
    kv_tables: [KV kinds, max_reqs, C] int32. block_sizes: [KV kinds] int32. history: token ids, with engram layers.
    """

    def __init__(self, memory: ModelMemory, max_model_len: int):
        size, device = memory.config.max_num_seqs, memory.device
        self.num_computed, self.top_k = (torch.zeros(size, dtype=torch.int32, device=device) for _ in "ck")
        self.temperature, self.top_p = torch.zeros(size, device=device), torch.ones(size, device=device)
        self.seeds = torch.zeros(size, dtype=torch.int64, device=device)
        columns = -(-max_model_len // memory.config.block_size)
        self.kv_tables = torch.zeros(len(memory.kv), size, columns, dtype=torch.int32, device=device)
        self.block_sizes = torch.full((len(memory.kv),), memory.config.block_size, dtype=torch.int32, device=device)
        self.history = token_history(memory.engram, size, max_model_len, device)


@dataclass
class DecodeOutput:
    """What a decode step hands back, on the CPU, by batch row."""

    samples: list[list[int]]  # [B][T] the model's own token after each input token
    accepted: list[int]  # tokens committed
    flushed: list[bool]  # rows that folded their ring


class DecodeStep:
    """One uniform decode step of up to `rows` requests with up to `tokens` tokens each, compiled as one graph.

    The input buffers belong to the caller between steps: input_ids [rows, tokens] int64, query_lens [rows] int32 (0
    for padding), idx_mapping [rows] int32 (-1 for padding), num_reqs [1] int32.
    """

    def __init__(self, model: HybridModel, memory: ModelMemory, requests: RequestState, rows: int, tokens: int,
                 compiled: bool = True):
        device = memory.device
        self.model, self.memory, self.requests = model, memory, requests
        self.rows, self.tokens = rows, tokens
        self.input_ids = torch.zeros(rows, tokens, dtype=torch.int64, device=device)
        self.query_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self.idx_mapping = torch.full((rows,), -1, dtype=torch.int32, device=device)
        self.num_reqs = torch.zeros(1, dtype=torch.int32, device=device)
        self.is_prefilling = torch.zeros(rows, dtype=torch.bool, device=device)
        routes = {"greedy": self.greedy_step, "sampled": self.sampled_step}
        self.run = {name: compile_alone(step) if compiled else step for name, step in routes.items()}

    def greedy_step(self) -> Tensor:
        """The step of rows that are all greedy: an argmax where sampling sorts the vocabulary."""
        return self.step(lambda logits, positions: logits.argmax(-1))

    def sampled_step(self) -> Tensor:
        """The step of any rows, greedy ones among them."""
        return self.step(lambda logits, positions: sample(self.requests, logits, positions, self.idx_mapping))

    def step(self, choose) -> Tensor:
        """Token ids to committed cursors. Returns [rows, tokens + 2] int64: samples, accepted, flushed.

        choose(logits [rows, tokens, V], positions [rows, tokens]) gives the model's token after each position.
        """
        memory, requests, lens = self.memory, self.requests, self.query_lens
        batch = build_batch(memory, requests, self.idx_mapping, lens, self.num_reqs, self.tokens)
        if requests.history is not None:
            batch.engram = requests.history.contexts(self.input_ids, batch, self.idx_mapping, self.num_reqs)
        hidden = forward_hidden(self.model, memory, self.input_ids, batch, prefill=False)
        logits = self.model.logits(hidden).float()
        positions = batch.positions.view(self.rows, self.tokens)
        samples = choose(logits, positions)
        accepted = count_accepted(samples, self.input_ids, lens)
        flushed = flushing(memory, batch, lens)
        commit(memory, requests, self.idx_mapping, lens, accepted, self.is_prefilling, self.num_reqs)
        return torch.cat([samples, accepted[:, None].long(), flushed[:, None].long()], 1)

    @torch.no_grad()
    def __call__(self, rows: list[tuple[int, list[int]]], route: str = "sampled") -> DecodeOutput:
        """Runs the step for `rows` of (request index, token ids: the last token, then drafts).

        route: "greedy" if every row is greedy, else "sampled"; each is a graph of its own.
        """
        count = len(rows)
        self.query_lens.zero_()
        self.idx_mapping.fill_(-1)
        self.num_reqs.fill_(count)
        ids = torch.zeros(self.rows, self.tokens, dtype=torch.int64)
        for row, (_, tokens) in enumerate(rows):
            ids[row, : len(tokens)] = torch.tensor(tokens)
        self.input_ids.copy_(ids)
        self.query_lens[:count] = torch.tensor([len(tokens) for _, tokens in rows], dtype=torch.int32)
        self.idx_mapping[:count] = torch.tensor([index for index, _ in rows], dtype=torch.int32)
        history = self.requests.history
        if history is not None:
            history.prefetch(rows, self.rows, self.tokens, keep=True)
        out = self.run[route]().tolist()[:count]
        if history is not None:
            history.advance([index for index, _ in rows], [row[-2] for row in out])
        return DecodeOutput([row[: self.tokens] for row in out], [row[-2] for row in out],
                            [bool(row[-1]) for row in out])


@torch.no_grad()
def prefill(model: HybridModel, memory: ModelMemory, requests: RequestState,
            rows: list[tuple[int, list[int]]]) -> list[int]:
    """Prefills one chunk a row, `rows` of (request index, token ids), and commits it.

    `requests.num_computed` holds each chunk's first position. Returns the token sampled after each row's last one.
    """
    device = memory.device
    lens = torch.tensor([len(tokens) for _, tokens in rows], dtype=torch.int32, device=device)
    longest = max(len(tokens) for _, tokens in rows)
    ids = torch.tensor([tokens + [0] * (longest - len(tokens)) for _, tokens in rows], device=device)
    idx_mapping = torch.tensor([index for index, _ in rows], dtype=torch.int32, device=device)
    num_reqs = torch.tensor([len(rows)], dtype=torch.int32, device=device)
    batch = build_batch(memory, requests, idx_mapping, lens, num_reqs, longest)
    if requests.history is not None:
        requests.history.prefetch(rows, len(rows), longest)
        batch.engram = requests.history.contexts(ids, batch, idx_mapping, num_reqs)
        requests.history.advance([index for index, _ in rows], lens.tolist())
    hidden = forward_hidden(model, memory, ids, batch, prefill=True)
    last = lens.long() - 1
    row = torch.arange(len(rows), device=device)
    logits = model.logits(hidden[row, last]).float()
    positions = batch.positions.view(len(rows), longest)[row, last]
    samples = sample(requests, logits[:, None], positions[:, None], idx_mapping)
    prefilling = torch.ones(len(rows), dtype=torch.bool, device=device)
    commit(memory, requests, idx_mapping, lens, lens, prefilling, num_reqs)
    return samples[:, 0].tolist()


def build_batch(memory: ModelMemory, requests: RequestState, idx_mapping: Tensor, query_lens: Tensor,
                num_reqs: Tensor, tokens: int) -> Batch:
    """Positions, tables, slots and window indices of a step in the uniform layout, from device tensors alone."""
    rows, device = idx_mapping.shape[0], idx_mapping.device
    query_start_loc = torch.arange(rows + 1, dtype=torch.int32, device=device) * tokens
    positions = torch.empty(rows * tokens, dtype=torch.int64, device=device)
    seq_lens = torch.empty(rows, dtype=torch.int32, device=device)
    ops.prepare_positions(positions, seq_lens, idx_mapping, query_start_loc, requests.num_computed, query_lens)
    state_slots, conv_slots, token_slots = {}, {}, {}
    for family, states in memory.states.items():
        if isinstance(states, ReplayContext):
            table = states.block_tables[:, :rows]
            ops.gather_block_tables(table, states.request_tables, idx_mapping, num_reqs)
            state_slots[family] = conv_slots[family] = table[0, :, 0]
            token_slots[family] = None
        else:
            state_slots[family], token_slots[family] = states.step_slots(idx_mapping)
            conv_slots[family] = torch.where(idx_mapping >= 0, idx_mapping + 1, 0)
    batch = Batch(positions, positions.view(rows, tokens)[:, 0], seq_lens, query_start_loc, query_lens, conv_slots,
                  state_slots, token_slots, {}, {})
    if memory.kv:
        tables = torch.empty(len(memory.kv), rows, requests.kv_tables.shape[2], dtype=torch.int32, device=device)
        ops.gather_block_tables(tables, requests.kv_tables, idx_mapping, num_reqs)
        mappings = torch.empty(len(memory.kv), rows * tokens, dtype=torch.int64, device=device)
        ops.compute_slot_mappings(mappings, tables, query_start_loc, positions, requests.block_sizes, query_lens)
        for i, kind in enumerate(memory.kv):
            batch.block_tables[kind], batch.slot_mappings[kind] = tables[i], mappings[i]
    if "swa" in memory.kv:
        window = memory.attention_window
        batch.swa_indices = torch.empty(rows * tokens, window, dtype=torch.int32, device=device)
        batch.swa_lens = torch.empty(rows * tokens, dtype=torch.int32, device=device)
        ops.swa_indices(batch.swa_indices, batch.swa_lens, seq_lens, query_start_loc, batch.block_tables["swa"],
                        batch.slot_mappings["swa"], None, query_lens, window=window,
                        block_size=memory.config.block_size)
    return batch


def sample(requests: RequestState, logits: Tensor, positions: Tensor, idx_mapping: Tensor) -> Tensor:
    """logits [B, T, V] at `positions` [B, T] -> the token that follows each, by the request's parameters."""
    req = idx_mapping.clamp(min=0).long()
    return sample_tokens(logits, positions + 1, requests.temperature[req], requests.top_k[req], requests.top_p[req],
                         requests.seeds[req])


def flushing(memory: ModelMemory, batch: Batch, query_lens: Tensor) -> Tensor:
    """[B] flags of rows whose forward folded their ring; read before the commit moves the cursors."""
    for family, states in memory.states.items():
        if isinstance(states, ReplayContext):
            slots = batch.state_slots[family]
            committed = states.cursors(0)[1][slots.long()]
            return (slots > 0) & (committed + query_lens > states.window)
    return torch.zeros_like(query_lens, dtype=torch.bool)


def commit(memory: ModelMemory, requests: RequestState, idx_mapping: Tensor, query_lens: Tensor, accepted: Tensor,
           is_prefilling: Tensor, num_reqs: Tensor) -> None:
    """Moves cursors (or, without replay, current slots) by the accepted tokens of each row."""
    size = requests.num_computed.shape[0]
    # empty rows write an extra element that is cut off again
    req = torch.where(idx_mapping >= 0, idx_mapping, size).long()
    by_req = torch.zeros(size + 1, dtype=torch.int32, device=req.device).scatter(0, req, accepted.int())[:size]
    for states in memory.states.values():
        if isinstance(states, ReplayContext):
            states.postprocess(requests.num_computed, by_req, is_prefilling, num_reqs, query_lens=query_lens,
                               idx_mapping=idx_mapping)
        else:
            # a prefill leaves its state in the current slot
            states.accept(idx_mapping, torch.where(is_prefilling, 0, accepted))


def compile_alone(method, backend: str = "inductor"):
    """`torch.compile(fullgraph=True)` of a bound method with a code object of its own.

    Dynamo keeps compiled variants, eight at most, per code object; two steps of other sizes must not share them.
    """
    function = method.__func__
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_serial)}")
    own = types.FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    return torch.compile(types.MethodType(own, method.__self__), fullgraph=True, dynamic=False, backend=backend)
