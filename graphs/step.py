"""The steps of serving: a uniform decode step as one compiled graph, and the prefill of prompt chunks.

A decode step runs from token ids to committed cursors: block tables, positions, slot mappings and window indices, the
forward, sampling, acceptance of drafts, commit. Everything that changes from step to step is a tensor, so one graph
serves every step; the Python around it only schedules.
"""

import itertools
import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Optional

import torch
from torch import Tensor

from ..memory import ModelMemory
from ..model_state import DefaultModelState, InputBatch
from ..models import HybridModel
from ..models.cached import Batch, forward_hidden
from ..replay_context import ReplayContext
from ..sampling import count_accepted, sample_tokens
from .engram import token_history

if TYPE_CHECKING:
    from ..parallel import Agreed

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

    `inputs` are its persistent input buffers.
    """

    def __init__(self, model: HybridModel, state: DefaultModelState, rows: int, tokens: int, compiled: bool = True):
        self.model, self.state = model, state
        self.rows, self.tokens = rows, tokens
        self.inputs = state.prepare_dummy_inputs(rows, tokens)
        self.is_prefilling = torch.zeros(rows, dtype=torch.bool, device=self.inputs.idx_mapping.device)
        routes = {"greedy": self.greedy_step, "sampled": self.sampled_step}
        self.run = {name: compile_alone(step) if compiled else step for name, step in routes.items()}

    def greedy_step(self) -> Tensor:
        """The step of rows that are all greedy: an argmax where sampling sorts the vocabulary."""
        return self.step(lambda logits, positions: logits.argmax(-1))

    def sampled_step(self) -> Tensor:
        """The step of any rows, greedy ones among them."""
        return self.step(lambda logits, positions: sample(self.state.requests, logits, positions,
                                                          self.inputs.idx_mapping))

    def step(self, choose) -> Tensor:
        """Token ids to committed cursors. Returns [rows, tokens + 2] int64: samples, accepted, flushed.

        choose(logits [rows, tokens, V], positions [rows, tokens]) gives the model's token after each position.
        """
        state, inputs = self.state, self.inputs
        batch = state.prepare_inputs(inputs)
        state.prepare_attn(batch, inputs)
        hidden = forward_hidden(self.model, state.memory, inputs.input_ids, batch, prefill=False)
        logits = self.model.logits(hidden).float()
        positions = batch.positions.view(self.rows, self.tokens)
        samples = choose(logits, positions)
        accepted = count_accepted(samples, inputs.input_ids, inputs.query_lens)
        flushed = flushing(state.memory, batch, inputs.query_lens)
        commit(state, inputs, accepted, self.is_prefilling)
        return torch.cat([samples, accepted[:, None].long(), flushed[:, None].long()], 1)

    @torch.no_grad()
    def __call__(self, rows: list[tuple[int, list[int]]], route: str = "sampled") -> DecodeOutput:
        """Runs the step for `rows` of (request index, token ids: the last token, then drafts).

        route: "greedy" if every row is greedy, else "sampled"; each is a graph of its own.
        """
        self.inputs.fill(rows)
        history = self.state.requests.history
        if history is not None:
            history.prefetch(rows, self.rows, self.tokens, keep=True)
        out = self.run[route]().tolist()[: len(rows)]
        if history is not None:
            history.advance([index for index, _ in rows], [row[-2] for row in out])
        return DecodeOutput([row[: self.tokens] for row in out], [row[-2] for row in out],
                            [bool(row[-1]) for row in out])


@torch.no_grad()
def prefill(model: HybridModel, state: DefaultModelState, rows: list[tuple[int, list[int]]],
            following: list[list[int]], agreed: Optional["Agreed"] = None) -> tuple[list[int], list[list[float]]]:
    """Prefills one chunk a row, `rows` of (request index, token ids), and commits it.

    `requests.num_computed` holds each chunk's first position. A state that continues a snapshot is copied from it
    first. following: for each row, the prompt tokens that follow its first tokens and whose log probability is wanted.
    agreed: what the step does on all ranks. A rank without rows runs one of padding, which changes no state.
    Returns the token sampled after each row's last one, and those log probabilities.
    """
    memory, device = state.memory, state.memory.device
    longest = max((len(tokens) for _, tokens in rows), default=1)
    padded = max(len(rows), 1)
    inputs = state.prepare_dummy_inputs(padded, longest)
    inputs.fill(rows, [True] * len(rows))
    inputs.agreed = agreed
    history = state.requests.history
    if history is not None:
        history.prefetch(rows, padded, longest)
    batch = state.prepare_inputs(inputs)
    if history is not None:
        history.advance([index for index, _ in rows], [len(tokens) for _, tokens in rows])
    state.prepare_attn(batch, inputs)
    for states in memory.states.values():
        if isinstance(states, ReplayContext) and states.mode == "align":
            states.reset_new_slots(states.src_cols, states.dst_cols, inputs.idx_mapping)
    hidden = forward_hidden(model, memory, inputs.input_ids, batch, prefill=True)
    last = inputs.query_lens.long() - 1
    row = torch.arange(padded, device=device)
    logits = model.logits(hidden[row, last]).float()
    positions = batch.positions.view(padded, longest)[row, last]
    samples = sample(state.requests, logits[:, None], positions[:, None], inputs.idx_mapping)
    logprobs = {row: prompt_logprobs(model, hidden[row], wanted) for row, wanted in enumerate(following) if wanted}
    commit(state, inputs, inputs.query_lens, inputs.is_prefilling)
    listed = [logprobs[row].tolist() if row in logprobs else [] for row in range(len(rows))]
    return samples[: len(rows), 0].tolist(), listed


def prompt_logprobs(model: HybridModel, hidden: Tensor, following: list[int]) -> Tensor:
    """log p(following[i] | tokens 0 .. i), float32 [n], from the residual stream [T, hidden] of those tokens."""
    target = torch.tensor(following, dtype=torch.int64, device=hidden.device)
    return model.logits(hidden[: len(following)]).float().log_softmax(-1).gather(1, target[:, None])[:, 0]


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


def commit(state: DefaultModelState, inputs: InputBatch, accepted: Tensor, is_prefilling: Tensor) -> None:
    """Moves cursors (or, without replay, current slots) by the accepted tokens of each row; publishes snapshots."""
    requests, idx_mapping = state.requests, inputs.idx_mapping
    size = requests.num_computed.shape[0]
    # empty rows write an extra element that is cut off again
    req = torch.where(idx_mapping >= 0, idx_mapping, size).long()
    by_req = torch.zeros(size + 1, dtype=torch.int32, device=req.device).scatter(0, req, accepted.int())[:size]
    for states in state.memory.states.values():
        if isinstance(states, ReplayContext):
            states.postprocess(requests.num_computed, by_req, is_prefilling, inputs.num_reqs,
                               query_lens=inputs.query_lens, live_cols=states.live_cols, idx_mapping=idx_mapping)
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
