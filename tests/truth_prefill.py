"""Prefill with the decode ops' inputs, token by token, one row, one head at a time, in float64."""

import torch
import truth_gdn
import truth_kda
import truth_mamba2

__all__ = ["conv_prefill", "gdn_prefill", "kda_prefill", "mamba2_prefill"]


def spans(x, slots, query_lens, starts):
    """Of every row that owns tokens: (row, slot, index of each of its tokens in x)."""
    for row, slot in enumerate(slots.tolist()):
        if slot and starts is not None:
            first, last = int(starts[row]), int(starts[row + 1])
            last = last if query_lens is None else first + int(query_lens[row])
            yield row, slot, [(token,) for token in range(first, last)]
        elif slot:
            count = x.shape[1] if query_lens is None else int(query_lens[row])
            yield row, slot, [(row, token) for token in range(count)]


def recurrence(x, state, state_scale, ring_start, ring_committed, slots, query_lens, has_state, starts, step):
    """Runs `step(state of a slot, token's index) -> (state, output)`; returns the outputs, laid out like x."""
    out = torch.zeros_like(x)
    stored = truth_mamba2.decoded(state, state_scale)
    for row, slot, tokens in spans(x, slots, query_lens, starts):
        current = stored[slot] if has_state is not None and has_state[row] else torch.zeros_like(stored[slot])
        for token in tokens:
            current, out[token] = step(current, token)
        if tokens:
            ring_start[slot] = ring_committed[slot] = 0
            if state_scale is None:
                state[slot] = current
    return out


def mamba2_prefill(state, ring_start, ring_committed, x, dt, A, B, C, D, z, dt_bias, slots, query_lens, has_state,
                   query_start_loc, state_scale, seed, max_query_len, dt_softplus, dt_min, dt_max, philox_rounds):
    steps = truth_mamba2.processed(dt, dt_bias, dt_softplus, dt_min, dt_max)

    def step(current, i):
        current = truth_mamba2.advance(current, x[i], B[i], steps[i], A)
        return current, truth_mamba2.output(current, x[i], C[i], D, None if z is None else z[i])

    return recurrence(x, state, state_scale, ring_start, ring_committed, slots, query_lens, has_state, query_start_loc,
                      step)


def delta_prefill(prepared, state, ring_start, ring_committed, v, slots, query_lens, has_state, starts, state_scale):
    q, k, g, beta = prepared

    def step(current, i):
        u = truth_gdn.corrected(current, k[i], v[i], g[i], beta[i])
        current = truth_gdn.decay_and_add(current, u, k[i], g[i])
        return current, truth_gdn.output(current, q[i])

    return recurrence(v, state, state_scale, ring_start, ring_committed, slots, query_lens, has_state, starts, step)


def gdn_prefill(state, ring_start, ring_committed, q, k, v, a, b, A_log, dt_bias, slots, query_lens, has_state,
                query_start_loc, state_scale, seed, max_query_len, scale, l2norm, philox_rounds):
    prepared = truth_gdn.prepared(q, k, a, b, A_log, dt_bias, scale, l2norm)
    return delta_prefill(prepared, state, ring_start, ring_committed, v, slots, query_lens, has_state, query_start_loc,
                         state_scale)


def kda_prefill(state, ring_start, ring_committed, q, k, v, a, b, A_log, dt_bias, slots, query_lens, has_state,
                query_start_loc, state_scale, seed, max_query_len, scale, l2norm, lower_bound, philox_rounds):
    prepared = truth_kda.prepared(q, k, a, b, A_log, dt_bias, scale, l2norm, lower_bound)
    return delta_prefill(prepared, state, ring_start, ring_committed, v, slots, query_lens, has_state, query_start_loc,
                         state_scale)


def conv_prefill(conv_ring, x, weight, bias, positions, slots, query_lens, query_start_loc, max_query_len, silu):
    y = torch.zeros_like(x)
    width, ring_len = weight.shape[1], conv_ring.shape[2]
    for row, slot, tokens in spans(x, slots, query_lens, query_start_loc):
        first = int(positions[row])
        inputs = {p: conv_ring[slot, :, p % ring_len].clone() for p in range(max(0, first - width + 1), first)}
        for position, token in enumerate(tokens, first):
            inputs[position] = conv_ring[slot, :, position % ring_len] = x[token].clone()
            total = torch.zeros(x.shape[-1], dtype=torch.float64) if bias is None else bias.clone()
            for w in range(width):
                if position - (width - 1) + w >= 0:
                    total = total + weight[:, w] * inputs[position - (width - 1) + w]
            y[token] = total / (1 + torch.exp(-total)) if silu else total
    return y
