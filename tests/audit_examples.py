"""Functions that break a rule of the audit each, at lines marked `# line of ...`, and one that keeps them all."""

import itertools

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("torch_replay_audit_examples", "FRAGMENT")
_LIBRARY.define("add_both(Tensor(a!) keys, Tensor(b!) values, Tensor x) -> ()")
_LIBRARY.define("doubled(Tensor x) -> Tensor")
_LIBRARY.impl("add_both", lambda keys, values, x: (keys.add_(x), values.add_(x), None)[-1], "CPU")
_LIBRARY.impl("doubled", lambda x: x * 2, "CPU")
torch.library.register_fake("torch_replay_audit_examples::add_both", lambda keys, values, x: None, lib=_LIBRARY)
add_both, doubled = torch.ops.torch_replay_audit_examples.add_both, torch.ops.torch_replay_audit_examples.doubled


@torch.library.custom_op("torch_replay_audit_examples::tripled", mutates_args=())
def tripled(x: Tensor) -> Tensor:
    return x * 3


class Cache:
    """Keeps every rule: each tensor has a storage of its own."""

    def __init__(self):
        self.keys, self.values = torch.zeros(64, 32), torch.zeros(64, 32)

    def step(self, x: Tensor) -> Tensor:
        add_both(self.keys, self.values, x)
        return x.view(-1)


class SlicedCache:
    """Keys and values are slices of one storage, and one op writes both: the values are cloned at every step."""

    def __init__(self):
        pool = torch.zeros(3, 64, 32)
        self.keys, self.values = pool[0], pool[1]

    def step(self, x: Tensor) -> None:
        add_both(self.keys, self.values, x)  # line of clones


class StaleCache:
    """A row that is read before the cache is written, where Inductor puts off the reading until after."""

    def __init__(self):
        self.keys, self.values = torch.zeros(64, 32), torch.zeros(64, 32)

    def step(self, x: Tensor) -> Tensor:
        row = self.keys[0]
        before = row + 1
        add_both(self.keys, self.values, x)  # line of stale
        return torch.stack([row, before])


class ViewedCache:
    """A cache written under another dtype: cloned by torch 2.11, copied onto itself by 2.13."""

    def __init__(self):
        self.rows, self.bits = torch.zeros(64, 32), torch.zeros(64, 32, dtype=torch.int32)

    def step(self, x: Tensor) -> None:
        add_both(self.rows.view(torch.int32), self.bits, x[0].int())  # line of dtype


class Counting:
    """A Python number that changes from call to call."""

    def __init__(self):
        self.calls = itertools.count()
        self.length = 0

    def step(self, x: Tensor) -> Tensor:
        self.length += 1  # line of recompiles
        return x.view(-1)[: self.length]


def broken(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()  # line of breaks
    return x.view(-1)


def waits(x: Tensor) -> Tensor:
    return x[: int(x[0, 0].item())]  # line of syncs


def lists(x: Tensor) -> Tensor:
    return x[: len(x[0].tolist())]  # line of tolist


def masks(x: Tensor) -> Tensor:
    return x[x > 1]  # line of masks


def fakeless(x: Tensor) -> Tensor:
    return doubled(x)  # line of fakeless


def fakeless_custom_op(x: Tensor) -> Tensor:
    return tripled(x)  # line of custom_op


@torch._dynamo.disable
def opaque(x: Tensor) -> Tensor:
    return x.view(-1)


def unregistered(x: Tensor) -> Tensor:
    return opaque(x)  # line of unregistered


def calls():
    """An input factory: two calls."""
    for _ in range(2):
        yield (torch.zeros(64, 32),)


def fails(x: Tensor) -> Tensor:
    raise RuntimeError("no such luck")


NOT_CALLABLE = 3
