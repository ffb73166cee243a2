"""Metadata of full decode steps as one CUDA graph for each padded size, for an engine whose forward is elsewhere.

`graphs.step.DecodeStep` has forward and metadata in one graph. An engine that keeps a forward of its own (captured by
itself, or compiled apart) still pays the host for every small kernel of the metadata; here they are one launch.
"""

import logging
import warnings
from collections.abc import Iterable, Sequence
from typing import Optional

import torch
from torch import Tensor

from ..graphs.compiled import compile_alone, forget_compiled, mark_static
from ..progress import shown
from .batch import Batch
from .builders import is_recordable
from .groups import KVGroup
from .model_state import ReplayModelState
from .protocols import Memory
from .request_state import InputBatch, RequestState

logger = logging.getLogger(__name__)
Key = tuple[int, int]  # padded requests, padded tokens


class KeptTensors:
    """Makes each tensor once, by name and shape, so that it stays where it is; -1 in all, until a step writes it."""

    def __init__(self):
        self.tensors: dict[str, Tensor] = {}

    def __call__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device) -> Tensor:
        key = f"{name}{list(shape)}"
        if key not in self.tensors:
            self.tensors[key] = torch.full(shape, -1, dtype=dtype, device=device)
        return self.tensors[key]

    def keep(self, name: str, value: Tensor) -> Tensor:
        """The tensor of that name, overwritten with `value`."""
        return self(name, tuple(value.shape), value.dtype, value.device).copy_(value)


