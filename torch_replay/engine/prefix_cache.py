"""What requests may take over from earlier ones that began with the same tokens. Pure Python: no tensors.

Three kinds of memory follow three rules:

    full attention   blocks are shared: a block stands for all tokens up to its end
    sliding window   private: the last window before the hit is computed again ("replayed"), from tokens alone
    state space      a snapshot of the state, published at edges of state blocks: by a prompt chunk at several inside it
                     and at its end, by a decode step at the last one that it reached

A request that hits at boundary H therefore starts at `H - window`, where the snapshot must stand, and keeps all blocks
of full attention up to H. Between `H - window` and H it overwrites nothing that is shared: what it computes there is
an approximation, because the window's keys below its start are missing. For the same reason it publishes snapshots
only beyond H. What it publishes there is of its own hit: a prefix that was evicted, and computed and published anew
behind another hit or none, may hold other approximate values than before, so that a request which hits it, or one that
is put back and takes its hit again, may get another text than it would have had.

Which edges of a prompt are published, and what goes when snapshots run short: *kept* are the edge where the same
prompt, sent again, would look for its state, the end of the prompt, and the edge where it parts from what was known
before, as its blocks of full attention tell (a prompt that begins alike will look there). *Spare* are the others, at
the finest spacing (a power of two of state blocks) of which a prompt takes half of the snapshots at most, and a chunk
INNER_EDGES; should those not suffice, the coarser multiples come first. A spare snapshot takes the place of another
spare one at most, the least recently used first. A hit makes it a kept one. Kept ones take the place of spare ones, and
if there are none, of the least recently used kept one. A snapshot whose blocks of full attention were evicted can make
no hit: such go before all others.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import gcd
from typing import Optional

from ..states.groups import INNER_EDGES
from .block_pool import BlockPool
from .request import Request, check_int


@dataclass(frozen=True)
class Hit:
    """boundary: H, tokens that need not be computed but for the replay. start: the first token to compute. branch: the
    edge where a snapshot would have made for a longer hit, as far as blocks go; 0: none would."""

    boundary: int = 0
    start: int = 0
    branch: int = 0


@dataclass
class CacheCounts:
    """hits: admissions that took something over. hit_tokens: their boundaries, summed. replayed_tokens: computed again
    below the boundary. published_blocks, published_snapshots: made available to others."""

    hits: int = 0
    hit_tokens: int = 0
    replayed_tokens: int = 0
    published_blocks: int = 0
    published_snapshots: int = 0


class PrefixCache:
    """Finds and publishes prefixes in the pools of a scheduler.

    full_pools: pools of the full-attention groups by name, blocks of block_size tokens. replay_window: the largest
    attention window, 0 without sliding-window layers. snapshots: pool of snapshots, None without state-space layers;
    they stand at multiples of state_block_size. Without full attention and snapshots nothing ever hits.

    Raises ValueError if there are snapshots and replay_window is no multiple of state_block_size: the start of a
    replay would not be where a snapshot stands.
    """

    def __init__(self, full_pools: dict[str, BlockPool], block_size: int, replay_window: int = 0,
                 snapshots: Optional[BlockPool] = None, state_block_size: int = 1):
        self.full_pools, self.block_size = full_pools, block_size
        self.replay_window = check_int("replay_window", replay_window, 0)
        self.snapshots = snapshots
        self.state_block_size = check_int("state_block_size", state_block_size, 1)
        if snapshots is not None and replay_window % state_block_size:
            raise ValueError(f"state_block_size: expected a divisor of the attention window {replay_window}, so that "
                             f"a snapshot stands where a replay starts, got {state_block_size}")
        # keys are made at every position where a block or a snapshot may end
        ends = [block_size] * bool(full_pools) + [state_block_size] * (snapshots is not None)
        self.key_step = gcd(*ends) if ends else block_size
        self.counts = CacheCounts()
        # by a snapshot's key, where windows are replayed: the keys of blocks that end where its hits would
        self._ends: dict[bytes, set[bytes]] = {}
        self._looked = 0  # evictions of blocks when useless snapshots were last looked for

    @property
    def evictions(self) -> int:
        pools = [*self.full_pools.values(), *([self.snapshots] if self.snapshots else [])]
        return sum(pool.evictions for pool in pools)

    def forget(self) -> None:
        """Forgets all that was published; `Scheduler.reset_prefix_cache` says what that asks of running requests."""
        for pool in [*self.full_pools.values(), *([self.snapshots] if self.snapshots else [])]:
            pool.forget()
        self._ends.clear()

    def lookup(self, request: Request) -> Hit:
        """The longest boundary that the request can take over; it leaves at least one token to compute.

        With a replay, which is an approximation, a request that was admitted before gets the hit it had then, or none:
        what else it finds, its own tokens' blocks among them, would change its text.
        """
        if request.params.prompt_logprobs:
            return Hit()
        tokens = request.view
        extend_keys(request.prefix_keys, tokens, self.key_step, request.cache_salt)
        limit = len(tokens) - 1
        if self.full_pools:
            end = self.block_size
            while end <= limit and all(self._find(pool, request, end) for pool in self.full_pools.values()):
                end += self.block_size
            limit = end - self.block_size
        branch = 0
        for boundary in self.boundaries(limit):
            start = boundary - self.replay_window
            if self.replay_window and request.first_hit not in (None, boundary):
                continue
            if self.snapshots is None or self._find(self.snapshots, request, start):
                return Hit(boundary, start, branch)
            branch = branch or start
        return Hit(branch=branch)

    def boundaries(self, limit: int) -> Iterator[int]:
        """Boundaries up to `limit` tokens that a hit may have, the longest first."""
        window, edge = self.replay_window, self.state_block_size
        if self.full_pools:
            for boundary in range(limit // self.block_size * self.block_size, window, -self.block_size):
                if self.snapshots is None or (boundary - window) % edge == 0:
                    yield boundary
        elif self.snapshots is not None:
            yield from range(limit - (limit - window) % edge, window, -edge)

    def block_keys(self, request: Request, boundary: int) -> list[bytes]:
        """Keys of the full-attention blocks below a boundary."""
        return [self._key(request, end) for end in range(self.block_size, boundary + 1, self.block_size)]

    def adopt(self, request: Request, hit: Hit) -> None:
        """Notes a hit in the request and takes hold of its snapshot; its blocks the caller shares."""
        request.hit_tokens, request.output_edges, request.first_hit = hit.boundary, [], hit.boundary
        request.num_computed, request.branch_edge = hit.start, hit.branch
        request.replay_start = hit.start if self.replay_window else 0
        if hit.boundary:
            if self.snapshots is not None:
                request.source = self.snapshots.share(self._key(request, hit.start))
            self.counts.hits += 1
            self.counts.hit_tokens += hit.boundary
            self.counts.replayed_tokens += hit.boundary - hit.start

    def claim(self, request: Request, start: int, end: int, prefilling: bool) -> None:
        """Takes a snapshot for every edge at which the step over tokens start .. end may publish; those that nothing
        is free for go without. `settle` or `drop` gives them back."""
        if self.snapshots is None:
            return
        # of a plan that was given up; those up to `start` belong to a step that is under way
        self._let_go(request, [edge for edge in request.snapshots if edge > start])
        if request.private:
            return
        size = self.state_block_size
        if prefilling:
            kept, spare = self._prompt_edges(request, start, end)
        else:
            kept, spare = list(range(start // size * size + size, end + 1, size)), []
        for edge in kept + spare:
            if edge <= request.hit_tokens:
                continue
            if edge <= len(request.prefix_keys) * self.key_step and self._find(self.snapshots, request, edge):
                continue  # somebody published it
            self._drop_useless()
            ids = self.snapshots.allocate(1, spare=edge in spare)
            if ids is not None:
                request.snapshots[edge] = ids[0]

    def _drop_useless(self) -> None:
        """If the next snapshot would take the place of another, forgets those that cannot make a hit any more."""
        evictions = sum(pool.evictions for pool in self.full_pools.values())
        if self.snapshots.num_blank or evictions == self._looked:
            return
        for key in self.snapshots.idle_keys():
            ends = self._ends.get(key, ()) if self.replay_window else [key]
            if ends and not any(all(pool.find(end) for pool in self.full_pools.values()) for end in ends):
                self.snapshots.withdraw(key)
        self._ends = {key: ends for key, ends in self._ends.items() if self.snapshots.find(key)}
        self._looked = evictions

    def _prompt_edges(self, request: Request, start: int, end: int) -> tuple[list[int], list[int]]:
        """Edges that a prompt chunk start .. end should publish, kept ones and spare ones, the most wanted first."""
        size, tokens = self.state_block_size, request.num_tokens
        again = next(self.boundaries(tokens - 1), 0) - self.replay_window
        kept = [edge for edge in dict.fromkeys((again, request.branch_edge, tokens))
                if start < edge <= end and edge % size == 0]
        share, room = max((self.snapshots.num_blocks - 1) // 2, 1), INNER_EDGES - sum(edge < end for edge in kept)
        stride = size
        while True:
            spare = [edge for edge in range(start // stride * stride + stride, end + 1, stride) if edge not in kept]
            if tokens // stride <= share and sum(edge < end for edge in spare) <= room:
                break
            stride *= 2
        return kept, sorted(spare, key=lambda edge: -((edge // size) & -(edge // size)))

    def settle(self, request: Request, before: int, drafts: list[int], under_way: bool = False) -> None:
        """After a forward that took the request from `before` computed tokens to `num_computed`: publishes its whole
        blocks and the snapshots that the step made, and lets go of the others.

        drafts: computed tokens that the request does not list yet. under_way: the request's next step is, whose claims
        stay. A prompt chunk made all that it claimed, a decode step the one at the last edge that it reached, the rule
        by which `ops.ring_commit` plans.
        """
        after = request.num_computed
        if not request.private:
            self._publish(request, before, after, drafts)
        if under_way:
            self._let_go(request, [edge for edge in request.snapshots if edge <= after])
        else:
            self.drop(request)

    def _publish(self, request: Request, before: int, after: int, drafts: list[int]) -> None:
        if before // self.key_step < after // self.key_step:
            tokens = request.tokens + drafts if drafts else request.view
            extend_keys(request.prefix_keys, tokens, self.key_step, request.cache_salt)
        for name, pool in self.full_pools.items():
            table = request.tables[name]
            for column in range(max(before, request.hit_tokens) // self.block_size, after // self.block_size):
                key = self._key(request, (column + 1) * self.block_size)
                self.counts.published_blocks += pool.publish(table[column], key)
        last = after // self.state_block_size * self.state_block_size
        # drafts come with decode steps alone, and without them a decode step reaches one edge at most
        for edge in [edge for edge in request.snapshots if edge <= after and (not drafts or edge == last)]:
            published = self.snapshots.publish(request.snapshots[edge], self._key(request, edge))
            self.counts.published_snapshots += published
            if published and edge > len(request.prompt_ids):
                request.output_edges.append(edge)
                self._thin_out(request)
        self._note_ends(request, before, after)

    def _note_ends(self, request: Request, before: int, after: int) -> None:
        """Where windows are replayed: which snapshots the blocks that end in before + 1 .. after may make hits with."""
        if self.snapshots is None or not self.replay_window or not self.full_pools:
            return
        for end in range(before // self.block_size * self.block_size + self.block_size, after + 1, self.block_size):
            start = end - self.replay_window
            if start > 0 and start % self.state_block_size == 0 and self._find(self.snapshots, request, start):
                self._ends.setdefault(self._key(request, start), set()).add(self._key(request, end))

    def _thin_out(self, request: Request) -> None:
        """Withdraws the snapshots in the request's output that its next turn has no use for: those below the one where
        that turn would start by now. Else a long output would evict what everybody else left."""
        start = next(self.boundaries(request.num_computed), 0) - self.replay_window
        if start in request.output_edges:
            for edge in [edge for edge in request.output_edges if edge < start]:
                request.output_edges.remove(edge)
                self.snapshots.withdraw(self._key(request, edge))

    def _let_go(self, request: Request, edges: list[int]) -> None:
        if edges:
            self.snapshots.free([request.snapshots.pop(edge) for edge in edges])

    def drop(self, request: Request) -> None:
        """Lets go of all snapshots that the request holds."""
        if self.snapshots is not None:
            # the least wanted first: so they are evicted
            self.snapshots.free([*reversed(request.snapshots.values()), request.source])
            request.source, request.snapshots = 0, {}

    def _key(self, request: Request, end: int) -> bytes:
        return request.prefix_keys[end // self.key_step - 1]

    def _find(self, pool: BlockPool, request: Request, end: int) -> Optional[int]:
        return pool.find(self._key(request, end))


def extend_keys(keys: list[bytes], tokens: Sequence[int], step: int, salt: str = "") -> None:
    """Appends what is missing in `keys`, of which entry i names the first (i + 1) * step tokens under `salt`.

    Each key is a digest of the one before and of the tokens since, so equal keys mean equal prefixes: BLAKE2b (Aumasson
    et al. 2013) with 128 bits, for which no two inputs of one digest are known. Salts and tokens are digested under
    names of their own (its `person`), each behind its length, so that no salt begins where some tokens ended.

    Raises ValueError, having appended nothing, for a salt that UTF-8 cannot encode.
    """
    parent = keys[-1] if keys else _digest(b"cache_salt", _encode_salt(salt))
    for end in range((len(keys) + 1) * step, len(tokens) + 1, step):
        parent = _digest(b"tokens", array("q", tokens[end - step : end]).tobytes(), parent)
        keys.append(parent)


def _digest(domain: bytes, content: bytes, parent: bytes = b"") -> bytes:
    return blake2b(parent + len(content).to_bytes(8, "little") + content, digest_size=16, person=domain).digest()


def _encode_salt(salt: str) -> bytes:
    try:
        return salt.encode()
    except UnicodeEncodeError:
        raise ValueError(f"cache_salt: expected text that UTF-8 can encode, got {salt!r}") from None
