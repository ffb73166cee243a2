"""Per-request buffers on the device, their mirror on the host, and the batch that brings a step's changes to them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Optional

import numpy as np
import torch
from torch import Tensor

from ..graphs.transfer import Upload
from .batch import fresh_tensor
from .token_history import token_history

if TYPE_CHECKING:
    from ..engine.parallel import Agreed
    from ..engine.request import Request
    from ..models.memory import ModelMemory


class RequestState:
    """Persistent per-request buffers, by request index: lengths, sampling parameters and block tables.

    Each has one row more than there are requests: rows of padding write there, so that no step branches on them.

    num_computed, top_k, last_token: [N + 1] int32, last_token the one that the last decode step sampled. temperature,
    top_p: [N + 1] float32. seeds: [N + 1] int64. kv_tables: [KV groups, N + 1, C] int32. block_sizes: [KV groups]
    int32. history: token ids, with engram layers. host: what the host knows of the same.
    """

    def __init__(self, memory: "ModelMemory", max_model_len: int):
        self.size, device = memory.config.max_num_seqs, memory.device
        rows = self.size + 1
        # a storage for each, aligned: else CUDA-graph trees would copy them
        self.num_computed, self.top_k, self.last_token = (
            torch.zeros(rows, dtype=torch.int32, device=device) for _ in range(3))
        self.temperature = torch.zeros(rows, dtype=torch.float32, device=device)
        self.top_p = torch.ones(rows, dtype=torch.float32, device=device)
        self.seeds = torch.zeros(rows, dtype=torch.int64, device=device)
        columns = -(-max_model_len // memory.config.block_size)
        self.kv_tables = torch.zeros(len(memory.kv), rows, columns, dtype=torch.int32, device=device)
        self.block_sizes = torch.full((len(memory.kv),), memory.config.block_size, dtype=torch.int32, device=device)
        self.history = token_history(memory.engram, self.size, max_model_len, device)
        self.host = HostRequests(len(memory.kv), self.size, columns)


class HostRequests:
    """What the host knows of the requests, by index, and how much of it the device has.

    num_computed: [N]. tables: [groups, N, C], of which the first `filled [groups, N]` columns are in use, and the
    device has `sent [groups, N]`; `grown` if that may be less anywhere. Columns that a sliding window left behind keep
    their block: no query looks there.
    snapshots: by index, slots of the states that a step may read or publish, by the edge at which they stand.
    fresh: by index, whether the next step starts the state, from snapshot `fresh[index]` or, 0, from nothing.
    """

    def __init__(self, groups: int, size: int, columns: int):
        self.num_computed = np.zeros(size, np.int32)
        self.tables = np.zeros((groups, size, columns), np.int32)
        self.filled, self.sent = np.zeros((2, groups, size), np.int32)
        self.grown = True  # whether some table may have columns that were not sent
        self.snapshots: list[dict[int, int]] = [{} for _ in range(size)]
        self.fresh: dict[int, int] = {}

    def admit(self, index: int) -> None:
        """The index has a new owner, of whom the device knows nothing yet."""
        self.tables[:, index], self.filled[:, index], self.sent[:, index] = 0, 0, 0

    def update(self, request: "Request", kinds) -> None:
        """Takes over the request's length and what its tables gained. kinds: names of the groups, in order."""
        index = request.index
        self.num_computed[index] = request.num_computed
        for group, kind in enumerate(kinds):
            table, begin = request.tables[kind], self.filled[group, index]
            if len(table) > begin:
                self.tables[group, index, begin : len(table)] = table[begin:]
                self.filled[group, index] = len(table)
                self.grown = True


@dataclass
class Changes:
    """How much of the requests' memory an `InputBatch` brings along, by row.

    groups: KV groups. blocks: consecutive columns of a request's tables. edges: consecutive snapshot columns, 0: none.
    whole: from column 0 on, else from where the device's tables end. lookback: token ids before the row's first.
    inner: snapshots published inside a prompt chunk, by the number of the row's tokens before them; 0: none.
    """

    groups: int
    blocks: int
    edges: int = 0
    whole: bool = False
    lookback: int = 0
    inner: int = 0


@dataclass
class InputBatch:
    """What a step is given: B rows of T tokens each, row r's first `query_lens[r]` real.

    Everything on the device lies in `upload.buffer`; the properties are views of it, made anew in a traced function.
    Where a step uses fewer rows and tokens than the buffer has, `sent_ids` says how many: they are its two sizes.
    """

    upload: Upload
    changes: Optional[Changes] = None
    is_prefilling: Optional[Tensor] = None  # [B] bool; None: no row is
    rows: list[tuple[int, int, bool]] = field(default_factory=list)  # host, with prompts: request, tokens, prefilling
    agreed: Optional["Agreed"] = None  # what the step does on all ranks; None: no ranks that agree
    max_seq_len: int = 0  # host: no sequence is longer, for builders that size something by it; 0: not said
    allocate: Callable[..., Tensor] = fresh_tensor  # makes what is written for the step
    sent_ids: Optional[Tensor] = None  # [B, T] int32, `input_ids` of part of the buffer; None: of all of it

    @classmethod
    def empty(cls, rows: int, tokens: int, device, changes: Optional[Changes] = None) -> "InputBatch":
        """A batch whose rows are all empty."""
        shapes = {"num_reqs": (1,), "input_ids": (rows, tokens), "query_lens": (rows,), "idx_mapping": (rows,),
                  "rows": (rows,), "prefilling": (rows,), "query_start_loc": (rows + 1,)}
        if changes is not None:
            shapes["num_computed"] = (rows,)
            if changes.groups:
                # a first column of -1: nothing new
                shapes.update(first_cols=(rows, changes.groups), blocks=(rows, changes.groups, changes.blocks))
            if changes.edges:
                shapes.update(snapshot_cols=(rows, changes.edges), snapshot_slots=(rows, changes.edges))
            if changes.whole:
                shapes.update(src_cols=(rows,), dst_cols=(rows,))
            if changes.lookback:
                shapes.update(lookback=(rows, changes.lookback))
            if changes.inner:
                shapes.update(inner_ends=(rows, changes.inner), inner_slots=(rows, changes.inner))
        batch = cls(Upload(shapes, device), changes=changes)
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
        """[B, T] int32. -1 in a row's first place: the token that the device sampled last for the request."""
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
    def num_reqs(self) -> Tensor:
        """[1] int32, leading rows in use."""
        return self.upload.view("num_reqs")

    def fill(self, rows: list[tuple[int, list[int]]], prefilling: Optional[list[bool]] = None, more=None) -> None:
        """Overwrites the batch with `rows` of (request index, token ids), in one copy; what they leave is empty.

        prefilling: which of them prefill, None: none. more(arrays, indices): fills further arrays of the upload.
        """
        count, tokens = len(rows), [tokens for _, tokens in rows]
        lengths = [len(each) for each in tokens]
        arrays = self.upload.begin()
        ids, lens, indices, own = (arrays[name] for name in ("input_ids", "query_lens", "idx_mapping", "rows"))
        arrays["num_reqs"][0] = count
        if count:
            lens[:count] = lengths
            indices[:count] = [index for index, _ in rows]
            own[:count] = np.arange(count)
        lens[count:], indices[count:], own[count:] = 0, -1, -1
        ids.fill(0)
        if set(lengths) == {1}:
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
        self.upload.send()
        self.is_prefilling = self.view("prefilling") != 0 if prefilling is not None else None
