"""The ops around the replay: snapshots, the commit of the cursors, the short convolution. Same two things as a
contestant: launches for the clock, and a check, here against the reference kernel on the same inputs."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from torch_replay.ops.registry import OPS

from .families import ACTIVATIONS, Draw, Family, state_bytes
from .timing import cache_bytes

WINDOW = 16
LAYERS = 4  # layers of one materialise launch
GROUPS = 2  # cache groups of one commit


@dataclass(frozen=True)
class Task:
    """One measurement of an op that is not a decode kernel. variant: "all rows" or "idle" for materialise, else ""."""

    op: str
    family: Family
    batch: int
    tokens: int
    state_dtype: torch.dtype
    device: torch.device
    variant: str = ""
    window: int = WINDOW

    def sets(self, touched: int) -> int:
        """Sets of rows to rotate, so that one set's bytes are out of the cache when its turn comes again."""
        return max(2, -(-5 * cache_bytes(self.device) // (2 * touched)))


class Materialize:
    """state[dst] = state[src] advanced by W ring rows, all layers at once; idle: the list of active rows is empty."""

    name = "torch_replay"

    def __init__(self, task: Task, draw: Draw):
        self.task, family = task, task.family
        touched = 2 * LAYERS * task.batch * state_bytes(family, task.state_dtype)
        self.sets = 2 if task.variant == "idle" else task.sets(touched)
        pairs = draw.slots(2 * self.sets, task.batch).view(self.sets, 2, 1, task.batch)
        count = pairs.numel() + 1
        self.ring_len = task.window + task.tokens
        self.state = draw.normal(LAYERS, count, *family.state_shape, dtype=task.state_dtype)
        self.rings = family.rings(draw, LAYERS, count, ring_len=self.ring_len)
        self.params = family.params(draw, LAYERS)
        start = draw.uniform(0, self.ring_len, 1, task.batch).int()
        rows = torch.arange(task.batch, device=task.device, dtype=torch.int32)
        active = torch.full_like(rows, -1) if task.variant == "idle" else rows
        layer_group = torch.zeros(LAYERS, dtype=torch.int32, device=task.device)
        filled = torch.full_like(start, task.window)
        self.plans = [(source, target, start, filled, layer_group, active) for source, target in pairs]

    def call(self, op: Callable, state: Tensor, plan) -> None:
        self.task.family.materialize(op, state, self.rings, self.params, plan)

    def own(self) -> Callable:
        """What is being measured, in the op's calling convention."""
        return OPS[self.task.op].wrapper

    def launches(self) -> list[Callable]:
        op = self.own()
        return [partial(self.call, op, self.state, plan) for plan in self.plans]

    def bytes(self) -> float:
        if self.task.variant == "idle":
            return 4.0  # the end of the list
        family = self.task.family
        row = 2 * state_bytes(family, self.task.state_dtype) + self.task.window * family.ring_row_bytes
        return LAYERS * self.task.batch * row

    def results(self, op: Callable) -> list[Tensor]:
        state = self.state.clone()
        self.call(op, state, self.plans[0])
        return [state]


class Commit:
    """ring_commit of decode rows, snapshots planned where a block ends."""

    name = "torch_replay"

    def __init__(self, task: Task, draw: Draw):
        self.task = task
        batch, columns = task.batch, 8
        integers = partial(torch.randint, generator=draw.generator, device=task.device, dtype=torch.int32)
        self.ring_len = task.window + task.tokens
        tables = draw.slots(GROUPS, batch * columns).view(GROUPS, batch, columns)
        count = GROUPS * batch * columns + 1
        self.start, self.committed = integers(self.ring_len, (GROUPS, count)), integers(task.window, (GROUPS, count))
        self.plan = [torch.zeros(GROUPS, batch, dtype=torch.int32, device=task.device) for _ in range(4)]
        computed = integers(64 * (columns - 1), (batch,))
        lens = torch.full((batch,), task.tokens, dtype=torch.int32, device=task.device)
        accepted = integers(1, task.tokens + 1, (batch,))
        self.rest = (tables, None, lens, computed, accepted, torch.zeros_like(lens).bool(), computed // 64, None)

    def call(self, op: Callable, start: Tensor, committed: Tensor, plan: list[Tensor]) -> None:
        op(start, committed, *plan, *self.rest, block_size=64, window=self.task.window, ring_len=self.ring_len,
           post_step=False, materialize=True)

    def own(self) -> Callable:
        return OPS["ring_commit"].wrapper

    def launches(self) -> list[Callable]:
        # the cursors move on from launch to launch and stay in range by the op's own rule
        op = self.own()
        return [partial(self.call, op, self.start, self.committed, self.plan)] * 20

    def bytes(self) -> float:
        """A slot id, two cursors read and written and four plan entries by group and row; four integers by row."""
        return self.task.batch * (GROUPS * (4 + 16 + 16) + 17.0)

    def results(self, op: Callable) -> list[Tensor]:
        start, committed, plan = self.start.clone(), self.committed.clone(), [part.clone() for part in self.plan]
        self.call(op, start, committed, plan)
        return [start, committed, *plan]


class Conv:
    """conv_replay over the channels that the layer's convolution has."""

    name = "torch_replay"

    def __init__(self, task: Task, draw: Draw):
        self.task, dim = task, task.family.conv_dim
        self.width = task.family.conv_width
        self.columns = self.width - 1 + task.tokens
        self.sets = task.sets(task.batch * dim * self.columns * ACTIVATIONS.itemsize)
        self.slots = draw.slots(self.sets, task.batch)
        self.ring = draw.normal(self.slots.numel() + 1, dim, self.columns)
        self.x = [draw.normal(task.batch, task.tokens, dim) for _ in range(min(self.sets, 8))]
        self.weight, self.bias = draw.normal(dim, self.width), draw.normal(dim)
        self.positions = draw.uniform(8, 1000, task.batch).int()

    def call(self, op: Callable, ring: Tensor, x: Tensor, slots: Tensor) -> Tensor:
        return op(ring, x, self.weight, self.bias, self.positions, slots, silu=True)

    def own(self) -> Callable:
        return OPS["conv_replay"].wrapper

    def launches(self) -> list[Callable]:
        op = self.own()
        return [partial(self.call, op, self.ring, self.x[k % len(self.x)], self.slots[k]) for k in range(self.sets)]

    def bytes(self) -> float:
        """Ring columns read and written, input and output by row and channel; the weights once."""
        dim, tokens = self.task.family.conv_dim, self.task.tokens
        row = (self.width - 1 + tokens + 2 * tokens) * dim * ACTIVATIONS.itemsize + 8
        return self.task.batch * row + (self.width + 1) * dim * ACTIVATIONS.itemsize

    def results(self, op: Callable) -> list[Tensor]:
        ring = self.ring.clone()
        return [self.call(op, ring, self.x[0], self.slots[0]), ring]


KINDS = {"mamba2_materialize": Materialize, "gdn_materialize": Materialize, "ring_commit": Commit, "conv_replay": Conv}


def check_task(make: Callable[[Task, Draw], object], task: Task, reference: Callable, seed: int = 0) -> float:
    """Largest RMS ratio of a result against the reference kernel; integers have to be equal (else infinity)."""
    subject = make(task, Draw(task.device, seed))
    got, want = subject.results(subject.own()), subject.results(reference)
    worst = 0.0
    for result, value in zip(got, want):
        if not value.is_floating_point():
            error = 0.0 if torch.equal(result, value) else float("inf")
        else:
            result, value = result.double(), value.double()
            error = ((result - value).square().mean() / value.square().mean()).sqrt().item()
        worst = error if not error <= worst else worst
        if worst != worst:
            break
    return worst


def reference_of(name: str) -> Callable:
    """The op computed by its CPU kernel, on whatever device the arguments are."""
    op = OPS[name]

    def run(*args, **kwargs):
        out = op.body(*args, **kwargs)
        op.kernel("cpu")(*args, **kwargs, **({} if out is None else {"out": out}))
        return out

    return run
