"""Short causal convolution over a ring of raw inputs, and copying and zeroing of whole slots.

The ring of a slot holds inputs by absolute position: position p in column p % Rc. Rejecting draft tokens therefore
needs nothing: the next step starts at the accepted position and overwrites what was rejected.

Sizes: S slots, D channels, Rc ring columns, B batch rows, T tokens a row, L layers, G cache groups. Slot 0 is null.
"""

from typing import Optional

from torch import Tensor

from .. import check
from ..check import FLOAT, INDEX, Shapes, TokenShapes, require
from ..layers import Layers, dtype_of, shape_of
from ..registry import register
from . import naive


def _conv_values(conv_ring, x, weight, bias, positions, slots, query_lens=None, query_start_loc=None, *, silu,
                 max_query_len=None) -> None:
    op = "conv_replay"
    check.require_range(op, "slots", slots, 0, conv_ring.shape[0] - 1)
    check.require_distinct_slots(op, "slots", slots)
    check.require_range(op, "positions", positions[slots > 0], 0, 2**62)
    check.check_tokens(op, x, query_lens, query_start_loc, max_query_len)


@register(mutates=("conv_ring",), cpu=naive.conv_replay,
          cuda="torch_replay.ops.conv.kernels", check_values=_conv_values, out=True)
def conv_replay(
    conv_ring: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    positions: Tensor,
    slots: Tensor,
    query_lens: Optional[Tensor] = None,
    query_start_loc: Optional[Tensor] = None,
    *,
    silu: bool,
    max_query_len: Optional[int] = None,
) -> Tensor:
    """Causal depthwise convolution of T tokens a row, continuing from the inputs that the ring holds.

    y_t = bias + sum_w weight[:, w] * input[position + t - (width - 1) + w], then silu(y) = y * sigmoid(y) if asked
    for. Inputs at positions before 0 are zero, whatever the ring holds. New inputs are rounded to the ring's dtype
    before they are used; sums are float32.

    Args:
        conv_ring: [S, D, Rc] raw inputs, float32, bfloat16 or float16, Rc >= width - 1 + T. Mutated: the row's q
            tokens are stored, accepted or not.
        x: [B, T, D], or packed [tokens, D], any strides. weight: [D, width], the newest input last. bias: [D] or None.
        positions: [B] position of the row's first token. slots: [B], slot of each row; 0 is a padded row.
        query_lens: [B] real tokens q a row in [0, T], the first ones; None: T, or of packed rows all.
        query_start_loc: [B + 1], tokens are packed: row b owns tokens query_start_loc[b] .. query_start_loc[b + 1] - 1.
        max_query_len: T, a bound on the tokens of a packed row; larger ones are an error that only a CPU sees.
        silu: apply silu to y.

    Returns:
        y: like x, contiguous; 0 for padded rows, for tokens from q on and for those that belong to no row.

    Raises:
        ValueError: shapes, dtypes, a ring too short; on a CPU also slots, positions and lengths out of range and slots
            named twice.
    """
    shapes = TokenShapes("conv_replay", query_start_loc, max_query_len)
    shapes("conv_ring", conv_ring, "S D Rc", FLOAT)
    shapes.tokens("x", x, "D")
    shapes("weight", weight, "D width", FLOAT)
    shapes("bias", bias, "D", FLOAT)
    shapes("positions", positions, "B", INDEX)
    shapes.rows("x", slots, query_lens, query_start_loc)
    require(shapes.width >= 1, shapes.op, "weight", f"of width {shapes.width}", "1 or more")
    require(shapes.Rc >= shapes.width - 1 + shapes.T, shapes.op, "conv_ring", f"of {shapes.Rc} columns",
            f"at least width - 1 + T = {shapes.width - 1 + shapes.T}")
    return x.new_empty(x.shape)


def _copy_values(pool, src_slots, dst_slots, layer_group, active_rows) -> None:
    op = "copy_slots"
    groups, rows = src_slots.shape
    check.require_range(op, "layer_group", layer_group, 0, groups - 1)
    check.require_range(op, "active_rows", active_rows, -1, rows - 1)
    check.require_own_memory(op, "pool", pool, layer_group)
    listed = naive.listed_rows(active_rows)
    for group in range(groups):
        source, target = src_slots[group, listed], dst_slots[group, listed]
        check.require_range(op, "src_slots", source, 0, shape_of(pool)[1] - 1)
        check.require_range(op, "dst_slots", target, 0, shape_of(pool)[1] - 1)
        check.require_distinct_slots(op, "dst_slots", target[source > 0])


