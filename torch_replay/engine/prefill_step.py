"""The prefill of prompt chunks: a step of its own, for its shapes change from step to step.

Compiled, it is one graph for all steps of one row and one for those of several, whose numbers of rows and tokens are
symbols. A graph of its own for one row, which most steps have: a size of 1 is no symbol to the compiler, and another
row of padding would double the work. It runs without CUDA graphs, which are recorded for one shape each.
"""

import contextlib
from typing import TYPE_CHECKING, Optional

import torch
from torch import Tensor

from ..graphs.compiled import compile_alone, mark_static
from ..models import HybridModel
from ..models.cached import forward_hidden
from ..states.model_state import DefaultModelState
from ..states.replay_context import ReplayContext
from ..states.request_state import InputBatch
from ..states.token_history import HostPrefetch, Rows
from ..states.warmup import temporary_ring_state
from .decode_step import sample, sound

if TYPE_CHECKING:
    from .parallel import Agreed

FEWEST_TOKENS = 2  # a size of 1 would be compiled for itself


@torch.no_grad()
def prefill(model: HybridModel, state: DefaultModelState, rows: Rows, following: list[list[int]],
            agreed: Optional["Agreed"] = None,
            before: Optional[list[list[int]]] = None) -> tuple[list[int], list[list[float]]]:
    """Prefills one chunk a row, `rows` of (request index, token ids), and commits it.

    A state that continues a snapshot is copied from it first. following: for each row, the prompt tokens that follow
    its first tokens and whose log probability is wanted. agreed: what the step does on all ranks. A rank without rows
    runs one of padding, which changes no state. before: for a model with n-grams, the tokens before each chunk.
    Returns the token sampled after each row's last one, NO_TOKEN where there are no logits to draw from (see `sound`),
    and those log probabilities.
    """
    longest = max((len(tokens) for _, tokens in rows), default=1)
    padded = max(len(rows), 1)
    inner = max(map(len, state.inner_edges(rows)), default=0)
    inputs = state.prefill_inputs(padded, longest, inner)
    state.fill(inputs, rows, [True] * len(rows), before)
    inputs.agreed = agreed
    samples, hidden = run_chunks(model, state, inputs)
    return _results(model, state, rows, following, samples, hidden)


