"""Memory of state-space layers: `ReplayContext` (checkpoint, ring, cursors), `PlainStates` (written each step)."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Optional, Union

import torch
from torch import Tensor

from .. import ops
from ..ops.check import EIGHT_BIT
from .pools import ContextPools, LayerMemory, Pool, allocate_conv_ring, allocate_states, copy_leading, layers_of
from .state_spec import FAMILIES, RING_NAMES, StateGroup, StateLayer, check_groups


@dataclass(frozen=True)
class KVCacheConfig:
    """What an engine decides about a pool: how many slots (the null slot 0 included) and where."""

    num_slots: int
    device: torch.device


class ReplayContext:
    """Pools of all state-space layers of one geometry, their trackers, slot tables and plans.

    Attributes (L layers, S slots, G groups, B batch rows, C table columns). Pools are stacked, [L, S, ...], or lists of
    L layer tensors [S, ...] of the host's, see `ContextPools`; `layer(i)` gives the ops of layer i what they take:
        state: [L, S, ...] checkpoints, `state_scale` row scales of 8-bit ones or None.
        seeds: [L] int64, from which the layers' next flushes draw, or None without stochastic rounding. `postprocess`
            adds 1, on the device, so that every replay of a recorded step draws anew.
        rings: the three ring tensors, [L, S, heads, R, dim] twice and [L, S, heads, R] float32 (KDA: [.., R, K]).
        conv_ring: [L, S, channels, conv_len], None where the host keeps the inputs of the convolutions.
        layer_group: [L] int32. ring_start, ring_committed: [G, S] int32.
        request_tables: [G, max_num_reqs, C] and block_tables: [G, max_num_reqs, C] int32, slot ids.
        live_col, live_cols: the last column, where an engine whose live states never move may keep them; [max_num_reqs]
            int32, the same by request.
        windows: by (rows, tokens) of padded decode steps, the window they run with, W or 0: few rows may be faster if
            every step rewrites the checkpoint. `warmup.choose_windows` fills it; read it by `window_of`.
            window_us: what it measured, by size and window.
        plan: [4, G, max_num_reqs] int32, the last step's snapshot plan: src_slots, dst_slots, plan_start, plan_count.
            One tensor, since every input of a compiled step costs the host microseconds.
    """

    @classmethod
    def create(cls, groups: list[StateGroup], max_num_reqs: int, *, num_slots: int, columns: int = 1,
               device="cpu", pools: Optional[ContextPools] = None) -> "ReplayContext":
        """A context for `groups`.

        Args:
            max_num_reqs: requests, and batch rows, at most. One more than that for a compiled step whose number of
                rows is a symbol: torch 2.11 makes the size of a slice as long as its buffer a constant.
            num_slots: rows of each pool, the null slot 0 included.
            columns: C, block-table columns; 1 suffices in mode none.
            device: of the pools and of all else; of the host's pools where they are given.
            pools: the host's, which the context reads and writes and never replaces. None: stacked, zeroed ones of the
                context's own.

        Raises:
            ValueError: no groups, groups of different cache specs, layers of different geometry or dtypes, T > W,
                R < W + T, or pools that do not fit; the message names the layer, group or pool.
        """
        check_groups(groups)
        if max_num_reqs < 1 or num_slots < 2:
            raise ValueError(f"max_num_reqs is {max_num_reqs} and num_slots {num_slots}, expected at least 1 and 2")
        return cls(groups, max_num_reqs, num_slots, columns, torch.device(device), pools)

    def __init__(self, groups, max_num_reqs, num_slots, columns, device, pools):
        self.groups = tuple(groups)
        self.layers = [layer for group in groups for layer in group.layers]
        self.spec = self.layers[0]
        self.family, self.mode, self.block_size = self.spec.family, groups[0].mode, groups[0].block_size
        self.window, self.ring_len = self.spec.window, self.spec.ring_len
        self.windows: dict[tuple[int, int], int] = {}
        self.window_us: dict[tuple[int, int], dict[int, float]] = {}
        self.ring_start = self.ring_committed = None
        self.bind(pools or ContextPools.allocate(self.spec, len(self.layers), num_slots, device), num_slots)
        device = self.device
        indices = [index for index, group in enumerate(groups) for _ in group.layers]
        self.layer_group = torch.tensor(indices, dtype=torch.int32, device=device)
        self.group_of = indices
        table = (len(groups), max_num_reqs, columns)
        self.request_tables, self.block_tables = (torch.zeros(table, dtype=torch.int32, device=device) for _ in "rb")
        self.live_col = columns - 1
        self.live_cols = torch.full((max_num_reqs,), columns - 1, dtype=torch.int32, device=device)
        self.plan = torch.zeros(4, *table[:2], dtype=torch.int32, device=device)
        self.seeds = None
        if self.spec.philox_rounds:  # contexts and layers in ranges of their own
            first = FAMILIES.index(self.family) << 48
            self.seeds = first + (torch.arange(len(self.layers), dtype=torch.int64, device=device) << 32)
        self.warmed_signature = None  # of the pools that `warm_up_materializer` ran on

    def bind(self, pools: ContextPools, num_slots: int, copy: bool = True) -> None:
        """Works on other pools from now on, of `num_slots` slots. Slots that both have keep their cursors.

        copy: they keep their contents as well; False where the host has put them there. Compiled steps that hold the
        old pools' addresses must be made anew; those of the trackers stay where `initialize_ring_trackers` can.

        Raises:
            ValueError, TypeError: pools that do not fit, see `ContextPools.check`; nothing has changed.
        """
        pools.check(self.spec, len(self.layers), num_slots)
        device = layers_of(pools.state)[0].device
        if self.ring_start is not None and device != self.device:
            raise ValueError(f"pools: are on {device}, expected {self.device}, where the context's tables are")
        if self.ring_start is not None and copy:
            copy_leading(self.pools, pools, min(self.num_slots, num_slots))
        self.state, self.state_scale, self.conv_ring = pools.state, pools.state_scale, pools.conv_ring
        self.rings = tuple(pools.rings)
        self.device = device
        self.initialize_ring_trackers(KVCacheConfig(num_slots, self.device))
        self.num_slots = num_slots

    def grow(self, num_slots: int) -> None:
        """Stacked pools of the context's own with so many slots, more or fewer; see `bind`. New slots are zero."""
        if num_slots < 1:
            raise ValueError(f"num_slots is {num_slots}, expected at least 1")
        pools = ContextPools.allocate(self.spec, len(self.layers), num_slots, self.device, self.conv_ring is not None)
        self.bind(pools, num_slots)

    def initialize_ring_trackers(self, kv_cache_config: KVCacheConfig) -> None:
        """Cursors for `kv_cache_config.num_slots` slots: those of slots that were there before stay, others are 0, 0.

        Compiled graphs hold the addresses of the trackers, so the present pair is kept if it has at least as many
        slots and lies on the same device; otherwise a new pair takes its place.
        """
        slots, device = kv_cache_config.num_slots, torch.device(kv_cache_config.device)
        old = self.ring_start, self.ring_committed
        if old[0] is None or old[0].shape[1] < slots or old[0].device != device:
            shape = (len(self.groups), slots)
            self.ring_start, self.ring_committed = (torch.zeros(shape, dtype=torch.int32, device=device) for _ in "sc")
        for kept, before in zip((self.ring_start, self.ring_committed), old):
            if before is not None and kept is not before:
                both = min(slots, before.shape[1])
                kept[:, :both] = before[:, :both].to(device)
            kept[:, slots:] = 0  # a slot that comes back is a new one

    src_slots = property(lambda self: self.plan[0])
    dst_slots = property(lambda self: self.plan[1])
    plan_start = property(lambda self: self.plan[2])
    plan_count = property(lambda self: self.plan[3])

    @property
    def pools(self) -> ContextPools:
        return ContextPools(self.state, self.rings, self.conv_ring, self.state_scale)

    def layer(self, index: int) -> LayerMemory:
        """What the ops of a layer take: views of the pools and of its group's trackers."""
        start, committed = self.cursors(index)
        conv_ring, scale = (pool if pool is None else pool[index] for pool in (self.conv_ring, self.state_scale))
        return LayerMemory(self.state[index], tuple(ring[index] for ring in self.rings), conv_ring, scale, start,
                           committed)

    def cursors(self, layer: int) -> tuple[Tensor, Tensor]:
        """ring_start and ring_committed [S] of a layer's group."""
        group = self.group_of[layer]
        return self.ring_start[group, : self.num_slots], self.ring_committed[group, : self.num_slots]

    def rounding(self, layer: int) -> dict:
        """Keyword arguments of a layer's replay op: how its checkpoints are stored."""
        return {"state_scale": None if self.state_scale is None else self.state_scale[layer],
                "seed": None if self.seeds is None else self.seeds[layer], "philox_rounds": self.spec.philox_rounds}

    def block_copy_tensors(self) -> list[Pool]:
        """Every pool that holds part of a slot's logical state: who copies a slot copies its row of all of these.

        Pools are [L, S, ...] or lists of [S, ...], see `ContextPools`; trackers, which come last, [G, S].
        """
        return [*(pool for _, pool in self.pools.named()), self.ring_start, self.ring_committed]

    def window_of(self, rows: int, tokens: int = 1) -> int:
        """The window of decode steps of so many padded rows and tokens of a row: W, or 0 if that was found faster."""
        return self.windows.get((rows, tokens), self.window)

    def export_slot(self, slot: int, position: int) -> dict[str, Tensor]:
        """The logical state of a slot after `position` tokens, position independent; see `ops.ring_export`."""
        return ops.ring_export(self._ring_pool(), slot, position=position, conv_history=self.spec.conv_width - 1)

    def import_slot(self, slot: int, exported: dict[str, Tensor]) -> None:
        """Makes a slot's logical state the exported one, which may come from another ring length; see
        `ops.ring_import`."""
        ops.ring_import(self._ring_pool(), slot, exported, conv_history=self.spec.conv_width - 1)

    def _ring_pool(self) -> SimpleNamespace:
        names = RING_NAMES[self.family]
        return SimpleNamespace(
            family=self.family, state=self.state, state_scale=self.state_scale, conv_ring=self.conv_ring,
            rings=dict(zip(names, self.rings, strict=True)), layer_group=self.layer_group, window=self.window,
            ring_start=self.ring_start[:, : self.num_slots], ring_committed=self.ring_committed[:, : self.num_slots])

    def reset_new_slots(self, src_cols: Tensor, dst_cols: Tensor, idx_mapping: Optional[Tensor] = None,
                        num_reqs: Union[Tensor, int, None] = None) -> None:
        """Prepares the slots of admitted or moved requests, per batch row and group; one call, traceable.

        dst slot = block_tables[dst_cols[req]], src likewise (negative or out of range: none). With a src, the whole
        slot and its cursors are copied; without one, the checkpoint is zeroed and the cursors are 0, 0. Rows without
        a dst change nothing, nor do those from `num_reqs` on.
        """
        rows = (dst_cols if idx_mapping is None else idx_mapping).shape[0]
        idx_mapping = _bounded(idx_mapping, num_reqs, rows, dst_cols.device)
        tables = self.block_tables[:, :rows]
        src, dst = _slot_at(tables, src_cols, idx_mapping), _slot_at(tables, dst_cols, idx_mapping)
        every_row = torch.arange(rows, dtype=torch.int32, device=dst.device)
        copied = torch.where((src > 0) & (src != dst), dst, 0)
        for pool in self.block_copy_tensors()[:-2]:
            ops.copy_slots(pool, src, copied, self.layer_group, every_row)
        fresh = torch.where(src > 0, 0, dst)
        ops.zero_slots(self.state, fresh, self.layer_group)
        if self.state_scale is not None:
            ops.zero_slots(self.state_scale, fresh, self.layer_group)
        ops.ring_reset(self.ring_start, self.ring_committed, tables, src_cols, dst_cols, idx_mapping)

    def postprocess(
        self, num_computed: Tensor, num_accepted: Tensor, is_prefilling: Tensor,
        num_reqs: Union[Tensor, int, None] = None, *,
        query_start_loc: Optional[Tensor] = None, query_lens: Optional[Tensor] = None,
        live_cols: Optional[Tensor] = None, idx_mapping: Optional[Tensor] = None, window: Optional[int] = None,
        post_step: bool = False, A: Optional[Tensor] = None,
    ) -> None:
        """Commits a step's cursors and, in mode align, publishes snapshots at block edges; one call, traceable.

        Arguments as in `ops.ring_commit`; `window` must be the one that the forward used (default: W). num_reqs: rows
        from there on change nothing, an int or int32 of one element; None: rows count whose request is not negative.
        A: decay rates [L, H] float32 that the forward used, which snapshots of Mamba-2 need.

        Raises:
            ValueError: no A where snapshots need it; nothing has been written.
        """
        align = self.mode == "align"
        if align and self.family == "mamba2" and A is None:
            raise ValueError("postprocess: A is None, expected the layers' decay rates [L, H] for snapshots of Mamba-2")
        rows = is_prefilling.shape[0]
        idx_mapping = _bounded(idx_mapping, num_reqs, rows, is_prefilling.device)
        plan = self.commit(num_computed, num_accepted, is_prefilling, query_start_loc, query_lens, live_cols,
                           idx_mapping, window, post_step)
        if align:
            src, dst, _, count = plan
            active, _ = ops.compact_active(count, count.new_full((1,), rows))
            self.materialize(plan, active, A)
            if self.conv_ring is not None:
                ops.copy_slots(self.conv_ring, src, dst, self.layer_group, active)
        if self.seeds is not None:
            self.seeds.add_(1)

    def commit(self, num_computed, num_accepted, is_prefilling, query_start_loc=None, query_lens=None, live_cols=None,
               idx_mapping=None, window=None, post_step=False) -> list[Tensor]:
        """The first part of `postprocess`: moves cursors. Returns the snapshot plan, views [G, B] of `src_slots`,
        `dst_slots`, `plan_start` and `plan_count`; empty in mode none."""
        rows = is_prefilling.shape[0]
        plan = [part[:, :rows] for part in self.plan.unbind()]
        ops.ring_commit(
            self.ring_start, self.ring_committed, *plan, self.block_tables[:, :rows], query_start_loc, query_lens,
            num_computed, num_accepted, is_prefilling, live_cols, idx_mapping, block_size=self.block_size,
            window=self.window if window is None else window, ring_len=self.ring_len, post_step=post_step,
            materialize=self.mode == "align")
        return plan

    def materialize(self, plan: list[Tensor], active_rows: Tensor, A: Optional[Tensor] = None) -> None:
        """Writes the checkpoints that a `plan` asks for, of the batch rows in `active_rows` [B] (-1 ends the list).

        A: [L, H] float32 for Mamba-2, None for the delta rule, whose ring holds the decays.
        """
        # layer l draws with this and l: below zero, where no layer's flushes draw, and anew in every step
        seed = None if self.seeds is None else -len(self.layers) * (self.seeds[:1] + 1)
        where = (*plan, self.layer_group, active_rows, self.state_scale, seed)
        if self.family == "mamba2":
            ops.mamba2_materialize(self.state, *self.rings, A, *where, philox_rounds=self.spec.philox_rounds)
        else:
            fold = ops.gdn_materialize if self.family == "gdn" else ops.kda_materialize
            fold(self.state, *self.rings, *where, philox_rounds=self.spec.philox_rounds)


