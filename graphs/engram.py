"""The n-gram memory of a step: token history on the device, and one hash and one lookup for all engram layers.

Row ids follow from token ids alone, so a step needs them once, before any layer, and one launch fetches the rows of all
layers. A step is one stream, in which the lookup costs its own time wherever Inductor places it; `benchmarks/engram.py`
measures that time, and what running it beside the layers before would save.
"""

import torch
from torch import Tensor

from .. import ops


class TokenHistory:
    """Ids of every request by position, on the device, so that n-grams reach over chunk and step boundaries.

    A step writes its own inputs at their positions. Ids at and after a request's position are leftovers (rejected
    drafts, an earlier request) that no lookback reads, so acceptance and the end of a request need nothing. Ids before
    a prefill chunk come from the host (`upload`), whichever way the request got there.
    """

    def __init__(self, max_reqs: int, max_len: int, device):
        # one request more: filler tokens write there
        self.ids = torch.zeros(max_reqs + 1, max_len, dtype=torch.int32, device=device)

    def upload(self, req: int, tokens: list[int], start: int, depth: int) -> None:
        """Before a prefill chunk from position `start`: the `depth` ids that its n-grams reach back to."""
        first = max(start - depth, 0)
        self.ids[req, first:start] = torch.tensor(tokens[first:start], dtype=torch.int32)

    def write(self, input_ids: Tensor, positions: Tensor, idx_mapping: Tensor, query_lens: Tensor) -> None:
        """Takes over a step's inputs [B, T] at positions [B * T]; filler and empty rows write nowhere."""
        rows, tokens = input_ids.shape
        real = torch.arange(tokens, device=input_ids.device) < query_lens[:, None]
        real &= (idx_mapping >= 0)[:, None]
        req = torch.where(real, idx_mapping[:, None], self.ids.shape[0] - 1).long()
        self.ids.index_put_((req, positions.view(rows, tokens)), input_ids.int())


def gather_entries(store, history: TokenHistory, input_ids: Tensor, batch, idx_mapping: Tensor,
                   num_reqs: Tensor) -> list[tuple[Tensor, Tensor]]:
    """For each engram layer the entries [B, T, columns * D] and the masked tokens [B, T]; the history gets the inputs.

    store: `engram.EngramStore`. Filler tokens read no rows. The lookback is read before the inputs are written, though
    a row's chunk never overlaps its own lookback.
    """
    rows, tokens = input_ids.shape
    lookback = torch.empty(rows, store.depth, dtype=torch.int32, device=input_ids.device)
    layout = batch.query_start_loc, idx_mapping, num_reqs, batch.query_lens
    ops.engram_lookback(lookback, history.ids, batch.positions, *layout)
    row_ids = store.rows(input_ids.flatten(), batch.positions, batch.query_start_loc, lookback, batch.query_lens)
    entries = store.entries(row_ids)
    history.write(input_ids, batch.positions, idx_mapping, batch.query_lens)
    masked = store.masked(input_ids)
    return [(layer.unflatten(0, (rows, tokens)), masked) for layer in entries.unbind(1)]
