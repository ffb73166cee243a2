"""The ops that have a C++ kernel. Each takes the op's arguments and `out`, and returns whether it served the call:
False, with nothing written, leaves it to the reference kernel."""

import math

from .build import call

CHECKED = ("ring_commit",)  # kernels that check their arguments' values themselves, and refuse what is not right
FEW_TOKENS = 64  # beyond, the reference's matrix products over whole prompts are faster
GATES = {"head": 0, "channel": 1, "channel_bounded": 2}


def _call_on_rows(name: str, tensors: tuple, query_start_loc, out, integers: tuple = (), floats: tuple = ()) -> bool:
    """`call` of a kernel that writes the tokens of packed rows and leaves those of no row alone."""
    if query_start_loc is not None:
        out.zero_()
    return call(name, (*tensors, query_start_loc, out), integers, floats)


def mamba2_replay(
    state, x_ring, B_ring, dt_ring, ring_start, ring_committed, x, dt, A, B, C, D, z, dt_bias, slots, query_lens=None,
    state_scale=None, seed=None, query_start_loc=None, *, window, max_query_len=None, dt_softplus=True, dt_min=0.0,
    dt_max=None, philox_rounds=0, out,
) -> bool:
    if state_scale is not None or philox_rounds:
        return False
    tensors = (state, x_ring, B_ring, dt_ring, ring_start, ring_committed, x, dt, A, B, C, D, z, dt_bias, slots,
               query_lens)
    return _call_on_rows("mamba2_replay", tensors, query_start_loc, out, (dt_softplus, window),
                         (dt_min, math.inf if dt_max is None else dt_max))


def mamba2_update(
    state, x, dt, A, B, C, D, z, dt_bias, slots, query_lens=None, token_slots=None, query_start_loc=None, *,
    max_query_len=None, dt_softplus=True, dt_min=0.0, dt_max=None, out,
) -> bool:
    return _call_on_rows("mamba2_update", (state, token_slots, x, dt, A, B, C, D, z, dt_bias, slots, query_lens),
                         query_start_loc, out, (dt_softplus,), (dt_min, math.inf if dt_max is None else dt_max))


def gdn_replay(
    state, u_ring, k_ring, g_ring, ring_start, ring_committed, q, k, v, a, b, A_log, dt_bias, slots, query_lens=None,
    state_scale=None, seed=None, query_start_loc=None, *, window, scale, l2norm, max_query_len=None, philox_rounds=0,
    out,
) -> bool:
    if state_scale is not None or philox_rounds:
        return False
    tensors = (state, u_ring, k_ring, g_ring, ring_start, ring_committed, q, k, v, a, b, A_log, dt_bias, slots,
               query_lens)
    return _call_on_rows("delta_replay", tensors, query_start_loc, out, (GATES["head"], l2norm, window), (scale, 0.0))


def gdn_update(
    state, q, k, v, a, b, A_log, dt_bias, slots, query_lens=None, token_slots=None, query_start_loc=None, *, scale,
    l2norm, max_query_len=None, out,
) -> bool:
    return _call_on_rows("delta_update", (state, token_slots, q, k, v, a, b, A_log, dt_bias, slots, query_lens),
                         query_start_loc, out, (GATES["head"], l2norm), (scale, 0.0))


def kda_replay(
    state, u_ring, k_ring, g_ring, ring_start, ring_committed, q, k, v, a, b, A_log, dt_bias, slots, query_lens=None,
    state_scale=None, seed=None, query_start_loc=None, *, window, scale, l2norm, max_query_len=None, lower_bound=None,
    philox_rounds=0, out,
) -> bool:
    if state_scale is not None or philox_rounds:
        return False
    gate = GATES["channel" if lower_bound is None else "channel_bounded"]
    tensors = (state, u_ring, k_ring, g_ring, ring_start, ring_committed, q, k, v, a, b, A_log, dt_bias, slots,
               query_lens)
    return _call_on_rows("delta_replay", tensors, query_start_loc, out, (gate, l2norm, window),
                         (scale, lower_bound or 0.0))


def kda_update(
    state, q, k, v, a, b, A_log, dt_bias, slots, query_lens=None, token_slots=None, query_start_loc=None, *, scale,
    l2norm, max_query_len=None, lower_bound=None, out,
) -> bool:
    gate = GATES["channel" if lower_bound is None else "channel_bounded"]
    return _call_on_rows("delta_update", (state, token_slots, q, k, v, a, b, A_log, dt_bias, slots, query_lens),
                         query_start_loc, out, (gate, l2norm), (scale, lower_bound or 0.0))


def conv_replay(
    conv_ring, x, weight, bias, positions, slots, query_lens=None, query_start_loc=None, *, silu, max_query_len=None,
    out,
) -> bool:
    tensors = (conv_ring, x, weight, bias, positions, slots, query_lens)
    return _call_on_rows("conv_replay", tensors, query_start_loc, out, (silu,))


def write_kv(cache, k, v, slot_mapping) -> bool:
    return call("write_kv", (cache, k, v, slot_mapping))


def swa_attention(q, cache, indices, lens, *, scale, out) -> bool:
    return len(q) <= FEW_TOKENS and call("swa_attention", (q, cache, indices, lens, out), (), (scale,))


def paged_attention(q, cache, block_table, seq_lens, query_start_loc, query_lens=None, *, scale, out) -> bool:
    tensors = (q, cache, block_table, seq_lens, query_start_loc, query_lens, out)
    return len(q) <= FEW_TOKENS and call("paged_attention", tensors, (), (scale,))


def swa_indices(
    indices, lens, seq_lens, query_start_loc, block_table, slot_mapping, replay_start=None, query_lens=None, *, window,
    block_size,
) -> bool:
    return call("swa_indices", (indices, lens, seq_lens, query_start_loc, block_table, slot_mapping, replay_start,
                                query_lens), (window, block_size))


def prepare_positions(positions, seq_lens, idx_mapping, query_start_loc, num_computed, query_lens=None) -> bool:
    return call("prepare_positions", (positions, seq_lens, idx_mapping, query_start_loc, num_computed, query_lens))


def compute_slot_mappings(
    slot_mappings, block_tables, query_start_loc, positions, block_sizes, query_lens=None
) -> bool:
    return call("compute_slot_mappings", (slot_mappings, block_tables, query_start_loc, positions, block_sizes,
                                          query_lens))


def ring_commit(
    ring_start, ring_committed, src_slots, dst_slots, plan_start, plan_count, block_tables, query_start_loc, query_lens,
    num_computed, num_accepted, is_prefilling, live_cols, idx_mapping, *, block_size, window, ring_len, post_step,
    materialize,
) -> bool:
    return call("ring_commit", (ring_start, ring_committed, src_slots, dst_slots, plan_start, plan_count, block_tables,
                                query_start_loc, query_lens, num_computed, num_accepted, is_prefilling, live_cols,
                                idx_mapping), (block_size, window, ring_len, post_step, materialize))
