"""Sample inputs of the Mamba-2 ops."""

import torch

from ..samples import (
    Rng,
    cursors,
    encode_state,
    layer_by_layer,
    pack_rows,
    plan,
    poison_dead_rows,
    poison_unplanned_rows,
    query_lengths,
    row_slots,
    table,
)


def tokens_of(rng: Rng, rows, tokens, heads, dim, state_dim, groups, strided=False):
    """x, dt, B, C as in `mamba2_replay`; strided: column slices of one wide projection and an expanded dt."""
    if not strided:
        return (rng.normal(rows, tokens, heads, dim), rng.normal(rows, tokens, heads),
                rng.normal(rows, tokens, groups, state_dim), rng.normal(rows, tokens, groups, state_dim))
    inner, side = heads * dim, groups * state_dim
    wide = rng.normal(rows, tokens, inner + 2 * side + 3)
    x = wide[..., :inner].unflatten(-1, (heads, dim))
    B = wide[..., inner : inner + side].unflatten(-1, (groups, state_dim))
    C = wide[..., inner + side : inner + 2 * side].unflatten(-1, (groups, state_dim))
    return x, rng.normal(rows, tokens, 1).expand(rows, tokens, heads), B, C


def replay(rng: Rng, rows=3, tokens=1, heads=4, dim=32, state_dim=16, groups=2, window=16, ring_len=None, slots=None,
           padded=0, ragged=False, strided=False, optional=True, state_dtype=torch.float32, ring_dtype=None, rounds=0,
           route_window=None, index_dtype=torch.int32, dt_max=None, packed=False):
    ring_len = ring_len or window + tokens
    slots = slots or rows + 2
    start, committed = cursors(rng, slots, window, ring_len)
    values = rng.normal(slots, heads, dim, state_dim, dtype=torch.float32)
    values[0] = 1e4
    state, scale = encode_state(rng, values, state_dtype)
    ring_dtype = ring_dtype or rng.dtype
    x_ring = rng.normal(slots, heads, ring_len, dim, dtype=ring_dtype)
    B_ring = rng.normal(slots, groups, ring_len, state_dim, dtype=ring_dtype)
    dt_ring = rng.uniform(0.01, 0.5, slots, heads, ring_len)
    poison_dead_rows((x_ring, B_ring, dt_ring), start, committed, ring_len, 2)
    x, dt, B, C = tokens_of(rng, rows, tokens, heads, dim, state_dim, groups, strided)
    A = -rng.uniform(0.1, 2.0, heads)
    given = (rng.normal(heads), rng.normal(rows, tokens, heads, dim), rng.normal(heads))
    D, z, bias = given if optional else (None, None, None)
    where = row_slots(rng, rows, slots, padded, index_dtype)
    lens = query_lengths(rng, rows, tokens) if ragged else None
    seed = rng.tensor([1234567890123], torch.int64) if rounds else None
    kwargs = dict(window=window if route_window is None else route_window, philox_rounds=rounds, dt_max=dt_max)
    lens, starts, bound, x, dt, B, C, z = pack_rows(rng, packed, lens, x, dt, B, C, z, dtype=index_dtype)
    return (state, x_ring, B_ring, dt_ring, start, committed, x, dt, A, B, C, D, z, bias, where, lens, scale,
            seed, starts), kwargs | bound


def update(rng: Rng, rows=3, tokens=1, heads=4, dim=32, state_dim=16, groups=2, padded=0, ragged=False, strided=False,
           optional=True, keep=False, state_dtype=torch.float32, packed=False):
    slots = rows * (tokens + 1) + 1
    state = rng.normal(slots, heads, dim, state_dim, dtype=torch.float32)
    state[0] = float("nan")
    x, dt, B, C = tokens_of(rng, rows, tokens, heads, dim, state_dim, groups, strided)
    A = -rng.uniform(0.1, 2.0, heads)
    given = (rng.normal(heads), rng.normal(rows, tokens, heads, dim), rng.normal(heads))
    D, z, bias = given if optional else (None, None, None)
    where = rng.tensor([slot + 1 for slot in rng.permutation(slots - 1)])
    kept = where[rows:].view(rows, tokens).clone()
    kept[0, 0] = 0
    where = where[:rows].clone()
    where[rows - padded :] = 0
    lens = query_lengths(rng, rows, tokens) if ragged else None
    kept = kept if keep else None
    lens, starts, bound, x, dt, B, C, z, kept = pack_rows(rng, packed, lens, x, dt, B, C, z, kept)
    return (state.to(state_dtype), x, dt, A, B, C, D, z, bias, where, lens, kept, starts), bound


