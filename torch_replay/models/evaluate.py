"""Measuring a model: loss per token, loss after its recurrent state was zeroed, and slow but simple generation."""

import contextlib

import torch
import torch.nn.functional as F

from .layers import DeltaMixer, Mamba2Mixer


@torch.no_grad()
def token_losses(model, ids: torch.Tensor, batch: int = 8) -> torch.Tensor:
    """Cross-entropy in nats of every next token: ids `[N,T]` -> float32 `[N,T-1]`, `batch` rows at a time."""
    losses = []
    for rows in ids.split(batch):
        logits = model(rows[:, :-1]).float()
        losses.append(F.cross_entropy(logits.transpose(1, 2), rows[:, 1:].long(), reduction="none"))
    return torch.cat(losses)


@contextlib.contextmanager
def forget_state_at(model, position: int):
    """While active, every recurrent layer of `model` starts again from a zero state at `position`, in each sequence.

    Only the checkpoint-like state is lost: attention still sees the tokens before `position`, and the short
    convolutions still read their last inputs. So the loss that rises is what the recurrent state was worth.
    """
    mixers = [module for module in model.modules() if isinstance(module, (Mamba2Mixer, DeltaMixer))]
    for mixer in mixers:
        mixer.core = _cut_core(mixer.core, position)
    try:
        yield
    finally:
        for mixer in mixers:
            del mixer.core  # the instance attribute hid the method


@contextlib.contextmanager
def shut_engram(model):
    """While active, the gate of every engram layer of `model` is 0. What the loss gains is what the table was worth."""
    mixers = [layer.mixer for layer in model.layers if layer.kind == "engram"]
    for mixer in mixers:
        mixer.gate = _closed_gate
    try:
        yield
    finally:
        for mixer in mixers:
            del mixer.gate  # the instance attribute hid the method


def _closed_gate(hidden, keys, masked):
    return hidden.new_zeros(hidden.shape[:-1])


def _cut_core(core, position):
    def cut(*inputs):
        first, _ = core(*(t[:, :position] for t in inputs))
        second, state = core(*(t[:, position:] for t in inputs))
        return torch.cat([first, second], 1), state

    return cut


def forgetting_losses(model, ids: torch.Tensor, position: int, batch: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses from `position` on with the state kept, and with it zeroed there: ids `[N,T]`, each `[N,T-1-position]`."""
    kept = token_losses(model, ids, batch)[:, position:]
    with forget_state_at(model, position):
        return kept, token_losses(model, ids, batch)[:, position:]


@torch.no_grad()
def generate_slow(model, prompts: list[list[int]], tokens: int, temperature: float = 0.0, seed: int = 0):
    """Continues each prompt by `tokens` ids, running the whole forward for every token; returns lists of new ids.

    Greedy at temperature 0, else sampled from a generator seeded with `seed`. Prompts may differ in length: rows are
    filled up on the right, which a causal model does not see. ValueError if a row outgrows the context.
    """
    device = model.embedding.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    ends = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int64, device=device)
    total = int(ends.max()) + tokens
    if total > model.config.max_position or int(ends.min()) < 1:
        raise ValueError(f"prompts: got lengths {ends.tolist()}, expected 1..{model.config.max_position - tokens}")
    rows = torch.zeros(len(prompts), total, dtype=torch.long, device=device)
    for row, prompt in zip(rows, prompts):
        row[: len(prompt)] = torch.tensor(prompt, dtype=torch.int64, device=device)
    pick = torch.arange(len(prompts), device=device)
    for _ in range(tokens):
        logits = model(rows[:, : int(ends.max())])[pick, ends - 1].float()
        if temperature > 0:
            chosen = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]
        else:
            chosen = logits.argmax(-1)
        rows[pick, ends] = chosen
        ends = ends + 1
    return [row[len(prompt) : len(prompt) + tokens].tolist() for row, prompt in zip(rows, prompts)]
