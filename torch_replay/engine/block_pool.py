"""Blocks of a cache, counted by who holds them, and found again by what they contain. Pure Python: no tensors."""

from collections import Counter, deque
from collections.abc import Iterable
from typing import Optional

from .request import check_int


class BlockPool:
    """Block ids 1 .. num_blocks - 1, handed out first in, first out; 0 is the null block and never handed out.

    A block has any number of holders. One that its last holder gives back is pending until the next `begin_step`: the
    step that frees it may still read it. A block that was published under a key keeps its contents when it is free,
    and can be shared by that key until it is evicted: blocks without a key are handed out first, then published ones
    that were allocated as spare and that nobody has shared yet, then the other published ones; of each, the one freed
    longest ago first. What is allocated as spare never takes the place of a block of the last kind.

    `evictions` counts the published blocks that were handed out anew. Raises ValueError for fewer than 2 blocks, and
    for freeing or publishing what is not in use.
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = check_int("num_blocks", num_blocks, 2)
        self.evictions = 0
        self._free = deque(range(1, num_blocks))
        self._idle: dict[int, None] = {}  # published blocks that nobody holds, freed longest ago first
        self._idle_spare: dict[int, None] = {}  # likewise, those that go before
        self._spare: set[int] = set()  # allocated as spare, and not shared since
        self._pending: list[int] = []
        self._holders: dict[int, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give now."""
        return len(self._free) + len(self._idle_spare) + len(self._idle)

    @property
    def num_blank(self) -> int:
        """Blocks that `allocate` can give now and that hold nothing published."""
        return len(self._free)

    @property
    def num_pending(self) -> int:
        """Blocks that the next `begin_step` makes free."""
        return len(self._pending)

    @property
    def num_used(self) -> int:
        return len(self._holders)

    def begin_step(self) -> None:
        for block in self._pending:
            if block in self._key_of:
                (self._idle_spare if block in self._spare else self._idle)[block] = None
            else:
                self._free.append(block)
        self._pending.clear()

    def allocate(self, count: int, spare: bool = False) -> Optional[list[int]]:
        """`count` block ids, or None (and nothing taken) if fewer are free. spare: what they will hold is of less use
        than other published blocks, until somebody shares it."""
        if check_int("count", count, 0) > self.num_free - (len(self._idle) if spare else 0):
            return None
        ids = [self._free.popleft() if self._free else self._evict() for _ in range(count)]
        self._holders.update(dict.fromkeys(ids, 1))
        (self._spare.update if spare else self._spare.difference_update)(ids)
        return ids

    def free(self, ids: Iterable[int]) -> None:
        """One holder gives blocks back; zeros are skipped. Of published ones, the first given is the first evicted.

        Raises ValueError, having freed nothing, if one is not in use or named twice."""
        ids = [i for i in ids if i != 0]
        if len(set(ids)) < len(ids) or not self._holders.keys() >= set(ids):
            raise ValueError(f"ids: expected blocks in use, each once, got {ids}")
        for block in ids:
            self._holders[block] -= 1
            if not self._holders[block]:
                del self._holders[block]
                self._pending.append(block)

    def restore(self, held: Iterable[int]) -> None:
        """Lets `held`, a block for each holder, be all that is held, whatever state an interrupted call left behind;
        zeros are skipped. What is published under a key stays published. May be called again where it was interrupted.
        """
        self._holders = dict(Counter(block for block in held if block))
        # of a block that was being published or evicted, one of the two may miss
        self._block_of = {key: block for key, block in self._block_of.items() if self._key_of.get(block) == key}
        self._key_of = {block: key for key, block in self._block_of.items()}
        # those idle for longest first, then what was let go just now, a prefix from its end
        idle = [*self._idle_spare, *self._idle, *reversed(self._key_of)]
        idle = [block for block in idle if block in self._key_of and block not in self._holders]
        self._idle_spare = {block: None for block in idle if block in self._spare}
        self._idle = {block: None for block in idle if block not in self._spare}
        self._free = deque(
            b for b in range(1, self.num_blocks) if b not in self._key_of and b not in self._holders)
        self._pending.clear()

    def publish(self, block: int, key: bytes) -> bool:
        """Lets a block in use be found by `key`. False, and nothing done, if another block has that key, or the block
        has one."""
        if block not in self._holders:
            raise ValueError(f"block: expected one in use, got {block}")
        if key in self._block_of or block in self._key_of:
            return False
        self._block_of[key], self._key_of[block] = block, key
        return True

    def find(self, key: bytes) -> Optional[int]:
        """The block that was published under `key`, held or not."""
        return self._block_of.get(key)

    def idle_keys(self) -> list[bytes]:
        """Keys of the published blocks that `allocate` can give now, the first to go first."""
        return [self._key_of[block] for block in (*self._idle_spare, *self._idle)]

    def holds(self, key: bytes) -> bool:
        """Whether somebody holds the block of `key`, so that sharing it takes nothing from the free ones."""
        return self._block_of.get(key) in self._holders

    def share(self, key: bytes) -> int:
        """One holder more for the block of `key`, which must have been published. Raises KeyError otherwise."""
        block = self._block_of[key]
        if block not in self._holders and not self._leave_idle(block):
            self._pending.remove(block)
        self._spare.discard(block)
        self._holders[block] = self._holders.get(block, 0) + 1
        return block

    def withdraw(self, key: bytes) -> None:
        """Forgets what was published under `key`, so that its block is handed out like any other. A block that
        somebody holds stays published."""
        block = self._block_of.get(key)
        if block is None or block in self._holders:
            return
        del self._block_of[self._key_of.pop(block)]
        if self._leave_idle(block):
            self._free.append(block)

    def forget(self) -> None:
        """Forgets all that was published: once nobody holds them, its blocks are handed out like any other."""
        self._block_of, self._key_of = {}, {}
        self._free.extend([*self._idle_spare, *self._idle])
        self._idle_spare, self._idle = {}, {}

    def next_victim(self) -> int:
        """The published block that goes first."""
        return next(iter(self._idle_spare or self._idle))

    def _evict(self) -> int:
        block = self.next_victim()
        self._leave_idle(block)
        del self._block_of[self._key_of.pop(block)]
        self.evictions += 1
        return block

    def _leave_idle(self, block: int) -> bool:
        """Takes a block off the lists of idle ones; whether it was there."""
        for idle in (self._idle, self._idle_spare):
            if block in idle:
                del idle[block]
                return True
        return False
