"""Reference kernels of the Kimi Delta Attention ops: vectorised torch on any device.

As in the gated delta rule family, rows that are not live are dropped by `where` at the load. Decays are formed per
token as exp(G_t - G_j) with j <= t, which never exceeds 1; the factors exp(G_t) exp(-G_j) would overflow.
"""

import torch
from torch import Tensor

from ..gdn.naive import delta_update, normalised, value_heads
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


def gates(a, b, A_log, dt_bias, lower_bound) -> tuple[Tensor, Tensor]:
    """Raw a [..., HV, K] and b [..., HV] -> float32 log decay g [..., HV, K] and beta [..., HV]."""
    rate = torch.exp(A_log.float()).unsqueeze(-1)
    if lower_bound is None:
        g = -rate * process_dt(a, dt_bias, dt_softplus=True, dt_min=0.0, dt_max=None)
    else:
        g = lower_bound * torch.sigmoid(rate * (a.float() + dt_bias.float()))
    return g, torch.sigmoid(b.float())


def _read(checkpoint, carried, u, decayed, x) -> Tensor:
    """(checkpoint diag(carried) + sum of u_j decayed_j^T) x.

    checkpoint [B, HV, V, K], carried and x [B, HV, K], u [B, j, HV, V], decayed keys [B, j, HV, K] -> [B, HV, V].
    """
    weights = torch.einsum("bjhk,bhk->bjh", decayed, x)
    return torch.einsum("bhvk,bhk->bhv", checkpoint, carried * x) + torch.einsum("bjh,bjhv->bhv", weights, u)


def _fold(state, u, k, g) -> Tensor:
    """state [n, HV, V, K] advanced by rows u [n, j, HV, V], k [n, j, H, K], g [n, j, HV, K] (all 0: not live)."""
    passed = elapsed(g)
    total = passed[:, -1:]
    decayed = torch.exp((total - passed).float()) * value_heads(k, u.shape[2], 2)
    return torch.exp(total.float()).movedim(1, 2) * state + torch.einsum("njhv,njhk->nhvk", u, decayed)


def _load_history(u_ring, k_ring, g_ring, slots, rows, live) -> list[Tensor]:
    """Live ring rows as float32 [B, j, HV, V], [B, j, H, K], [B, j, HV, K]; dead rows read as 0."""
    at, live = slots.long()[:, None], live[..., None, None]
    return [torch.where(live, ring[at, :, rows].float(), 0.0) for ring in (u_ring, k_ring, g_ring)]


@takes_packed_rows("v", "q", "k", "a", "b")
def kda_replay(
    state, u_ring, k_ring, g_ring, ring_start, ring_committed, q, k, v, a, b, A_log, dt_bias, slots, query_lens=None,
    state_scale=None, seed=None, query_start_loc=None, *, window, scale, l2norm, max_query_len=None, lower_bound=None,
    philox_rounds=0, out,
) -> None:
    tokens, heads, ring_len = v.shape[1], v.shape[2], u_ring.shape[2]
    lens = row_lengths(slots, query_lens, tokens)
    start, committed = ring_start[slots], ring_committed[slots]
    committed = torch.where(slots > 0, committed, 0)
    real = torch.arange(tokens, device=v.device) < lens[:, None]
    real_head, real_item = real[..., None], real[..., None, None]
    past = ring_len - tokens
    rows, live = history_rows(start, committed, past, ring_len)

    g, beta = gates(a, b, A_log, dt_bias, lower_bound)
    g, beta = torch.where(real_item, g, 0.0), torch.where(real_head, beta, 0.0)
    # new keys and updates go through the ring's dtype first: what is replayed later must be what was used now
    new_k = torch.where(real_item, normalised(k, l2norm).to(k_ring.dtype).float(), 0.0)
    new_q = torch.where(real_item, normalised(q, l2norm) * scale, 0.0)
    new_v = torch.where(real_item, v.float(), 0.0)
    old_u, old_k, old_g = _load_history(u_ring, k_ring, g_ring, slots, rows, live)
    keys, queries = value_heads(torch.cat([old_k, new_k], 1), heads, 2), value_heads(new_q, heads, 2)

    checkpoint = load_state(state, slots, state_scale)
    checkpoint = torch.where((slots > 0)[:, None, None, None], checkpoint, 0.0)
    passed = elapsed(torch.cat([old_g, g], 1))
    u = torch.cat([old_u, torch.zeros_like(new_v)], 1)
    o = torch.zeros_like(new_v)
    # decays differ by token, row and channel: one token at a time keeps them [B, j, HV, K]. A view of u, so that an
    # update reaches the next reads as the ring's dtype rounded it
    for t in range(tokens):
        here = past + t
        carried = torch.exp(passed[:, here].float())
        decayed = torch.exp((passed[:, here, None] - passed[:, : here + 1]).float()) * keys[:, : here + 1]
        known = u[:, : here + 1]
        update = beta[:, t].unsqueeze(-1) * (new_v[:, t] - _read(checkpoint, carried, known, decayed, keys[:, here]))
        u[:, here] = update.to(u_ring.dtype).float()
        o[:, t] = _read(checkpoint, carried, known, decayed, queries[:, t])
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
def kda_update(
    state, q, k, v, a, b, A_log, dt_bias, slots, query_lens=None, token_slots=None, query_start_loc=None, *, scale,
    l2norm, max_query_len=None, lower_bound=None, out,
) -> None:
    g, beta = gates(a, b, A_log, dt_bias, lower_bound)
    delta_update(state, q, k, v, g, beta, slots, query_lens, token_slots, scale, l2norm, out)


def kda_materialize(
    state, u_ring, k_ring, g_ring, src_slots, dst_slots, ring_start, count, layer_group, active_rows,
    state_scale=None, seed=None, *, philox_rounds=0,
) -> None:
    def fold(layer, current, source, rows, live):
        return _fold(current, *_load_history(u_ring[layer], k_ring[layer], g_ring[layer], source, rows, live))

    materialize_layers(state, shape_of(u_ring)[3], src_slots, dst_slots, ring_start, count, layer_group, active_rows,
                       state_scale, seed, philox_rounds, fold)
