"""One table of sample inputs for every op. opcheck, compile tests, graph tests and benchmarks all read it.

A family describes its samples in its own `samples.py` as `Sample(op, id, build)`. `build(rng)` returns the op's
arguments, drawn from `rng`; state that must not be read (dead ring rows, the null slot) is poisoned with NaN there.
"""

import importlib
import zlib
from dataclasses import dataclass
from typing import Callable

import torch
from torch import Tensor

from .rounding import LARGEST

FAMILIES = ("mamba2", "gdn", "kda", "conv", "ring", "tokens", "attention", "engram", "scan", "prefill")


class Rng:
    """Draws inputs on one device: `dtype` is the activations' dtype that a sample should use by default."""

    def __init__(self, seed: int, device: str, dtype: torch.dtype):
        self.generator = torch.Generator("cpu").manual_seed(seed)
        self.device, self.dtype = device, dtype

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype = None) -> Tensor:
        values = torch.randn(shape, generator=self.generator, dtype=torch.float32) * scale
        return values.to(self.device, dtype or self.dtype)

    def uniform(self, low: float, high: float, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        values = torch.rand(shape, generator=self.generator, dtype=torch.float32) * (high - low) + low
        return values.to(self.device, dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Values in [low, high)."""
        return torch.randint(low, high, shape, generator=self.generator).to(self.device, dtype)

    def permutation(self, n: int) -> list[int]:
        return torch.randperm(n, generator=self.generator).tolist()

    def tensor(self, values, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)


@dataclass(frozen=True)
class Sample:
    op: str
    id: str
    build: Callable[[Rng], tuple[tuple, dict]]

    def make(self, device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[tuple, dict]:
        """Fresh (args, kwargs); the same for the same op, id, seed and dtype."""
        return self.build(Rng(zlib.crc32(f"{self.op}/{self.id}/{seed}".encode()), device, dtype))

    def __str__(self) -> str:
        return f"{self.op}-{self.id}"


def samples(op: str = None) -> list[Sample]:
    """All samples, or those of one op."""
    table = []
    for family in FAMILIES:
        table += importlib.import_module(f".{family}.samples", __package__).SAMPLES
    return [sample for sample in table if op in (None, sample.op)]


def table(op, builder, cases):
    return [Sample(op, name, lambda rng, options=options: builder(rng, **options)) for name, options in cases.items()]


def layer_by_layer(builder, *places: int, together: bool = False):
    """The builder of the same call whose stacked pools, at these places of the arguments, are lists of layers.

    Each pool lies in pages of its own, or all lie in the same pages: `together`, which torch.compile does not take.
    """
    def build(rng: Rng, **options):
        args, kwargs = builder(rng, **options)
        args = list(args)
        given = [place for place in places if args[place] is not None]
        for part in [given] if together else [[place] for place in given]:
            for place, layers in zip(part, page_views([args[place] for place in part])):
                args[place] = layers
        return tuple(args), kwargs
    return build


def page_views(pools: list[Tensor]) -> list[list[Tensor]]:
    """Stacked pools [L, S, ...] as a host may keep them: a page for each layer and slot, in one storage, that holds the
    slot's part of every pool. Addresses are aligned to the element's size and no better; bytes in between are 255."""
    begins, size, widest = [], 0, max(pool.element_size() for pool in pools)
    for pool in pools:
        begins.append(-(-size // 16) * 16 + pool.element_size())
        size = begins[-1] + pool[0, 0].numel() * pool.element_size()
    size = -(-size // 16) * 16 + widest
    layers, slots = pools[0].shape[:2]
    storage = torch.full((layers * slots * size,), 255, dtype=torch.uint8, device=pools[0].device)
    views = []
    for pool, begin in zip(pools, begins):
        width, inner = pool.element_size(), torch.empty(pool.shape[2:], dtype=torch.uint8, device="meta").stride()
        places = [(layer * slots * size + begin) // width for layer in range(layers)]
        views.append([storage.view(pool.dtype).as_strided(pool.shape[1:], (size // width, *inner), place)
                      for place in places])
        for view, values in zip(views[-1], pool):
            view.copy_(values)
    return views


# Draws that several families share.


def encode_state(rng: Rng, values: torch.Tensor, dtype: torch.dtype):
    """float32 [..., N] -> (state of dtype, row scales or None)."""
    if dtype not in (torch.float8_e4m3fn, torch.int8):
        return values.to(dtype), None
    scale = values.abs().amax(-1) / LARGEST[dtype]
    values = values / scale.unsqueeze(-1)
    return (values.round() if dtype == torch.int8 else values).to(dtype), scale


def poison_dead_rows(rings, start, committed, ring_len: int, ring_dim: int) -> None:
    """NaN in every ring row that is not live and in the whole null slot. rings: tensors [S, ...]."""
    row = torch.arange(ring_len, device=start.device)
    age = (row - start[:, None]) % ring_len
    dead = (age >= committed[:, None]) | (torch.arange(len(start), device=start.device) == 0)[:, None]
    for ring in rings:
        moved = ring.movedim(ring_dim, 1) if ring_dim != 1 else ring
        moved[dead] = float("nan")


def cursors(rng: Rng, slots: int, window: int, ring_len: int):
    """start in [0, R), committed in [0, W], every extreme among them."""
    start = rng.integers(0, ring_len, slots)
    committed = rng.integers(0, window + 1, slots)
    for slot, value in zip(range(1, slots), (window, 0, window - 1)):
        committed[slot] = value
    return start, committed


def query_lengths(rng: Rng, rows: int, tokens: int) -> torch.Tensor:
    """Ragged, with q = 0 beside q = T."""
    lens = rng.integers(0, tokens + 1, rows)
    lens[0] = tokens
    if rows > 1:
        lens[1] = 0
    return lens


def pack(lens: torch.Tensor, *tensors, gap: int = 2, dtype=torch.int32) -> tuple:
    """query_start_loc of rows that own `lens` tokens, then each tensor [B, T, ...] (or None) as packed tokens: views of
    the same memory, with `gap` tokens at the end that belong to no row."""
    starts = torch.nn.functional.pad(lens.cumsum(0), (1, 0)).to(dtype)
    count = int(starts[-1]) + gap
    return starts, *(None if tensor is None else tensor.flatten(0, 1)[:count] for tensor in tensors)


def pack_rows(rng: Rng, packed: bool, lens, *tensors, dtype=torch.int32) -> tuple:
    """query_lens, query_start_loc, keyword arguments, and tensors [B, T, ...] (or None): as they come, or `packed` into
    ragged rows. With `lens`, the last quarter of what a packed row owns is not real."""
    if not packed:
        return lens, None, {}, *tensors
    rows, tokens = tensors[0].shape[:2]
    owned = query_lengths(rng, rows, tokens)
    starts, *tensors = pack(owned, *tensors, dtype=dtype)
    return None if lens is None else owned - owned // 4, starts, dict(max_query_len=tokens), *tensors


def row_slots(rng: Rng, rows: int, slots: int, padded: int = 0, dtype=torch.int32) -> torch.Tensor:
    """Distinct slots in 1..S-1 in random order; the last `padded` rows are null."""
    chosen = [slot + 1 for slot in rng.permutation(slots - 1)[: rows - padded]]
    return rng.tensor(chosen + [0] * padded, dtype)


def plan(rng: Rng, groups: int, rows: int, slots: int, window: int, ring_len: int):
    """src, dst, start, count [G, B] and active_rows [B]: folds, copies, skips, in place, null slots, unlisted rows."""
    src, dst = rng.tensor([[0] * rows] * groups), rng.tensor([[0] * rows] * groups)
    for group in range(groups):
        order = [slot + 1 for slot in rng.permutation(slots - 1)]
        for row in range(rows):
            src[group, row], dst[group, row] = order[2 * row], order[2 * row + 1]
    count = rng.integers(1, window + 1, groups, rows)
    for row, value in zip(range(rows), (window, 0, -1)):
        count[0, row] = value
    if rows > 3:
        dst[:, 3] = src[:, 3]
        src[0, 4 % rows] = 0
    active = [row for row in rng.permutation(rows)][: max(1, rows - 1)]
    return src, dst, rng.integers(0, ring_len, groups, rows), count, rng.tensor(active + [-1] * (rows - len(active)))


def poison_unplanned_rows(rings, src, start, count, layer_group, ring_len: int) -> None:
    """NaN in every ring row that no plan folds. rings: tensors [L, S, heads, R, ...]."""
    dead = torch.ones(*rings[0].shape[:2], ring_len, dtype=torch.bool)
    for layer, group in enumerate(layer_group.tolist()):
        for slot, first, rows in zip(src[group].tolist(), start[group].tolist(), count[group].tolist()):
            for j in range(rows):
                dead[layer, slot, (first + j) % ring_len] = False
    for ring in rings:
        ring.movedim(3, 2)[dead.to(ring.device)] = float("nan")
