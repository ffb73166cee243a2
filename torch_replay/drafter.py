"""Guesses of the next tokens for speculative decoding. A wrong guess costs time, never correctness."""

from array import array
from typing import Protocol

import numpy as np

from torch_replay.request import check_int


class Drafter(Protocol):
    """What the scheduler asks for drafts. A drafter sees the tokens so far and nothing of the draws to come, which is
    all that exact verification needs (see `sampling.count_accepted`)."""

    def propose(self, tokens: list[int], limit: int) -> list[int]:
        """At most `limit` (>= 1) token ids that may follow `tokens` (prompt and output); may be empty. What goes beyond
        `limit` is cut off by the scheduler. `tokens` is the drafter's own copy."""
        ...


class NoDraft:
    """Never guesses."""

    def propose(self, tokens: list[int], limit: int) -> list[int]:
        return []


class PromptLookup:
    """Finds the last few tokens earlier in the request's own text and proposes what followed them there.

    The longest suffix of min_ngram to max_ngram tokens that occurs earlier counts; of its occurrences, the most recent
    one. Only the last `history` tokens are searched, so a call costs at most `max_ngram` passes over that many
    numbers. Raises TypeError or ValueError for sizes below 1 or out of order.
    """

    def __init__(self, max_ngram: int = 4, min_ngram: int = 2, history: int = 4096):
        self.min_ngram = check_int("min_ngram", min_ngram, 1)
        self.max_ngram = check_int("max_ngram", max_ngram, self.min_ngram)
        self.history = check_int("history", history, self.max_ngram + 1)

    def propose(self, tokens: list[int], limit: int) -> list[int]:
        """At most `limit` ids; fewer where the match lies close to the end, none without a match."""
        tokens = tokens[-self.history :]
        if limit < 1 or len(tokens) <= self.min_ngram:
            return []
        ids = np.frombuffer(array("q", tokens), dtype=np.int64)  # several times faster than np.array(list)
        last = len(ids) - 1
        ends = np.flatnonzero(ids[:last] == ids[last])  # where an earlier occurrence may end
        length = 1
        while length < self.max_ngram:
            ends_inside = ends[ends >= length]
            longer = ends_inside[ids[ends_inside - length] == ids[last - length]]
            if not len(longer):
                break
            ends, length = longer, length + 1
        if not len(ends) or length < self.min_ngram:
            return []
        follows = int(ends[-1]) + 1
        return tokens[follows : follows + limit]
