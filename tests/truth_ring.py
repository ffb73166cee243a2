"""The ring lifecycle, row by row and group by group, as the specification words it, and an engine in miniature that
runs the ops over many steps beside the token-by-token truth."""

from types import SimpleNamespace

import torch
import truth_mamba2
from harness import assert_close, raw

from torch_replay.ops.conv import op as conv_ops
from torch_replay.ops.mamba2 import op as mamba2_ops
from torch_replay.ops.ring import naive
from torch_replay.ops.ring import op as ring_ops
from torch_replay.ops.ring.samples import mapping
from torch_replay.ops.ring.transfer import ring_export, ring_import
from torch_replay.ops.samples import Rng


def request_of(idx_mapping, row):
    return row if idx_mapping is None else int(idx_mapping[row])


def slot_in(table, column):
    """Slot in a column of one row's table; 0 outside it."""
    return int(table[column]) if 0 <= column < len(table) else 0


def gather_block_tables(block_tables, request_tables, idx_mapping, num_reqs):
    for g in range(block_tables.shape[0]):
        for row in range(block_tables.shape[1]):
            block_tables[g, row] = 0
            if row < int(num_reqs) and idx_mapping[row] >= 0:
                block_tables[g, row] = request_tables[g, int(idx_mapping[row])]


def ring_advance(ring_start, ring_committed, slots, query_lens, num_accepted, is_prefilling, num_reqs, window,
                 ring_len):
    slots = slots.view(len(ring_start), -1)
    for row in range(slots.shape[1] if num_reqs is None else int(num_reqs)):
        q = int(query_lens[row])
        for g, slot in enumerate(slots[:, row].tolist()):
            if slot == 0 or q == 0:
                continue
            start, committed = int(ring_start[g, slot]), int(ring_committed[g, slot])
            if is_prefilling is not None and is_prefilling[row]:
                start, committed = 0, 0
            else:
                if committed + q > window:
                    start, committed = (start + committed) % ring_len, 0
                committed += min(max(int(num_accepted[row]), 0), q)
            ring_start[g, slot], ring_committed[g, slot] = start, committed


def ring_reset(ring_start, ring_committed, block_tables, src_cols, dst_cols, idx_mapping):
    old_start, old_committed = ring_start.clone(), ring_committed.clone()
    groups, rows, _ = block_tables.shape
    for row in range(rows):
        req = request_of(idx_mapping, row)
        if req < 0:
            continue
        for g in range(groups):
            src = slot_in(block_tables[g, row], int(src_cols[req]))
            dst = slot_in(block_tables[g, row], int(dst_cols[req]))
            if dst == 0 or src == dst:
                continue
            if src == 0:
                ring_start[g, dst], ring_committed[g, dst] = 0, 0
            else:
                ring_start[g, dst], ring_committed[g, dst] = old_start[g, src], old_committed[g, src]


