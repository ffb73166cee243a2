"""The scans of prompts, one token at a time, in the dtype of the inputs."""

import torch


def ssd_loop(x, dt, A, B, C, state, edges=None):
    """One token at a time, in the dtype of the inputs, by the recurrence as it is written in the specification.

    edges: [B, E] numbers of tokens, after which the states are returned too."""
    batch, tokens, heads, head_dim = x.shape
    groups, state_dim = B.shape[2:]
    state = x.new_zeros(batch, heads, head_dim, state_dim) if state is None else state
    outputs, states = [], [state]
    for t in range(tokens):
        read = [h // (heads // groups) for h in range(heads)]
        b, c = B[:, t, read], C[:, t, read]
        decay = torch.exp(A * dt[:, t])[..., None, None]
        state = decay * state + dt[:, t, :, None, None] * x[:, t, :, :, None] * b[:, :, None, :]
        outputs.append((state * c[:, :, None, :]).sum(-1))
        states.append(state)
    return torch.stack(outputs, 1), state, *at_edges(states, edges)


def delta_loop(q, k, v, g, beta, state, edges=None):
    """The gated delta rule, one token at a time, in the dtype of the inputs; edges as in `ssd_loop`.

    g: [B, T, HV], or a decay for each key channel, [B, T, HV, K]."""
    batch, tokens, heads, value_dim = v.shape
    read = [h // (heads // k.shape[2]) for h in range(heads)]
    state = v.new_zeros(batch, heads, value_dim, k.shape[-1]) if state is None else state
    outputs, states = [], [state]
    for t in range(tokens):
        keys, queries = k[:, t, read], q[:, t, read]
        decay = torch.exp(g[:, t])
        state = (decay[..., None, None] if g.dim() == 3 else decay[:, :, None, :]) * state
        u = beta[:, t, :, None] * (v[:, t] - (state * keys[:, :, None, :]).sum(-1))
        state = state + u[..., None] * keys[:, :, None, :]
        outputs.append((state * queries[:, :, None, :]).sum(-1))
        states.append(state)
    return torch.stack(outputs, 1), state, *at_edges(states, edges)


def at_edges(states, edges):
    """Nothing, or the states [B, E, ...] of each row after its numbers of tokens."""
    return () if edges is None else (torch.stack(states, 1)[torch.arange(len(edges))[:, None], edges.long()],)


def ssd_prefill(x, dt, A, B, C, initial_state, edges):
    no_edges = torch.zeros(len(x), 0, dtype=torch.int64)
    return ssd_loop(x, dt, A, B, C, initial_state, no_edges if edges is None else edges)


def delta_prefill(q, k, v, g, beta, initial_state, edges):
    no_edges = torch.zeros(len(v), 0, dtype=torch.int64)
    return delta_loop(q, k, v, g, beta, initial_state, no_edges if edges is None else edges)
