"""Reference kernels of the Mamba-2 ops: vectorised torch on any device.

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


def _heads(per_group: Tensor, heads: int) -> Tensor:
    """[..., Gr, n] -> [..., H, n]: head h reads group h // (H / Gr)."""
    return per_group.repeat_interleave(heads // per_group.shape[-2], dim=-2)


def _fold(state, x, B, dt, A) -> Tensor:
    """state [n, H, P, N] advanced by rows x [n, j, H, P], B [n, j, Gr, N], dt [n, j, H] (0: not live); A [H]."""
    passed = elapsed(dt)
    total = passed[:, -1:]
    weight = torch.exp(A * (total - passed).float()) * dt
    outer = torch.einsum("njhp,njhs->nhps", x * weight.unsqueeze(-1), _heads(B, A.shape[-1]))
    return torch.exp(A * total[:, 0].float())[..., None, None] * state + outer


def _load_history(x_ring, B_ring, dt_ring, slots, rows, live) -> tuple[Tensor, Tensor, Tensor]:
    """Live ring rows as float32 [B, j, H, P], [B, j, Gr, N], [B, j, H]; dead rows read as 0."""
    at = slots.long()[:, None]
    x = torch.where(live[..., None, None], x_ring[at, :, rows].float(), 0.0)
    B = torch.where(live[..., None, None], B_ring[at, :, rows].float(), 0.0)
    return x, B, torch.where(live[..., None], dt_ring[at, :, rows], 0.0)


@takes_packed_rows("x", "dt", "B", "C", "z")
def mamba2_replay(
    state, x_ring, B_ring, dt_ring, ring_start, ring_committed, x, dt, A, B, C, D, z, dt_bias, slots, query_lens=None,
    state_scale=None, seed=None, query_start_loc=None, *, window, max_query_len=None, dt_softplus=True, dt_min=0.0,
    dt_max=None, philox_rounds=0, out,
) -> None:
    tokens, heads, ring_len = x.shape[1], x.shape[2], x_ring.shape[2]
    lens = row_lengths(slots, query_lens, tokens)
    start, committed = ring_start[slots], ring_committed[slots]
    committed = torch.where(slots > 0, committed, 0)
    real = torch.arange(tokens, device=x.device) < lens[:, None]
    rows, live = history_rows(start, committed, ring_len - tokens, ring_len)

    # new tokens go through the ring's dtype first: what is replayed later must be what was used now
    step = torch.where(real[..., None], process_dt(dt, dt_bias, dt_softplus, dt_min, dt_max), 0.0)
    new_x = torch.where(real[..., None, None], x.to(x_ring.dtype).float(), 0.0)
    new_B = torch.where(real[..., None, None], B.to(B_ring.dtype).float(), 0.0)
    new_C = torch.where(real[..., None, None], C.float(), 0.0)
    old_x, old_B, old_dt = _load_history(x_ring, B_ring, dt_ring, slots, rows, live)
    all_x, all_B = torch.cat([old_x, new_x], 1), torch.cat([old_B, new_B], 1)
    all_dt = torch.cat([old_dt, step], 1)

    passed = elapsed(all_dt)
    now = passed[:, -tokens:]
    checkpoint = load_state(state, slots, state_scale)
    checkpoint = torch.where((slots > 0)[:, None, None, None], checkpoint, 0.0)
    y = torch.einsum("bhpn,bthn->bthp", checkpoint, _heads(new_C, heads)) * torch.exp(A * now.float()).unsqueeze(-1)

    index = torch.arange(all_dt.shape[1], device=x.device)
    seen = index <= index[-tokens:, None]
    exponent = A * (now[:, :, None] - passed[:, None]).float()
    decay = torch.exp(torch.where(seen[..., None], exponent, -torch.inf))
    overlap = torch.einsum("btgn,bjgn->btjg", new_C, all_B).unsqueeze(-1)
    weight = decay * all_dt[:, None] * overlap.expand(*overlap.shape[:-1], heads // overlap.shape[3]).flatten(3)
    y = y + torch.einsum("btjh,bjhp->bthp", weight, all_x)
    if D is not None:
        y = y + D.float()[:, None] * torch.where(real[..., None, None], x.float(), 0.0)
    if z is not None:
        gate = z.float()
        y = y * (gate * torch.sigmoid(gate))
    out.copy_(torch.where(real[..., None, None], y, 0.0))

    flush = flushing_rows(committed, lens, window)
    if flush.numel():
        folded = _fold(checkpoint[flush], old_x[flush], old_B[flush], old_dt[flush], A)
        store_state(state, slots[flush].long(), folded, state_scale, seed, philox_rounds)
    row, token, at, physical = append_rows(slots, start, committed, lens, tokens, ring_len)
    x_ring[at, :, physical] = x[row, token].to(x_ring.dtype)
    B_ring[at, :, physical] = B[row, token].to(B_ring.dtype)
    dt_ring[at, :, physical] = step[row, token]


@takes_packed_rows("x", "dt", "B", "C", "z", "token_slots")
def mamba2_update(
    state, x, dt, A, B, C, D, z, dt_bias, slots, query_lens=None, token_slots=None, query_start_loc=None, *,
    max_query_len=None, dt_softplus=True, dt_min=0.0, dt_max=None, out,
) -> None:
    tokens, heads = x.shape[1], x.shape[2]
    lens = row_lengths(slots, query_lens, tokens)
    step = process_dt(dt, dt_bias, dt_softplus, dt_min, dt_max)
    current = load_state(state, slots, None)
    for t in range(tokens):
        real = (t < lens)[:, None, None]
        outer = (step[:, t, :, None] * x[:, t].float()).unsqueeze(-1) * _heads(B[:, t].float(), heads).unsqueeze(-2)
        advanced = torch.exp(A * step[:, t])[..., None, None] * current + outer
        current = torch.where(real.unsqueeze(-1), advanced, current)
        y = torch.einsum("bhpn,bhn->bhp", current, _heads(C[:, t].float(), heads))
        if D is not None:
            y = y + D.float()[:, None] * x[:, t].float()
        if z is not None:
            gate = z[:, t].float()
            y = y * (gate * torch.sigmoid(gate))
        out[:, t] = torch.where(real, y, 0.0)
        if token_slots is not None:
            keep = ((t < lens) & (token_slots[:, t] > 0)).nonzero().squeeze(1)
            store_state(state, token_slots[keep, t].long(), current[keep], None, None, 0)
    if token_slots is None:
        keep = (lens > 0).nonzero().squeeze(1)
        store_state(state, slots[keep].long(), current[keep], None, None, 0)


def mamba2_materialize(
    state, x_ring, B_ring, dt_ring, A, src_slots, dst_slots, ring_start, count, layer_group, active_rows,
    state_scale=None, seed=None, *, philox_rounds=0,
) -> None:
    def fold(layer, current, source, rows, live):
        history = _load_history(x_ring[layer], B_ring[layer], dt_ring[layer], source, rows, live)
        return _fold(current, *history, A[layer])

    materialize_layers(state, shape_of(x_ring)[3], src_slots, dst_slots, ring_start, count, layer_group, active_rows,
                       state_scale, seed, philox_rounds, fold)