def ring_commit(ring_start, ring_committed, src_slots, dst_slots, plan_start, plan_count, block_tables, query_start_loc,
                query_lens, num_computed, num_accepted, is_prefilling, live_cols, idx_mapping, block_size, window,
                ring_len, post_step, materialize):
    groups, rows, columns = block_tables.shape
    for row in range(rows):
        for g in range(groups):
            src_slots[g, row], dst_slots[g, row], plan_start[g, row], plan_count[g, row] = 0, 0, 0, -1
        req = request_of(idx_mapping, row)
        q = int(query_lens[row]) if query_start_loc is None else int(query_start_loc[row + 1] - query_start_loc[row])
        if req < 0 or q == 0:
            continue
        live_col = 0 if live_cols is None else int(live_cols[req])
        accepted = max(0, min(q, int(num_accepted[req])))
        computed = int(num_computed[req])
        if bool(is_prefilling[row]):
            before = computed - q if post_step else computed
            commit_prefill_row(ring_start, ring_committed, src_slots, dst_slots, plan_start, plan_count, block_tables,
                               row, before, q, live_col, block_size, materialize)
            continue
        after = computed if post_step else computed + accepted
        edge = max([e for e in range(0, after + 1, block_size)])
        for g in range(groups):
            live = slot_in(block_tables[g, row], live_col)
            if live == 0:
                continue
            start, committed = int(ring_start[g, live]), int(ring_committed[g, live])
            if committed + q > window:
                start, first_position = (start + committed) % ring_len, after - accepted
                committed = accepted
            else:
                first_position = after - accepted - committed
                committed = committed + accepted
            ring_start[g, live], ring_committed[g, live] = start, committed
            if not materialize or edge <= 0 or edge <= after - accepted:
                continue  # no token of this step ends a block
            dst = slot_in(block_tables[g, row], edge // block_size - 1)
            if dst == 0 or (dst == live and edge < after):
                continue
            count = 0
            for position in range(first_position, after):  # ring row j holds the token at first_position + j
                if position < edge:
                    count += 1
            src_slots[g, row], dst_slots[g, row] = live, dst
            plan_start[g, row], plan_count[g, row] = start, count
            ring_start[g, dst], ring_committed[g, dst] = 0, 0


def commit_prefill_row(ring_start, ring_committed, src_slots, dst_slots, plan_start, plan_count, block_tables, row,
                       before, q, live_col, block_size, materialize):
    groups, _, columns = block_tables.shape
    after = before + q
    for g in range(groups):
        table = block_tables[g, row]
        reset = {live_col}
        if materialize:
            for position in range(before, after):
                reset.add(position // block_size)
        for column in reset:
            slot = slot_in(table, column)
            if slot != 0:
                ring_start[g, slot], ring_committed[g, slot] = 0, 0
        dst_col = after // block_size - 1
        live, dst = slot_in(table, live_col), slot_in(table, dst_col)
        if materialize and after % block_size == 0 and live != 0 and dst != 0 and live_col != dst_col:
            src_slots[g, row], dst_slots[g, row], plan_start[g, row], plan_count[g, row] = live, dst, 0, 0
            ring_start[g, dst], ring_committed[g, dst] = 0, 0


def compact_active(plan_count, num_reqs):
    rows = plan_count.shape[1]
    listed = []
    for row in range(min(rows, int(num_reqs))):
        if any(int(plan_count[g, row]) >= 0 for g in range(plan_count.shape[0])):
            listed.append(row)
    active = torch.tensor(listed + [-1] * (rows - len(listed)), dtype=torch.int32)
    return active, torch.tensor([len(listed)], dtype=torch.int32)


# The engine in miniature


LAYERS, GROUPS, HEADS, DIM, STATE_DIM, WIDTH = 3, 2, 2, 4, 3, 4
TOKENS, BLOCK, COLUMNS, REQS, ROWS = 4, 5, 12, 4, 5
LAYER_GROUP = torch.tensor([0, 1, 0], dtype=torch.int32)


def layers_of(group):
    return [layer for layer, own in enumerate(LAYER_GROUP.tolist()) if own == group]


def make_pool(window=6, ring_len=11, slots=2 * REQS * COLUMNS):
    """Poisoned pools of all layers. Spare slots are there for imports."""
    nan = float("nan")
    return SimpleNamespace(
        family="mamba2", window=window, ring_len=ring_len, layer_group=LAYER_GROUP, state_scale=None,
        state=torch.full((LAYERS, slots, HEADS, DIM, STATE_DIM), nan),
        rings={"x": torch.full((LAYERS, slots, HEADS, ring_len, DIM), nan),
               "B": torch.full((LAYERS, slots, 1, ring_len, STATE_DIM), nan),
               "dt": torch.full((LAYERS, slots, HEADS, ring_len), nan)},
        conv_ring=torch.full((LAYERS, slots, HEADS * DIM, WIDTH - 1 + TOKENS), nan),
        ring_start=torch.full((GROUPS, slots), 3, dtype=torch.int32),
        ring_committed=torch.full((GROUPS, slots), 5, dtype=torch.int32))


class Request:
    """The truth of one request: after every token the state of each layer, and every input of its convolution."""

    def __init__(self, rng, live):
        self.prompt, self.live, self.fresh, self.computed = int(rng.integers(1, 14, 1)), live, True, 0
        self.states = [[torch.zeros(HEADS, DIM, STATE_DIM, dtype=torch.float64)] for _ in range(LAYERS)]
        self.inputs = [torch.zeros(WIDTH - 1, HEADS * DIM, dtype=torch.float64) for _ in range(LAYERS)]

    def cut(self, computed):
        self.computed = computed
        self.states = [states[: computed + 1] for states in self.states]
        self.inputs = [inputs[: computed + WIDTH - 1] for inputs in self.inputs]


class MiniEngine:
    """Steps of ragged drafts over all ops. `moving`: the live slot follows the blocks from column to column; else it
    stays in the last column, and some of the snapshot columns are null."""

    def __init__(self, moving, uniform, post_step, alternate=False, seed=0):
        self.rng, self.pool = Rng(seed, "cpu", torch.float32), make_pool()
        self.moving, self.uniform, self.post_step, self.alternate = moving, uniform, post_step, alternate
        self.A = -self.rng.uniform(0.1, 1.0, LAYERS, HEADS)
        self.weight, self.bias = self.rng.normal(LAYERS, HEADS * DIM, WIDTH), self.rng.normal(LAYERS, HEADS * DIM)
        self.free = [[slot + 1 for slot in self.rng.permutation(2 * REQS * COLUMNS - 1)] for _ in range(GROUPS)]
        self.tables = torch.zeros(GROUPS, REQS, COLUMNS, dtype=torch.int32)
        self.published, self.snapshots, self.flushes, self.retired, self.exports = {}, 0, 0, 0, []
        self.requests = [None] * REQS
        for req in range(REQS):
            self.admit(req)

    def admit(self, req):
        """A new request in slots that others have used; what they published there is gone."""
        for group in range(GROUPS):
            for column in range(COLUMNS):
                old = int(self.tables[group, req, column])
                self.published.pop((group, old), None)
                self.free[group] += [old] if old else []
                null = not self.moving and column < COLUMNS - 1 and float(self.rng.uniform(0, 1, 1)) < 0.2
                self.tables[group, req, column] = 0 if null else self.free[group].pop(0)
        self.requests[req] = Request(self.rng, 0 if self.moving else COLUMNS - 1)

    def plan_step(self):
        """Rows, lengths and routes. A prompt's chunks end at block edges; its last token may run as a decode row."""
        self.idx = mapping(self.rng, ROWS, REQS, 1)
        self.lens, self.prefill = torch.zeros(ROWS, dtype=torch.int32), torch.zeros(ROWS, dtype=torch.bool)
        self.accepted = torch.full((REQS,), 3, dtype=torch.int32)
        for row, req in enumerate(self.idx.tolist()):
            if req < 0:
                continue
            if self.requests[req].computed + TOKENS > (COLUMNS - 1) * BLOCK:
                self.check_published(req)
                self.admit(req)
                self.retired += 1
            request = self.requests[req]
            left = request.prompt - request.computed
            if left > 0:
                chunk = min(left, TOKENS, BLOCK - request.computed % BLOCK)
                self.prefill[row] = left > 1 or request.computed == 0 or bool(self.rng.integers(0, 2, 1))
                self.lens[row] = self.accepted[req] = chunk
            else:
                self.lens[row] = self.rng.integers(0, TOKENS + 1, 1)
                self.accepted[req] = self.rng.integers(0, int(self.lens[row]) + 1, 1)

    def check_published(self, req):
        """With a slot for every block and blocks longer than a step, every block was published."""
        request = self.requests[req]
        if self.moving:
            for group in range(GROUPS):
                for column in range(request.computed // BLOCK):
                    assert (group, int(self.tables[group, req, column])) in self.published

    def move_slots(self):
        """reset_new_slots: copies or zeroes the pools, then the cursors."""
        src_cols, dst_cols = (torch.full((REQS,), -1, dtype=torch.int32) for _ in range(2))
        for row, req in enumerate(self.idx.tolist()):
            if req < 0 or self.lens[row] == 0:
                continue
            request, end = self.requests[req], self.requests[req].computed + int(self.lens[row])
            new = max(request.live, (end - 1) // BLOCK) if self.moving else request.live
            src_cols[req], dst_cols[req] = -1 if request.fresh else request.live, new
            request.live = new
            if request.fresh:
                for layer, group in enumerate(LAYER_GROUP.tolist()):
                    self.pool.state[layer, self.tables[group, req, new]] = 0
            request.fresh = False
        source, target = naive.reset_slots(self.block_tables, src_cols, dst_cols, self.idx)
        source = torch.where(source == target, 0, source)
        for pool in (self.pool.state, *self.pool.rings.values(), self.pool.conv_ring):
            conv_ops.copy_slots(pool, source, target, LAYER_GROUP, torch.arange(ROWS))
        ring_ops.ring_reset(self.pool.ring_start, self.pool.ring_committed, self.block_tables, src_cols, dst_cols,
                            self.idx)

    def forward(self, window):
        """All layers; every output is compared with the truth, which grows by q tokens."""
        positions = torch.tensor([0 if req < 0 else self.requests[req].computed for req in self.idx.tolist()])
        live = [0 if req < 0 else self.requests[req].live for req in self.idx.tolist()]
        pool = self.pool
        for layer, group in enumerate(LAYER_GROUP.tolist()):
            slots = torch.stack([self.block_tables[group, row, column] for row, column in enumerate(live)])
            raw_x, dt = self.rng.normal(ROWS, TOKENS, HEADS * DIM), self.rng.normal(ROWS, TOKENS, HEADS)
            B, C = self.rng.normal(2, ROWS, TOKENS, 1, STATE_DIM)
            x = conv_ops.conv_replay(pool.conv_ring[layer], raw_x, self.weight[layer], self.bias[layer], positions,
                                     slots, self.lens, silu=True).unflatten(2, (HEADS, DIM))
            decode = torch.where(self.prefill, 0, slots)
            rings = [ring[layer] for ring in pool.rings.values()]
            cursors = pool.ring_start[group], pool.ring_committed[group]
            self.flushes += int(((decode > 0) & (self.lens + cursors[1][decode] > window)).sum())
            y = mamba2_ops.mamba2_replay(pool.state[layer], *rings, *cursors, x, dt, self.A[layer], B, C, None, None,
                                         None, decode, self.lens, window=window)
            y += mamba2_ops.mamba2_update(pool.state[layer], x, dt, self.A[layer], B, C, None, None, None,
                                          torch.where(self.prefill, slots, 0), self.lens)
            self.compare(layer, raw_x, dt, B, C, y)

    def compare(self, layer, raw_x, dt, B, C, y):
        step, weight = truth_mamba2.softplus(dt.double()), self.weight[layer].double()
        for row, req in enumerate(self.idx.tolist()):
            for t in range(int(self.lens[row]) if req >= 0 else 0):
                request = self.requests[req]
                inputs = torch.cat([request.inputs[layer], raw_x[row, t : t + 1].double()])
                z = self.bias[layer].double() + (weight.T * inputs[-WIDTH:]).sum(0)
                x = (z * torch.sigmoid(z)).view(HEADS, DIM)
                state = truth_mamba2.advance(request.states[layer][-1], x, B[row, t].double(), step[row, t],
                                             self.A[layer].double())
                request.inputs[layer] = inputs
                request.states[layer].append(state)
                want = truth_mamba2.output(state, x, C[row, t].double(), None, None)
                assert_close("y", y[row, t].double(), want, 2e-5)

    def commit(self, window):
        pool = self.pool
        computed = torch.tensor([request.computed for request in self.requests], dtype=torch.int32)
        moved = torch.zeros_like(computed)
        for row, req in enumerate(self.idx.tolist()):
            if req >= 0:
                moved[req] = self.lens[row] if self.prefill[row] else torch.minimum(self.accepted[req], self.lens[row])
                self.requests[req].cut(int(computed[req] + moved[req]))
        starts = torch.cat([torch.zeros(1, dtype=torch.int32), self.lens.cumsum(0).int()])
        plan = torch.full((4, GROUPS, ROWS), 99, dtype=torch.int32)
        ring_ops.ring_commit(
            pool.ring_start, pool.ring_committed, *plan, self.block_tables, None if self.uniform else starts,
            self.lens if self.uniform else None, num_computed=computed + moved if self.post_step else computed,
            num_accepted=self.accepted, is_prefilling=self.prefill, idx_mapping=self.idx,
            live_cols=torch.tensor([request.live for request in self.requests]), block_size=BLOCK, window=window,
            ring_len=pool.ring_len, post_step=self.post_step, materialize=True)
        active, _ = ring_ops.compact_active(plan[3], torch.tensor(ROWS))
        mamba2_ops.mamba2_materialize(pool.state, *pool.rings.values(), self.A, *plan, LAYER_GROUP, active)
        conv_ops.copy_slots(pool.conv_ring, plan[0], plan[1], LAYER_GROUP, active)
        for row, req in enumerate(self.idx.tolist()):
            self.check_snapshots(row, req, int(moved[req]) if req >= 0 else 0, plan[:, :, row])

    def check_snapshots(self, row, req, moved, plan):
        """A block that this step completed is published in every group that has a slot for it, and in no other."""
        request = self.requests[req]
        edge = request.computed // BLOCK * BLOCK
        due = moved > 0 and edge > request.computed - moved
        for group in range(GROUPS):
            slot = int(self.tables[group, req, edge // BLOCK - 1]) if due else 0
            in_place = self.prefill[row] and request.live == edge // BLOCK - 1
            assert (plan[3, group] >= 0) == (slot > 0 and not in_place) and (plan[1, group] == slot or in_place)
            if slot:
                self.check_published_slot(request, group, slot, edge)

    def check_published_slot(self, request, group, slot, edge):
        pool = self.pool
        assert pool.ring_start[group, slot] == pool.ring_committed[group, slot] == 0
        for layer in layers_of(group):
            assert_close("snapshot", pool.state[layer, slot].double(), request.states[layer][edge], 2e-5)
            for position in range(max(0, edge - WIDTH + 1), edge):
                kept = pool.conv_ring[layer, slot, :, position % pool.conv_ring.shape[3]]
                assert torch.equal(kept.double(), request.inputs[layer][WIDTH - 1 + position])
            self.published[group, slot] = pool.state[:, slot].clone(), pool.conv_ring[:, slot].clone()
        self.snapshots += 1

    def check_old_snapshots(self):
        for (group, slot), (state, conv) in self.published.items():
            for layer in layers_of(group):
                assert torch.equal(self.pool.state[layer, slot], state[layer]), "a published slot was written"
                assert torch.equal(raw(self.pool.conv_ring[layer, slot]), raw(conv[layer]))

    def step(self):
        window = 0 if self.alternate and int(self.rng.integers(0, 2, 1)) else self.pool.window
        self.plan_step()
        self.block_tables = torch.full((GROUPS, ROWS, COLUMNS), 99, dtype=torch.int32)
        ring_ops.gather_block_tables(self.block_tables, self.tables, self.idx, torch.tensor([ROWS]))
        self.move_slots()
        self.forward(window)
        self.commit(window)
        self.check_old_snapshots()

    def relocate(self, req):
        """Exports the live slot, takes it through a pool of other sizes into spare slots, and poisons the old."""
        request, pool = self.requests[req], self.pool
        old = self.tables[:, req, request.live].tolist()
        if request.fresh or any((group, slot) in self.published for group, slot in enumerate(old)):
            return  # nothing to move yet, or a published slot, which the cache owns
        sizes = dict(position=request.computed, conv_history=WIDTH - 1)
        exported = ring_export(pool, old, **sizes)
        other = make_pool(window=9, ring_len=23, slots=3)
        ring_import(other, [2, 1], exported, conv_history=WIDTH - 1)
        again = ring_export(other, (2, 1), **sizes)
        assert exported.keys() == again.keys() and all(torch.equal(raw(exported[k]), raw(again[k])) for k in again)
        new = [self.free[group].pop(0) for group in range(GROUPS)]
        ring_import(pool, new, again)
        first, count = int(pool.ring_start[0, old[0]]), int(pool.ring_committed[0, old[0]])
        self.exports.append((count, first + count > pool.ring_len))
        for layer, group in enumerate(LAYER_GROUP.tolist()):
            for tensor in (pool.state, *pool.rings.values(), pool.conv_ring):
                tensor[layer, old[group]] = float("nan")
        for group in range(GROUPS):
            self.free[group].append(old[group])
            self.tables[group, req, request.live] = new[group]
