"""Engines with a prefix cache under watch: what was published never changes, and host and device publish the same."""

import torch
from harness import raw
from tiny import engine

from torch_replay.engine.prefix_cache import PrefixCache
from torch_replay.states.replay_context import ReplayContext


class Watch:
    """An engine whose every step is checked.

    A published block or snapshot holds the same bits for as long as it is published; the snapshots that the scheduler
    publishes are those that `ops.ring_commit` planned.
    """

    def __init__(self, model, **options):
        self.runner = engine(model, **{"prefix_cache": True, **options})
        self.prefix, self.memory = self.runner.scheduler.prefix, self.runner.memory
        self.known, self.planned, self.planned_before = {}, [], []
        for states in self.contexts:
            states.postprocess = self._recording(states)
        self.prefix.settle = self._checking
        for kind, pool in [*self.prefix.full_pools.items(), ("state", self.prefix.snapshots)]:
            if pool is not None:
                pool._evict = self._forgetting(kind, pool)

    @property
    def contexts(self) -> list[ReplayContext]:
        return list(self.memory.states.values())

    @property
    def counts(self):
        return self.prefix.counts

    def _recording(self, states):
        def postprocess(*args, **kwargs):
            result = ReplayContext.postprocess(states, *args, **kwargs)
            rows = args[2].shape[0]
            planned = states.plan_count[0, :rows] >= 0
            slots = states.dst_slots[0, :rows][planned].tolist()
            if states is not self.contexts[0]:
                assert slots == self.planned, "families publish the same slots"
            else:
                self.planned_before, self.planned = self.planned, slots
            return result

        return postprocess

    def _forgetting(self, kind, pool):
        """A block that is evicted may be published again, by what may be an approximation, in the same step."""
        evict = pool._evict

        def forget():
            key = pool._key_of[pool.next_victim()]
            self.known.pop((kind, key), None)
            return evict()

        return forget

    def _checking(self, request, before, drafts, under_way=False):
        # what a prompt chunk published before its end its own forward wrote, and no plan
        edge, size = request.num_computed, self.prefix.state_block_size
        edge = edge // size * size if drafts else edge
        # while the next step is under way it has planned as well
        planned = self.planned_before + self.planned if under_way else self.planned
        for at, snapshot in request.snapshots.items():
            if at <= request.num_computed or not under_way:
                assert (self.memory.snapshot_slots(snapshot)[0] in planned) == (at == edge)
        PrefixCache.settle(self.prefix, request, before, drafts, under_way)

    def published(self) -> dict:
        """(kind, key) -> (block, tensors that hold it)."""
        found = {}
        for kind, pool in self.prefix.full_pools.items():
            for key, block in pool._block_of.items():
                found[kind, key] = block, [cache[block] for cache in self.memory.kv[kind]]
        if self.prefix.snapshots is not None:
            for key, block in self.prefix.snapshots._block_of.items():
                slot = self.memory.snapshot_slots(block)[0]
                found["state", key] = block, [
                    torch.stack([tensor[:, slot]]) for states in self.contexts
                    for tensor in (states.state, states.conv_ring, states.ring_start, states.ring_committed)]
        return found

    def step(self):
        try:
            return self.runner.step()
        finally:
            self.check()

    def check(self) -> None:
        now = self.published()
        for name, (block, tensors) in now.items():
            if name in self.known and self.known[name][0] == block:
                for old, new in zip(self.known[name][1], tensors, strict=True):
                    assert torch.equal(raw(old), raw(new)), f"{name[0]} changed"
        self.known = {name: self.known[name] if name in self.known and self.known[name][0] == block
                      else (block, [tensor.clone() for tensor in tensors])
                      for name, (block, tensors) in now.items()}

    def run(self, prompts, params) -> list[list[int]]:
        """Texts of prompts that run together."""
        ids = [self.runner.add_request(prompt, params) for prompt in prompts]
        final = {}
        while self.runner.has_work:
            final.update((output.id, output.token_ids) for output in self.step())
        return [final[i] for i in ids]


def poison_free(runner) -> None:
    """NaN wherever no request and nothing published is: free blocks of every kind, free slots, dead ring rows."""
    for kind, caches in runner.memory.kv.items():
        pool = runner.scheduler.pools[kind]
        free = [block for block in [*pool._free, *pool._pending] if block not in pool._key_of]
        for cache in caches:
            cache[free] = float("nan")
    snapshots = runner.scheduler.prefix.snapshots
    published = [] if snapshots is None else snapshots._block_of.values()
    kept = {runner.memory.snapshot_slots(block)[0] for block in published}
    live = {request.index + 1 for request in runner.scheduler.running}
    for states in runner.memory.states.values():
        for slot in range(1, states.num_slots):
            if slot in kept:
                for ring in states.rings:
                    ring[:, slot] = float("nan")  # a snapshot is its checkpoint and conv ring
            elif slot not in live:
                for tensor in (states.state, *states.rings, states.conv_ring):
                    tensor[:, slot] = float("nan")
