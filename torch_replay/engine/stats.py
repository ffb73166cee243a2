"""What a run did: tokens and seconds, acceptance, flushes, state traffic, and what the compiler did."""

import contextlib
import types
from dataclasses import asdict
from typing import Optional

from torch._dynamo.utils import counters

from ..models.memory import ModelMemory
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
        # as they follow from the lengths and W: of a run without replay, and of steps that run with window 0
        self.replay_flushes = 0

    def record_prefill(self, requests: list[str], tokens: int, seconds: float) -> None:
        """Chunks of `requests` (ids), which leave a fresh checkpoint and an empty ring."""
        self.prefill_tokens += tokens
        self.prefill_seconds += seconds
        self._ring_rows.update(dict.fromkeys(requests, 0))

    def record_decode(self, requests: list[str], drafts: list[int], accepted: list[int], seconds: float) -> None:
        """ids, drafts and accepted tokens by row. What of it reached the requests, `record_tokens` counts."""
        self.decode_steps += 1
        self.decode_rows += len(drafts)
        self.fed += sum(drafts) + len(drafts)
        self.decode_seconds += seconds
        for request, draft, taken in zip(requests, drafts, accepted, strict=True):
            rows = self._ring_rows[request]
            flush = rows + draft + 1 > self._window
            self.replay_flushes += flush
            self._ring_rows[request] = taken if flush else rows + taken

    def record_tokens(self, tokens: int, drafts: int, accepted: int) -> None:
        """What one row of a decode step gave its request: tokens in all, drafts proposed for it, and tokens that had
        been drafts. A draft behind the end of the text was proposed, but is no token."""
        self.decode_tokens += tokens
        self.drafted += drafts
        self.accepted_drafts += accepted

    def forget(self, request: str) -> None:
        """Drops what is kept of a request that has ended."""
        self._ring_rows.pop(request, None)

    def counters(self) -> dict:
        """What `summarize` reads, plain numbers; those of several engines add up by `add_up`."""
        counts = {} if self.prefix is None else {**asdict(self.prefix.counts), "evictions": self.prefix.evictions}
        return {
            **{name: getattr(self, name) for name in (
                "replay", "prefill_tokens", "decode_tokens", "decode_rows", "decode_steps", "prefill_seconds",
                "decode_seconds", "drafted", "accepted_drafts", "fed", "flushes", "replay_flushes")},
            "state_bytes": self._state_bytes, "ring_bytes": self._ring_bytes,
            "keeps_token_states": self._keeps_token_states,
            **{f"prefix_{name}": value for name, value in counts.items()},
        }

    def as_dict(self) -> dict:
        """`summarize` of this engine's counters."""
        return summarize(self.counters())


def add_up(ranks: list[dict]) -> dict:
    """Counters of engines of one model that ran side by side: counts add up, seconds are the longest."""
    def merge(name: str):
        values = [counters[name] for counters in ranks]
        if name in ("replay", "state_bytes", "ring_bytes", "keeps_token_states"):
            return values[0]
        return max(values) if name.endswith("_seconds") else sum(values)

    return {name: merge(name) for name in ranks[0]}


def summarize(counters: dict) -> dict:
    """Flat numbers of `Stats.counters`; None where nothing ran that would define one.

    State bytes are those of state-space layers: checkpoints and ring rows with replay, states without. The route
    that did not run is computed from the same steps.
    """
    count = types.SimpleNamespace(**counters)
    plain_writes = count.fed if count.keeps_token_states else count.decode_rows
    with_replay, as_run = (
        _ratio(flushes * count.state_bytes + count.fed * count.ring_bytes, count.decode_tokens)
        for flushes in (count.replay_flushes, count.flushes))
    plain = _ratio(plain_writes * count.state_bytes, count.decode_tokens)
    return {
        "replay": count.replay,
        "prefill_tokens": count.prefill_tokens,
        "prefill_tokens_per_second": _ratio(count.prefill_tokens, count.prefill_seconds),
        "decode_tokens": count.decode_tokens,
        "decode_steps": count.decode_steps,
        "tokens_per_second": _ratio(count.decode_tokens, count.decode_seconds),
        "acceptance_rate": _ratio(count.accepted_drafts, count.drafted),
        "flush_rate": _ratio(count.flushes, count.decode_rows) if count.replay else None,
        "state_bytes_per_token": as_run if count.replay else plain,
        "state_bytes_per_token_replay": with_replay,
        "state_bytes_per_token_plain": plain,
        **{name: value for name, value in counters.items() if name.startswith("prefix_")},
    }


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
