"""Guesses of the next tokens for speculative decoding. A wrong guess costs time, never correctness."""

from collections.abc import Sequence
from typing import Optional, Protocol
from weakref import WeakKeyDictionary

from .request import Tokens, check_int


class Drafter(Protocol):
    """What the scheduler asks for drafts. A drafter sees the tokens so far and nothing of the draws to come, which is
    all that exact verification needs (see `sampling.count_accepted`)."""

    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        """At most `limit` (>= 1) token ids that may follow `tokens` (prompt and output); may be empty. What goes beyond
        `limit` is cut off by the scheduler. `tokens` is a view, the same object at each step of a request, which grows
        as the request does; a slice of it is a list."""
        ...


class NoDraft:
    """Never guesses."""

    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        return []


class PromptLookup:
    """Finds the last few tokens earlier in the request's own text and proposes what followed them there.

    The longest suffix of min_ngram to max_ngram tokens that occurs earlier counts; of its occurrences, the most recent
    one. Only the last `history` tokens count. Each request has an index of them, which a step extends by its new
    tokens, so the cost of a step does not depend on the context; it is freed with the request. Raises TypeError or
    ValueError for sizes below 1 or out of order.
    """

    def __init__(self, max_ngram: int = 4, min_ngram: int = 2, history: int = 4096):
        self.min_ngram = check_int("min_ngram", min_ngram, 1)
        self.max_ngram = check_int("max_ngram", max_ngram, self.min_ngram)
        self.history = check_int("history", history, self.max_ngram + 1)
        self._indices: WeakKeyDictionary[Tokens, _Index] = WeakKeyDictionary()

    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        """At most `limit` ids; fewer where the match lies close to the end, none without a match. Other sequences than
        a request's `Tokens` are searched anew at every call."""
        if limit < 1 or len(tokens) <= self.min_ngram:
            return []
        index = self._indices.get(tokens) if isinstance(tokens, Tokens) else None
        if index is None or len(tokens) <= index.end:  # new, or tokens were taken back
            index = _Index(self.min_ngram, self.max_ngram, self.history)
            if isinstance(tokens, Tokens):
                self._indices[tokens] = index
        index.extend(tokens, len(tokens) - 1)
        follows = index.follows(tokens)
        return [] if follows is None else tokens[follows : follows + limit]


class _Index:
    """Where each short run of tokens ended last, among the first `end` tokens and no further back than `history`."""

    def __init__(self, shortest: int, longest: int, history: int):
        self.sizes, self.history, self.end = range(longest, shortest - 1, -1), history, 0
        self.ends: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Sequence[int], end: int) -> None:
        """Takes in the runs that end before `end`, and lets go of those that ended too long ago to count."""
        begin = max(self.end, end - self.history)
        for last in range(begin, end):
            for size in self.sizes:
                if last + 1 >= size:
                    self.ends[tuple(tokens[last + 1 - size : last + 1])] = last + 1
                old = last + 1 - self.history
                if old >= size and self.ends.get(run := tuple(tokens[old - size : old])) == old:
                    del self.ends[run]
        self.end = end

    def follows(self, tokens: Sequence[int]) -> Optional[int]:
        """The place after the latest earlier occurrence of the longest suffix that has one."""
        for size in self.sizes:
            if size < len(tokens):
                place = self.ends.get(tuple(tokens[len(tokens) - size :]))
                if place is not None and place - size >= len(tokens) - self.history:
                    return place
        return None
