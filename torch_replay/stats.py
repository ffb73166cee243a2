"""What a run did: tokens and seconds, acceptance, flushes, state traffic, and what the compiler did."""

import contextlib
from dataclasses import asdict
from typing import Optional

from torch._dynamo.utils import counters

from .memory import ModelMemory
from .prefix_cache import PrefixCache


class Stats:
    """Counts of an engine's steps. Rates are None until there is something to divide by."""

    def __init__(self, memory: ModelMemory, prefix: Optional[PrefixCache] = None):
        self.prefix = prefix
        layers = [layer for states in memory.states.values() for layer in states.layers]
        self._state_bytes = sum(layer.state_bytes() for layer in layers)
        self._ring_bytes = sum(layer.ring_row_bytes() for layer in layers)
        self._window, self._ring_rows = memory.config.window, {}
        self._keeps_token_states = memory.config.max_tokens > 1
        self.replay = memory.config.replay
        self.prefill_tokens = self.decode_tokens = self.decode_rows = self.decode_steps = 0
        self.prefill_seconds = self.decode_seconds = 0.0
        self.drafted = self.accepted_drafts = self.fed = 0
        self.flushes = 0  # as the steps reported them
        self.replay_flushes = 0  # as they follow from the lengths, which also holds for a run without replay

    def record_prefill(self, requests: list[str], tokens: int, seconds: float) -> None:
        """Chunks of `requests` (ids), which leave a fresh checkpoint and an empty ring."""
        self.prefill_tokens += tokens
        self.prefill_seconds += seconds
        self._ring_rows.update(dict.fromkeys(requests, 0))

    def record_decode(self, requests: list[str], drafts: list[int], accepted: list[int], seconds: float) -> None:
        """ids, drafts and accepted tokens by row. `decode_tokens`, those that reach requests, the engine counts as it
        hands them out: a stop cuts a step's tail."""
        self.decode_steps += 1
        self.decode_rows += len(drafts)
        self.drafted += sum(drafts)
        self.fed += sum(drafts) + len(drafts)
        self.accepted_drafts += sum(accepted) - len(accepted)
        self.decode_seconds += seconds
        for request, draft, taken in zip(requests, drafts, accepted, strict=True):
            rows = self._ring_rows[request]
            flush = rows + draft + 1 > self._window
            self.replay_flushes += flush
            self._ring_rows[request] = taken if flush else rows + taken

    def forget(self, request: str) -> None:
        """Drops what is kept of a request that has ended."""
        self._ring_rows.pop(request, None)

    def as_dict(self) -> dict:
        """Flat numbers; None where nothing ran that would define one.

        State bytes are those of state-space layers: checkpoints and ring rows with replay, states without. The route
        that did not run is computed from the same steps.
        """
        plain_writes = self.fed if self._keeps_token_states else self.decode_rows
        with_replay = _ratio(self.replay_flushes * self._state_bytes + self.fed * self._ring_bytes, self.decode_tokens)
        plain = _ratio(plain_writes * self._state_bytes, self.decode_tokens)
        return {
            "replay": self.replay,
            "prefill_tokens": self.prefill_tokens,
            "prefill_tokens_per_second": _ratio(self.prefill_tokens, self.prefill_seconds),
            "decode_tokens": self.decode_tokens,
            "decode_steps": self.decode_steps,
            "tokens_per_second": _ratio(self.decode_tokens, self.decode_seconds),
            "acceptance_rate": _ratio(self.accepted_drafts, self.drafted),
            "flush_rate": _ratio(self.flushes, self.decode_rows) if self.replay else None,
            "state_bytes_per_token": with_replay if self.replay else plain,
            "state_bytes_per_token_replay": with_replay,
            "state_bytes_per_token_plain": plain,
            **self._prefix_counts(),
        }

    def _prefix_counts(self) -> dict:
        if self.prefix is None:
            return {}
        counts = {f"prefix_{name}": value for name, value in asdict(self.prefix.counts).items()}
        return {**counts, "prefix_evictions": self.prefix.evictions}


class CompileCounts:
    """What Dynamo did in an engine's warm-up and after it: graphs of a decode step, graph breaks, recompiles.

    Read from Dynamo's process-wide counters around the calls themselves, so other compiled code does not count. A
    step has two routes (greedy, sampled), each compiled once; what its first call compiles is no recompile.
    """

    def __init__(self):
        self.graphs = self.graph_breaks = self.recompiles = 0
        self._warm: set[str] = set()

    @contextlib.contextmanager
    def watch(self, route: str):
        """Around a call of the decode step by `route`."""
        before = _dynamo_counts()
        yield
        graphs, breaks = (after - count for after, count in zip(_dynamo_counts(), before))
        self.graph_breaks += breaks
        if route in self._warm:
            self.recompiles += graphs
        else:
            self.graphs = max(self.graphs, graphs)
            self._warm.add(route)

    def as_dict(self) -> dict:
        return {"graphs": self.graphs, "graph_breaks": self.graph_breaks, "recompiles": self.recompiles}


def _dynamo_counts() -> tuple[int, int]:
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
