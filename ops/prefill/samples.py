"""Sample inputs of the prefill ops: padded and packed rows, from zero and from the slot's own state."""

import torch

from ..mamba2.samples import tokens_of
from ..samples import Rng, encode_state, pack, query_lengths, row_slots, table


def _rows(rng: Rng, rows, tokens, padded, ragged, packed, index_dtype=torch.int32):
    """slots, query_lens, query_start_loc and the keywords of one call; packed rows are ragged, one of them empty."""
    slots = row_slots(rng, rows, rows + 2, padded, index_dtype)
    lens = query_lengths(rng, rows, tokens)
    if not packed:
        return slots, lens if ragged else None, None, {}
    return slots, lens - lens // 4 if ragged else None, pack(lens, dtype=index_dtype)[0], dict(max_query_len=tokens)


def _layout(tensor, starts):
    """[B, T, ...] as it is, or packed."""
    return tensor if starts is None else pack(starts.diff(), tensor)[1]


def _states(rng: Rng, rows, shape, state_dtype, with_state, rounds):
    """state, cursors, has_state, scale, seed; the null slot holds NaN where the dtype has it, cursors are anywhere."""
    values = rng.normal(rows + 2, *shape, dtype=torch.float32)
    state, scale = encode_state(rng, values, state_dtype)
    if state.is_floating_point() and scale is None:
        state[0] = float("nan")
    start, committed = rng.integers(0, 9, rows + 2), rng.integers(0, 9, rows + 2)
    flags = None
    if with_state:
        flags = rng.integers(0, 2, rows, dtype=torch.bool)
        flags[0] = True
        committed.zero_()
    return state, start, committed, flags, scale, rng.tensor([1234567890123], torch.int64) if rounds else None


def mamba2(rng: Rng, rows=3, tokens=70, heads=4, dim=8, state_dim=16, groups=2, padded=0, ragged=False, packed=False,
           strided=False, optional=True, with_state=True, state_dtype=torch.float32, rounds=0):
    state, start, committed, flags, scale, seed = _states(rng, rows, (heads, dim, state_dim), state_dtype, with_state,
                                                          rounds)
    x, dt, B, C = tokens_of(rng, rows, tokens, heads, dim, state_dim, groups, strided)
    given = (rng.normal(heads), rng.normal(rows, tokens, heads, dim), rng.normal(heads))
    D, z, bias = given if optional else (None, None, None)
    slots, lens, starts, kwargs = _rows(rng, rows, tokens, padded, ragged, packed)
    x, dt, B, C, z = (t if t is None else _layout(t, starts) for t in (x, dt, B, C, z))
    kwargs |= dict(philox_rounds=rounds, dt_max=None if optional else 0.5)
    return (state, start, committed, x, dt - 2, -rng.uniform(0.1, 2.0, heads), B, C, D, z, bias, slots, lens, flags,
            starts, scale, seed), kwargs


def delta(rng: Rng, kda=False, rows=3, tokens=40, key_heads=2, heads=4, key_dim=8, value_dim=12, padded=0, ragged=False,
          packed=False, strided=False, l2norm=True, with_state=True, state_dtype=torch.float32, rounds=0,
          lower_bound=None):
    state, start, committed, flags, scale, seed = _states(rng, rows, (heads, value_dim, key_dim), state_dtype,
                                                          with_state, rounds)
    q, k = (rng.normal(rows, tokens, key_heads, key_dim) for _ in "qk")
    if not l2norm:
        k = torch.nn.functional.normalize(k, dim=-1)
    v = rng.normal(rows, tokens, heads, value_dim + 3 * strided)[..., : value_dim]
    decay = (heads, key_dim) if kda else (heads,)
    a, b = rng.normal(rows, tokens, *decay), rng.normal(rows, tokens, heads)
    slots, lens, starts, kwargs = _rows(rng, rows, tokens, padded, ragged, packed)
    q, k, v, a, b = (_layout(t, starts) for t in (q, k, v, a, b))
    kwargs |= dict(scale=key_dim**-0.5, l2norm=l2norm, philox_rounds=rounds)
    if kda:
        kwargs["lower_bound"] = lower_bound
    return (state, start, committed, q, k, v, a, b, rng.uniform(-2.0, 1.0, heads, dtype=rng.dtype),
            rng.uniform(-3.0, 0.0, *decay, dtype=rng.dtype), slots, lens, flags, starts, scale, seed), kwargs


