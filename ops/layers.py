"""Pools of all layers in either of two forms: stacked, one tensor [L, S, ...], or a list of L tensors [S, ...], for
instance the views that a host has of its own pages.

The tensors of a list share shape, dtype, device and strides. They differ in their address, which may be any multiple of
the element's size. An op that takes either form has two overloads with one body and one kernel: `default` for stacked
pools, `layers` for lists; both name in their schema what they write. The Python wrapper chooses, and takes lists beside
stacked pools.

In a compiled graph lists are written in place like stacked pools, if each layer that comes in as an input of the graph
has a storage of its own. Torch clones, or refuses, inputs of one storage of which several are written.

Layers of different groups may be one and the same memory, whose slots the groups share out: no slot may then be written
for one group and read or written for another in one call, which nobody checks.
"""

from typing import Union

import torch
from torch import Tensor

Layers = Union[Tensor, list[Tensor]]  # annotation of such an argument


def tensors_of(pool: Layers) -> tuple[Tensor, ...]:
    """The tensors that hold a pool: the stacked one, or one a layer."""
    return (pool,) if isinstance(pool, Tensor) else tuple(pool)


def shape_of(pool: Layers) -> tuple[int, ...]:
    """[L, S, ...] in both forms."""
    return tuple(pool.shape) if isinstance(pool, Tensor) else (len(pool), *pool[0].shape)


def strides_of(pool: Layers) -> tuple[int, ...]:
    """Strides that go with `shape_of`; 0 between the tensors of a list, which have addresses of their own."""
    return tuple(pool.stride()) if isinstance(pool, Tensor) else (0, *pool[0].stride())


def dtype_of(pool: Layers) -> torch.dtype:
    return (pool if isinstance(pool, Tensor) else pool[0]).dtype