class SpecializedDecodeModelState(ReplayModelState):
    """The latency path of full decode steps: no prompts, no rows resized on the device, no micro-batches.

        state = SpecializedDecodeModelState(memory, RequestState(memory, max_model_len), sizes=[1, 8, 64], tokens=1)
        state.warm_up()                          # compiles and records every key
        key = state.key(len(rows))               # of each step
        state.fill(state.inputs(key), rows)      # one upload
        batch = state.replay(key)                # one graph launch; then the forward reads `batch`

    A key is (padded requests, padded tokens); how many of them are real the device reads from the upload, so one
    recording serves every step that fits. What `replay` returns lies in tensors of the key that never move: a graph of
    the forward may hold their addresses. It is valid until the next replay. Nothing eager runs between the metadata's
    graph and the forward's. Full decode steps have no replay starts (`replay_start` 0 in every row), and builders are
    given none: there is nothing to upload.

    Args:
        memory, requests, groups, tail_windows, exact: as for `ReplayModelState`.
        sizes: padded numbers of requests. tokens: T, tokens of a decode row.
        compiled: False builds eagerly, into the same tensors.
    """

    def __init__(self, memory: Memory, requests: RequestState, groups: Optional[Sequence[KVGroup]] = None,
                 sizes: Iterable[int] = (), tokens: int = 1, tail_windows: int = 0, exact: bool = False,
                 compiled: bool = True):
        self.sizes, self.tokens, self.compiled = sorted(set(sizes)), tokens, compiled
        if not self.sizes or self.sizes[0] < 1 or self.sizes[-1] > requests.size:
            raise ValueError(f"sizes is {self.sizes}, expected numbers of requests from 1 to {requests.size}")
        if tokens < 1:
            raise ValueError(f"tokens is {tokens}, expected at least 1")
        self._built: dict[Key, _Metadata] = {}
        super().__init__(memory, requests, groups, tail_windows, exact)

    def initialize_kv_cache(self, memory: Memory) -> None:
        """Takes other pools. What was recorded reads the old ones and is released: `warm_up` records again."""
        self.release()
        super().initialize_kv_cache(memory)

    def key(self, num_reqs: int) -> Key:
        """The smallest key that holds so many requests. Raises ValueError if none does."""
        for size in self.sizes:
            if num_reqs <= size:
                return size, size * self.tokens
        raise ValueError(f"num_reqs is {num_reqs}, expected at most {self.sizes[-1]}, the largest of sizes")

    def capture_keys(self) -> list[Key]:
        """Every key that `warm_up` records, the largest first: its graph's memory serves the others."""
        return [(size, size * self.tokens) for size in reversed(self.sizes)]

    def can_record(self, builders: Optional[Iterable] = None) -> bool:
        """Whether every builder's class declares `recordable = True`. builders: None for this state's own."""
        return all(map(is_recordable, self.builders.values() if builders is None else builders))

    def inputs(self, key: Key) -> InputBatch:
        """The persistent inputs of a key, to be given to `fill`."""
        return self._metadata(key).inputs

    def padded_decode_batch(self, key: Key) -> InputBatch:
        """The inputs of a key as they are recorded: every request is padding, so that no request's memory is written,
        and of the longest length there can be, for builders that size something by lengths."""
        inputs = self.inputs(key)
        self.fill(inputs, [])
        self.abandon_step()
        inputs.upload.begin()["padding_len"][0] = self.requests.max_model_len
        inputs.upload.send()
        return inputs

    @torch.no_grad()
    def warm_up(self, quiet: bool = False) -> None:
        """Compiles and records the metadata of every key anew. No request's memory changes. quiet: no progress bar.

        With a builder that is not recordable, nothing is recorded: steps are built eagerly, and a line in the log says
        why.
        """
        self.release()
        if not self.can_record():
            for name, builder in self.builders.items():
                if not is_recordable(builder):
                    logger.warning("decode metadata is built eagerly: the builder of group %s, %s, does not declare "
                                   "recordable = True", name, type(builder).__name__)
            return
        for key in shown(self.capture_keys(), "recording metadata of decode steps", quiet):
            self.padded_decode_batch(key)
            metadata = self._metadata(key)
            metadata.record(self.compiled)

    @torch.no_grad()
    def replay(self, key: Key) -> Batch:
        """Positions, slots and attention metadata of the step that `inputs(key)` was filled with.

        A key that was not recorded is built eagerly, with a warning the first time.
        """
        metadata = self._metadata(key)
        if metadata.run is None:
            if self.can_record() and key not in self._warned:
                self._warned.add(key)
                warnings.warn(f"decode metadata of key {key} was not recorded and is built eagerly; recorded: "
                              f"{[key for key, made in self._built.items() if made.run is not None]}", stacklevel=2)
            metadata.build()
        else:
            metadata.run()
        return metadata.batch

    def release(self) -> None:
        """Lets go of what was compiled and recorded; `replay` builds eagerly until the next `warm_up`.

        CUDA-graph trees free their pool when no compiled function of the process holds a recording any more.
        """
        for metadata in self._built.values():
            metadata.release()
        self._built, self._warned = {}, set()

    def _metadata(self, key: Key) -> "_Metadata":
        if key not in self._built:
            size, tokens = key
            if not 1 <= size <= self.requests.size or tokens % size:
                raise ValueError(f"key is {key}, expected (padded requests up to {self.requests.size}, a multiple)")
            self._built[key] = _Metadata(self, size, tokens // size)
        return self._built[key]


class _Metadata:
    """The metadata of one key: its inputs, its tensors, and the compiled function that fills them."""

    def __init__(self, state: SpecializedDecodeModelState, rows: int, tokens: int):
        self.state, self.kept = state, KeptTensors()
        self.inputs = state.decode_inputs(rows, tokens)
        self.inputs.allocate, self.inputs.pads = self.kept, True
        self.batch: Optional[Batch] = None
        self.run = None

    def build(self) -> None:
        """Eagerly; makes the tensors the first time."""
        self.batch = self._filled()

    def fill_tensors(self) -> None:
        """What is compiled: the same, and nothing comes back, for a graph's outputs would die at the next replay."""
        self._filled()

    def _filled(self) -> Batch:
        state, keep = self.state, self.kept.keep
        batch = state.prepare_inputs(self.inputs)
        state.prepare_attn(batch, self.inputs)
        # what was made on the way moves to a place of its own
        batch.input_ids = keep("input_ids", batch.input_ids)
        for name in ("conv_slots", "state_slots", "token_slots"):
            slots = getattr(batch, name)
            setattr(batch, name, {family: value if value is None else keep(f"{family}.{name}", value)
                                  for family, value in slots.items()})
        if batch.engram is not None:
            batch.engram = [(keep(f"engram.{layer}.entries", entries), keep(f"engram.{layer}.masked", masked))
                            for layer, (entries, masked) in enumerate(batch.engram)]
        return batch

    def record(self, compiled: bool) -> None:
        self.build()
        if not compiled:
            self.run = self.fill_tensors
            return
        mark_static(self.inputs.upload, self.kept, *self.state.owners)
        cuda = self.inputs.upload.buffer.is_cuda
        self.run = compile_alone(self.fill_tensors, cuda=cuda, guarded=not cuda, direct=cuda)
        # on a GPU the first call runs in the graphs' memory pool, the second records, the third replays
        for _ in range(3 if cuda else 1):
            self.run()

    def release(self) -> None:
        if self.run is not None:
            forget_compiled(self.run)
        self.run = None
