"""The gated delta rule token by token, one row, one head at a time, in float64."""

import torch
from truth_mamba2 import decoded, softplus
from truth_rows import takes_packed_rows

__all__ = ["decoded", "gdn_materialize", "gdn_replay", "gdn_update"]


def prepared(q, k, a, b, A_log, dt_bias, scale, l2norm):
    """The recurrence's own inputs: scaled queries, keys, log decay and beta."""
    if l2norm:
        q = q / torch.sqrt((q * q).sum(-1, keepdim=True) + 1e-6)
        k = k / torch.sqrt((k * k).sum(-1, keepdim=True) + 1e-6)
    return q * scale, k, -torch.exp(A_log) * softplus(a + dt_bias), 1 / (1 + torch.exp(-b))


def decay_and_add(state, u, k, g):
    """state [HV, V, K], u [HV, V], k [H, K], g [HV] -> the next state."""
    ratio = len(u) // len(k)
    return torch.stack([torch.exp(g[h]) * state[h] + torch.outer(u[h], k[h // ratio]) for h in range(len(u))])


def corrected(state, k, v, g, beta):
    """u [HV, V] of one token."""
    ratio = len(v) // len(k)
    return torch.stack([beta[h] * (v[h] - torch.exp(g[h]) * state[h] @ k[h // ratio]) for h in range(len(v))])


def output(state, q):
    ratio = len(state) // len(q)
    return torch.stack([state[h] @ q[h // ratio] for h in range(len(state))])


@takes_packed_rows("v", "q", "k", "a", "b")
def gdn_replay(state, u_ring, k_ring, g_ring, ring_start, ring_committed, q, k, v, a, b, A_log, dt_bias, slots,
               query_lens, state_scale, seed, window, scale, l2norm, philox_rounds):
    rows, tokens = v.shape[:2]
    ring_len = u_ring.shape[2]
    o = torch.zeros_like(v)
    q, k, g, beta = prepared(q, k, a, b, A_log, dt_bias, scale, l2norm)
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
def gdn_update(state, q, k, v, a, b, A_log, dt_bias, slots, query_lens, token_slots, scale, l2norm):
    rows, tokens = v.shape[:2]
    o = torch.zeros_like(v)
    q, k, g, beta = prepared(q, k, a, b, A_log, dt_bias, scale, l2norm)
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


def gdn_materialize(state, u_ring, k_ring, g_ring, src_slots, dst_slots, ring_start, count, layer_group, active_rows,
                    state_scale, seed, philox_rounds):
    for row in active_rows.tolist():
        if row < 0:
            break
        for layer, group in enumerate(layer_group.tolist()):
            src, dst, n = int(src_slots[group, row]), int(dst_slots[group, row]), int(count[group, row])
            if n < 0 or src == 0 or dst == 0:
                continue
            current = state[layer, src].clone()
            for j in range(n):
                r = (int(ring_start[group, row]) + j) % u_ring.shape[3]
                current = decay_and_add(current, u_ring[layer, src, :, r], k_ring[layer, src, :, r],
                                        g_ring[layer, src, :, r])
            state[layer, dst] = current
