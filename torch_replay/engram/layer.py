"""The engram layer, and what all engram layers of a model share: hash constants, compressed vocabulary and table."""

from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from .hashing import NGramHash
from .tables import DeviceTable

SMALLEST = 1e-6  # below this size of the gate's argument its root, and the gradient of the root, stay fixed


class EngramStore(nn.Module):
    """Hash constants, compressed vocabulary and table of all L engram layers of a model, in one table.

    Row ids follow from token ids alone, so one hash and one lookup serve all layers of a step. A fresh store maps every
    token to itself; its table is normal with deviation 0.02, so that n-grams never seen in training add little.

    Args:
        hash_: constants; its vocab_size is the number of compressed ids. dim: D, values of a row. vocab_size: tokens of
            the tokenizer. pad_token_id: the token that stands for missing history. device: where the ids are. dtype: of
            the table. table_device: "meta" if `place` will bring the table; None for `device`.
    """

    def __init__(self, hash_: NGramHash, dim: int, vocab_size: int, pad_token_id: int, device=None, dtype=torch.float32,
                 table_device=None):
        super().__init__()
        self.hash, self.pad_token_id = hash_, pad_token_id
        where = device if table_device is None else table_device
        self.weight = nn.Parameter(torch.empty(sum(hash_.layer_rows), dim, device=where, dtype=dtype).normal_(std=0.02))
        self.table: Optional[DeviceTable] = None  # what `place` brought
        self.register_buffer("token_map", torch.arange(vocab_size, dtype=torch.int32, device=device))
        for name in ("multipliers", "primes", "stacked_offsets"):
            self.register_buffer(name, getattr(hash_, name).to(device), persistent=False)

    @property
    def depth(self) -> int:
        """Ids of lookback that the hash needs."""
        return self.hash.max_order - 1

    def set_token_map(self, token_map: Tensor) -> None:
        """Compressed ids [V], as `compress_vocabulary` makes them; negative: masked.

        Raises ValueError for another length, or ids that are not exactly those below the hash's vocab_size.
        """
        if token_map.shape != self.token_map.shape:
            raise ValueError(f"token_map: got shape {list(token_map.shape)}, expected {list(self.token_map.shape)}")
        used = torch.unique(token_map[token_map >= 0])
        if not torch.equal(used.cpu(), torch.arange(self.hash.vocab_size)):
            raise ValueError(f"token_map: got {len(used)} compressed ids up to {int(used.max()) if len(used) else -1}, "
                             f"expected all of 0..{self.hash.vocab_size - 1}")
        self.token_map.copy_(token_map)

    def place(self, table: DeviceTable) -> None:
        """Serves from `table` instead of a parameter: for inference, and no longer part of the state dict."""
        if tuple(table.weight.shape) != tuple(self.weight.shape):
            raise ValueError(f"table: got shape {list(table.weight.shape)}, expected {list(self.weight.shape)}")
        self._parameters.pop("weight", None)
        # plain attributes: a table stays where it is when the model moves
        self.table, self.weight = table, table.weight

    def on_host(self) -> "EngramStore":
        """The same store for ids on the CPU, over the same placed table."""
        sizes = self.weight.shape[1], self.token_map.shape[0], self.pad_token_id
        host = EngramStore(self.hash, *sizes, device="cpu", table_device="meta")
        host.token_map.copy_(self.token_map)
        host.place(self.table)
        return host

    def rows(self, ids: Tensor, positions: Tensor, query_start_loc: Tensor, lookback: Tensor,
             query_lens: Optional[Tensor] = None) -> Tensor:
        """Row ids [tokens, L * columns] int64; arguments as for `ops.ngram_hash`."""
        pad = self.token_map[self.pad_token_id].clamp(min=0)
        return ops.ngram_hash(ids, positions, query_start_loc, lookback, self.token_map, self.multipliers, self.primes,
                              self.stacked_offsets, pad, query_lens)

    def entries(self, rows: Tensor) -> Tensor:
        """Row ids [tokens, L * columns], negative for none -> [tokens, L, columns * D]. Without a gradient."""
        found = ops.engram_lookup(self.weight, None, rows) if self.table is None else self.table.lookup(rows)
        return found.view(len(rows), len(self.hash.layer_ids), -1)

    def masked(self, ids: Tensor) -> Tensor:
        """Which tokens the layers leave alone: those that the compressed vocabulary masks or does not have."""
        known = (ids >= 0) & (ids < self.token_map.shape[0])
        return ~known | (self.token_map[torch.where(known, ids, 0)] < 0)

    def forward(self, input_ids: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Whole sequences from their first token, ids [B, T]: for each layer its entries [B, T, columns * D] and the
        masked tokens [B, T], as `Engram.forward` takes them. A table that is a parameter gets its gradient."""
        rows, tokens = input_ids.shape
        start = torch.arange(rows + 1, device=input_ids.device) * tokens
        positions = torch.arange(tokens, device=input_ids.device).repeat(rows)
        lookback = torch.full((rows, self.depth), -1, dtype=torch.int64, device=input_ids.device)
        row_ids = self.rows(input_ids.flatten(), positions, start, lookback)
        entries = F.embedding(row_ids, self.weight) if self.table is None else self.entries(row_ids)
        masked = self.masked(input_ids)
        return [(layer, masked) for layer in entries.view(rows, tokens, len(self.hash.layer_ids), -1).unbind(2)]


class Engram(nn.Module):
    """A gated read of n-gram entries (arXiv 2601.07372, as recent public models compute it, without a convolution).

    A projection of the entries gives one key per residual branch and one value that all branches share. For branch h
    with hidden state x and key k, both RMS-normalised over the last dimension (mean square plus eps) and weighted,
        dot = C^-0.5 * sum(norm(x) q_weight * norm(k) k_weight),    gate = sigmoid(sign(dot) sqrt(max(|dot|, 1e-6)))
    where a dot of 0 counts as positive; masked tokens have gate 0. The residual gains `gate * value`.

    Args:
        hidden_size: C. entry_size: columns * D of a token in this layer. branches: parallel residual streams.
    """

    def __init__(self, hidden_size: int, entry_size: int, eps: float = 1e-5, branches: int = 1, device=None,
                 dtype=None):
        super().__init__()
        self.hidden_size, self.branches, self.eps = hidden_size, branches, eps
        kwargs = {"device": device, "dtype": dtype}
        self.q_weight = nn.Parameter(torch.ones(branches, hidden_size, **kwargs))
        self.k_weight = nn.Parameter(torch.ones(branches, hidden_size, **kwargs))
        # the keys of all branches, then the value
        self.kv_proj = nn.Linear(entry_size, (branches + 1) * hidden_size, bias=False, **kwargs)

    def gate(self, hidden: Tensor, keys: Tensor, masked: Tensor) -> Tensor:
        """hidden, keys [..., branches, C], masked [...] -> [..., branches], in float32 (float64 for float64 input)."""
        x, k = (t if t.dtype == torch.float64 else t.float() for t in (hidden, keys))
        dot = (x * self.q_weight * self.k_weight * k).sum(-1) * self.hidden_size**-0.5
        dot = dot * torch.rsqrt(x.square().mean(-1) + self.eps) * torch.rsqrt(k.square().mean(-1) + self.eps)
        root = dot.abs().clamp(min=SMALLEST).sqrt()
        gate = torch.where(dot >= 0, root, -root).sigmoid()
        return torch.where(masked[..., None], 0.0, gate)

    def read(self, hidden: Tensor, entries: Tensor, masked: Tensor) -> Tensor:
        """What the residual streams gain: hidden [..., branches, C], entries [..., entry_size], masked [...] -> like
        hidden, in its dtype."""
        projected = self.kv_proj(entries.to(self.kv_proj.weight.dtype)).unflatten(-1, (-1, self.hidden_size))
        keys, value = projected.split([self.branches, 1], -2)
        return (self.gate(hidden, keys, masked)[..., None] * value).to(hidden.dtype)

    def forward(self, x: Tensor, context: tuple[Tensor, Tensor]) -> Tensor:
        """One residual stream: x [..., C], context the entries and masked tokens -> [..., C]."""
        return self.read(x.unsqueeze(-2), *context).squeeze(-2)
