"""Row arithmetic that the reference kernels of the state-space families share: which rows are real, live, planned."""

import torch
from torch import Tensor

from .rounding import bits, load_state, store_state


def row_lengths(slots: Tensor, query_lens, tokens: int) -> Tensor:
    """Real tokens of each row, int64 [B]: 0 for padded rows."""
    lens = torch.full_like(slots, tokens) if query_lens is None else query_lens
    return torch.where(slots > 0, lens, 0).long()


def history_rows(start: Tensor, committed: Tensor, rows: int, ring_len: int) -> tuple[Tensor, Tensor]:
    """Physical ring rows of logical rows 0..rows-1 and which of them are live; both [B, rows]."""
    logical = torch.arange(rows, device=start.device)
    return (start.long()[:, None] + logical) % ring_len, logical < committed.long()[:, None]


def append_rows(slots, start, committed, lens, tokens: int, ring_len: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Where new tokens go: batch row, token, slot and physical ring row of every real token, each [n]."""
    row, token = (torch.arange(tokens, device=slots.device) < lens[:, None]).nonzero(as_tuple=True)
    physical = (start.long()[row] + committed.long()[row] + token) % ring_len
    return row, token, slots[row].long(), physical


def flushing_rows(committed, lens, window: int) -> Tensor:
    """Batch rows that fold their committed rows in this step.

    Without live rows there is nothing to fold. A row without tokens is empty: the commit moves no cursor for it, so
    it must not fold either, whatever the window.
    """
    return ((lens > 0) & (committed + lens > window) & (committed > 0)).nonzero().squeeze(1)


def planned_rows(src_slots, dst_slots, count, active_rows) -> Tensor:
    """[G, B] flags: rows before the first -1 of active_rows, with a plan and two real slots."""
    listed = active_rows[(active_rows < 0).cumsum(0) == 0].long()
    active = torch.zeros_like(count, dtype=torch.bool)
    active[:, listed] = True
    return active & (count >= 0) & (src_slots > 0) & (dst_slots > 0)


def elapsed(steps: Tensor) -> Tensor:
    """Running sums over dim 1. In float64, so that differences after one huge step keep their digits."""
    return steps.double().cumsum(1)


def process_dt(dt, dt_bias, dt_softplus, dt_min, dt_max) -> Tensor:
    """Raw dt [..., H] -> float32 step sizes: bias, softplus (identity above 20), clamp."""
    dt = dt.float()
    if dt_bias is not None:
        dt = dt + dt_bias.float()
    if dt_softplus:
        dt = torch.where(dt > 20.0, dt, torch.log1p(torch.exp(dt.clamp(max=20.0))))
    return dt.clamp(min=dt_min, max=dt_max)


def materialize_layers(
    state, ring_len, src_slots, dst_slots, ring_start, count, layer_group, active_rows, state_scale, seed, rounds, fold
) -> None:
    """Runs a snapshot plan over all layers: exact copies where count is 0, `fold` where it is more.

    fold(layer, current [n, ...] float32, source slots [n], ring rows [n, R], live [n, R]) returns the states advanced
    by the live rows.
    """
    planned = planned_rows(src_slots, dst_slots, count, active_rows)
    for layer, group in enumerate(layer_group.tolist()):
        scale = None if state_scale is None else state_scale[layer]
        source, target = src_slots[group].long(), dst_slots[group].long()
        copied = (planned[group] & (count[group] == 0)).nonzero().squeeze(1)
        exact = state[layer].view(bits(state.dtype))
        exact[target[copied]] = exact[source[copied]]
        if scale is not None:
            scale[target[copied]] = scale[source[copied]]
        folded = (planned[group] & (count[group] > 0)).nonzero().squeeze(1)
        if folded.numel():
            source = source[folded]
            rows, live = history_rows(ring_start[group, folded], count[group, folded], ring_len, ring_len)
            advanced = fold(layer, load_state(state[layer], source, scale), source, rows, live)
            layer_seed = None if seed is None else seed + layer
            store_state(state[layer], target[folded], advanced, scale, layer_seed, rounds)
