"""The uniform decode step as one compiled graph.

It runs from token ids to committed cursors: what changed of the requests, block tables, positions, slot mappings and
window indices, the forward, sampling, acceptance of drafts, commit. Everything that changes from step to step is a
tensor, so one graph serves every step of a size. The Python around it fills one upload, launches one graph and starts
one copy back; it waits for the results only when they are asked for.
"""

from dataclasses import dataclass, field
from typing import Optional

import torch
from torch import Tensor

from ..graphs.compiled import compile_alone, mark_static
from ..graphs.transfer import Download
from ..models import HybridModel
from ..models.cached import Batch, forward_hidden
from ..models.memory import ModelMemory
from ..states.model_state import DefaultModelState
from ..states.replay_context import ReplayContext
from ..states.request_state import RequestState
from .sampling import count_accepted, sample_tokens

ROUTES = ("greedy", "sampled")
SAME_TOKEN = -1  # a row's first token: the one that the device sampled last for the request
NO_TOKEN = -1  # in place of a sample: the logits were not sound


@dataclass
class DecodeOutput:
    """What a decode step hands back, on the CPU, by batch row."""

    samples: list[list[int]]  # [B][T] the model's own token after each input token, or NO_TOKEN
    accepted: list[int]  # tokens committed
    flushed: list[bool]  # rows that folded their ring


@dataclass
class Flight:
    """A decode step under way."""

    step: "DecodeStep"
    rows: int  # in use
    ticket: int
    landed: Optional[DecodeOutput] = field(default=None, init=False)

    def result(self) -> DecodeOutput:
        """Waits for the step, and for no other work of the device."""
        if self.landed is None:
            self.landed = self.step.land(self)
        return self.landed


