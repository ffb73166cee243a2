"""Kernels of the prefill ops in plain torch, for any device: raw inputs are processed, then the chunked scans run.

Nothing waits for the device. Rows that may write nothing (null slots, no tokens) write back what was there.
"""

import torch
from torch import Tensor

from ..gdn import naive as gdn
from ..kda import naive as kda
from ..rounding import bits, load_state, round_state
from ..rows import TokenRows, process_dt
from ..scan.naive import delta_scan, kda_scan, ssd_scan


def _begin(state, state_scale, slots, has_state) -> Tensor:
    """float32 states [B, ...] that the rows start from."""
    if has_state is None:
        return state.new_zeros(slots.shape[0], *state.shape[1:], dtype=torch.float32)
    own = (has_state != 0) & (slots > 0)
    return torch.where(own.view(-1, 1, 1, 1), load_state(state, slots, state_scale), 0.0)


def _finish(rows: TokenRows, state, ring_start, ring_committed, slots, final, state_scale, seed, rounds) -> None:
    """Stores the final states [B, ...] as checkpoints with empty rings."""
    at, wrote = slots.long(), rows.lens > 0
    rounded, scale = round_state(state.dtype, at, final, state_scale is not None, seed, rounds)
    pairs = [(state.view(bits(state.dtype)), rounded.view(bits(state.dtype)))]
    pairs += [] if scale is None else [(state_scale, scale)]
    pairs += [(cursors, torch.zeros_like(slots, dtype=torch.int32)) for cursors in (ring_start, ring_committed)]
    for pool, values in pairs:
        pool[at] = torch.where(wrote.view(-1, *[1] * (pool.dim() - 1)), values, pool[at])


def mamba2_prefill(
    state, ring_start, ring_committed, x, dt, A, B, C, D, z, dt_bias, slots, query_lens=None, has_state=None,
    query_start_loc=None, state_scale=None, seed=None, *, max_query_len=None, dt_softplus=True, dt_min=0.0,
    dt_max=None, philox_rounds=0, out,
) -> None:
    rows = TokenRows(x, slots, query_lens, query_start_loc, max_query_len)
    values, step = rows.load(x), rows.only_real(process_dt(rows.load(dt), dt_bias, dt_softplus, dt_min, dt_max))
    y, final = ssd_scan(values, step, A, rows.load(B), rows.load(C), _begin(state, state_scale, slots, has_state))
    if D is not None:
        y = y + D.float()[:, None] * values
    if z is not None:
        gate = rows.load(z)
        y = y * (gate * torch.sigmoid(gate))
    rows.store(out, y)
    _finish(rows, state, ring_start, ring_committed, slots, final, state_scale, seed, philox_rounds)


def gdn_prefill(
    state, ring_start, ring_committed, q, k, v, a, b, A_log, dt_bias, slots, query_lens=None, has_state=None,
    query_start_loc=None, state_scale=None, seed=None, *, max_query_len=None, scale, l2norm, philox_rounds=0, out,
) -> None:
    rows = TokenRows(v, slots, query_lens, query_start_loc, max_query_len)
    gates = gdn.gates(rows.load(a), rows.load(b), A_log, dt_bias)
    _delta(delta_scan, gates, rows, state, ring_start, ring_committed, q, k, v, slots, has_state, state_scale, seed,
           scale, l2norm, philox_rounds, out)


def kda_prefill(
    state, ring_start, ring_committed, q, k, v, a, b, A_log, dt_bias, slots, query_lens=None, has_state=None,
    query_start_loc=None, state_scale=None, seed=None, *, max_query_len=None, scale, l2norm, lower_bound=None,
    philox_rounds=0, out,
) -> None:
    rows = TokenRows(v, slots, query_lens, query_start_loc, max_query_len)
    gates = kda.gates(rows.load(a), rows.load(b), A_log, dt_bias, lower_bound)
    _delta(kda_scan, gates, rows, state, ring_start, ring_committed, q, k, v, slots, has_state, state_scale, seed,
           scale, l2norm, philox_rounds, out)


def _delta(scan, gates, rows, state, ring_start, ring_committed, q, k, v, slots, has_state, state_scale, seed, scale,
           l2norm, rounds, out) -> None:
    """The delta rule of either family; gates: (g, beta), of tokens that are none as well."""
    queries, keys = (gdn.normalised(rows.load(t), l2norm) for t in (q, k))
    g, beta = (rows.only_real(gate) for gate in gates)
    o, final = scan(queries * scale, keys, rows.load(v), g, beta, _begin(state, state_scale, slots, has_state))
    rows.store(out, o)
    _finish(rows, state, ring_start, ring_committed, slots, final, state_scale, seed, rounds)


def conv_prefill(
    conv_ring, x, weight, bias, positions, slots, query_lens=None, query_start_loc=None, *, max_query_len=None, silu,
    out,
) -> None:
    rows = TokenRows(x, slots, query_lens, query_start_loc, max_query_len)
    width, ring_len = weight.shape[1], conv_ring.shape[2]
    at, first = slots.long(), torch.where(slots > 0, positions, 0).long()[:, None]

    # inputs go through the ring's dtype first: what later steps read must be what was used now
    rounded = rows.load(x).to(conv_ring.dtype)
    earlier = first + torch.arange(1 - width, 0, device=x.device)
    known = (earlier >= 0) & (slots > 0)[:, None]
    history = torch.where(known[..., None], conv_ring[at[:, None], :, earlier % ring_len].float(), 0.0)
    inputs = torch.cat([history, rounded.float()], 1)
    y = sum(inputs[:, j : j + rows.tokens] * weight[:, j].float() for j in range(width))
    if bias is not None:
        y = y + bias.float()
    rows.store(out, y * torch.sigmoid(y) if silu else y)

    # the newest token that falls on each column, counted from the row's first; below 0: the column keeps its input
    column = torch.arange(ring_len, device=x.device)
    lens = rows.lens[:, None]
    token = lens - 1 - (first + lens - 1 - column) % ring_len
    newest = rounded.gather(1, token.clamp(min=0)[..., None].expand(-1, -1, x.shape[-1])).transpose(1, 2)
    conv_ring[at] = torch.where((token >= 0)[:, None], newest, conv_ring[at])
