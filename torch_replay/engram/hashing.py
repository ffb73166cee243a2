"""Hash constants of engram layers: one prime per column, one odd multiplier per shift, found once at construction."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

SEED_STEP = 10007  # layer l draws its multipliers from seed SEED_STEP * l


def next_primes(start: int, count: int) -> list[int]:
    """The `count` smallest primes that are at least `start`, ascending."""
    primes, candidate = [], max(start, 2)
    while len(primes) < count:
        if _is_prime(candidate):
            primes.append(candidate)
        candidate += 1
    return primes


def _is_prime(value: int) -> bool:
    if value < 4:
        return value >= 2
    return value % 2 == 1 and all(value % divisor for divisor in range(3, math.isqrt(value) + 1, 2))


@dataclass(frozen=True)
class NGramHash:
    """The hash constants of a model's engram layers, as `ops.ngram_hash` takes them.

    layer_ids: the engram layers' numbers in the model (L of them). max_order: n, the longest n-gram, at least 2. heads:
    H, hashes of each order. table_size: where the search for primes begins, about the rows of one column. vocab_size:
    number of compressed ids, which every multiplier depends on. Primes are distinct over all layers, orders and heads,
    and ascend in that nesting. Raises ValueError naming the field.
    """

    layer_ids: tuple[int, ...]
    max_order: int
    heads: int
    table_size: int
    vocab_size: int

    def __post_init__(self):
        object.__setattr__(self, "layer_ids", tuple(self.layer_ids))
        for name, least in (("max_order", 2), ("heads", 1), ("table_size", 1), ("vocab_size", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected {least} or more")
        ids = self.layer_ids
        if not ids or len(set(ids)) != len(ids) or min(ids) < 0:
            raise ValueError(f"layer_ids: got {ids}, expected one or more distinct numbers of 0 or more")

    @property
    def columns(self) -> int:
        """Rows that one token reads in one layer, (n - 1) * H."""
        return (self.max_order - 1) * self.heads

    @cached_property
    def primes(self) -> Tensor:
        """int64 [L, n - 1, H]."""
        found = next_primes(self.table_size, len(self.layer_ids) * self.columns)
        return torch.tensor(found, dtype=torch.int64).view(len(self.layer_ids), self.max_order - 1, self.heads)

    @cached_property
    def multipliers(self) -> Tensor:
        """int64 [L, n]: odd, and so small that no product with a compressed id reaches 2^63."""
        bound = max(1, (2**63 - 1) // self.vocab_size // 2)
        drawn = [np.random.default_rng(SEED_STEP * layer).integers(0, bound, size=self.max_order, dtype=np.int64)
                 for layer in self.layer_ids]
        return torch.from_numpy(np.stack(drawn) * 2 + 1)

    @property
    def layer_rows(self) -> list[int]:
        """Rows of each layer's own table: the sum of its primes."""
        return self.primes.flatten(1).sum(1).tolist()

    @property
    def offsets(self) -> Tensor:
        """int64 [L, n - 1, H]: where each column's rows begin in its layer's own table."""
        flat = self.primes.flatten(1)
        return (flat.cumsum(1) - flat).view_as(self.primes)

    @property
    def stacked_offsets(self) -> Tensor:
        """The same with all layers' tables stacked into one of `sum(layer_rows)` rows."""
        flat = self.primes.flatten()
        return (flat.cumsum(0) - flat).view_as(self.primes)
