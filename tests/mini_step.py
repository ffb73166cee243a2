"""A decode step of a small hybrid, written by hand against the ops: what a foreign engine would compile."""

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_replay import ops

HEADS, DIM, STATE = 2, 8, 4
CHANNELS = HEADS * DIM + 2 * STATE
WINDOW, WIDTH, BLOCK = 4, 3, 4  # of the ring, of the convolution, tokens a block
SEEN = 5  # positions that a sliding window covers


class MiniStep(torch.nn.Module):
    """Positions, tables, then layers of convolution, Mamba-2 and attention, then commit, snapshots and new lengths.

    Caches are buffers with a storage each, pools [L, S, ...] of all layers; layers attend in turn over a window and
    over everything. Request r's state lives in the last column of its table; block edges publish snapshots to the
    others. Buffers by request or row are longer than any batch: rows of padding write to the spare element, and a slice
    of all of a tensor is another graph than a slice of a part.
    """

    def __init__(self, requests: int = 5, tokens: int = 3, layers: int = 2, columns: int = 12, device="cpu"):
        super().__init__()
        self.tokens, self.layers = tokens, layers
        rng = torch.Generator().manual_seed(7)

        def buffer(name, value):
            self.register_buffer(name, value.to(device))

        def table(groups: int) -> Tensor:
            return 1 + torch.arange(groups * requests * columns, dtype=torch.int32).view(groups, requests, columns)

        slots, ring = 1 + requests * columns, WINDOW + tokens
        buffer("state", torch.zeros(layers, slots, HEADS, DIM, STATE))
        buffer("x_ring", torch.zeros(layers, slots, HEADS, ring, DIM))
        buffer("B_ring", torch.zeros(layers, slots, 1, ring, STATE))
        buffer("dt_ring", torch.zeros(layers, slots, HEADS, ring))
        buffer("conv_ring", torch.zeros(layers, slots, CHANNELS, WIDTH - 1 + tokens))
        for name in ("start", "committed"):
            buffer(name, torch.zeros(1, slots, dtype=torch.int32))
        for name in ("swa", "full"):
            buffer(name, torch.zeros(layers, slots, BLOCK, 2, HEADS, DIM))
        for name in ("src_slots", "dst_slots", "plan_start", "plan_count"):
            buffer(name, torch.zeros(1, requests + 1, dtype=torch.int32))
        buffer("num_computed", torch.zeros(requests + 1, dtype=torch.int32))
        buffer("state_tables", table(1))
        buffer("kv_tables", table(1).repeat(2, 1, 1))
        buffer("block_sizes", torch.full((2,), BLOCK, dtype=torch.int32))
        buffer("live_cols", torch.full((requests + 1,), columns - 1, dtype=torch.int32))
        buffer("layer_group", torch.zeros(layers, dtype=torch.int32))
        buffer("decay", -torch.rand(layers, HEADS, generator=rng) - 0.1)
        buffer("weight", torch.randn(layers, CHANNELS, WIDTH, generator=rng))

    def caches(self) -> dict[str, Tensor]:
        """What a step writes and a later one reads."""
        names = ("state", "x_ring", "B_ring", "dt_ring", "conv_ring", "start", "committed", "swa", "full",
                 "num_computed")
        return {name: getattr(self, name) for name in names}

    def forward(self, h: Tensor, idx_mapping: Tensor, query_lens: Tensor, accepted: Tensor) -> tuple[Tensor, Tensor]:
        """h: [B, T, CHANNELS]. idx_mapping, query_lens, accepted: [B] int32; a row without a request has idx -1 and
        q = 0. Returns the last layer's output, and the rows that each live ring holds after the commit."""
        rows, tokens = h.shape[:2]
        starts = torch.arange(rows + 1, dtype=torch.int32, device=h.device) * tokens
        positions = torch.empty(rows * tokens, dtype=torch.int64, device=h.device)
        seq_lens = torch.empty(rows, dtype=torch.int32, device=h.device)
        ops.prepare_positions(positions, seq_lens, idx_mapping, starts, self.num_computed, query_lens)
        first = positions.view(rows, tokens)[:, 0]

        in_use = torch.full((1,), rows, dtype=torch.int32, device=h.device)
        states = torch.empty(1, rows, self.state_tables.shape[2], dtype=torch.int32, device=h.device)
        ops.gather_block_tables(states, self.state_tables, idx_mapping, in_use)
        tables = torch.empty(2, rows, self.kv_tables.shape[2], dtype=torch.int32, device=h.device)
        ops.gather_block_tables(tables, self.kv_tables, idx_mapping, in_use)
        slots = states[0, :, -1]
        mapping = torch.empty(2, rows * tokens, dtype=torch.int64, device=h.device)
        ops.compute_slot_mappings(mapping, tables, starts, positions, self.block_sizes, query_lens)
        indices = torch.empty(rows * tokens, SEEN, dtype=torch.int32, device=h.device)
        lens = torch.empty(rows * tokens, dtype=torch.int32, device=h.device)
        ops.swa_indices(indices, lens, seq_lens, starts, tables[0], mapping[0], None, query_lens, window=SEEN,
                        block_size=BLOCK)

        for layer in range(self.layers):
            y = self._mixer(layer, h, first, slots, query_lens)
            q, k, v = y, y * 0.5, -y
            if layer % 2 == 0:
                ops.write_kv(self.swa[layer], k, v, mapping[0])
                out = ops.swa_attention(q, self.swa[layer], indices, lens, scale=0.25)
            else:
                ops.write_kv(self.full[layer], k, v, mapping[1])
                out = ops.paged_attention(q, self.full[layer], tables[1], seq_lens, starts, query_lens, scale=0.25)
            h = h + F.pad(out.view(rows, tokens, -1), (0, 2 * STATE))

        self._commit(states, first, accepted, query_lens, idx_mapping, in_use)
        request = torch.where(idx_mapping >= 0, idx_mapping, self.num_computed.shape[0] - 1).long()
        self.num_computed.index_put_((request,), accepted, accumulate=True)
        return h, self.committed[0][slots.long()]

    def _mixer(self, layer, h, first, slots, query_lens) -> Tensor:
        """[B, T, CHANNELS] -> [tokens, HEADS, DIM]."""
        x, B, C = ops.conv_replay(self.conv_ring[layer], h, self.weight[layer], None, first, slots, query_lens,
                                  silu=True).split((HEADS * DIM, STATE, STATE), -1)
        rings = (self.state[layer], self.x_ring[layer], self.B_ring[layer], self.dt_ring[layer])
        return ops.mamba2_replay(*rings, self.start[0], self.committed[0], x.unflatten(-1, (HEADS, DIM)),
                                 h[..., :HEADS], self.decay[layer], B.unsqueeze(2), C.unsqueeze(2), None, None, None,
                                 slots, query_lens, window=WINDOW).flatten(0, 1)

    def _commit(self, states, first, accepted, query_lens, idx_mapping, in_use) -> None:
        rows = idx_mapping.shape[0]
        by_row = torch.arange(rows, dtype=torch.int32, device=idx_mapping.device)
        by_row = torch.where(idx_mapping >= 0, by_row, -1)
        plan = [t[:, :rows] for t in (self.src_slots, self.dst_slots, self.plan_start, self.plan_count)]
        ops.ring_commit(self.start, self.committed, *plan, states, None, query_lens, first, accepted, by_row < -1,
                        self.live_cols[:rows], by_row, block_size=BLOCK, window=WINDOW,
                        ring_len=self.x_ring.shape[3], post_step=False, materialize=True)
        active, _ = ops.compact_active(plan[3], in_use)
        ops.mamba2_materialize(self.state, self.x_ring, self.B_ring, self.dt_ring, self.decay, *plan,
                               self.layer_group, active)
        ops.copy_slots(self.conv_ring, plan[0], plan[1], self.layer_group, active)


def batches(rows: int, steps: int, tokens: int = 3, requests: int = 5, empty: int = 0, device="cpu", seed: int = 0):
    """`steps` batches of distinct requests, drafts of every length, any number accepted; the last `empty` rows have
    none. Rows never stand for the request of their number."""
    rng = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        order = torch.randperm(requests, generator=rng)[:rows].int()
        lens = torch.randint(1, tokens + 1, (rows,), generator=rng, dtype=torch.int32)
        order[rows - empty :], lens[rows - empty :] = -1, 0
        accepted = (torch.rand(rows, generator=rng) * (lens + 1)).int()
        h = torch.randn(rows, tokens, CHANNELS, generator=rng)
        yield tuple(value.to(device) for value in (h, order, lens, accepted))