def kda(rng: Rng, **options):
    return delta(rng, True, **options)


def conv(rng: Rng, rows=3, tokens=13, dim=12, width=4, ring_len=6, padded=0, ragged=False, packed=False, strided=False,
         bias=True, silu=True, ring_dtype=None, far=50):
    """Rows at positions 0, 1 and anywhere; columns that no row may read hold NaN."""
    ring = torch.full((rows + 2, dim, ring_len), float("nan"), dtype=torch.float32)
    slots, lens, starts, kwargs = _rows(rng, rows, tokens, padded, ragged, packed, torch.int64 if strided else
                                        torch.int32)
    positions = rng.integers(0, far, rows)
    for row, position in zip(range(rows), (far, 0, 1)):
        positions[row] = position
    for row in range(rows - padded):
        for position in range(max(0, int(positions[row]) - width + 1), int(positions[row])):
            ring[int(slots[row]), :, position % ring_len] = rng.normal(dim, dtype=torch.float32).cpu()
    x = _layout(rng.normal(rows, tokens, dim + 5 * strided)[..., :dim], starts)
    return (ring.to(rng.device, ring_dtype or rng.dtype), x, rng.normal(dim, width), rng.normal(dim) if bias else None,
            positions, slots, lens, starts), kwargs | dict(silu=silu)


STATES = {
    "typical": dict(rows=4),
    "ragged_padded": dict(rows=5, tokens=19, ragged=True, padded=1, with_state=False),
    "packed_padded": dict(rows=5, tokens=19, packed=True, padded=1),
    "packed_in_part": dict(rows=4, tokens=9, packed=True, ragged=True),
    "one_token": dict(rows=2, tokens=1),
    "state_fp16_stochastic": dict(tokens=9, state_dtype=torch.float16, rounds=10),
    "state_int8": dict(tokens=9, ragged=True, state_dtype=torch.int8),
    "state_fp8": dict(tokens=9, ragged=True, state_dtype=torch.float8_e4m3fn),
}
SAMPLES = table("mamba2_prefill", mamba2, STATES | {
    "one_row_no_optionals": dict(rows=1, heads=1, groups=1, optional=False),
    "odd_sizes_strided": dict(rows=2, tokens=131, heads=3, groups=1, dim=5, state_dim=7, strided=True),
}) + table("gdn_prefill", delta, STATES | {
    "odd_sizes_strided": dict(rows=2, tokens=67, key_heads=1, heads=3, key_dim=5, value_dim=7, strided=True,
                              l2norm=False),
}) + table("kda_prefill", kda, STATES | {
    "odd_sizes_strided": dict(rows=2, tokens=37, key_heads=1, heads=3, key_dim=5, value_dim=7, strided=True,
                              l2norm=False, lower_bound=-5.0),
}) + table("conv_prefill", conv, {
    "typical": dict(rows=4),
    "ragged_padded": dict(rows=5, ragged=True, padded=1),
    "packed_padded": dict(rows=5, packed=True, padded=1),
    "packed_in_part": dict(rows=4, packed=True, ragged=True),
    "short_no_bias": dict(rows=4, tokens=2, bias=False, silu=False),
    "width_1_strided": dict(tokens=4, width=1, ring_len=1, strided=True),
    "ring_bf16": dict(ring_dtype=torch.bfloat16, ring_len=3),
})
