"""What is measured: the geometry of public models, random pools and inputs for it, and the bytes that must move.

Bytes that must move, by row of the batch, with everything that is used read once and everything that changes written
once; q = T everywhere, indices count 4 bytes:

    replay   state + committed * ring row + T * (ring row + token) + flush * state + slot and two cursors
    update   state + written * state + T * token + slot        written: 1 in place, T with a slot for each token

plus the parameters, once a launch. A *token* is its inputs and its output, a *ring row* is what one token leaves in the
rings. `flush` is the share of rows that flush and `committed` their mean, both taken from the schedule that ran.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from torch_replay import ops
from torch_replay.ops.gdn import naive as gdn_naive
from torch_replay.ops.mamba2 import naive as mamba2_naive

ACTIVATIONS = torch.bfloat16


class Draw:
    """Random tensors made on the device that uses them."""

    def __init__(self, device: torch.device, seed: int):
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = ACTIVATIONS) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=dtype)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, device=self.device) * (high - low) + low

    def slots(self, sets: int, rows: int) -> Tensor:
        """int32 [sets, rows], distinct slots from 1 on in random order."""
        order = torch.randperm(sets * rows, generator=self.generator, device=self.device) + 1
        return order.view(sets, rows).int()


@dataclass(frozen=True)
class Mamba2:
    """One Mamba-2 layer. Inputs are (x, dt, B, C), parameters (A, D, dt_bias) in float32; no gate z, as in models that
    gate inside the following norm."""

    name: str
    heads: int
    dim: int
    state_dim: int
    groups: int
    conv_width: int = 4
    family = "mamba2"

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.heads, self.dim, self.state_dim

    @property
    def conv_dim(self) -> int:
        return self.heads * self.dim + 2 * self.groups * self.state_dim

    @property
    def ring_row_bytes(self) -> int:
        return (self.heads * self.dim + self.groups * self.state_dim) * ACTIVATIONS.itemsize + self.heads * 4

    @property
    def token_bytes(self) -> int:
        return (2 * self.heads * self.dim + self.heads + 2 * self.groups * self.state_dim) * ACTIVATIONS.itemsize

    @property
    def param_bytes(self) -> int:
        return 3 * self.heads * 4

    def rings(self, draw: Draw, *lead: int, ring_len: int) -> tuple[Tensor, ...]:
        """x_ring, B_ring, dt_ring; every row holds a plausible token, so that any cursors are valid."""
        return (draw.normal(*lead, self.heads, ring_len, self.dim), draw.normal(*lead, self.groups, ring_len,
                self.state_dim), draw.uniform(0.01, 0.5, *lead, self.heads, ring_len))

    def inputs(self, draw: Draw, rows: int, tokens: int) -> tuple[Tensor, ...]:
        side = rows, tokens, self.groups, self.state_dim
        return (draw.normal(rows, tokens, self.heads, self.dim), draw.normal(rows, tokens, self.heads),
                draw.normal(*side), draw.normal(*side))

    def params(self, draw: Draw, *lead: int) -> tuple[Tensor, ...]:
        return (-draw.uniform(0.1, 1.0, *lead, self.heads), draw.normal(*lead, self.heads, dtype=torch.float32),
                draw.normal(*lead, self.heads, dtype=torch.float32) - 1)

    def replay(self, state, rings, start, committed, inputs, params, slots, window) -> Tensor:
        (x, dt, B, C), (A, D, bias) = inputs, params
        return ops.mamba2_replay(state, *rings, start, committed, x, dt, A, B, C, D, None, bias, slots, window=window)

    def update(self, state, inputs, params, slots, token_slots=None) -> Tensor:
        (x, dt, B, C), (A, D, bias) = inputs, params
        return ops.mamba2_update(state, x, dt, A, B, C, D, None, bias, slots, None, token_slots)

    def recur(self, state, inputs, params, slots) -> Tensor:
        """The reference recurrence, outputs in float32; `state` advances in place."""
        (x, dt, B, C), (A, D, bias) = inputs, params
        out = torch.empty_like(x, dtype=torch.float32)
        mamba2_naive.mamba2_update(state, x, dt, A, B, C, D, None, bias, slots, out=out)
        return out

    def materialize(self, op, state, rings, params, plan) -> None:
        op(state, *rings, params[0], *plan)


@dataclass(frozen=True)
class GatedDelta:
    """One gated-delta-rule layer. Inputs are (q, k, v, a, b), parameters (A_log, dt_bias) in float32."""

    name: str
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    conv_width: int = 4
    family = "gdn"

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.heads, self.value_dim, self.key_dim

    @property
    def conv_dim(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    @property
    def ring_row_bytes(self) -> int:
        return (self.heads * self.value_dim + self.key_heads * self.key_dim) * ACTIVATIONS.itemsize + self.heads * 4

    @property
    def token_bytes(self) -> int:
        wide = 2 * self.heads * self.value_dim + 2 * self.key_heads * self.key_dim
        return (wide + 2 * self.heads) * ACTIVATIONS.itemsize

    @property
    def param_bytes(self) -> int:
        return 2 * self.heads * 4

    def rings(self, draw: Draw, *lead: int, ring_len: int) -> tuple[Tensor, ...]:
        """u_ring, k_ring, g_ring; keys of length about 1."""
        keys = draw.normal(*lead, self.key_heads, ring_len, self.key_dim) * self.key_dim**-0.5
        return (draw.normal(*lead, self.heads, ring_len, self.value_dim), keys,
                -draw.uniform(0.01, 0.5, *lead, self.heads, ring_len))

    def inputs(self, draw: Draw, rows: int, tokens: int) -> tuple[Tensor, ...]:
        key = rows, tokens, self.key_heads, self.key_dim
        gate = rows, tokens, self.heads
        return (draw.normal(*key), draw.normal(*key), draw.normal(*gate, self.value_dim), draw.normal(*gate),
                draw.normal(*gate))

    def params(self, draw: Draw, *lead: int) -> tuple[Tensor, ...]:
        return draw.uniform(-2.0, 1.0, *lead, self.heads), draw.normal(*lead, self.heads, dtype=torch.float32)

    def replay(self, state, rings, start, committed, inputs, params, slots, window) -> Tensor:
        return ops.gdn_replay(state, *rings, start, committed, *inputs, *params, slots, window=window,
                              scale=self.key_dim**-0.5, l2norm=True)

    def update(self, state, inputs, params, slots, token_slots=None) -> Tensor:
        return ops.gdn_update(state, *inputs, *params, slots, None, token_slots, scale=self.key_dim**-0.5, l2norm=True)

    def recur(self, state, inputs, params, slots) -> Tensor:
        """The reference recurrence, outputs in float32; `state` advances in place."""
        out = torch.empty_like(inputs[2], dtype=torch.float32)
        gdn_naive.gdn_update(state, *inputs, *params, slots, scale=self.key_dim**-0.5, l2norm=True, out=out)
        return out

    def materialize(self, op, state, rings, params, plan) -> None:
        op(state, *rings, *plan)


Family = Mamba2 | GatedDelta

GEOMETRIES: dict[str, Family] = {family.name: family for family in (
    Mamba2("nemotron-h", heads=128, dim=64, state_dim=128, groups=8),
    GatedDelta("qwen3-next", key_heads=16, heads=32, key_dim=128, value_dim=128),
    Mamba2("tiny-mamba2", heads=4, dim=16, state_dim=16, groups=2),
    GatedDelta("tiny-gdn", key_heads=2, heads=4, key_dim=16, value_dim=16),
)}


def state_bytes(family: Family, dtype: torch.dtype) -> int:
    """One slot's checkpoint."""
    first, second, third = family.state_shape
    return first * second * third * dtype.itemsize


def replay_bytes(family: Family, rows: int, tokens: int, dtype: torch.dtype, committed: float, flush: float) -> float:
    """Bytes that one replay launch must move; `committed` and `flush` are means over rows and steps."""
    state = state_bytes(family, dtype)
    row = state * (1 + flush) + family.ring_row_bytes * (committed + tokens) + family.token_bytes * tokens + 3 * 4
    return rows * row + family.param_bytes


def update_bytes(family: Family, rows: int, tokens: int, dtype: torch.dtype, written: int) -> float:
    """Bytes that one update launch must move; `written` states a row."""
    row = state_bytes(family, dtype) * (1 + written) + family.token_bytes * tokens + 4
    return rows * row + family.param_bytes
