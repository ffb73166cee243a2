"""The prefill of prompt chunks: a step of its own, for its shapes change from step to step."""

from typing import TYPE_CHECKING, Optional

import torch
from torch import Tensor

from ..model_state import DefaultModelState
from ..models import HybridModel
from ..models.cached import forward_hidden
from ..replay_context import ReplayContext
from .step import commit, sample

if TYPE_CHECKING:
    from ..parallel import Agreed


@torch.no_grad()
def prefill(model: HybridModel, state: DefaultModelState, rows: list[tuple[int, list[int]]],
            following: list[list[int]], agreed: Optional["Agreed"] = None,
            before: Optional[list[list[int]]] = None) -> tuple[list[int], list[list[float]]]:
    """Prefills one chunk a row, `rows` of (request index, token ids), and commits it.

    A state that continues a snapshot is copied from it first. following: for each row, the prompt tokens that follow
    its first tokens and whose log probability is wanted. agreed: what the step does on all ranks. A rank without rows
    runs one of padding, which changes no state. before: for a model with n-grams, the tokens before each chunk.
    Returns the token sampled after each row's last one, and those log probabilities.
    """
    memory, device = state.memory, state.memory.device
    longest = max((len(tokens) for _, tokens in rows), default=1)
    padded = max(len(rows), 1)
    inputs, history = state.prefill_inputs(padded, longest), state.requests.history
    if history is not None:
        before = [[] for _ in rows] if before is None else before
        for (index, _), tokens in zip(rows, before, strict=True):
            history.started(index, tokens)
        history.prefetch(rows, padded, longest)
    state.fill(inputs, rows, [True] * len(rows), before)
    inputs.agreed = agreed
    batch = state.prepare_inputs(inputs)
    if history is not None:
        history.advance([index for index, _ in rows], [len(tokens) for _, tokens in rows])
    state.prepare_attn(batch, inputs)
    row = torch.arange(padded, device=device)
    src_cols, dst_cols = inputs.upload.view("moves").unbind()
    for states in memory.states.values():
        if isinstance(states, ReplayContext) and states.mode == "align":
            states.reset_new_slots(src_cols, dst_cols, row)
    hidden = forward_hidden(model, memory, batch, prefill=True)
    last = inputs.query_lens.long() - 1
    logits = model.logits(hidden[row, last]).float()
    positions = batch.positions.view(padded, longest)[row, last]
    samples = sample(state.requests, logits[:, None], positions[:, None], inputs.idx_mapping)
    logprobs = {row: prompt_logprobs(model, hidden[row], wanted) for row, wanted in enumerate(following) if wanted}
    commit(state, batch, inputs, inputs.query_lens, inputs.is_prefilling)
    for index, _ in rows:
        state.requests.host.fresh.pop(index, None)
    listed = [logprobs[row].tolist() if row in logprobs else [] for row in range(len(rows))]
    return samples[: len(rows), 0].tolist(), listed


def prompt_logprobs(model: HybridModel, hidden: Tensor, following: list[int]) -> Tensor:
    """log p(following[i] | tokens 0 .. i), float32 [n], from the residual stream [T, hidden] of those tokens."""
    target = torch.tensor(following, dtype=torch.int64, device=hidden.device)
    return model.logits(hidden[: len(following)]).float().log_softmax(-1).gather(1, target[:, None])[:, 0]
