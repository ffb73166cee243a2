"""Cursors of full fill-and-flush cycles, worked out beforehand, so that a timed region holds nothing but the op.

A benchmark that leaves the cursors where they are never leaves the phase between two flushes, and flatters. Here every
row walks through its whole cycle, and rows are staggered so that each step has its natural share of flushing rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


def committed_cycle(window: int, tokens: int, accepted: int) -> list[int]:
    """Committed rows before each step of the steady cycle; the last step is the one that flushes.

    window: W; tokens: T, appended by a step; accepted: of these, how many stay, 1..T.
    """
    if not 1 <= accepted <= tokens <= window:
        raise ValueError(f"accepted {accepted}, tokens {tokens}, window {window}: expected 1 <= accepted <= T <= W")
    committed = [accepted]
    while committed[-1] + tokens <= window:
        committed.append(committed[-1] + accepted)
    return committed


@dataclass(frozen=True)
class Schedule:
    """start, committed [steps, S] int32: the cursors before each step; phase [steps, S] counts from the last flush."""

    start: Tensor
    committed: Tensor
    phase: Tensor
    flushing: Tensor

    @property
    def flush_fraction(self) -> float:
        return self.flushing.double().mean().item()

    @property
    def mean_committed(self) -> float:
        return self.committed.double().mean().item()


def make_schedule(window: int, tokens: int, accepted: int, slots: int, ring_len: int, flush: bool,
                  generator: torch.Generator) -> Schedule:
    """Cursors of `slots` slots over one cycle, on the generator's device.

    flush: True for whole cycles. False for the steps between two flushes only, over and over: what a benchmark that
    ignores flushes would measure, kept because published numbers do.
    """
    cycle = committed_cycle(window, tokens, accepted)
    steps = len(cycle) if flush else len(cycle) - 1
    if not steps:
        raise ValueError(f"window {window}, {tokens} tokens: every step flushes, there is no step without")
    device = generator.device
    # as many rows in each phase as possible, in an order that has nothing to do with the slot
    order = torch.randperm(slots, generator=generator, device=device) % steps
    phase = (torch.arange(steps, device=device)[:, None] + order) % steps
    committed = torch.tensor(cycle, device=device)[phase]
    flushing = committed + tokens > window
    base = torch.randint(ring_len, (slots,), generator=generator, device=device)
    moved = torch.where(flushing, committed, 0).cumsum(0) - torch.where(flushing, committed, 0)  # by earlier flushes
    start = (base + moved) % ring_len
    return Schedule(start.int().contiguous(), committed.int().contiguous(), phase.int().contiguous(), flushing)