class PlainStates:
    """State pools of an engine without replay: the state is written at every step.

    A request owns one slot, or with drafts 1 + T of them: column 0 of `own_slots` is the current state, the others
    receive the state after each token of a step, and acceptance swaps the right one into column 0.
    """

    def __init__(self, layers: list[StateLayer], max_num_reqs: int, device="cpu"):
        if layers[0].state_dtype in EIGHT_BIT or layers[0].philox_rounds:
            raise ValueError(f"layer {layers[0].name}: state_dtype is {layers[0].state_dtype} and philox_rounds "
                             f"{layers[0].philox_rounds}, expected a float type and 0 without replay")
        self.layers, self.spec, self.family = layers, layers[0], layers[0].family
        self.group_of = [0] * len(layers)
        self.tokens = self.spec.max_tokens
        each = 1 + self.tokens if self.tokens > 1 else 1
        self.state, self.state_scale = allocate_states(self.spec, len(layers), 1 + max_num_reqs * each, device)
        self.conv_ring = allocate_conv_ring(self.spec, len(layers), 1 + max_num_reqs, device)
        slots = torch.arange(1, 1 + max_num_reqs * each, dtype=torch.int32, device=device)
        self.own_slots = slots.view(max_num_reqs, each)

    def step_slots(self, idx_mapping: Tensor, tokens: Optional[int]) -> tuple[Tensor, Optional[Tensor]]:
        """slots [B] that hold the states; token_slots [B, tokens] for those after each token, None without drafts.

        tokens: of a row. None for prefill, which keeps no state by token either.
        """
        own = self.own_slots[idx_mapping.clamp(min=0)]
        own = torch.where((idx_mapping >= 0)[:, None], own, 0)
        return own[:, 0], own[:, 1 : 1 + tokens] if self.tokens > 1 and tokens is not None else None

    def accept(self, idx_mapping: Tensor, num_accepted: Tensor) -> None:
        """The state after the last accepted token of each row becomes current; 0 accepted keeps the old one.

        idx_mapping, num_accepted: [B]; a row with a negative index changes nothing. Mutates `own_slots`.
        """
        if self.tokens == 1:
            return
        real = idx_mapping >= 0
        row = torch.where(real, num_accepted, 0).long()[:, None]
        # rows of padding write column 0 of an extra request, which is cut off again
        req = torch.where(real, idx_mapping, self.own_slots.shape[0]).long()
        padded = torch.cat([self.own_slots, self.own_slots[:1]])
        own = padded[req]
        chosen, current = own.gather(1, row), own[:, :1]
        swapped = own.scatter(1, row, current)
        swapped = torch.cat([chosen, swapped[:, 1:]], 1)
        self.own_slots.copy_(padded.index_copy(0, req, swapped)[:-1])


def _bounded(idx_mapping: Optional[Tensor], num_reqs: Union[Tensor, int, None], rows: int, device) -> Optional[Tensor]:
    """The request of each of `rows` rows, -1 from `num_reqs` on; None stands for rows that are requests."""
    if num_reqs is None:
        return idx_mapping
    row = torch.arange(rows, dtype=torch.int32, device=device)
    return torch.where(row < num_reqs, row if idx_mapping is None else idx_mapping, -1)


def _slot_at(tables: Tensor, cols: Tensor, idx_mapping: Optional[Tensor]) -> Tensor:
    """Slots [G, B] at column cols[req] of tables [G, B, C]; 0 for empty rows and columns out of range."""
    req = torch.arange(tables.shape[1], device=tables.device) if idx_mapping is None else idx_mapping.long()
    col = cols[req.clamp(min=0)].long()
    inside = (req >= 0) & (col >= 0) & (col < tables.shape[2])
    at = torch.where(inside, col, 0)[None, :, None].expand(tables.shape[0], -1, 1)
    return torch.where(inside, tables.gather(2, at).squeeze(2), 0)
