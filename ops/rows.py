"""Row arithmetic that the reference kernels of the state-space families share: which rows are real, live, planned."""

import functools
import inspect
from typing import Callable

import torch
from torch import Tensor

from .layers import dtype_of
from .rounding import bits, load_state, store_state


def row_lengths(slots: Tensor, query_lens, tokens: int) -> Tensor:
    """Real tokens of each row, int64 [B]: 0 for padded rows."""
    lens = torch.full_like(slots, tokens) if query_lens is None else query_lens
    return torch.where(slots > 0, lens, 0).long()


class TokenRows:
    """The tokens of a call by row, whether they came padded, [B, T, ...], or packed, [tokens, ...].

    lens: int64 [B], 0 for padded rows. real: bool [B, T].
    """

    def __init__(self, x: Tensor, slots: Tensor, query_lens, query_start_loc, max_query_len):
        self.starts, self.count = query_start_loc, x.shape[0]
        self.tokens = x.shape[1] if self.starts is None else max_query_len
        if query_lens is None and self.starts is not None:
            query_lens = self.starts.diff()
        self.lens = row_lengths(slots, query_lens, self.tokens)
        self.real = torch.arange(self.tokens, device=x.device) < self.lens[:, None]

    def padded(self, t: Tensor) -> Tensor:
        """[B, T, ...]; anything where there is no token."""
        if self.starts is None:
            return t
        at = self.starts[:-1, None] + torch.arange(self.tokens, device=t.device)
        return t[at.clamp(0, self.count - 1)]

    def load(self, t: Tensor) -> Tensor:
        """float32 [B, T, ...]; 0 where there is no token, whatever the memory holds."""
        return self.only_real(self.padded(t).float())

    def only_real(self, t: Tensor) -> Tensor:
        """t [B, T, ...], 0 where there is no token."""
        return torch.where(self.real.view(*self.real.shape, *[1] * (t.dim() - 2)), t, 0.0)

    def store(self, out: Tensor, y: Tensor) -> None:
        """y [B, T, ...] into out, which is laid out as the inputs were; 0 where there is no token."""
        y = self.only_real(y)
        if self.starts is not None:
            token = torch.arange(self.count, device=y.device)
            row = (torch.searchsorted(self.starts.long(), token, right=True) - 1).clamp(0, len(self.lens) - 1)
            offset = token - self.starts[row]
            inside = (offset >= 0) & (offset < self.lens[row])
            y = y[row, offset.clamp(0, self.tokens - 1)]
            y = torch.where(inside.view(-1, *[1] * (y.dim() - 1)), y, 0.0)
        out.copy_(y)


def takes_packed_rows(*tokens: str) -> Callable:
    """Decorator of a reference kernel for padded rows: packed ones are padded for it, and its output packed again.

    tokens: names of the arguments that have tokens; the first is laid out like the output. The kernel has the arguments
    `slots`, `query_lens`, `query_start_loc` and `max_query_len`, and is called without the last two.
    """

    def decorate(kernel: Callable) -> Callable:
        signature = inspect.signature(kernel)

        @functools.wraps(kernel)
        def run(*args, **kwargs) -> None:
            call = signature.bind(*args, **kwargs).arguments
            starts, most = call.pop("query_start_loc", None), call.pop("max_query_len", None)
            if starts is not None:
                out, first = call["out"], call[tokens[0]]
                rows = TokenRows(first, call["slots"], call.get("query_lens"), starts, most)
                call |= {name: rows.padded(call[name]) for name in tokens if call.get(name) is not None}
                call |= dict(query_lens=rows.lens, out=out.new_empty(call[tokens[0]].shape))
            kernel(**call)
            if starts is not None:
                rows.store(out, call["out"])

        return run

    return decorate


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
        exact = state[layer].view(bits(dtype_of(state)))
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
