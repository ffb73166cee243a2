"""Kimi Delta Attention token by token, one row, one head at a time, in float64.

The step of the gated delta rule's truth serves here: its e^g, a number a head there, is a vector over K here and scales
the columns of a head's state [V, K].
"""

import torch
from truth_gdn import corrected, decay_and_add, decoded, gdn_materialize, output
from truth_mamba2 import softplus
from truth_rows import takes_packed_rows

__all__ = ["corrected", "decay_and_add", "decoded", "kda_materialize", "kda_replay", "kda_update", "output"]

kda_materialize = gdn_materialize


def prepared(q, k, a, b, A_log, dt_bias, scale, l2norm, lower_bound):
    """The recurrence's own inputs: scaled queries, keys, log decay [.., HV, K] and beta."""
    if l2norm:
        q = q / torch.sqrt((q * q).sum(-1, keepdim=True) + 1e-6)
        k = k / torch.sqrt((k * k).sum(-1, keepdim=True) + 1e-6)
    rate = torch.exp(A_log)[:, None]
    if lower_bound is None:
        g = -rate * softplus(a + dt_bias)
    else:
        g = lower_bound / (1 + torch.exp(-rate * (a + dt_bias)))
    return q * scale, k, g, 1 / (1 + torch.exp(-b))


@takes_packed_rows("v", "q", "k", "a", "b")
def kda_replay(state, u_ring, k_ring, g_ring, ring_start, ring_committed, q, k, v, a, b, A_log, dt_bias, slots,
               query_lens, state_scale, seed, window, scale, l2norm, lower_bound, philox_rounds):
    rows, tokens = v.shape[:2]
    ring_len = u_ring.shape[2]
    o = torch.zeros_like(v)
    q, k, g, beta = prepared(q, k, a, b, A_log, dt_bias, scale, l2norm, lower_bound)
    checkpoints = decoded(state, state_scale)
    for row in range(rows):
        s = int(slots[row])
        real = tokens if query_lens is None else int(query_lens[row])
        if s == 0:
            continue
        start, committed = int(ring_start[s]), int(ring_committed[s])
        current = checkpoints[s]
        for j in range(committed):
            r = (start + j) % ring_len
            current = decay_and_add(current, u_ring[s, :, r], k_ring[s, :, r], g_ring[s, :, r])
        if real > 0 and committed + real > window and state_scale is None:
            state[s] = current
        for t in range(real):
            u = corrected(current, k[row, t], v[row, t], g[row, t], beta[row, t])
            current = decay_and_add(current, u, k[row, t], g[row, t])
            o[row, t] = output(current, q[row, t])
            r = (start + committed + t) % ring_len
            u_ring[s, :, r], k_ring[s, :, r], g_ring[s, :, r] = u, k[row, t], g[row, t]
    return o


@takes_packed_rows("v", "q", "k", "a", "b", "token_slots")
def kda_update(state, q, k, v, a, b, A_log, dt_bias, slots, query_lens, token_slots, scale, l2norm, lower_bound):
    rows, tokens = v.shape[:2]
    o = torch.zeros_like(v)
    q, k, g, beta = prepared(q, k, a, b, A_log, dt_bias, scale, l2norm, lower_bound)
    for row in range(rows):
        s = int(slots[row])
        real = tokens if query_lens is None else int(query_lens[row])
        if s == 0:
            continue
        current = state[s].clone()
        for t in range(real):
            u = corrected(current, k[row, t], v[row, t], g[row, t], beta[row, t])
            current = decay_and_add(current, u, k[row, t], g[row, t])
            o[row, t] = output(current, q[row, t])
            if token_slots is not None and token_slots[row, t] > 0:
                state[int(token_slots[row, t])] = current
        if token_slots is None and real > 0:
            state[s] = current
    return o