def materialize(rng: Rng, layers=3, groups=2, rows=5, heads=4, dim=32, state_dim=16, state_groups=2, window=16,
                ring_len=20, state_dtype=torch.float32, rounds=0):
    slots = 2 * rows + 1
    state, scale = encode_state(rng, rng.normal(layers, slots, heads, dim, state_dim, dtype=torch.float32), state_dtype)
    x_ring = rng.normal(layers, slots, heads, ring_len, dim)
    B_ring = rng.normal(layers, slots, state_groups, ring_len, state_dim)
    dt_ring = rng.uniform(0.01, 0.5, layers, slots, heads, ring_len)
    src, dst, start, count, active = plan(rng, groups, rows, slots, window, ring_len)
    seed = rng.tensor([77], torch.int64) if rounds else None
    layer_group = rng.tensor([layer % groups for layer in range(layers)])
    poison_unplanned_rows((x_ring, B_ring, dt_ring), src, start, count, layer_group, ring_len)
    return (state, x_ring, B_ring, dt_ring, -rng.uniform(0.1, 2.0, layers, heads), src, dst, start, count, layer_group,
            active, scale, seed), dict(philox_rounds=rounds)


SAMPLES = table("mamba2_replay", replay, {
    "typical": dict(rows=4, dim=64, state_dim=128, groups=1),
    "spec_ragged_padded": dict(rows=5, tokens=4, ragged=True, padded=1),
    "one_row_no_optionals": dict(rows=1, heads=1, groups=1, optional=False),
    "odd_sizes": dict(rows=3, tokens=3, heads=6, dim=33, state_dim=17, groups=3, window=7, ring_len=13),
    "window_4_token_4": dict(rows=3, tokens=4, window=4, ring_len=8),
    "token_16": dict(rows=2, tokens=16, window=16, ring_len=37),
    "strided": dict(rows=3, tokens=2, strided=True, index_dtype=torch.int64),
    "packed_padded": dict(rows=5, tokens=4, packed=True, padded=1),
    "packed_in_part_strided": dict(rows=4, tokens=4, packed=True, ragged=True, strided=True, index_dtype=torch.int64),
    "packed_token_1": dict(rows=4, packed=True, optional=False),
    "small_batch_route": dict(rows=3, tokens=2, ring_len=20, route_window=0),
    "all_padded": dict(rows=2, padded=2),
    "state_bf16_clamped": dict(rows=3, state_dtype=torch.bfloat16, dt_max=0.1),
    "state_fp16_stochastic": dict(rows=3, state_dtype=torch.float16, rounds=10),
    "state_int8": dict(rows=3, tokens=2, state_dtype=torch.int8),
    "state_fp8_stochastic": dict(rows=3, tokens=2, state_dtype=torch.float8_e4m3fn, rounds=7),
    "ring_bf16": dict(rows=3, tokens=2, ring_dtype=torch.bfloat16),
}) + table("mamba2_update", update, {
    "typical": dict(rows=4, dim=64, state_dim=128, groups=1),
    "spec_in_place_ragged_padded": dict(rows=7, tokens=4, ragged=True, padded=1),
    "spec_kept_ragged_padded": dict(rows=7, tokens=4, ragged=True, padded=1, keep=True),
    "one_row_no_optionals": dict(rows=1, heads=1, groups=1, optional=False),
    "odd_sizes_strided": dict(rows=3, tokens=3, heads=6, dim=33, state_dim=17, groups=3, strided=True),
    "state_fp16": dict(rows=3, tokens=2, state_dtype=torch.float16, keep=True),
    "packed_padded": dict(rows=5, tokens=4, packed=True, padded=1),
    "packed_in_part_kept_strided": dict(rows=4, tokens=4, packed=True, ragged=True, strided=True, keep=True),
}) + table("mamba2_materialize", materialize, {
    "typical": dict(),
    "one_row": dict(layers=1, groups=1, rows=1),
    "odd_sizes": dict(layers=2, groups=1, rows=4, heads=3, dim=33, state_dim=17, state_groups=1, window=7, ring_len=11),
    "state_bf16": dict(state_dtype=torch.bfloat16),
    "state_fp16_stochastic": dict(state_dtype=torch.float16, rounds=10),
    "state_int8": dict(state_dtype=torch.int8),
    "state_fp8": dict(state_dtype=torch.float8_e4m3fn),
}) + table("mamba2_materialize", layer_by_layer(materialize, 0, 1, 2, 3, 11), {
    "layers": dict(layers=4, groups=2),
    "layers_one": dict(layers=1, groups=1, rows=2),
    "layers_odd_bf16": dict(layers=2, state_dtype=torch.bfloat16, state_groups=1, heads=3, dim=33, state_dim=17),
    "layers_int8": dict(state_dtype=torch.int8),
    "layers_fp8_stochastic": dict(state_dtype=torch.float8_e4m3fn, rounds=7),
})
