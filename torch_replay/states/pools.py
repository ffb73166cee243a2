"""Tensors that hold the states of a context's layers: the context's own, or a host's."""

from dataclasses import dataclass
from typing import Iterator, NamedTuple, Optional, Sequence, Union

import torch
from torch import Tensor

from ..ops.check import EIGHT_BIT
from .state_spec import StateLayer

Pool = Union[Tensor, Sequence[Tensor]]  # [L, S, ...] of all layers, or L layer tensors [S, ...]


@dataclass(frozen=True)
class ContextPools:
    """The pools of L layers and S slots that a `ReplayContext` works on.

    Each is stacked, [L, S, ...], or a list of L layer tensors [S, ...] that differ in their addresses alone: views of a
    host's pages with any strides, at any multiple of the element's size. Below, what a layer holds. Within a compiled
    step give a state and its rings a storage each: what two views of one storage write costs a copy of it.

    state: [S, heads, head_dim, state_dim]. rings: [S, heads, R, head_dim], [S, groups, R, state_dim] and float32
    [S, heads, R], for KDA [S, heads, R, state_dim]. conv_ring: [S, conv_dim, conv_len], None where the host keeps the
    inputs of the convolutions. state_scale: float32 [S, heads, head_dim], for 8-bit states and no others.
    """

    state: Pool
    rings: tuple[Pool, Pool, Pool]
    conv_ring: Optional[Pool]
    state_scale: Optional[Pool] = None

    @classmethod
    def allocate(cls, spec: StateLayer, layers: int, slots: int, device, conv: bool = True) -> "ContextPools":
        """Zeroed stacked pools, each tensor a storage of its own."""
        state, scale = allocate_states(spec, layers, slots, device)
        shapes = ring_shapes(spec, slots)
        dtypes = (spec.ring_dtype, spec.ring_dtype, torch.float32)
        rings = tuple(torch.zeros(layers, *shape, dtype=dtype, device=device) for shape, dtype in zip(shapes, dtypes))
        return cls(state, rings, allocate_conv_ring(spec, layers, slots, device) if conv else None, scale)

    def named(self) -> Iterator[tuple[str, Pool]]:
        """Name and pool of all that are there, in the order in which slots are copied."""
        pools = {"state": self.state, "state_scale": self.state_scale,
                 **{f"rings[{i}]": ring for i, ring in enumerate(self.rings)}, "conv_ring": self.conv_ring}
        return ((name, pool) for name, pool in pools.items() if pool is not None)

    def check(self, spec: StateLayer, layers: int, slots: int) -> None:
        """Raises ValueError or TypeError, naming the pool, if they are not what `layers` layers like `spec` need."""
        shapes, wide = ring_shapes(spec, slots), (slots, spec.heads, spec.head_dim)
        expected = {"state": ((*wide, spec.state_dim), spec.state_dtype), "state_scale": (wide, torch.float32),
                    "conv_ring": ((slots, spec.conv_dim, spec.conv_len), spec.conv_dtype)}
        for i, shape in enumerate(shapes):
            expected[f"rings[{i}]"] = shape, torch.float32 if i == 2 else spec.ring_dtype
        if len(self.rings) != 3:
            raise ValueError(f"pools: rings holds {len(self.rings)} pools, expected 3")
        if (self.state_scale is not None) != (spec.state_dtype in EIGHT_BIT):
            raise ValueError(f"pools: state_scale is {'None' if self.state_scale is None else 'given'}, expected row "
                             f"scales exactly for 8-bit states, not for {spec.state_dtype}")
        device = layers_of(self.state)[0].device if len(self.state) else None
        for name, pool in self.named():
            if len(pool) != layers:
                raise ValueError(f"pools: {name} has {len(pool)} layers, expected {layers}")
            shape, dtype = expected[name]
            first = layers_of(pool)[0]
            for index, layer in enumerate(layers_of(pool)):
                where = f"pools: layer {index} of {name}"
                if not isinstance(layer, Tensor):
                    raise TypeError(f"{where} is {type(layer).__name__}, expected Tensor")
                for what, got, want in (("shape", tuple(layer.shape), shape), ("dtype", layer.dtype, dtype),
                                        ("device", layer.device, device), ("strides", layer.stride(), first.stride())):
                    if got != want:
                        raise ValueError(f"{where} has {what} {got}, expected {want}")


class LayerMemory(NamedTuple):
    """What one layer's ops take, [S, ...] each; see `ContextPools`. ring_start, ring_committed: [S] int32."""

    state: Tensor
    rings: tuple[Tensor, Tensor, Tensor]
    conv_ring: Optional[Tensor]
    state_scale: Optional[Tensor]
    ring_start: Tensor
    ring_committed: Tensor


def layers_of(pool: Pool) -> Sequence[Tensor]:
    """The layers [S, ...] of a pool."""
    return pool.unbind() if isinstance(pool, Tensor) else pool


def copy_leading(source: ContextPools, target: ContextPools, slots: int) -> None:
    """The first `slots` slots of `source` into `target`, bit for bit, pool by pool; those that one lacks are left out.
    A layer that is the same memory in both stays as it is."""
    old = dict(source.named())
    for name, pool in target.named():
        for layer, before in zip(layers_of(pool), layers_of(old.get(name, ()))):
            if layer.data_ptr() != before.data_ptr() or layer.stride() != before.stride():
                layer[:slots].copy_(before[:slots])


def ring_shapes(spec: StateLayer, slots: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of a layer's three rings."""
    wide = (slots, spec.heads, spec.ring_len)
    return ((*wide, spec.head_dim), (slots, spec.groups, spec.ring_len, spec.state_dim),
            (*wide, *spec.decay_shape[1:]))


def allocate_states(spec: StateLayer, layers: int, slots: int, device) -> tuple[Tensor, Optional[Tensor]]:
    """Zeroed checkpoints [L, S, heads, head_dim, state_dim] and, for 8-bit ones, row scales of 1."""
    shape = (layers, slots, spec.heads, spec.head_dim, spec.state_dim)
    scale = torch.ones(shape[:4], dtype=torch.float32, device=device) if spec.state_dtype in EIGHT_BIT else None
    return torch.zeros(shape, dtype=spec.state_dtype, device=device), scale


def allocate_conv_ring(spec: StateLayer, layers: int, slots: int, device) -> Tensor:
    """Zeroed conv rings [L, S, channels, conv_len]."""
    return torch.zeros(layers, slots, spec.conv_dim, spec.conv_len, dtype=spec.conv_dtype, device=device)
