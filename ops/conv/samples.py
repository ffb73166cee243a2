"""Sample inputs of the convolution and slot ops."""

import torch

from ..samples import Rng, layer_by_layer, pack_rows, query_lengths, row_slots, table


def conv(rng: Rng, rows=3, tokens=1, dim=12, width=4, ring_len=None, padded=0, ragged=False, strided=False, bias=True,
         silu=True, ring_dtype=None, index_dtype=torch.int32, far=50, packed=False):
    """Rows at positions 0, 1, width - 1 and anywhere; columns that no row may read hold NaN."""
    ring_len, slots = ring_len or width - 1 + tokens, rows + 2
    ring = torch.full((slots, dim, ring_len), float("nan"), dtype=torch.float32)
    where = row_slots(rng, rows, slots, padded, index_dtype)
    positions = rng.integers(0, far, rows, dtype=index_dtype)
    for row, position in zip(range(rows), (far, 0, 1, width - 1)):
        positions[row] = position
    for row in range(rows - padded):
        for position in range(max(0, int(positions[row]) - width + 1), int(positions[row])):
            ring[int(where[row]), :, position % ring_len] = rng.normal(dim, dtype=torch.float32).cpu()
    if strided:
        x = rng.normal(rows, tokens, 2 * dim + 3)[..., 2 : dim + 2]
    else:
        x = rng.normal(rows, tokens, dim)
    weight, bias = rng.normal(dim, width), rng.normal(dim) if bias else None
    lens = query_lengths(rng, rows, tokens) if ragged else None
    lens, starts, bound, x = pack_rows(rng, packed, lens, x, dtype=index_dtype)
    return (ring.to(rng.device, ring_dtype or rng.dtype), x, weight, bias, positions, where, lens, starts), dict(
        bound, silu=silu)


def slots(rng: Rng, layers=3, groups=2, rows=5, shape=(4, 6), dtype=None, index_dtype=torch.int32, strided=False,
          listed=None):
    """A chain within group 0, null slots on either side, unlisted rows that would break the pool."""
    count = 2 * rows + 1
    src, dst = (torch.zeros(groups, rows, dtype=index_dtype) for _ in range(2))
    for group in range(groups):
        order = [slot + 1 for slot in rng.permutation(count - 1)]
        src[group] = torch.tensor(order[:rows], dtype=torch.int64)
        dst[group] = torch.tensor(order[rows:], dtype=torch.int64)
    if rows > 3:
        dst[0, 0] = src[0, 1]
        src[0, 2], dst[groups - 1, 3] = 0, 0
    listed = rows - 1 if listed is None else listed
    active = rng.permutation(rows)[:listed] + [-1] + [0] * (rows - listed - 1)
    values = rng.normal(layers, count, *shape, scale=30.0, dtype=torch.float32)
    if strided:
        values = torch.stack([values, values + 1], -1)[..., 0]
    layer_group = torch.tensor([layer % groups for layer in range(layers)], dtype=index_dtype)
    pool = values.to(dtype or rng.dtype) if not strided else values
    return (pool, src.to(rng.device), dst.to(rng.device), layer_group.to(rng.device),
            rng.tensor(active[:rows], index_dtype)), {}


def zeroed(rng: Rng, layers=3, groups=2, rows=5, shape=(4, 6), dtype=None, index_dtype=torch.int32, strided=False):
    """Null slots among the rows, and a slot named twice; the null slot of the pool holds NaN."""
    slot_count = 2 * rows + 1
    at = rng.integers(1, slot_count, groups, rows, dtype=index_dtype)
    at[:, 1:2] = 0
    at[:, -1] = at[:, 0]
    values = rng.normal(layers, slot_count, *shape, scale=30.0, dtype=torch.float32)
    if strided:
        values = torch.stack([values, values + 1], -1)[..., 0]
    pool = values if strided else values.to(dtype or rng.dtype)
    if pool.is_floating_point():
        pool[:, 0] = float("nan")
    layer_group = torch.tensor([layer % groups for layer in range(layers)], dtype=index_dtype)
    return (pool, at, layer_group.to(rng.device)), {}


SAMPLES = table("conv_replay", conv, {
    "typical": dict(rows=4, dim=64),
    "spec_ragged_padded": dict(rows=5, tokens=4, ragged=True, padded=1, ring_len=11),
    "one_row_no_bias": dict(rows=1, dim=1, bias=False, silu=False),
    "odd_sizes": dict(rows=4, tokens=3, dim=33, width=5, ring_len=13),
    "width_1": dict(rows=3, tokens=2, width=1),
    "strided_int64": dict(rows=3, tokens=2, strided=True, index_dtype=torch.int64, far=2**40),
    "all_padded": dict(rows=2, padded=2),
    "packed_padded": dict(rows=5, tokens=4, packed=True, padded=1, ring_len=11),
    "packed_in_part_strided": dict(rows=4, tokens=20, packed=True, ragged=True, strided=True, index_dtype=torch.int64),
    "ring_bf16": dict(rows=4, tokens=2, ring_dtype=torch.bfloat16, ragged=True),
}) + table("copy_slots", slots, {
    "typical": dict(),
    "one_row": dict(layers=1, groups=1, rows=1, listed=1),
    "nothing_listed": dict(listed=0),
    "all_listed": dict(listed=5, index_dtype=torch.int64),
    "no_trailing_dims_int32": dict(shape=(), dtype=torch.int32),
    "strided_5d": dict(shape=(2, 3, 5), strided=True),
    "bf16": dict(dtype=torch.bfloat16, groups=3),
    "int8": dict(dtype=torch.int8),
    "fp8": dict(dtype=torch.float8_e4m3fn),
}) + table("zero_slots", zeroed, {
    "typical": dict(),
    "one_row": dict(layers=1, groups=1, rows=1),
    "no_trailing_dims_int64": dict(shape=(), dtype=torch.int32, index_dtype=torch.int64),
    "strided_5d": dict(shape=(2, 3, 5), strided=True),
    "bf16_many_rows": dict(dtype=torch.bfloat16, groups=3, rows=70, shape=(3, 5)),
    "long": dict(rows=3, shape=(3, 4100)),
    "fp8": dict(dtype=torch.float8_e4m3fn),
}) + table("copy_slots", layer_by_layer(slots, 0), {
    "layers": dict(layers=4),
    "layers_one_bf16": dict(layers=1, groups=1, dtype=torch.bfloat16),
    "layers_int8": dict(dtype=torch.int8, shape=(3, 7)),
    "layers_of_numbers": dict(shape=(), dtype=torch.int64),
}) + table("zero_slots", layer_by_layer(zeroed, 0), {
    "layers": dict(layers=4),
    "layers_one_bf16": dict(layers=1, groups=1, dtype=torch.bfloat16),
    "layers_long_int8": dict(dtype=torch.int8, shape=(3, 4101)),
})
