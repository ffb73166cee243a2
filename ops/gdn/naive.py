"""Reference kernels of the gated delta rule ops: vectorised torch on any device.

Rows that are not live may hold anything, NaN included, so they are dropped by `where` at the load, never by a
multiplication with zero.
"""

import torch
from torch import Tensor

from ..layers import shape_of
from ..rounding import load_state, store_state
from ..rows import (
    append_rows,
    elapsed,
    flushing_rows,
    history_rows,
    materialize_layers,
    process_dt,
    row_lengths,
    takes_packed_rows,
)


def gates(a, b, A_log, dt_bias) -> tuple[Tensor, Tensor]:
    """Raw a, b [..., HV] -> float32 log decay g = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b)."""
    step = process_dt(a, dt_bias, dt_softplus=True, dt_min=0.0, dt_max=None)
    return -torch.exp(A_log.float()) * step, torch.sigmoid(b.float())


def normalised(x: Tensor, l2norm: bool) -> Tensor:
    """x [..., K] as float32, divided by sqrt(sum x^2 + 1e-6) over K if l2norm."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) if l2norm else x


def value_heads(per_key_head: Tensor, heads: int, dim: int) -> Tensor:
    """H -> HV entries along `dim`: value head h reads key head h // (HV / H)."""
    return per_key_head.repeat_interleave(heads // per_key_head.shape[dim], dim=dim)


def _read(state: Tensor, keys: Tensor) -> Tensor:
    """state [n, HV, V, K] times keys [n, T, H, K] -> [n, T, HV, V]."""
    return torch.einsum("nhvk,nthk->nthv", state, value_heads(keys, state.shape[1], 2))


def _fold(state, u, k, g) -> Tensor:
    """state [n, HV, V, K] advanced by rows u [n, j, HV, V], k [n, j, H, K], g [n, j, HV] (all 0: not live)."""
    passed = elapsed(g)
    total = passed[:, -1:]
    weighted = torch.exp((total - passed).float()).unsqueeze(-1) * u
    outer = torch.einsum("njhv,njhk->nhvk", weighted, value_heads(k, u.shape[2], 2))
    return torch.exp(total[:, 0].float())[..., None, None] * state + outer


def _load_history(u_ring, k_ring, g_ring, slots, rows, live) -> tuple[Tensor, Tensor, Tensor]:
    """Live ring rows as float32 [B, j, HV, V], [B, j, H, K], [B, j, HV]; dead rows read as 0."""
    at = slots.long()[:, None]
    u = torch.where(live[..., None, None], u_ring[at, :, rows].float(), 0.0)
    k = torch.where(live[..., None, None], k_ring[at, :, rows].float(), 0.0)
    return u, k, torch.where(live[..., None], g_ring[at, :, rows], 0.0)


@takes_packed_rows("v", "q", "k", "a", "b")
def gdn_replay(
    state, u_ring, k_ring, g_ring, ring_start, ring_committed, q, k, v, a, b, A_log, dt_bias, slots, query_lens=None,
    state_scale=None, seed=None, query_start_loc=None, *, window, scale, l2norm, max_query_len=None, philox_rounds=0,
    out,
) -> None:
    tokens, heads, ring_len = v.shape[1], v.shape[2], u_ring.shape[2]
    lens = row_lengths(slots, query_lens, tokens)
    start, committed = ring_start[slots], ring_committed[slots]
    committed = torch.where(slots > 0, committed, 0)
    real = torch.arange(tokens, device=v.device) < lens[:, None]
    real_head, real_item = real[..., None], real[..., None, None]
    past = ring_len - tokens
    rows, live = history_rows(start, committed, past, ring_len)

    g, beta = gates(a, b, A_log, dt_bias)
    g, beta = torch.where(real_head, g, 0.0), torch.where(real_head, beta, 0.0)
    # new keys and updates go through the ring's dtype first: what is replayed later must be what was used now
    new_k = torch.where(real_item, normalised(k, l2norm).to(k_ring.dtype).float(), 0.0)
    new_q = torch.where(real_item, normalised(q, l2norm) * scale, 0.0)
    new_v = torch.where(real_item, v.float(), 0.0)
    old_u, old_k, old_g = _load_history(u_ring, k_ring, g_ring, slots, rows, live)
    all_k = torch.cat([old_k, new_k], 1)

    passed = elapsed(torch.cat([old_g, g], 1))
    now = passed[:, past:]
    index = torch.arange(ring_len, device=v.device)
    seen = index <= index[past:, None]
    exponent = (now[:, :, None] - passed[:, None]).float()
    decay = torch.exp(torch.where(seen[..., None], exponent, -torch.inf))  # [B, T, j, HV]

    def weights(x: Tensor) -> Tensor:
        """How much row j's u reaches a read at token t with x [B, T, H, K]: decay times (k_j . x_t), [B, T, j, HV]."""
        return decay * value_heads(torch.einsum("bthk,bjhk->btjh", x, all_k), heads, 3)

    checkpoint = load_state(state, slots, state_scale)
    checkpoint = torch.where((slots > 0)[:, None, None, None], checkpoint, 0.0)
    carried = torch.exp(now.float()).unsqueeze(-1)

    # (I + L) U = beta (V - carried S k - history), L strictly lower triangular (the UT form), solved by forward
    # substitution and not by a library solve: a row that is rounded to the ring's dtype must reach the next ones so
    against_k = weights(new_k)
    remainder = new_v - carried * _read(checkpoint, new_k)
    u = torch.cat([old_u, torch.zeros_like(new_v)], 1)
    for t in range(tokens):
        before = torch.einsum("bjh,bjhv->bhv", against_k[:, t, : past + t], u[:, : past + t])
        update = beta[:, t].unsqueeze(-1) * (remainder[:, t] - before)
        u[:, past + t] = update.to(u_ring.dtype).float()
    o = carried * _read(checkpoint, new_q) + torch.einsum("btjh,bjhv->bthv", weights(new_q), u)
    out.copy_(torch.where(real_item, o, 0.0))

    flush = flushing_rows(committed, lens, window)
    if flush.numel():
        folded = _fold(checkpoint[flush], old_u[flush], old_k[flush], old_g[flush])
        store_state(state, slots[flush].long(), folded, state_scale, seed, philox_rounds)
    row, token, at, physical = append_rows(slots, start, committed, lens, tokens, ring_len)
    u_ring[at, :, physical] = u[row, past + token].to(u_ring.dtype)
    k_ring[at, :, physical] = new_k[row, token].to(k_ring.dtype)
    g_ring[at, :, physical] = g[row, token]


@takes_packed_rows("v", "q", "k", "a", "b", "token_slots")
def gdn_update(
    state, q, k, v, a, b, A_log, dt_bias, slots, query_lens=None, token_slots=None, query_start_loc=None, *, scale,
    l2norm, max_query_len=None, out,
) -> None:
    g, beta = gates(a, b, A_log, dt_bias)
    delta_update(state, q, k, v, g.unsqueeze(-1), beta, slots, query_lens, token_slots, scale, l2norm, out)


def delta_update(state, q, k, v, g, beta, slots, query_lens, token_slots, scale, l2norm, out) -> None:
    """The delta rule token by token, the state written each time. g: log decay [B, T, HV, 1], or [B, T, HV, K]."""
    tokens, heads = v.shape[1], v.shape[2]
    lens = row_lengths(slots, query_lens, tokens)
    keys = value_heads(normalised(k, l2norm), heads, 2)
    queries = value_heads(normalised(q, l2norm) * scale, heads, 2)
    current = load_state(state, slots, None)
    for t in range(tokens):
        real = (t < lens)[:, None, None]
        decayed = torch.exp(g[:, t]).unsqueeze(-2) * current
        stored = torch.einsum("bhvk,bhk->bhv", decayed, keys[:, t])
        update = beta[:, t].unsqueeze(-1) * (v[:, t].float() - stored)
        advanced = decayed + update.unsqueeze(-1) * keys[:, t].unsqueeze(-2)
        current = torch.where(real.unsqueeze(-1), advanced, current)
        o = torch.einsum("bhvk,bhk->bhv", current, queries[:, t])
        out[:, t] = torch.where(real, o, 0.0)
        if token_slots is not None:
            keep = ((t < lens) & (token_slots[:, t] > 0)).nonzero().squeeze(1)
            store_state(state, token_slots[keep, t].long(), current[keep], None, None, 0)
    if token_slots is None:
        keep = (lens > 0).nonzero().squeeze(1)
        store_state(state, slots[keep].long(), current[keep], None, None, 0)


def gdn_materialize(
    state, u_ring, k_ring, g_ring, src_slots, dst_slots, ring_start, count, layer_group, active_rows,
    state_scale=None, seed=None, *, philox_rounds=0,
) -> None:
    def fold(layer, current, source, rows, live):
        return _fold(current, *_load_history(u_ring[layer], k_ring[layer], g_ring[layer], source, rows, live))

    materialize_layers(state, shape_of(u_ring)[3], src_slots, dst_slots, ring_start, count, layer_group, active_rows,
                       state_scale, seed, philox_rounds, fold)