class DecodeStep:
    """One uniform decode step of up to `rows` requests with up to `tokens` tokens each, compiled as one graph.

    `inputs` are its persistent input buffers. `run` holds its routes: "greedy" for rows that are all greedy, and
    "sampled"; each is a graph of its own.

    compiled: False runs it eagerly. packed: the model's parameters as `pack_parameters` laid them out, None: as they
    are. guarded: see `compile_alone`.
    """

    def __init__(self, model: HybridModel, state: DefaultModelState, rows: int, tokens: int, compiled: bool = True,
                 packed=None, guarded: bool = True):
        self.model, self.state = model, state
        self.rows, self.tokens = rows, tokens
        self.compiled, self.guarded = compiled, guarded
        self.inputs = state.decode_inputs(rows, tokens)
        self.inputs.upload.records = False
        self.download = Download((rows, tokens + 2), torch.int32, self.inputs.upload.buffer.device)
        bind = (lambda function: function) if packed is None else packed.bind
        self._routes = {route: bind(getattr(self, f"_{route}")) for route in ROUTES}
        self.run = {}
        self.compile()

    def compile(self) -> None:
        """Makes the routes anew: what compiled before, and its recordings, is let go."""
        steps = {"greedy": self.greedy_step, "sampled": self.sampled_step}
        upload = self.inputs.upload
        mark_static(self, upload, *self.state.owners)
        if self.compiled:
            cuda = upload.buffer.is_cuda
            direct = cuda and not self.guarded
            steps = {route: compile_alone(step, cuda=cuda, guarded=self.guarded, direct=direct)
                     for route, step in steps.items()}
        self.run = steps

    def greedy_step(self) -> Tensor:
        """The step of rows that are all greedy: an argmax where sampling sorts the vocabulary."""
        return self._routes["greedy"]()

    def sampled_step(self) -> Tensor:
        """The step of any rows, greedy ones among them."""
        return self._routes["sampled"]()

    def _greedy(self) -> Tensor:
        return self.step(lambda logits, positions: logits.argmax(-1))

    def _sampled(self) -> Tensor:
        return self.step(lambda logits, positions: sample(self.state.requests, logits, positions,
                                                          self.inputs.idx_mapping))

    def step(self, choose) -> Tensor:
        """Token ids to committed cursors. Returns [rows, tokens + 2] int32: samples, accepted, flushed.

        choose(logits [rows, tokens, V], positions [rows, tokens]) gives the model's token after each position.
        """
        state, inputs = self.state, self.inputs
        batch = state.prepare_inputs(inputs)
        state.prepare_attn(batch, inputs)
        hidden = forward_hidden(self.model, state.memory, batch, prefill=False)
        logits = self.model.logits(hidden).float()
        positions = batch.positions.view(self.rows, self.tokens)
        # a draft never equals NO_TOKEN, so nothing behind it is accepted
        samples = sound(choose(logits, positions), logits).int()
        accepted = count_accepted(samples, batch.input_ids, batch.query_lens)
        # One tensor, which the commit reads: else Inductor moves the cursors' read behind the commit, and clones them.
        counts = torch.stack([accepted, flushing(state.memory, batch)], 1)
        state.commit(batch, inputs, counts[:, 0])
        self._note_last(samples, counts[:, 0])
        return torch.cat([samples, counts], 1)

    def _note_last(self, samples: Tensor, accepted: Tensor) -> None:
        """Each request's newest token stays on the device, for a step that is launched before the host knows it."""
        requests, idx_mapping = self.state.requests, self.inputs.idx_mapping
        req = torch.where(idx_mapping >= 0, idx_mapping, requests.size).long()
        last = samples.gather(1, (accepted - 1).clamp(min=0).long()[:, None]).clamp(min=0)  # NO_TOKEN is none
        requests.last_token.index_put_((req,), last[:, 0])

    @torch.no_grad()
    def launch(self, rows: list[tuple[int, list[int]]], route: str = "sampled") -> Flight:
        """Starts the step for `rows` of (request index, token ids: the last token or SAME_TOKEN, then drafts)."""
        self.state.fill(self.inputs, rows)
        if self.download.pinned:
            torch.compiler.cudagraph_mark_step_begin()
        try:
            ticket = self.download.start(self.run[route]())
        except BaseException:
            self.state.abandon_step()
            raise
        self.state.committed(self.inputs)
        if self.download.pinned:
            self.inputs.upload.sent_before(self.download.event)
        return Flight(self, len(rows), ticket)

    def land(self, flight: Flight) -> DecodeOutput:
        """What `Flight.result` gives, once."""
        out = self.download.wait(flight.ticket)[: flight.rows].tolist()
        return DecodeOutput([row[: self.tokens] for row in out], [row[-2] for row in out],
                            [bool(row[-1]) for row in out])

    def __call__(self, rows: list[tuple[int, list[int]]], route: str = "sampled") -> DecodeOutput:
        """`launch`, and its result."""
        return self.launch(rows, route).result()


def sample(requests: RequestState, logits: Tensor, positions: Tensor, idx_mapping: Tensor) -> Tensor:
    """logits [B, T, V] at `positions` [B, T] -> the token that follows each, by the request's parameters."""
    req = idx_mapping.clamp(min=0).long()
    return sample_tokens(logits, positions + 1, requests.temperature[req], requests.top_k[req], requests.top_p[req],
                         requests.seeds[req])


def sound(samples: Tensor, logits: Tensor) -> Tensor:
    """samples [...], NO_TOKEN where the largest of the logits [..., V] is NaN or infinite: some are NaN or +Inf, or all
    are -Inf. A model may well mask some tokens with -Inf.

    A NaN in any memory that a token reads reaches its logits, for every layer sums over all that it reads; and so does
    one that the token itself leaves there, for it reads its own.
    """
    return torch.where(logits.amax(-1).isfinite(), samples, NO_TOKEN)


def flushing(memory: ModelMemory, batch: Batch) -> Tensor:
    """[B] int32 flags of rows whose forward folded their ring; read before the commit moves the cursors."""
    for family, states in memory.states.items():
        if isinstance(states, ReplayContext):
            slots = batch.state_slots[family][0]
            committed = states.cursors(0)[1][slots.long()]
            return ((slots > 0) & (committed + batch.query_lens > batch.windows[family])).int()
    return torch.zeros_like(batch.query_lens, dtype=torch.int32)
