"""KV cache groups: layers that share block tables. Everything about a group is its own and is found by its name."""

from dataclasses import dataclass
from typing import Optional

INNER_EDGES = 8  # snapshots that a prompt chunk publishes before its end, at most: their states are computed together


@dataclass(frozen=True)
class KVGroup:
    """A KV cache group.

    name: by which a request's block ids, a step's metadata and a builder are found. num_blocks: blocks of its pool, the
    null block included. sliding_window: tokens that a query sees, itself included; None: all. block_size: tokens of a
    block. kind: the kind of its layers, for which a builder is registered; None: "swa" with a window, else "full".

    Raises ValueError for sizes below 1.
    """

    name: str
    num_blocks: int
    sliding_window: Optional[int] = None
    block_size: int = 16
    kind: Optional[str] = None

    def __post_init__(self):
        for name in ("num_blocks", "block_size", "sliding_window"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"group {self.name}: {name} is {value}, expected at least 1")
        if self.kind is None:
            object.__setattr__(self, "kind", "full" if self.sliding_window is None else "swa")

    @property
    def prefix_cacheable(self) -> bool:
        """Whether its blocks are shared by prefix; those of a sliding window are private."""
        return self.sliding_window is None

    @property
    def prefix_replay_tokens(self) -> int:
        """Tokens before a prefix hit that the group needs computed again."""
        return self.sliding_window or 0


def by_name(groups) -> dict[str, KVGroup]:
    """Groups by name. Raises ValueError for two of one name."""
    found = {group.name: group for group in groups}
    if len(found) < len(groups):
        raise ValueError(f"groups are named {[group.name for group in groups]}, expected a name of its own for each")
    return found
