"""`ReplayCache`: tokens taken back, rings folded, and sequences copied from slot to slot."""

import pytest
import torch
from test_replay_cache import FAMILIES, SLOTS, TOKENS, Layers, make


class Rows:
    """Two rows of random layers over a cache, in slots 2 and 4, and all inputs so far."""

    def __init__(self, family):
        self.layers, self.cache, self.slots = Layers(family), make(family), torch.tensor([2, 4])

    def prefill(self, inputs):
        return self._run(self.cache.prefill(self.slots, inputs[0][0].shape[1]), inputs)

    def decode(self, inputs):
        return self._run(self.cache.decode(self.slots, inputs[0][0].shape[1]), inputs)

    def _run(self, step, inputs):
        outputs = self.layers.run(step, inputs)
        self.cache.commit()
        return outputs


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_taken_back(family):
    """What `rewind` takes back never happened, after single steps and after one of several tokens."""
    ours, other = Rows(family), Rows(family)
    prompt = ours.layers.inputs(2, 5)
    ours.prefill(prompt), other.prefill(prompt)
    for count in (1, 2, 3, TOKENS):
        wrong = [ours.layers.inputs(2, 1) for _ in range(count)] if count < TOKENS else [ours.layers.inputs(2, TOKENS)]
        for inputs in wrong:
            ours.decode(inputs)
        ours.cache.rewind(ours.slots, count)
        ours.cache.fold(ours.slots), other.cache.fold(other.slots)  # so that no flush comes before the next rewind
        right = ours.layers.inputs(2, 2)
        for mine, theirs in zip(ours.decode(right), other.decode(right), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    assert torch.equal(ours.cache.positions, other.cache.positions)


def test_what_cannot_be_taken_back():
    """More than the rings hold, or than a step has, and a step under way: refused, and nothing moves."""
    rows = Rows("gdn")
    rows.prefill(rows.layers.inputs(2, 5))
    rows.decode(rows.layers.inputs(2, 2))
    before = rows.cache.positions.clone(), rows.cache.ring_committed.clone()
    for tokens in (-1, 3):
        with pytest.raises(ValueError, match=f"rewind of {tokens} tokens, expected 0..2: the rings hold 2"):
            rows.cache.rewind(rows.slots, tokens)
    assert torch.equal(before[0], rows.cache.positions) and torch.equal(before[1], rows.cache.ring_committed)
    rows.cache.decode(rows.slots, 1)
    for call in (lambda: rows.cache.rewind(rows.slots, 1), lambda: rows.cache.fold(rows.slots),
                 lambda: rows.cache.reorder(rows.slots, rows.slots)):
        with pytest.raises(ValueError, match="uncommitted"):
            call()


@pytest.mark.parametrize("family", FAMILIES)
def test_fold(family):
    """Folding changes where a state lies and not what it is; it takes the null slot for a padded row."""
    rows = Rows(family)
    rows.prefill(rows.layers.inputs(2, 5))
    rows.decode(rows.layers.inputs(2, 2))
    layout = "pn" if family == "mamba2" else "kv"
    before = [rows.cache.export_state(slot, layout=layout) for slot in (2, 4)]
    rows.cache.fold(torch.tensor([2, 0]))
    assert rows.cache.ring_committed[0].tolist() == [0, 0, 0, 0, 2]
    for slot, exported in zip((2, 4), before, strict=True):
        for key, value in rows.cache.export_state(slot, layout=layout).items():
            torch.testing.assert_close(value, exported[key], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_reorder(family):
    """Slots go on from copies of others, also where two take the same and one takes another's old content."""
    rows = Rows(family)
    rows.prefill(rows.layers.inputs(2, 5))
    for count in (2, 1, 3):
        rows.decode(rows.layers.inputs(2, count))
    held = {slot: rows.cache.export(slot) for slot in (2, 4)}
    rows.cache.reorder(torch.tensor([2, 4, 1]), torch.tensor([4, 2, 2]))
    for slot, source in ((2, 4), (4, 2), (1, 2)):
        for key, value in rows.cache.export(slot).items():
            assert torch.equal(value, held[source][key]), key
    assert rows.cache.positions.tolist() == [-1, 11, 11, -1, 11] and SLOTS == 4
