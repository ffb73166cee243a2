"""Sample inputs of the Kimi Delta Attention ops: those of the gated delta rule with a decay per key channel.

`decay` makes every other channel lose about that much (log) a token, in the ring and in the new tokens, beside channels
that decay mildly: the case in which exp(-G) of a row overflows while other channels still carry it.
"""

import torch

from ..gdn import samples as gdn
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
    """q, k, v, a, b as in `kda_replay`; strided: column slices of wide projections."""
    q, k, v, _, b = gdn.tokens_of(rng, rows, tokens, key_heads, heads, key_dim, value_dim, strided, l2norm)
    a = rng.normal(rows, tokens, heads * key_dim + 3 * strided)[..., : heads * key_dim]
    return q, k, v, a.unflatten(-1, (heads, key_dim)), b


def parameters(rng: Rng, heads, key_dim, decay=0.0):
    """A_log and dt_bias: log decays between about -4 and -0.01 a token, and `decay` more in odd channels."""
    bias = rng.normal(heads, key_dim)
    bias[:, 1::2] += decay
    return rng.uniform(-2.0, 1.0, heads), bias


def pools(rng: Rng, slots, key_heads, heads, key_dim, value_dim, ring_len, ring_dtype, lead=(), decay=0.0):
    """Checkpoints in float32 and the three rings; `lead`: sizes in front of the slots."""
    state, u_ring, k_ring, _ = gdn.pools(rng, slots, key_heads, heads, key_dim, value_dim, ring_len, ring_dtype, lead)
    g_ring = -rng.uniform(0.01, 0.5, *lead, slots, heads, ring_len, key_dim)
    g_ring[..., 1::2] -= decay
    return state, u_ring, k_ring, g_ring


def replay(rng: Rng, rows=3, tokens=1, key_heads=2, heads=4, key_dim=32, value_dim=32, window=16, ring_len=None,
           slots=None, padded=0, ragged=False, strided=False, l2norm=True, state_dtype=torch.float32, ring_dtype=None,
           rounds=0, route_window=None, index_dtype=torch.int32, lower_bound=None, decay=0.0,
           packed=False):
    ring_len = ring_len or window + tokens
    slots = slots or rows + 2
    start, committed = cursors(rng, slots, window, ring_len)
    values, *rings = pools(rng, slots, key_heads, heads, key_dim, value_dim, ring_len, ring_dtype or rng.dtype,
                           decay=decay)
    values[0] = 1e4
    state, scale = encode_state(rng, values, state_dtype)
    poison_dead_rows(rings, start, committed, ring_len, 2)
    if strided:
        state, scale, *rings = [gdn.interleaved(pool) for pool in (state, scale, *rings)]
    tokens_in = tokens_of(rng, rows, tokens, key_heads, heads, key_dim, value_dim, strided, l2norm)
    A_log, bias = parameters(rng, heads, key_dim, decay)
    where = row_slots(rng, rows, slots, padded, index_dtype)
    lens = query_lengths(rng, rows, tokens) if ragged else None
    seed = rng.tensor([1234567890123], torch.int64) if rounds else None
    kwargs = dict(window=window if route_window is None else route_window, scale=key_dim**-0.5, l2norm=l2norm,
                  lower_bound=lower_bound, philox_rounds=rounds)
    lens, starts, bound, *tokens_in = pack_rows(rng, packed, lens, *tokens_in, dtype=index_dtype)
    return (state, *rings, start, committed, *tokens_in, A_log, bias, where, lens, scale, seed, starts), kwargs | bound


def update(rng: Rng, rows=3, tokens=1, key_heads=2, heads=4, key_dim=32, value_dim=32, padded=0, ragged=False,
           strided=False, l2norm=True, keep=False, state_dtype=torch.float32, lower_bound=None, decay=0.0,
           packed=False):
    args, kwargs = gdn.update(rng, rows, tokens, key_heads, heads, key_dim, value_dim, padded, ragged, strided, l2norm,
                              keep, state_dtype)
    state, *_, where, lens, kept, _ = args
    tokens_in = tokens_of(rng, rows, tokens, key_heads, heads, key_dim, value_dim, strided, l2norm)
    A_log, bias = parameters(rng, heads, key_dim, decay)
    lens, starts, bound, *tokens_in, kept = pack_rows(rng, packed, lens, *tokens_in, kept)
    return (state, *tokens_in, A_log, bias, where, lens, kept, starts), dict(kwargs | bound, lower_bound=lower_bound)


