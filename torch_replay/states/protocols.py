"""What a host brings: the few attributes that model states read of its memory and of its requests."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Optional, Protocol, Union

import torch

from .groups import KVGroup

if TYPE_CHECKING:
    from .replay_context import PlainStates, ReplayContext


class Memory(Protocol):
    """A host's pools, as model states see them. The key-value caches themselves are the business of its forward.

    groups: KV groups; the order is that of the rows of block tables and slot mappings. states: recurrent states by
    family. engram: what `token_history` needs of a model with n-gram layers, or None. num_snapshots: state snapshots
    that requests may share, 0 without a prefix cache.
    """

    device: torch.device
    max_num_seqs: int
    groups: Sequence[KVGroup]
    states: Mapping[str, Union["ReplayContext", "PlainStates"]]
    engram: Optional[object]
    num_snapshots: int

    def snapshot_slots(self, snapshot: int) -> Sequence[int]:
        """Slots of a snapshot, numbered from 1: one for each group of each context that publishes, in their order."""
        ...


class Sampling(Protocol):
    """How a request's tokens are drawn, and whether log probabilities of its prompt are wanted: None or False, no;
    a number of alternatives, 0 among them, yes."""

    temperature: float
    top_p: float
    top_k: int
    seed: int
    prompt_logprobs: Union[bool, int, None]


class RequestLike(Protocol):
    """A request with an index, as model states see it when it is added and before each of its steps.

    index: its row in the per-request buffers. num_computed: tokens that are in its caches and states. tables: block ids
    by group name, of which only the new ones are looked at. replay_start: first position whose window keys are there,
    0: all. source: snapshot from which its state starts, 0: none. snapshots: by the number of tokens before it, the
    snapshot that a step may publish. params: see `Sampling`. token_ids: prompt and output; asked for only if there are
    n-gram layers and the request comes with tokens computed before.
    """

    index: int
    num_computed: int
    tables: Mapping[str, Sequence[int]]
    replay_start: int
    source: int
    snapshots: Mapping[int, int]
    params: Sampling
    token_ids: Sequence[int]
