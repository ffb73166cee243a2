"""Prompt lookup against a search by hand."""

import gc
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_replay.engine.drafter import NoDraft, PromptLookup
from torch_replay.engine.request import Request, Tokens


def by_hand(tokens, limit, max_ngram, min_ngram):
    """Longest suffix first, its latest earlier occurrence first."""
    for size in range(max_ngram, min_ngram - 1, -1):
        for begin in range(len(tokens) - size - 1, -1, -1):
            if tokens[begin : begin + size] == tokens[-size:]:
                return tokens[begin + size :][:limit]
    return []


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(st.lists(st.integers(0, 3), max_size=40), st.integers(0, 6), st.integers(1, 3), st.integers(0, 3))
def test_against_search_by_hand(tokens, limit, min_ngram, more):
    """Few different tokens, so that matches of every length, overlapping ones included, occur."""
    drafter = PromptLookup(min_ngram + more, min_ngram)
    assert drafter.propose(tokens, limit) == by_hand(tokens, limit, min_ngram + more, min_ngram)


def test_examples():
    """Longest before most recent, most recent among equals, nothing without two matching tokens."""
    drafter = PromptLookup()
    assert drafter.propose([1, 2, 3, 4, 5, 9, 3, 4, 6, 1, 2, 3, 4], 3) == [5, 9, 3]
    assert drafter.propose([1, 2, 7, 1, 2, 8, 1, 2], 2) == [8, 1]
    assert drafter.propose([1, 2, 3, 9, 3], 4) == []
    assert drafter.propose([5, 5, 5], 4) == [5]
    assert drafter.propose([1, 2, 1, 2], 4) == [1, 2]
    assert drafter.propose([], 4) == drafter.propose([1], 4) == drafter.propose([1, 2, 1, 2], 0) == []
    large = [2**40, 2**40 + 1, 3, 2**40, 2**40 + 1]
    assert drafter.propose(large, 1) == [3]
    assert NoDraft().propose([1, 2, 1, 2], 4) == []


def test_history_bounds_the_search():
    """Only the last `history` tokens are searched, and the proposal comes from there too."""
    tokens = [1, 2, 3] + [9] * 10 + [1, 2]
    assert PromptLookup(history=15).propose(tokens, 1) == [3]
    assert PromptLookup(history=14).propose(tokens, 1) == []


def test_sizes_are_checked():
    """Sizes below one or out of order are refused by name."""
    for sizes, name in (({"min_ngram": 0}, "min_ngram"), ({"max_ngram": 1}, "max_ngram"), ({"history": 4}, "history")):
        with pytest.raises(ValueError, match=f"^{name}"):
            PromptLookup(**sizes)
    with pytest.raises(TypeError, match="max_ngram"):
        PromptLookup(max_ngram=2.0)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.lists(st.integers(-2, 2), max_size=50),
       st.integers(5, 12))
def test_index_against_search_by_hand(prompt, steps, history):
    """A request that grows, and loses tokens now and then (a failed step's), drafts as if it were searched anew."""
    request, drafter = Request("a", prompt), PromptLookup(4, 2, history)
    for token in steps:
        if token >= 0:
            request.output_ids.append(token)
        else:
            del request.output_ids[token:]
        tokens = request.tokens
        assert list(request.view) == tokens and request.view[-3:] == tokens[-3:]
        assert drafter.propose(request.view, 3) == by_hand(tokens[-history:], 3, 4, 2)


def test_a_view_compares_like_its_list():
    """A drafter may compare what it sees with lists of its own; views of two requests are two things."""
    request, other = Request("a", [1, 2]), Request("b", [1, 2])
    request.output_ids.append(3)
    assert request.view == [1, 2, 3] and [1, 2, 3] == request.view and request.view not in ([1, 2], [1, 2, 4])
    assert request.view != "abc" and other.view == (1, 2) and other.view != Request("c", [1, 2]).view
    assert len({request.view, other.view, request.view}) == 2


def test_a_step_looks_at_new_tokens_alone(monkeypatch):
    """The tokens that a step reads do not grow with the context, nor does an index beyond its history; it goes with the
    request."""
    rng = random.Random(0)
    request, drafter, read = Request("a", [rng.randint(0, 50) for _ in range(20_000)]), PromptLookup(history=500), []
    right = Tokens.__getitem__
    monkeypatch.setattr(Tokens, "__getitem__", lambda self, place: (read.append(place), right(self, place))[1])
    for step in range(30):
        read.clear()
        drafter.propose(request.view, 4)
        assert step == 0 or len(read) < 20
        request.output_ids.append(rng.randint(0, 50))
    (index,) = drafter._indices.values()
    assert len(index.ends) <= 3 * 500
    del request
    gc.collect()
    assert not drafter._indices
