"""Mamba-2 token by token, one row, one head at a time, in float64."""

import torch
from truth_rows import takes_packed_rows


def softplus(x):
    return torch.where(x > 20, x, torch.log1p(torch.exp(torch.clamp(x, max=20.0))))


def processed(dt, bias, dt_softplus, dt_min, dt_max):
    if bias is not None:
        dt = dt + bias
    if dt_softplus:
        dt = softplus(dt)
    return dt.clamp(min=dt_min, max=dt_max)


def advance(state, x, B, dt, A):
    """state [H, P, N], x [H, P], B [Gr, N], dt [H], A [H] -> the next state."""
    ratio = len(A) // len(B)
    return torch.stack([
        torch.exp(A[h] * dt[h]) * state[h] + dt[h] * torch.outer(x[h], B[h // ratio]) for h in range(len(A))])


def output(state, x, C, D, z):
    ratio = len(x) // len(C)
    y = torch.stack([state[h] @ C[h // ratio] for h in range(len(x))])
    if D is not None:
        y = y + D[:, None] * x
    return y if z is None else y * z * torch.sigmoid(z)


def decoded(state, scale):
    return state.double() if scale is None else state.double() * scale.double().unsqueeze(-1)


@takes_packed_rows("x", "dt", "B", "C", "z")
def mamba2_replay(state, x_ring, B_ring, dt_ring, ring_start, ring_committed, x, dt, A, B, C, D, z, dt_bias, slots,
                  query_lens, state_scale, seed, window, dt_softplus, dt_min, dt_max, philox_rounds):
    rows, tokens = x.shape[:2]
    ring_len = x_ring.shape[2]
    y = torch.zeros_like(x)
    step = processed(dt, dt_bias, dt_softplus, dt_min, dt_max)
    checkpoints = decoded(state, state_scale)
    for b in range(rows):
        s = int(slots[b])
        q = tokens if query_lens is None else int(query_lens[b])
        if s == 0:
            continue
        start, committed = int(ring_start[s]), int(ring_committed[s])
        current = checkpoints[s]
        for j in range(committed):
            r = (start + j) % ring_len
            current = advance(current, x_ring[s, :, r], B_ring[s, :, r], dt_ring[s, :, r], A)
        if q > 0 and committed + q > window and state_scale is None:
            state[s] = current
        for t in range(q):
            current = advance(current, x[b, t], B[b, t], step[b, t], A)
            y[b, t] = output(current, x[b, t], C[b, t], D, None if z is None else z[b, t])
            r = (start + committed + t) % ring_len
            x_ring[s, :, r], B_ring[s, :, r], dt_ring[s, :, r] = x[b, t], B[b, t], step[b, t]
    return y


@takes_packed_rows("x", "dt", "B", "C", "z", "token_slots")
def mamba2_update(state, x, dt, A, B, C, D, z, dt_bias, slots, query_lens, token_slots, dt_softplus, dt_min, dt_max):
    rows, tokens = x.shape[:2]
    y = torch.zeros_like(x)
    step = processed(dt, dt_bias, dt_softplus, dt_min, dt_max)
    for b in range(rows):
        s = int(slots[b])
        q = tokens if query_lens is None else int(query_lens[b])
        if s == 0:
            continue
        current = state[s].clone()
        for t in range(q):
            current = advance(current, x[b, t], B[b, t], step[b, t], A)
            y[b, t] = output(current, x[b, t], C[b, t], D, None if z is None else z[b, t])
            if token_slots is not None and token_slots[b, t] > 0:
                state[int(token_slots[b, t])] = current
        if token_slots is None and q > 0:
            state[s] = current
    return y


def mamba2_materialize(state, x_ring, B_ring, dt_ring, A, src_slots, dst_slots, ring_start, count, layer_group,
                       active_rows, state_scale, seed, philox_rounds):
    for b in active_rows.tolist():
        if b < 0:
            break
        for layer, group in enumerate(layer_group.tolist()):
            src, dst, n = int(src_slots[group, b]), int(dst_slots[group, b]), int(count[group, b])
            if n < 0 or src == 0 or dst == 0:
                continue
            current = state[layer, src].clone()
            for j in range(n):
                r = (int(ring_start[group, b]) + j) % x_ring.shape[3]
                current = advance(
                    current, x_ring[layer, src, :, r], B_ring[layer, src, :, r], dt_ring[layer, src, :, r], A[layer])
            state[layer, dst] = current