def materialize(rng: Rng, layers=3, groups=2, rows=5, key_heads=2, heads=4, key_dim=32, value_dim=32, window=16,
                ring_len=20, state_dtype=torch.float32, ring_dtype=None, rounds=0, decay=0.0):
    slots = 2 * rows + 1
    values, *rings = pools(rng, slots, key_heads, heads, key_dim, value_dim, ring_len, ring_dtype or rng.dtype,
                           lead=(layers,), decay=decay)
    state, scale = encode_state(rng, values, state_dtype)
    src, dst, start, count, active = plan(rng, groups, rows, slots, window, ring_len)
    layer_group = rng.tensor([layer % groups for layer in range(layers)])
    poison_unplanned_rows(rings, src, start, count, layer_group, ring_len)
    seed = rng.tensor([77], torch.int64) if rounds else None
    return (state, *rings, src, dst, start, count, layer_group, active, scale, seed), dict(philox_rounds=rounds)


SAMPLES = table("kda_replay", replay, {
    "typical": dict(rows=4, key_dim=128, value_dim=128),
    "spec_ragged_padded": dict(rows=6, tokens=4, ragged=True, padded=1),
    "one_row_equal_heads": dict(rows=1, key_heads=1, heads=1),
    "odd_sizes": dict(rows=3, tokens=3, key_heads=3, heads=6, key_dim=33, value_dim=17, window=7, ring_len=13),
    "lower_bound": dict(rows=4, tokens=3, ragged=True, lower_bound=-5.0),
    "wide_values_no_l2norm": dict(rows=3, tokens=3, key_heads=2, heads=2, key_dim=24, value_dim=48, l2norm=False),
    "window_4_token_4": dict(rows=3, tokens=4, window=4, ring_len=8),
    "token_16": dict(rows=2, tokens=16, window=16, ring_len=37),
    "strong_decay": dict(rows=3, tokens=4, decay=50.0),
    "strong_lower_bound": dict(rows=3, tokens=2, decay=50.0, lower_bound=-50.0),
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
}) + table("kda_update", update, {
    "typical": dict(rows=4, key_dim=128, value_dim=128),
    "spec_in_place_ragged_padded": dict(rows=7, tokens=4, ragged=True, padded=1),
    "spec_kept_ragged_padded_lower_bound": dict(rows=6, tokens=4, ragged=True, padded=1, keep=True, lower_bound=-5.0),
    "one_row_equal_heads_no_l2norm": dict(rows=1, key_heads=1, heads=1, l2norm=False),
    "odd_sizes_strided": dict(rows=3, tokens=3, key_heads=3, heads=6, key_dim=33, value_dim=17, strided=True),
    "strong_decay": dict(rows=3, tokens=3, decay=50.0),
    "state_fp16": dict(rows=3, tokens=2, state_dtype=torch.float16, keep=True),
    "packed_padded": dict(rows=5, tokens=4, packed=True, padded=1),
    "packed_in_part_kept_strided": dict(rows=4, tokens=4, packed=True, ragged=True, strided=True, keep=True),
}) + table("kda_materialize", materialize, {
    "typical": dict(),
    "one_row": dict(layers=1, groups=1, rows=1),
    "odd_sizes": dict(layers=2, groups=1, rows=4, key_heads=1, heads=3, key_dim=33, value_dim=17, window=7,
                      ring_len=11),
    "strong_decay": dict(decay=50.0),
    "state_bf16": dict(state_dtype=torch.bfloat16, ring_dtype=torch.bfloat16),
    "state_fp16_stochastic": dict(state_dtype=torch.float16, rounds=10),
    "state_int8": dict(state_dtype=torch.int8),
    "state_fp8": dict(state_dtype=torch.float8_e4m3fn),
}) + table("kda_materialize", layer_by_layer(materialize, 0, 1, 2, 3, 10), {
    "layers": dict(layers=4, groups=2),
    "layers_one": dict(layers=1, groups=1, rows=2),
    "layers_odd_bf16": dict(layers=2, state_dtype=torch.bfloat16, key_heads=1, heads=3, key_dim=33, value_dim=17),
    "layers_int8": dict(state_dtype=torch.int8),
    "layers_fp8_stochastic": dict(state_dtype=torch.float8_e4m3fn, rounds=7),
})