@register(mutates=("pool",), cpu=naive.copy_slots, cuda="torch_replay.ops.conv.kernels", check_values=_copy_values)
def copy_slots(pool: Layers, src_slots: Tensor, dst_slots: Tensor, layer_group: Tensor, active_rows: Tensor) -> None:
    """Copies whole slots of a pool, bit for bit, of all layers at once: pool[l, dst] = pool[l, src].

    Layer l takes its slots from row layer_group[l] of src_slots and dst_slots. All reads come before all writes: one
    row's destination may be another row's source (1 to 2 and 2 to 3 in one call), and each gets what was there before.

    Args:
        pool: [L, S, ...], or a list of L tensors [S, ...] (see ops/layers.py), of any dtype of 1, 2, 4 or 8 bytes and
            any number of trailing dims. Mutated: destinations.
        src_slots, dst_slots: [G, B]; a null slot (0) on either side skips. Destinations of one group are distinct.
        layer_group: [L], group of each layer.
        active_rows: [B], the batch rows to treat; the first -1 ends the list.

    Raises:
        ValueError: shapes and dtypes; on a CPU also slots, groups and rows out of range and a destination named twice.
    """
    shapes = Shapes("copy_slots")
    _check_pool(shapes, pool, layer_group)
    shapes("src_slots", src_slots, "G B", INDEX)
    shapes("dst_slots", dst_slots, "G B", INDEX)
    shapes("active_rows", active_rows, "B", INDEX)


def _check_pool(shapes: Shapes, pool: Layers, layer_group: Tensor) -> None:
    """A pool [L, S, ...] of any dtype that moves as integers, and the groups of its layers."""
    op, stacked = shapes.op, not isinstance(pool, (list, tuple))
    if not stacked:
        shapes.equal_layers("pool", pool)
    shapes.same_device("pool", pool if stacked else pool[0])
    dims, shape, dtype = ("[L, S, ...]" if stacked else "[S, ...] a layer"), shape_of(pool), dtype_of(pool)
    require(len(shape) >= 2, op, "pool", f"of shape {shape[not stacked:]}", dims)
    require(not dtype.is_complex and dtype.itemsize in naive.SAME_WIDTH, op, "pool", f"of dtype {dtype}",
            "a dtype of 1, 2, 4 or 8 bytes, not complex")
    shapes("layer_group", layer_group, "L", INDEX)
    require(layer_group.shape[0] == shape[0], op, "layer_group", f"of shape {tuple(layer_group.shape)}",
            f"[L] with L = {shape[0]}")


def _zero_values(pool, slots, layer_group) -> None:
    check.require_range("zero_slots", "layer_group", layer_group, 0, slots.shape[0] - 1)
    check.require_range("zero_slots", "slots", slots, 0, shape_of(pool)[1] - 1)


@register(mutates=("pool",), cpu=naive.zero_slots, cuda="torch_replay.ops.conv.kernels", check_values=_zero_values)
def zero_slots(pool: Layers, slots: Tensor, layer_group: Tensor) -> None:
    """Zeroes whole slots of a pool, of all layers at once: pool[l, slots[layer_group[l], b]] = 0 for every row b.

    An op, because plain torch would gather the slots to tell null ones apart: rows times a state of all layers.

    Args:
        pool: [L, S, ...], or a list of L tensors [S, ...] (see ops/layers.py), of any dtype of 1, 2, 4 or 8 bytes and
            any number of trailing dims. Mutated: the slots.
        slots: [G, B]; a null slot (0) skips. A slot may be named more than once.
        layer_group: [L], group of each layer.

    Raises:
        ValueError: shapes and dtypes; on a CPU also slots and groups out of range.
    """
    shapes = Shapes("zero_slots")
    _check_pool(shapes, pool, layer_group)
    shapes("slots", slots, "G B", INDEX)
