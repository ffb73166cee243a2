"""Sample inputs of the gated delta rule ops.

Keys have length about 1 and beta lies in (0, 1), so that the rule contracts and states stay of order 1.
"""

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


def tokens_of(rng: Rng, rows, tokens, key_heads, heads, key_dim, value_dim, strided=False, l2norm=True):
    """q, k, v, a, b as in `gdn_replay`; strided: column slices of one wide projection and of one [.., b a ..]."""
    inner, outer = key_heads * key_dim, heads * value_dim
    if strided:
        wide = rng.normal(rows, tokens, 2 * inner + outer + 3)
        both = rng.normal(rows, tokens, 2 * heads + 1)
        b, a = both[..., :heads], both[..., heads : 2 * heads]
        q, k, v = wide[..., :inner], wide[..., inner : 2 * inner], wide[..., 2 * inner : 2 * inner + outer]
    else:
        q, k, v = rng.normal(rows, tokens, inner), rng.normal(rows, tokens, inner), rng.normal(rows, tokens, outer)
        a, b = rng.normal(rows, tokens, heads), rng.normal(rows, tokens, heads)
    if not l2norm:
        k.mul_(key_dim**-0.5)
    return (q.unflatten(-1, (key_heads, key_dim)), k.unflatten(-1, (key_heads, key_dim)),
            v.unflatten(-1, (heads, value_dim)), a, b)


def parameters(rng: Rng, heads):
    """A_log and dt_bias: log decays between about -4 and -0.01 a token."""
    return rng.uniform(-2.0, 1.0, heads), rng.normal(heads)


def pools(rng: Rng, slots, key_heads, heads, key_dim, value_dim, ring_len, ring_dtype, lead=()):
    """Checkpoints in float32 and the three rings; `lead`: sizes in front of the slots."""
    state = rng.normal(*lead, slots, heads, value_dim, key_dim, dtype=torch.float32)
    u_ring = rng.normal(*lead, slots, heads, ring_len, value_dim, dtype=ring_dtype)
    k_ring = rng.normal(*lead, slots, key_heads, ring_len, key_dim, scale=key_dim**-0.5, dtype=ring_dtype)
    return state, u_ring, k_ring, -rng.uniform(0.01, 0.5, *lead, slots, heads, ring_len)


def interleaved(pool):
    """The same pool as one layer's part of a pool [S, 2, ...], so that slots do not follow each other in memory."""
    return None if pool is None else torch.stack([torch.ones_like(pool), pool], 1)[:, 1]


def replay(rng: Rng, rows=3, tokens=1, key_heads=2, heads=4, key_dim=32, value_dim=32, window=16, ring_len=None,
           slots=None, padded=0, ragged=False, strided=False, l2norm=True, state_dtype=torch.float32, ring_dtype=None,
           rounds=0, route_window=None, index_dtype=torch.int32, packed=False):
    ring_len = ring_len or window + tokens
    slots = slots or rows + 2
    start, committed = cursors(rng, slots, window, ring_len)
    values, *rings = pools(rng, slots, key_heads, heads, key_dim, value_dim, ring_len, ring_dtype or rng.dtype)
    values[0] = 1e4
    state, scale = encode_state(rng, values, state_dtype)
    poison_dead_rows(rings, start, committed, ring_len, 2)
    if strided:
        state, scale, *rings = [interleaved(pool) for pool in (state, scale, *rings)]
    tokens_in = tokens_of(rng, rows, tokens, key_heads, heads, key_dim, value_dim, strided, l2norm)
    A_log, bias = parameters(rng, heads)
    where = row_slots(rng, rows, slots, padded, index_dtype)
    lens = query_lengths(rng, rows, tokens) if ragged else None
    seed = rng.tensor([1234567890123], torch.int64) if rounds else None
    kwargs = dict(window=window if route_window is None else route_window, scale=key_dim**-0.5, l2norm=l2norm,
                  philox_rounds=rounds)
    lens, starts, bound, *tokens_in = pack_rows(rng, packed, lens, *tokens_in, dtype=index_dtype)
    return (state, *rings, start, committed, *tokens_in, A_log, bias, where, lens, scale, seed, starts), kwargs | bound


def update(rng: Rng, rows=3, tokens=1, key_heads=2, heads=4, key_dim=32, value_dim=32, padded=0, ragged=False,
           strided=False, l2norm=True, keep=False, state_dtype=torch.float32, packed=False):
    slots = rows * (tokens + 1) + 1
    state = rng.normal(slots, heads, value_dim, key_dim, dtype=torch.float32)
    state[0] = float("nan")
    tokens_in = tokens_of(rng, rows, tokens, key_heads, heads, key_dim, value_dim, strided, l2norm)
    A_log, bias = parameters(rng, heads)
    where = rng.tensor([slot + 1 for slot in rng.permutation(slots - 1)])
    kept = where[rows:].view(rows, tokens).clone()
    kept[0, 0] = 0
    where = where[:rows].clone()
    where[rows - padded :] = 0
    lens = query_lengths(rng, rows, tokens) if ragged else None
    lens, starts, bound, *tokens_in, kept = pack_rows(rng, packed, lens, *tokens_in, kept if keep else None)
    return (state.to(state_dtype), *tokens_in, A_log, bias, where, lens, kept, starts), dict(
        bound, scale=key_dim**-0.5, l2norm=l2norm)


