"""KV cache groups: layers that share block tables."""

from dataclasses import dataclass
from typing import Optional

INNER_EDGES = 8  # snapshots that a prompt chunk publishes before its end, at most: their states are computed together


@dataclass(frozen=True)
class KVGroup:
    """A KV cache group: its name, its pool's size in blocks (the null block included), and how many tokens a query
    sees, itself included (None: all)."""

    name: str
    num_blocks: int
    sliding_window: Optional[int] = None

    @property
    def prefix_cacheable(self) -> bool:
        """Whether its blocks are shared by prefix; those of a sliding window are private."""
        return self.sliding_window is None

    @property
    def prefix_replay_tokens(self) -> int:
        """Tokens before a prefix hit that the group needs computed again."""
        return self.sliding_window or 0
