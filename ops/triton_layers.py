"""Triton: pools of all layers as kernel arguments, stacked or layer by layer."""

from typing import Optional

import triton
import triton.language as tl

from .layers import Layers, strides_of, tensors_of
from .triton_rounding import as_stored


@triton.jit
def layer_pointer(p_pool, layer, layer_stride, TYPE: tl.constexpr = None):
    """Where a layer begins. p_pool: a tuple, of one pointer to a stacked pool or of a pointer for each layer.

    A list costs a select a layer, on a scalar: no table of addresses has to lie on the device. TYPE: of the elements
    that strides count and the pointer points to, if not the pool's own.
    """
    p = p_pool[0]
    for i in tl.static_range(1, len(p_pool)):
        p = tl.where(layer == i, p_pool[i], p)
    if TYPE is not None:
        p = p.to(tl.pointer_type(TYPE), bitcast=True)
    return p + layer * layer_stride


def pool_arguments(pool: Optional[Layers], dims: int) -> tuple:
    """Two kernel arguments: a tuple of pointers, and one of `dims` strides (0 for a last dimension that is missing)."""
    if pool is None:
        return None, None
    return tuple(map(as_stored, tensors_of(pool))), (*strides_of(pool), 0)[:dims]
