"""The n-gram memory of a step: token history by request, and one hash and one lookup for all engram layers.

Row ids follow from token ids alone, so a step needs them once, before any layer, and one launch fetches the rows of all
layers. A step is one stream, in which the lookup costs its own time wherever Inductor places it; `benchmarks/engram.py`
measures that time, and what running it beside the layers before would save. (Prefetching rows into the L2 cache early
in the step saves nothing: rows in host memory are not kept there, those on the device are read in 4 us.)
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Optional

import numpy as np
import torch
from torch import Tensor

from .. import ops
from ..graphs.compiled import mark_static
from .batch import rows_of_tokens

Rows = list[tuple[int, list[int]]]  # of (request index, token ids)
Context = tuple[Tensor, Tensor]  # of one layer: entries [B, T, columns * D] and masked tokens [B, T]


class TokenHistory:
    """Ids of every request by position, on the device, so that n-grams reach over chunk and step boundaries.

    A step writes its own inputs at their positions. Ids at and after a request's position are leftovers (rejected
    drafts, an earlier request) that no lookback reads, so acceptance and the end of a request need nothing. Ids before
    a prefill chunk come from the host with the chunk (`write_lookback`), whichever way the request got there.

    ids: [max_reqs + 1, max_len] int32; filler tokens write to the last row. lookback: [max_reqs + 1, depth] int32,
    by row, the last step's; -1 at first. A row more than a step has, see `ReplayContext.create`.
    """

    def __init__(self, store, max_reqs: int, max_len: int, device):
        self.store, self.lookback_depth = store, store.depth
        self.ids = torch.zeros(max_reqs + 1, max_len, dtype=torch.int32, device=device)
        self.lookback = torch.full((max_reqs + 1, store.depth), -1, dtype=torch.int32, device=device)
        self.used_rows = 0  # of the lookback, in the last step

    def write_lookback(self, req: Tensor, start: Tensor, tokens: Tensor) -> None:
        """Ids before the chunks of requests `req` [B] from positions `start` [B] on: tokens [B, depth], newest first,
        -1 for none."""
        position = start[:, None] - 1 - torch.arange(tokens.shape[1], device=tokens.device)
        inside = (tokens >= 0) & (position >= 0)
        row = torch.where(inside, req[:, None], self.ids.shape[0] - 1)
        self.ids.index_put_((row, position.clamp(min=0).long()), tokens)

    def admit(self, index: int, tokens: Sequence[int]) -> None:
        """A request takes the index, `tokens` of which are computed already: elsewhere, or by an earlier owner of what
        it was given."""
        oldest = max(len(tokens) - self.lookback_depth, 0)
        newest = torch.tensor(list(tokens[oldest:]), dtype=torch.int32)
        self.ids[index, oldest : len(tokens)].copy_(newest)

    def prefetch(self, rows: Rows, computed: np.ndarray, before: Optional[list[list[int]]], height: int,
                 width: int) -> None:
        """The step looks its rows up itself. What larger steps left in the lookback behind its own rows goes."""
        used = len(rows) if before is not None else height
        if used < self.used_rows:
            self.lookback[used:].fill_(-1)
        self.used_rows = used

    def contexts(self, input_ids: Tensor, batch, idx_mapping: Tensor, num_reqs: Tensor) -> list[Context]:
        """What each engram layer reads for a step's inputs, [B, T] or packed [tokens], which the history takes over.

        Filler tokens read no rows. The lookback lies before a row's inputs, so the order of the two does not matter.
        """
        store, rows = self.store, idx_mapping.shape[0]
        lookback = self.lookback[:rows]
        layout = batch.query_start_loc, idx_mapping, num_reqs, batch.query_lens
        ops.engram_lookback(lookback, self.ids, batch.positions, *layout)
        row_ids = store.rows(input_ids.flatten(), batch.positions, batch.query_start_loc, lookback, batch.query_lens)
        entries = store.entries(row_ids)
        self._write(input_ids, batch.positions, idx_mapping, batch.query_start_loc, batch.query_lens)
        masked = store.masked(input_ids)
        return [(layer.unflatten(0, input_ids.shape), masked) for layer in entries.unbind(1)]

    def _write(self, input_ids: Tensor, positions: Tensor, idx_mapping: Tensor, query_start_loc: Tensor,
               query_lens: Tensor) -> None:
        """Takes over inputs at positions [tokens]; filler and empty rows write nowhere."""
        row, inside = rows_of_tokens(input_ids, query_start_loc, query_lens)
        req = idx_mapping[row]
        req = torch.where(inside & (req >= 0), req, self.ids.shape[0] - 1).long()
        self.ids.index_put_((req, positions), input_ids.flatten().int())


class HostPrefetch:
    """The same where a step cannot read the table (a file, on a GPU): the host fetches the rows before the step.

    The host knows a step's input ids and positions as soon as the last step's results are there. It needs nothing else
    from the device.
    """

    lookback_depth = 0  # the device needs none

    def __init__(self, store, max_reqs: int, max_len: int, device):
        self.history, self.device = TokenHistory(store.on_host(), max_reqs, max_len, "cpu"), device
        self.kept: dict[tuple[int, int], list[Context]] = {}  # buffers by rows and tokens of a step
        self.current: list[Context] = []  # for the step to come

    def admit(self, index: int, tokens: Sequence[int]) -> None:
        """As in `TokenHistory`."""
        self.history.admit(index, tokens)

    def prefetch(self, rows: Rows, computed: np.ndarray, before: Optional[list[list[int]]], height: int,
                 width: int) -> None:
        """Fetches what a step of shape [height, width] will ask for.

        computed: by request, the position of a row's first token. before: for prompt chunks, all tokens before each
        row's first; None for decode steps, whose shapes come again and again, so that their buffers stay in place.
        """
        keep = before is None
        for (req, _), tokens in zip(rows, before or (), strict=not keep):
            oldest = max(len(tokens) - self.history.lookback_depth, 0)
            self.history.ids[req, oldest : len(tokens)] = torch.tensor(tokens[oldest:], dtype=torch.int32)
        ids, positions = torch.zeros(2, height, width, dtype=torch.int64)
        lens, reqs = torch.zeros(height, dtype=torch.int32), torch.full((height,), -1, dtype=torch.int32)
        for row, (req, tokens) in enumerate(rows):
            ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
            positions[row, : len(tokens)] = int(computed[req]) + torch.arange(len(tokens))
            lens[row], reqs[row] = len(tokens), req
        layout = SimpleNamespace(query_start_loc=torch.arange(height + 1) * width, query_lens=lens,
                                 positions=positions.flatten())
        found = self.history.contexts(ids, layout, reqs, torch.tensor(len(rows), dtype=torch.int64))
        if not keep or (height, width) not in self.kept:
            self.current = [tuple(value.to(self.device, copy=True) for value in layer) for layer in found]
            if keep:
                self.kept[height, width] = self.current
                mark_static(self)
            return
        self.current = self.kept[height, width]
        for buffer, value in zip(sum(self.current, ()), sum(found, ())):
            buffer.copy_(value)

    def contexts(self, input_ids: Tensor, batch, idx_mapping: Tensor, num_reqs: Tensor) -> list[Context]:
        """What `prefetch` fetched for this step."""
        return self.current


def token_history(store, max_reqs: int, max_len: int, device):
    """What keeps the ids and finds the entries of a model's steps; None for a model without engram layers."""
    if store is None:
        return None
    kind = HostPrefetch if store.table is not None and store.table.needs_prefetch(device) else TokenHistory
    return kind(store, max_reqs, max_len, device)
