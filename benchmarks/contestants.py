"""The kernels of torch_replay as the benchmark runs them, and the check that each has to pass before it is timed.

A contestant owns pools for several sets of rows and knows two things: the launches of a whole cycle, for the clock, and
one real step of real rows, for the check. Peers (`peers.py`) have the same two.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from .families import ACTIVATIONS, Draw, Family, replay_bytes, state_bytes, update_bytes
from .schedule import committed_cycle, make_schedule
from .timing import cache_bytes

WINDOW = 16
# RMS error over RMS of the float32 recurrence. bf16 operands cost up to 1e-2 (GUIDE); a bf16 state as much again.
TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 2e-2, torch.float16: 1e-2}
CHECK_ROWS = 3


@dataclass(frozen=True)
class Case:
    """One measurement. mode: "cycle" and "no flush" for replay, "plain" for updates."""

    family: Family
    mode: str
    batch: int
    tokens: int
    state_dtype: torch.dtype
    device: torch.device
    window: int = WINDOW
    sets: int = 1

    @property
    def accepted(self) -> int:
        """Tokens that stay, a step: all of them, the choice with the most flushes."""
        return self.tokens

    @property
    def op(self) -> str:
        return f"{self.family.family}_{'update' if self.mode == 'plain' else 'replay'}"

    def rotating(self) -> "Case":
        """With as many sets of rows as it takes to pass the device's cache: at least two, so that no launch finds what
        the one before it left there."""
        row = state_bytes(self.family, self.state_dtype)
        return replace(self, sets=max(2, -(-5 * cache_bytes(self.device) // (2 * row * self.batch))))


class Contestant:
    """What all have in common: inputs for each set of rows, drawn afresh, and parameters."""

    name = "torch_replay"

    def __init__(self, case: Case, draw: Draw):
        self.case, self.family, self.draw = case, case.family, draw
        self.inputs = [case.family.inputs(draw, case.batch, case.tokens) for _ in range(case.sets)]
        self.params = case.family.params(draw)

    def launches(self) -> list[Callable]:
        """One whole cycle over all sets, to be run in this order."""
        raise NotImplementedError

    def initial(self) -> Tensor:
        """Float32 copy of the checkpoints of the first set's rows, before any step."""
        raise NotImplementedError

    def step(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """Decodes T tokens of the first set's rows, all accepted, from where the last step ended."""
        raise NotImplementedError


class Replay(Contestant):
    """The replay op; a peer with the same pools and cursors overrides `call`."""

    def __init__(self, case: Case, draw: Draw):
        super().__init__(case, draw)
        self.ring_len, self.count = case.window + case.tokens, case.sets * case.batch + 1
        self.slots = draw.slots(case.sets, case.batch)
        self.state = draw.normal(self.count, *case.family.state_shape, dtype=case.state_dtype)
        self.rings = case.family.rings(draw, self.count, ring_len=self.ring_len)
        self.schedule = make_schedule(case.window, case.tokens, case.accepted, self.count, self.ring_len,
                                      case.mode == "cycle", draw.generator)
        self.start = draw.uniform(0, self.ring_len, self.count).int()
        self.committed = torch.zeros_like(self.start)

    def call(self, start, committed, inputs, slots) -> Tensor:
        return self.family.replay(self.state, self.rings, start, committed, inputs, self.params, slots,
                                  self.case.window)

    def launches(self) -> list[Callable]:
        cursors = zip(self.schedule.start, self.schedule.committed)
        return [partial(self.call, *pair, self.inputs[k], self.slots[k]) for pair in cursors
                for k in range(self.case.sets)]

    def initial(self) -> Tensor:
        return self.state[self.slots[0].long()].float()

    def step(self, inputs) -> Tensor:
        y = self.call(self.start, self.committed, inputs, self.slots[0])
        flush = self.committed + self.case.tokens > self.case.window
        self.start = torch.where(flush, (self.start + self.committed) % self.ring_len, self.start)
        self.committed = torch.where(flush, 0, self.committed) + self.case.accepted
        return y

    def bytes(self) -> float:
        case = self.case
        return replay_bytes(case.family, case.batch, case.tokens, case.state_dtype, self.schedule.mean_committed,
                            self.schedule.flush_fraction)


class Update(Contestant):
    """The plain update: in place for one token; with a slot for the state after each of several, as an engine without
    replay speculates. The slot of the last token is the live one of the next step."""

    def __init__(self, case: Case, draw: Draw):
        super().__init__(case, draw)
        self.kept = case.tokens if case.tokens > 1 else 0
        owned = draw.slots(1, case.sets * case.batch * (1 + self.kept))
        self.slots = owned.view(case.sets, case.batch, 1 + self.kept)
        self.state = draw.normal(owned.numel() + 1, *case.family.state_shape, dtype=case.state_dtype)
        self.steps = 1 + self.kept  # after so many steps every slot has been the live one
        self.at = 0

    def places(self, rows: Tensor, step: int) -> tuple[Tensor, Tensor | None]:
        """Slots that a step reads, and those that it writes."""
        turned = torch.roll(rows, step, dims=-1)
        return turned[:, 0].contiguous(), turned[:, 1:].contiguous() if self.kept else None

    def call(self, inputs, read, written) -> Tensor:
        return self.family.update(self.state, inputs, self.params, read, written)

    def launches(self) -> list[Callable]:
        return [partial(self.call, self.inputs[k], *self.places(self.slots[k], step)) for step in range(self.steps)
                for k in range(self.case.sets)]

    def initial(self) -> Tensor:
        return self.state[self.slots[0, :, 0].long()].float()

    def step(self, inputs) -> Tensor:
        y = self.call(inputs, *self.places(self.slots[0], self.at))
        self.at += 1
        return y

    def bytes(self) -> float:
        case = self.case
        return update_bytes(case.family, case.batch, case.tokens, case.state_dtype, max(1, self.kept))


def check(make: Callable[[Case, Draw], Contestant], case: Case, seed: int = 0) -> float:
    """Runs a few rows through two whole cycles and a step, and holds every output against the recurrence.

    Returns the largest RMS ratio of a step, NaN included: the caller compares it with `tolerance(case)`. Every kernel
    starts from an empty ring, so that the second cycle's outputs depend on what the first one folded.
    """
    draw = Draw(case.device, seed)
    mode = "plain" if case.mode == "plain" else "cycle"
    contestant = make(replace(case, batch=CHECK_ROWS, sets=1, mode=mode), draw)
    first = contestant.initial()
    state = torch.cat([torch.zeros_like(first[:1]), first])  # slot 0 is the null slot of the reference
    slots = torch.arange(1, CHECK_ROWS + 1, device=case.device, dtype=torch.int32)
    worst = 0.0
    for _ in range(2 * len(committed_cycle(case.window, case.tokens, case.accepted)) + 1):
        inputs = case.family.inputs(draw, CHECK_ROWS, case.tokens)
        got = contestant.step(inputs).double()
        want = case.family.recur(state, inputs, contestant.params, slots).double()
        error = ((got - want).square().mean() / want.square().mean()).sqrt().item()
        worst = error if not error <= worst else worst
        if worst != worst:
            break
    return worst


def tolerance(case: Case) -> float:
    return max(TOLERANCE[case.state_dtype], TOLERANCE[ACTIVATIONS] / 2)