def materialize(rng: Rng, layers=3, groups=2, rows=5, key_heads=2, heads=4, key_dim=32, value_dim=32, window=16,
                ring_len=20, state_dtype=torch.float32, ring_dtype=None, rounds=0):
    slots = 2 * rows + 1
    values, *rings = pools(rng, slots, key_heads, heads, key_dim, value_dim, ring_len, ring_dtype or rng.dtype,
                           lead=(layers,))
    state, scale = encode_state(rng, values, state_dtype)
    src, dst, start, count, active = plan(rng, groups, rows, slots, window, ring_len)
    layer_group = rng.tensor([layer % groups for layer in range(layers)])
    poison_unplanned_rows(rings, src, start, count, layer_group, ring_len)
    seed = rng.tensor([77], torch.int64) if rounds else None
    return (state, *rings, src, dst, start, count, layer_group, active, scale, seed), dict(philox_rounds=rounds)


SAMPLES = table("gdn_replay", replay, {
    "typical": dict(rows=4, key_dim=128, value_dim=128),
    "spec_ragged_padded": dict(rows=6, tokens=4, ragged=True, padded=1),
    "one_row_equal_heads": dict(rows=1, key_heads=1, heads=1),
    "odd_sizes": dict(rows=3, tokens=3, key_heads=3, heads=6, key_dim=33, value_dim=17, window=7, ring_len=13),
    "wide_values_no_l2norm": dict(rows=3, tokens=3, key_heads=2, heads=2, key_dim=24, value_dim=48, l2norm=False),
    "window_4_token_4": dict(rows=3, tokens=4, window=4, ring_len=8),
    "token_16": dict(rows=2, tokens=16, window=16, ring_len=37),
    "strided": dict(rows=3, tokens=2, strided=True, index_dtype=torch.int64),
    "strided_no_l2norm_ragged": dict(rows=3, tokens=3, key_heads=1, heads=3, strided=True, ragged=True, l2norm=False),
    "packed_padded": dict(rows=5, tokens=4, packed=True, padded=1),
    "packed_in_part_strided": dict(rows=4, tokens=4, packed=True, ragged=True, strided=True, index_dtype=torch.int64),
    "packed_token_1": dict(rows=4, packed=True),
    "small_batch_route": dict(rows=3, tokens=2, ring_len=20, route_window=0),
    "all_padded": dict(rows=2, padded=2),
    "state_bf16": dict(rows=3, state_dtype=torch.bfloat16),
    "state_fp16_stochastic": dict(rows=3, state_dtype=torch.float16, rounds=10),
    "state_int8": dict(rows=3, tokens=2, value_dim=40, state_dtype=torch.int8),
    "state_fp8_stochastic": dict(rows=3, tokens=2, state_dtype=torch.float8_e4m3fn, rounds=7),
    "ring_bf16": dict(rows=3, tokens=4, ring_dtype=torch.bfloat16),
}) + table("gdn_update", update, {
    "typical": dict(rows=4, key_dim=128, value_dim=128),
    "spec_in_place_ragged_padded": dict(rows=7, tokens=4, ragged=True, padded=1),
    "spec_kept_ragged_padded": dict(rows=6, tokens=4, ragged=True, padded=1, keep=True),
    "one_row_equal_heads_no_l2norm": dict(rows=1, key_heads=1, heads=1, l2norm=False),
    "odd_sizes_strided": dict(rows=3, tokens=3, key_heads=3, heads=6, key_dim=33, value_dim=17, strided=True),
    "state_fp16": dict(rows=3, tokens=2, state_dtype=torch.float16, keep=True),
    "packed_padded": dict(rows=5, tokens=4, packed=True, padded=1),
    "packed_in_part_kept_strided": dict(rows=4, tokens=4, packed=True, ragged=True, strided=True, keep=True),
}) + table("gdn_materialize", materialize, {
    "typical": dict(),
    "one_row": dict(layers=1, groups=1, rows=1),
    "odd_sizes": dict(layers=2, groups=1, rows=4, key_heads=1, heads=3, key_dim=33, value_dim=17, window=7,
                      ring_len=11),
    "state_bf16": dict(state_dtype=torch.bfloat16, ring_dtype=torch.bfloat16),
    "state_fp16_stochastic": dict(state_dtype=torch.float16, rounds=10),
    "state_int8": dict(state_dtype=torch.int8),
    "state_fp8": dict(state_dtype=torch.float8_e4m3fn),
}) + table("gdn_materialize", layer_by_layer(materialize, 0, 1, 2, 3, 10), {
    "layers": dict(layers=4, groups=2),
    "layers_one": dict(layers=1, groups=1, rows=2),
    "layers_odd_bf16": dict(layers=2, state_dtype=torch.bfloat16, key_heads=1, heads=3, key_dim=33, value_dim=17),
    "layers_int8": dict(state_dtype=torch.int8),
    "layers_fp8_stochastic": dict(state_dtype=torch.float8_e4m3fn, rounds=7),
})
