"""Per-request buffers on the device, their mirror on the host, and the batch that brings a step's changes to them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor

from ..graphs.transfer import Upload
from .batch import fresh_tensor
from .groups import by_name
from .protocols import Memory, RequestLike
from .token_history import token_history


class RequestState:
    """Persistent per-request buffers, by request index: lengths, sampling parameters and block tables.

    Each has one row more than there are requests: rows of padding write there, so that no step branches on them.

    num_computed, top_k, last_token: [N + 1] int32, last_token the one that the last decode step sampled. temperature,
    top_p: [N + 1] float32. seeds: [N + 1] int64. kv_tables: [KV groups, N + 1, C] int32, C columns for the group of the
    smallest blocks. block_sizes: [KV groups] int32. history: token ids, with engram layers. host: what the host knows
    of the same.

    device_counters: `num_computed` lives on the device: no step uploads over it, and a commit advances it by what was
    accepted. For hosts that verify drafts, or resize rows, on the device and do not wait to know. Else each step brings
    what the host knows.
    """

    def __init__(self, memory: Memory, max_model_len: int, device_counters: bool = False):
        self.device_counters = device_counters
        self.size, self.max_model_len, device = memory.max_num_seqs, max_model_len, memory.device
        rows = self.size + 1
        # a storage for each, aligned: else CUDA-graph trees would copy them
        self.num_computed, self.top_k, self.last_token = (
            torch.zeros(rows, dtype=torch.int32, device=device) for _ in range(3))
        self.temperature = torch.zeros(rows, dtype=torch.float32, device=device)
        self.top_p = torch.ones(rows, dtype=torch.float32, device=device)
        self.seeds = torch.zeros(rows, dtype=torch.int64, device=device)
        self.history = token_history(memory.engram, self.size, max_model_len, device)
        self.kv_tables = self.block_sizes = None
        self.initialize_tables(memory)

    def initialize_tables(self, memory: Memory) -> None:
        """Empty block tables for the memory's groups. Tensors stay where they are if their shapes do."""
        groups, device = list(by_name(memory.groups).values()), memory.device
        columns = [-(-self.max_model_len // group.block_size) for group in groups]
        shape = (len(groups), self.size + 1, max(columns, default=1))
        if self.kv_tables is None or self.kv_tables.shape != shape or self.kv_tables.device != device:
            self.kv_tables = torch.zeros(shape, dtype=torch.int32, device=device)
            self.block_sizes = torch.zeros(len(groups), dtype=torch.int32, device=device)
        self.kv_tables.zero_()
        self.block_sizes.copy_(torch.tensor([group.block_size for group in groups], dtype=torch.int32))
        self.host = HostRequests({group.name: (group.num_blocks, most) for group, most in zip(groups, columns)},
                                 self.size, shape[2])


class HostRequests:
    """What the host knows of the requests, by index, and how much of it the device has.

    num_computed: [N]. tables: [groups, N, C], of which the first `filled [groups, N]` columns are in use, and the
    device has `sent [groups, N]`; `grown` if that may be less anywhere. Columns that a sliding window left behind keep
    their block: no query looks there.
    snapshots: by index, slots of the states that a step may read or publish, by the edge at which they stand.
    fresh: by index, whether the next step starts the state, from snapshot `fresh[index]` or, 0, from nothing.
    """

    def __init__(self, groups: dict[str, tuple[int, int]], size: int, columns: int):
        """groups: by name, blocks of the pool and of a request, both at most."""
        self.groups = groups
        self.num_computed = np.zeros(size, np.int32)
        self.tables = np.zeros((len(groups), size, columns), np.int32)
        self.filled, self.sent = np.zeros((2, len(groups), size), np.int32)
        self.grown = True  # whether some table may have columns that were not sent
        self.snapshots: list[dict[int, int]] = [{} for _ in range(size)]
        self.fresh: dict[int, int] = {}

    def admit(self, index: int) -> None:
        """The index has a new owner, of whom the device knows nothing yet."""
        self.tables[:, index], self.filled[:, index], self.sent[:, index] = 0, 0, 0

    def update(self, request: RequestLike) -> None:
        """Takes over the request's length and what its tables gained.

        Raises ValueError, having changed nothing, for an index or a block that there is not, a table that is too long,
        or a group without a table.
        """
        index, gained = request.index, []
        if not 0 <= index < len(self.num_computed):
            raise ValueError(f"request: index is {index}, expected 0 to {len(self.num_computed) - 1}")
        for group, (name, (blocks, most)) in enumerate(self.groups.items()):
            if name not in request.tables:
                raise ValueError(f"request {index}: tables names {list(request.tables)}, expected {name!r} among them")
            table, begin = request.tables[name], int(self.filled[group, index])
            if len(table) > begin:
                new = table[begin:]
                if len(table) > most:
                    raise ValueError(f"request {index}: tables[{name!r}] has {len(table)} blocks, expected at most "
                                     f"{most}")
                if not 0 <= min(new) <= max(new) < blocks:
                    raise ValueError(f"request {index}: tables[{name!r}] gained {list(new)}, expected blocks in "
                                     f"[0, {blocks})")
                gained.append((group, begin, new))
        self.num_computed[index] = request.num_computed
        for group, begin, new in gained:
            self.tables[group, index, begin : begin + len(new)] = new
            self.filled[group, index] = begin + len(new)
            self.grown = True


@dataclass
class Changes:
    """How much of the requests' memory an `InputBatch` brings along, by row.

    groups: KV groups. blocks: consecutive columns of a request's tables. edges: consecutive snapshot columns, 0: none.
    whole: from column 0 on, else from where the device's tables end. lookback: token ids before the row's first.
    inner: snapshots published inside a prompt chunk, by the number of the row's tokens before them; 0: none.
    slots: of a snapshot, one for each group of recurrent states. counters: lengths come along.
    """

    groups: int
    blocks: int
    edges: int = 0
    whole: bool = False
    lookback: int = 0
    inner: int = 0
    slots: int = 1
    counters: bool = True


@dataclass
class InputBatch:
    """What a step is given: B rows of T tokens each, row r's first `query_lens[r]` real; or, `ragged`, rows of any
    lengths one after the other.

    Everything on the device lies in `upload.buffer`; the properties are views of it, made anew in a traced function.
    Where a step uses fewer rows and tokens than the buffer has, `sent_ids` says how many: they are its two sizes.
    """

    upload: Upload
    changes: Optional[Changes] = None
    is_prefilling: Optional[Tensor] = None  # [B] bool; None: no row is
    rows: list[tuple[int, int, bool]] = field(default_factory=list)  # host, with prompts: request, tokens, prefilling
    agreed: Optional[Any] = None  # what the step does on all ranks; None: no ranks that agree
    max_seq_len: Optional[int] = None  # host: no sequence is longer; None: than the model allows
    allocate: Callable[..., Tensor] = fresh_tensor  # makes what is written for the step
    sent_ids: Optional[Tensor] = None  # [B, T] int32, `input_ids` of part of the buffer; None: of all of it
    ragged: bool = False  # rows are packed
    pads: bool = False  # empty rows have the length `padding_len`
    started: list[int] = field(default_factory=list)  # host: requests of the last `fill`

    @classmethod
    def empty(cls, rows: int, tokens: int, device, changes: Optional[Changes] = None,
              ragged: bool = False) -> "InputBatch":
        """A batch whose rows are all empty. ragged: `tokens` is the number of all rows' tokens, else of each."""
        shapes = {"num_reqs": (1,), "input_ids": (tokens,) if ragged else (rows, tokens), "query_lens": (rows,),
                  "idx_mapping": (rows,), "rows": (rows,), "prefilling": (rows,), "query_start_loc": (rows + 1,),
                  "padding_len": (1,)}
        if changes is not None:
            if changes.counters:
                shapes["num_computed"] = (rows,)
            if changes.groups:
                # a first column of -1: nothing new
                shapes.update(first_cols=(rows, changes.groups), blocks=(rows, changes.groups, changes.blocks))
            if changes.edges:
                shapes.update(snapshot_cols=(rows, changes.edges), snapshot_slots=(rows, changes.edges, changes.slots))
            if changes.whole:
                shapes.update(src_cols=(rows,), begins=(rows,))
            if changes.lookback:
                shapes.update(lookback=(rows, changes.lookback))
            if changes.inner:
                shapes.update(inner_ends=(rows, changes.inner), inner_slots=(rows, changes.inner, changes.slots))
        batch = cls(Upload(shapes, device), changes=changes, ragged=ragged)
        if not ragged:
            batch.upload.fix("query_start_loc", np.arange(rows + 1) * tokens)
        batch.fill([])
        return batch

    def view(self, name: str) -> Tensor:
        """The device's array of that name, [B, ...]: one entry for each row in use."""
        # rows come first in all of them, so that a part is contiguous, whatever its size
        array = self.upload.view(name)
        return array if self.sent_ids is None else array[: self.sent_ids.shape[0]]

    @property
    def input_ids(self) -> Tensor:
        """[B, T] int32, ragged [tokens]. -1 in a row's first place: the token that the device sampled last for the
        request."""
        return self.upload.view("input_ids") if self.sent_ids is None else self.sent_ids

    @property
    def query_lens(self) -> Tensor:
        """[B] int32, 0 for empty rows."""
        return self.view("query_lens")

    @property
    def idx_mapping(self) -> Tensor:
        """[B] int32, request of each row, -1 for empty rows."""
        return self.view("idx_mapping")

    @property
    def by_row(self) -> Tensor:
        """[B] int32, each row's own number, -1 for empty rows: `idx_mapping` into what is known by row."""
        return self.view("rows")

    @property
    def query_start_loc(self) -> Tensor:
        """[B + 1] int32, where each row's tokens begin among all; the last is their number."""
        if self.sent_ids is None:
            return self.upload.view("query_start_loc")
        rows, tokens = self.sent_ids.shape
        return torch.arange(rows + 1, dtype=torch.int32, device=self.sent_ids.device) * tokens

    @property
    def padding_len(self) -> Tensor:
        """[1] int32, the sequence length of empty rows: 0, but the longest there can be while a step is recorded."""
        return self.upload.view("padding_len")

    @property
    def num_reqs(self) -> Tensor:
        """[1] int32, leading rows in use."""
        return self.upload.view("num_reqs")

    def check(self, rows: list[tuple[int, list[int]]], prefilling: Optional[list[bool]]) -> None:
        """Raises ValueError for rows that the batch does not hold, and for a request that comes twice."""
        shape = self.upload.places["input_ids"][1]
        most, lengths = self.upload.places["rows"][1][0], [len(tokens) for _, tokens in rows]
        if len(rows) > most:
            raise ValueError(f"fill: rows has {len(rows)} rows, expected at most {most}")
        if max(lengths, default=0) > shape[-1] or (self.ragged and sum(lengths) > shape[0]):
            raise ValueError(f"fill: rows have {lengths} tokens, expected at most {shape[-1]} "
                             f"{'in all' if self.ragged else 'each'}")
        real = [index for index, _ in rows if index >= 0]
        if len(set(real)) < len(real):
            raise ValueError(f"fill: rows are of requests {real}, expected each once")
        if prefilling is not None and len(prefilling) != len(rows):
            raise ValueError(f"fill: prefilling has {len(prefilling)} flags, expected one for each of {len(rows)} rows")

    def fill(self, rows: list[tuple[int, list[int]]], prefilling: Optional[list[bool]] = None, more=None) -> None:
        """Overwrites the batch with `rows` of (request index, token ids), in one copy; what they leave is empty.

        prefilling: which of them prefill, None: none. more(arrays, indices): fills further arrays of the upload.
        Raises as `check`, having written nothing.
        """
        self.check(rows, prefilling)
        count, tokens = len(rows), [tokens for _, tokens in rows]
        lengths = [len(each) for each in tokens]
        arrays = self.upload.begin()
        arrays["padding_len"][0] = 0
        ids, lens, indices, own = (arrays[name] for name in ("input_ids", "query_lens", "idx_mapping", "rows"))
        arrays["num_reqs"][0] = count
        if count:
            lens[:count] = lengths
            indices[:count] = [index for index, _ in rows]
            own[:count] = np.arange(count)
        lens[count:], indices[count:], own[count:] = 0, -1, -1
        ids.fill(0)
        if self.ragged:
            starts = arrays["query_start_loc"]
            starts[0], starts[1 : count + 1] = 0, np.cumsum(lengths)
            starts[count + 1 :] = sum(lengths)
            if count:
                ids[: sum(lengths)] = np.concatenate([np.asarray(each, np.int32) for each in tokens])
        elif set(lengths) == {1}:
            ids[:count, 0] = [first for first, in tokens]
        else:
            for row, each in enumerate(tokens):
                ids[row, : len(each)] = each
        self.rows = []
        if prefilling is not None:
            self.rows = [(index, len(each), flag) for (index, each), flag in zip(rows, prefilling, strict=True)]
            arrays["prefilling"][:count], arrays["prefilling"][count:] = prefilling, 0
        if more is not None:
            more(arrays, indices[:count])
        self.started = indices[:count].tolist()
        self.upload.send()
        self.is_prefilling = self.view("prefilling") != 0 if prefilling is not None else None
