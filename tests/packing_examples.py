"""Modules to pack, and what tests of packing look at."""

import math
from collections import Counter

import torch
from fx_text import traced
from torch import nn

from torch_replay.graphs.audit_code import ALLOCATION

WIDTH = 48


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shift", torch.randn(WIDTH))
        self.register_buffer("order", torch.randperm(WIDTH), persistent=False)

    def forward(self, x):
        return x + self.linear(self.norm(x))[:, self.order] + self.shift


class Counting(Layer):
    """Writes two buffers of four at every call: one in place, one by a custom op."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("total", torch.zeros(WIDTH))

    def forward(self, x):
        self.count.add_(1)
        torch.ops.packing_test.accumulate(self.total, x)
        return super().forward(x) * self.count + self.total


@torch.library.custom_op("packing_test::accumulate", mutates_args=("total",))
def accumulate(total: torch.Tensor, x: torch.Tensor) -> None:
    total.add_(x.sum(0))


@accumulate.register_fake
def _(total, x):
    return None


class Everything(nn.Module):
    """Ties of every kind, strides of every kind, and tensors that cannot move."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(6, 10), nn.Linear(6, 10)
        self.head.weight = self.first.weight  # one Parameter in two places
        self.again = self.first  # one module in two places
        self.transposed = nn.Parameter(self.first.weight.data.t())  # two Parameters on one memory
        self.column = nn.Parameter(torch.randn(7, 3)[:, 1], requires_grad=False)
        self.expanded = nn.Parameter(torch.randn(3, 1).expand(3, 5))
        self.channels_last = nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
        self.upper, self.lower = (nn.Parameter(half) for half in torch.randn(9, 3).split([4, 5]))  # side by side
        self.empty, self.scalar = nn.Parameter(torch.zeros(0, 4)), nn.Parameter(torch.tensor(2.5))
        self.nan = nn.Parameter(torch.full((3,), math.nan, dtype=torch.bfloat16))
        for dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.int64, torch.uint8, torch.bool, torch.complex64):
            value = torch.randint(0, 2, (5, dtype.itemsize), dtype=torch.uint8).view(dtype)
            self.register_buffer(str(dtype).removeprefix("torch."), value, persistent=dtype.is_floating_point)
        self.register_buffer("nothing", None)
        self.register_buffer("meta", torch.empty(3, device="meta"))
        self.register_buffer("sparse", torch.eye(3).to_sparse())
        both = torch.randn(4)
        self.register_buffer("number", both)
        self.register_buffer("bits", both.view(torch.int32))  # memory of two dtypes


ALONE = {"meta", "sparse", "number", "bits"}


def nothing():
    """As `call`: nothing is written, so that buffers move too."""


def described(module) -> dict:
    """All that shows from outside, with bytes in place of values."""
    return {name: (value.dtype, value.shape, value.stride(), value.requires_grad, raw(value))
            for name, value in [*module.state_dict(keep_vars=True).items(), *module.named_buffers()]
            if value.layout is torch.strided}


def raw(value):
    return None if value.is_meta else value.detach().contiguous().flatten().view(torch.uint8).tolist()


def ties(module) -> set:
    """Pairs of names with one object, and pairs with memory in common."""
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    found = set()
    for name, value in named:
        for other, second in named:
            if name < other and value is second:
                found.add((name, other, "same"))
            elif name < other and set(addresses(value)) & set(addresses(second)):
                found.add((name, other, "memory"))
    return found


def addresses(value):
    if value.layout is not torch.strided or value.is_meta or value.numel() == 0:
        return []
    steps = torch.zeros(value.shape, dtype=torch.int64)
    for dim, (size, stride) in enumerate(zip(value.shape, value.stride())):
        steps += (torch.arange(size) * stride).view([-1 if i == dim else 1 for i in range(value.dim())])
    return (steps.flatten() * value.itemsize + value.data_ptr()).tolist()


def misaligned(packed) -> list[str]:
    """Names of packed tensors, but for views of another one, that do not begin at a multiple of 128 bytes."""
    return [slot.name for slot, (flat, start, _, _) in packed._places
            if start * packed.flats[flat].itemsize % 128 and slot.name not in ("transposed",)]


def stack(count, layer=Layer, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(*(layer() for _ in range(count))).eval()


def inputs_of(fn, *args, **options) -> list[torch.fx.Node]:
    """The inputs of fn's one graph as Dynamo makes it."""
    graph, _ = traced(fn, *args, **options)
    return graph.find_nodes(op="placeholder")


def allocations(codes) -> Counter:
    """Elements of what the generated code allocates, by dtype and number."""
    return Counter((name, math.prod(int(size) for size in shape.split(",") if size.strip()))
                   for code in codes for shape, name in ALLOCATION.findall(code))


def compiled(fn, **options):
    torch._dynamo.reset()
    return torch.compile(fn, fullgraph=True, dynamic=False, **options)