class PrefillStep:
    """`prefill` of up to `rows` chunks of up to `tokens` tokens, compiled; it is called likewise.

    Each of its graphs compiles once, for every number of rows and tokens. Steps that trim have further sizes, known to
    the host alone, and n-gram rows that the host fetches are tensors anew at every step: those run eagerly, as do
    larger steps than announced. There is none for ranks that agree on steps.

    inputs: its persistent input buffers. run: its graphs, of one row and of several. packed: the model's parameters as
    `pack_parameters` laid them out, None: as they are. watch: makes a context around each call, given a name of the
    graph.
    """

    def __init__(self, model: HybridModel, state: DefaultModelState, rows: int, tokens: int, packed=None,
                 watch=contextlib.nullcontext):
        self.model, self.state, self.watch = model, state, watch
        self.rows, self.tokens = rows, max(tokens, FEWEST_TOKENS)
        # a row more than a step has: a slice as long as its buffer would make the rows a constant (torch 2.11)
        self.inputs = state.prefill_inputs(self.rows + 1, self.tokens)
        self._chunks = self._run_chunks if packed is None else packed.bind(self._run_chunks)
        self.run = {}
        self.compile()

    def compile(self) -> None:
        """Makes the graphs anew: what compiled before is let go."""
        mark_static(self.inputs.upload, *self.state.owners)
        names = ("one", "many") if self.rows > 1 else ("one",)
        self.run = {name: compile_alone(self.chunks) for name in names}

    def chunks(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """What is compiled: `run_chunks` on `inputs`, of which the step uses as many rows and tokens as ids [B, T]."""
        return self._chunks(ids)

    def _run_chunks(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        inputs = InputBatch(self.inputs.upload, self.inputs.changes, sent_ids=ids)
        inputs.is_prefilling = inputs.view("prefilling") != 0
        return run_chunks(self.model, self.state, inputs)

    def takes(self, rows: Rows) -> bool:
        """Whether a step of these rows runs compiled."""
        lengths = [len(tokens) for _, tokens in rows]
        if isinstance(self.state.requests.history, HostPrefetch) or len(rows) > self.rows or max(lengths) > self.tokens:
            return False
        return self.state.kept_counts([(index, len(tokens), True) for index, tokens in rows]) == lengths

    @torch.no_grad()
    def __call__(self, rows: Rows, following: list[list[int]], before: Optional[list[list[int]]] = None,
                 graph: Optional[str] = None) -> tuple[list[int], list[list[float]]]:
        """As `prefill`, for one row at least. graph: a name in `run`, None: the one that fits the number of rows."""
        if not self.takes(rows):
            return prefill(self.model, self.state, rows, following, before=before)
        graph = graph or ("one" if len(rows) == 1 else "many")
        self.state.fill(self.inputs, rows, [True] * len(rows), before)
        height = 1 if graph == "one" else max(len(rows), 2)
        width = max(FEWEST_TOKENS, *(len(tokens) for _, tokens in rows))
        # a tensor of its own: of a view, the sizes of the whole buffer would count too, as would its strides
        ids = self.inputs.input_ids[:height, :width].clone(memory_format=torch.contiguous_format)
        torch._dynamo.mark_dynamic(ids, [0, 1] if height > 1 else 1)
        with self.watch(("prefill", graph)):
            samples, hidden = self.run[graph](ids)
        self.state.committed(self.inputs)
        return _results(self.model, self.state, rows, following, samples, hidden)


def run_chunks(model: HybridModel, state: DefaultModelState, inputs: InputBatch) -> tuple[Tensor, Tensor]:
    """From a step's inputs on the device to committed cursors. Traceable, but for steps that trim.

    Writes the requests' memory. Returns the token sampled after each row's last one, or NO_TOKEN, [B] int64, and the
    residual stream [B, T, hidden].
    """
    memory, (rows, tokens) = state.memory, inputs.input_ids.shape
    batch = state.prepare_inputs(inputs)
    state.prepare_attn(batch, inputs)
    hidden = forward_hidden(model, memory, batch, prefill=True)
    row, last = torch.arange(rows, device=memory.device), inputs.query_lens.long() - 1
    logits = model.logits(hidden[row, last]).float()
    positions = batch.positions.view(rows, tokens)[row, last]
    samples = sample(state.requests, logits[:, None], positions[:, None], inputs.idx_mapping)
    state.commit(batch, inputs, inputs.query_lens)
    return sound(samples[:, 0], logits), hidden


def _results(model: HybridModel, state: DefaultModelState, rows: Rows, following: list[list[int]], samples: Tensor,
             hidden: Tensor) -> tuple[list[int], list[list[float]]]:
    """What `prefill` returns."""
    logprobs = [prompt_logprobs(model, hidden[row], wanted) if wanted else None for row, wanted in enumerate(following)]
    return samples[: len(rows)].tolist(), [[] if values is None else values.tolist() for values in logprobs]


def prompt_logprobs(model: HybridModel, hidden: Tensor, following: list[int]) -> Tensor:
    """log p(following[i] | tokens 0 .. i), float32 [n], from the residual stream [T, hidden] of those tokens."""
    target = torch.tensor(following, dtype=torch.int64, device=hidden.device)
    return model.logits(hidden[: len(following)]).float().log_softmax(-1).gather(1, target[:, None])[:, 0]


@torch.no_grad()
def warm_up_prefill(model: HybridModel, state: DefaultModelState, tokens: int,
                    step: Optional[PrefillStep] = None) -> None:
    """Runs one prompt chunk of `tokens` tokens, whose kernels would else compile when the first prompt comes.

    step: runs the chunk, and one that it takes, by each of its graphs, which compiles them.

    For an engine without running requests: the chunk belongs to request 0. It holds no blocks, so that no key-value
    cache is written; its slots, tables and buffers are put back. (Token history behind a request's position is never
    read, and stays.)
    """
    requests, ids = state.requests, [0] * tokens
    buffers = [value for owner in (requests, state) for value in vars(owner).values() if isinstance(value, Tensor)]
    host = requests.host
    with contextlib.ExitStack() as kept:
        kept.enter_context(temporary_ring_state((), (), buffers))
        host.admit(0)
        host.num_computed[0], host.snapshots[0], host.fresh[0] = 0, {}, 0
        for states in state.memory.states.values():
            if isinstance(states, ReplayContext):
                slots = states.request_tables[:, 0, states.live_col].unique().tolist()
                kept.enter_context(temporary_ring_state(states, slots))
            else:
                kept.enter_context(temporary_ring_state([states.state], states.own_slots[0].tolist(),
                                                        [states.own_slots]))
                kept.enter_context(temporary_ring_state([states.conv_ring], [1]))
        if step is None:
            prefill(model, state, [(0, ids)], [[]])
            return
        kept, = state.kept_counts([(0, tokens, True)])
        for count in sorted({kept, tokens}):
            for graph in step.run:
                step([(0, ids[:count])], [[]], graph=graph)
