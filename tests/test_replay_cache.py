"""`ReplayCache`: whole sequences against the token-by-token truth, its protocol, and hand-over to other libraries."""

import pytest
import torch
import truth_gdn
import truth_kda
import truth_mamba2
from harness import assert_close

from torch_replay import ReplayCache

FAMILIES = ("mamba2", "gdn", "kda")
LAYERS, SLOTS, WINDOW, TOKENS, WIDTH = 2, 4, 4, 3, 4
HEADS, GROUPS, WIDE, NARROW = 4, 2, 6, 5  # H, Gr, P, N or HV, H, V, K
CHANNELS = HEADS * WIDE + 2 * GROUPS * NARROW


def make(family, **options):
    sizes = dict(heads=HEADS, head_dim=WIDE, state_dim=NARROW, groups=GROUPS)
    if family != "mamba2":
        sizes = dict(heads=HEADS, value_dim=WIDE, key_dim=NARROW, key_heads=GROUPS)
    return getattr(ReplayCache, f"for_{family}")(LAYERS, SLOTS, WINDOW, TOKENS, **sizes, **options)


class Layers:
    """Random weights, and layers of convolution and recurrence: through a step of the cache, and in float64."""

    def __init__(self, family, seed=0):
        rng = torch.Generator().manual_seed(seed)
        self.family, self.rng = family, rng
        self.weight = [torch.randn(CHANNELS, WIDTH, generator=rng) * 0.5 for _ in range(LAYERS)]
        decay = (HEADS, NARROW) if family == "kda" else (HEADS,)
        self.decay = decay
        self.rate = [-torch.rand(HEADS, generator=rng) - 0.1 for _ in range(LAYERS)]
        self.bias = [torch.randn(decay, generator=rng) - 2 for _ in range(LAYERS)]

    def inputs(self, rows, tokens):
        """Of every layer: channels of the convolution, raw decay, and beta or the gate."""
        def draw(*shape):
            return torch.randn(rows, tokens, *shape, generator=self.rng)
        last = (HEADS, WIDE) if self.family == "mamba2" else (HEADS,)
        return [(draw(CHANNELS), draw(*self.decay), draw(*last)) for _ in range(LAYERS)]

    def split(self, mixed):
        """[..., CHANNELS] -> x, B, C or q, k, v."""
        first = HEADS * WIDE
        shared = GROUPS * NARROW
        order = [first, shared, shared] if self.family == "mamba2" else [shared, shared, first]
        parts = mixed.split(order, -1)
        return [part.unflatten(-1, (HEADS, WIDE) if size == first else (GROUPS, NARROW))
                for part, size in zip(parts, order)]

    def run(self, step, inputs):
        outputs = []
        for layer, (raw, decay, last) in enumerate(inputs):
            parts = self.split(step.conv(layer, raw, self.weight[layer]))
            if self.family == "mamba2":
                x, B, C = parts
                given = (x, decay, self.rate[layer], B, C, self.bias[layer], last, self.bias[layer])
            else:
                given = (*parts, decay, last, self.rate[layer], self.bias[layer])
            outputs.append(step(layer, *given))
        return outputs


class Sequence:
    """One sequence in float64: the state of each layer and every raw input of the convolutions."""

    def __init__(self, layers):
        self.layers = layers
        self.states = [torch.zeros(HEADS, WIDE, NARROW, dtype=torch.float64) for _ in range(LAYERS)]
        self.raw = [[] for _ in range(LAYERS)]

    def step(self, inputs, keep):
        """Outputs [T, HEADS, WIDE] of each layer for inputs [T, ...]; the first `keep` tokens stay."""
        return [self.layer(layer, *(t.double() for t in parts), keep) for layer, parts in enumerate(inputs)]

    def layer(self, layer, raw, decay, last, keep):
        model, history, state, outputs = self.layers, list(self.raw[layer]), self.states[layer], []
        rate, bias = model.rate[layer].double(), model.bias[layer].double()
        for t in range(len(raw)):
            history.append(raw[t])
            total = sum(model.weight[layer][:, w].double() * history[len(history) - WIDTH + w]
                        for w in range(WIDTH) if len(history) - WIDTH + w >= 0)
            parts = model.split(total / (1 + torch.exp(-total)))
            if model.family == "mamba2":
                x, B, C = parts
                state = truth_mamba2.advance(state, x, B, truth_mamba2.softplus(decay[t] + bias), rate)
                outputs.append(truth_mamba2.output(state, x, C, bias, last[t]))
            else:
                truth, extra = (truth_kda, [None]) if model.family == "kda" else (truth_gdn, [])
                q, k, v = parts
                q, k, g, beta = truth.prepared(q, k, decay[t], last[t], rate, bias, NARROW**-0.5, True, *extra)
                state = truth.decay_and_add(state, truth.corrected(state, k, v, g, beta), k, g)
                outputs.append(truth.output(state, q))
            if t + 1 == keep:
                self.raw[layer], self.states[layer] = list(history), state
        return torch.stack(outputs) if outputs else torch.zeros(0, HEADS, WIDE, dtype=torch.float64)


def check(outputs, inputs, sequences, lens, kept):
    """Outputs [B, T, ...] of each layer against the sequences (None: a padded row), which go on."""
    for row, (sequence, q, keep) in enumerate(zip(sequences, lens.tolist(), kept.tolist())):
        for out in outputs:
            assert not out[row, q if sequence else 0 :].any()
        if sequence is not None and q:
            want = sequence.step([[t[row, :q] for t in parts] for parts in inputs], keep)
            for out, expected in zip(outputs, want):
                assert_close("output", out[row, :q], expected, 2e-5)


def trace(family, steps, run, seed=0, wrapped=1):
    """Prompts in chunks, ragged drafts accepted at random, slots that get new sequences, and prompts that follow on
    decoded text, in random order. run(kind, cache, layers, inputs, slots, lens, third): one step."""
    layers, rng = Layers(family, seed), torch.Generator().manual_seed(seed + 1)
    cache, owners = make(family), dict.fromkeys(range(1, SLOTS + 1))
    wraps, begun, followed = 0, 0, 0
    for at in range(steps):
        order = (torch.randperm(SLOTS, generator=rng) + 1)[:3]
        slots = torch.cat([order, torch.zeros(1, dtype=torch.int64)]).int()
        if at % 15 in (7, 13) or any(owners[slot] is None for slot in order.tolist()):
            lens = torch.randint(1, 9, (4,), generator=rng, dtype=torch.int32)
            again = torch.tensor([slot > 0 and owners[slot] is not None and at % 15 == 7 for slot in slots.tolist()])
            followed += int(again.sum())
            for slot in slots[~again].tolist():
                if slot:
                    owners[slot], begun = Sequence(layers), begun + 1
            inputs, kept = layers.inputs(4, int(lens.max())), lens
            outputs = run("prefill", cache, layers, inputs, slots, lens, again)
        else:
            lens = torch.randint(0, TOKENS + 1, (4,), generator=rng, dtype=torch.int32)
            kept = (torch.rand(4, generator=rng) ** 0.5 * (lens + 1)).int()
            inputs, before = layers.inputs(4, TOKENS), cache.ring_start.clone()
            outputs = run("decode", cache, layers, inputs, slots, lens, kept)
            wraps += int((cache.ring_start < before).sum())
        check(outputs, inputs, [owners.get(slot) for slot in slots.tolist()], lens, kept)
    for slot, sequence in owners.items():
        assert int(cache.positions[slot]) == len(sequence.raw[0])
    assert wraps >= wrapped and begun > SLOTS and followed > 2
    return cache, owners


def eager(kind, cache, layers, inputs, slots, lens, third):
    step = cache.prefill(slots, lens, third) if kind == "prefill" else cache.decode(slots, lens)
    outputs = layers.run(step, inputs)
    cache.commit(third if kind == "decode" else None)
    return outputs


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_traces(family):
    """Random traces through many wraps of the rings equal the truth at every token of every layer."""
    trace(family, 80, eager, wrapped=8)


def test_negative_control():
    """A commit with another window than the step had, which the cache rules out, is far from the truth."""
    def run(kind, cache, layers, inputs, slots, lens, third):
        step = cache.prefill(slots, lens, third) if kind == "prefill" else cache.decode(slots, lens)
        outputs = layers.run(step, inputs)
        cache.window -= 1
        cache.commit(third if kind == "decode" else None)
        cache.window += 1
        return outputs

    with pytest.raises((AssertionError, ValueError)):
        trace("gdn", 30, run)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_graph(family):
    """A decode step, commit included, is one graph, compiled once for flushes, wraps, drafts and new sequences."""
    torch._dynamo.reset()

    def decode(cache, layers, inputs, slots, lens, kept):
        outputs = layers.run(cache.decode(slots, lens), inputs)
        cache.commit(kept)
        return outputs

    compiled, calls = torch.compile(decode, fullgraph=True, backend="aot_eager"), []

    def run(kind, *args):
        if kind == "prefill":
            return eager(kind, *args)
        calls.append(kind)
        with torch._dynamo.config.patch(error_on_recompile=len(calls) > 1):
            return compiled(*args)

    trace(family, 30, run)
    assert len(calls) > 20


def test_prefill_is_one_graph():
    """A prompt step compiles, too, with the fold of what was decoded before; nothing specialises on its length."""
    torch._dynamo.reset()

    def prefill(cache, layers, inputs, slots, lens, again):
        outputs = layers.run(cache.prefill(slots, lens, again), inputs)
        cache.commit()
        return outputs

    compiled = torch.compile(prefill, fullgraph=True, backend="aot_eager", dynamic=True)
    trace("mamba2", 30, lambda kind, *args: (compiled if kind == "prefill" else lambda *a: eager("decode", *a))(*args))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("state_dtype", [torch.float16, torch.int8], ids=str)
def test_narrow_states(family, state_dtype):
    """Checkpoints in 16 and 8 bits, stochastically rounded, stay near the float32 cache's outputs."""
    layers = Layers(family)
    caches = make(family), make(family, state_dtype=state_dtype, philox_rounds=7)
    slots = torch.tensor([2, 4])
    for length in (9, *[TOKENS] * 6):
        inputs, found = layers.inputs(2, length), []
        for cache in caches:
            found.append(layers.run(cache.prefill(slots, 9) if length == 9 else cache.decode(slots), inputs))
            cache.commit()
        for want, got in zip(*found):
            assert_close("output", got, want, 5e-2)
    assert not torch.equal(caches[0].state[:, 2].half(), caches[1].state[:, 2].half())


def started(family="gdn", length=7):
    """A cache whose slots 1 and 2 hold a prompt, and its layers."""
    cache, layers = make(family), Layers(family)
    layers.run(cache.prefill(torch.tensor([1, 2]), length), layers.inputs(2, length))
    cache.commit()
    layers.drawn = layers.inputs(2, TOKENS)
    return cache, layers


def decode(cache, layers, slots=(1, 2), **how):
    return layers.run(cache.decode(torch.tensor(slots), **how), layers.drawn)


def not_committed(cache, layers):
    decode(cache, layers)
    decode(cache, layers)


def committed_twice(cache, layers):
    decode(cache, layers)
    cache.commit(torch.tensor([1, 2]))
    cache.commit(torch.tensor([1, 2]))


def too_many(cache, layers):
    decode(cache, layers)
    cache.commit(torch.tensor([1, TOKENS + 1]))


def too_few_rows(cache, layers):
    decode(cache, layers)
    cache.commit(torch.tensor([1]))


def layer_left_out(cache, layers):
    step = cache.decode(torch.tensor([1, 2]))
    (raw, decay, last), _ = layers.inputs(2, TOKENS)
    q, k, v = layers.split(step.conv(0, raw, layers.weight[0]))
    step(0, q, k, v, decay, last, layers.rate[0], layers.bias[0])
    cache.commit()


def layer_twice(cache, layers):
    step = cache.decode(torch.tensor([1, 2]))
    layers.run(step, layers.inputs(2, TOKENS))
    layers.run(step, layers.inputs(2, TOKENS))


MISTAKES = {
    "never committed": (not_committed, "the last step was not committed"),
    "prompt never committed": (lambda c, m: (c.prefill(torch.tensor([3]), 2), decode(c, m)), "not committed"),
    "committed twice": (committed_twice, "commit without a step"),
    "commit before any step": (lambda c, m: c.commit(), "commit without a step"),
    "more accepted than there were": (too_many, r"accepted out of range.*\[1, 4"),
    "fewer counts than rows": (too_few_rows, r"accepted out of range \(or too short\)"),
    "empty slot": (lambda c, m: decode(c, m, (1, 3)), "decode in a slot without a sequence"),
    "empty slot continued": (lambda c, m: c.prefill(torch.tensor([3]), 2, torch.tensor([True])), "continues a slot"),
    "recycled slot": (lambda c, m: decode(c, m, positions=torch.tensor([7, 0])), "positions differ"),
    "position off by one": (lambda c, m: decode(c, m, positions=torch.tensor([8, 7])), "positions differ"),
    "slot out of range": (lambda c, m: decode(c, m, (1, SLOTS + 1)), "slots out of range"),
    "slot twice": (lambda c, m: decode(c, m, (2, 2)), "named by two rows"),
    "too many tokens": (lambda c, m: decode(c, m, query_lens=torch.tensor([1, 4])), "query_lens out of range"),
    "other tokens": (lambda c, m: decode(c, m, query_lens=1), "inputs have 3 tokens a row, expected 1"),
    "too many rows": (lambda c, m: decode(c, m, (0,) * (SLOTS + 1)), "slots is of shape"),
    "layer left out": (layer_left_out, r"layers \[1\] did not take part"),
    "layer twice": (layer_twice, "layer 0 runs twice"),
    "another width": (lambda c, m: c.decode(torch.tensor([1])).conv(0, torch.zeros(1, TOKENS, CHANNELS),
                                                                   torch.zeros(CHANNELS, 3)), "weight is of width 3"),
}


@pytest.mark.parametrize("mistake, message", MISTAKES.values(), ids=MISTAKES)
def test_mistakes(mistake, message):
    """Each breach of the protocol is a ValueError."""
    with pytest.raises(ValueError, match=message):
        mistake(*started())


@pytest.mark.parametrize("name", ["never committed", "committed twice", "recycled slot", "slot twice"])
def test_mistakes_in_a_graph(name):
    """Compiled code finds them as well, where it finds them by values; without the checks nothing is found."""
    mistake, message = MISTAKES[name]
    for checks in (True, False):
        torch._dynamo.reset()
        cache, layers = started()
        cache.checks = checks
        run = torch.compile(mistake, backend="aot_eager", fullgraph=True)
        if checks:
            with pytest.raises(RuntimeError, match=message):
                run(cache, layers)
        elif name != "slot twice":  # which the op itself refuses on a CPU
            run(cache, layers)


def test_second_commit_moves_nothing():
    """Unseen, a second commit still changes no cursor and no position."""
    cache, layers = started()
    cache.checks = False
    decode(cache, layers)
    cache.commit(torch.tensor([1, 2]))
    before = [t.clone() for t in (cache.ring_start, cache.ring_committed, cache.positions)]
    cache.commit(torch.tensor([1, 2]))
    assert all(map(torch.equal, before, (cache.ring_start, cache.ring_committed, cache.positions)))


def test_checks_follow_the_environment(monkeypatch):
    """On a CPU values are looked at; elsewhere only if TORCH_REPLAY_CHECK says so."""
    assert make("gdn").checks
    assert not make("gdn", device="meta").checks
    monkeypatch.setenv("TORCH_REPLAY_CHECK", "1")
    assert make("gdn", device="meta").checks


@pytest.mark.parametrize("family", FAMILIES)
def test_reset(family):
    """A reset slot decodes as an empty sequence, also after a step that was never committed; others go on."""
    cache, layers = started(family)
    other = cache.state[:, 2].clone()
    decode(cache, layers)
    cache.reset([1, 2])
    cache, layers = started(family)
    cache.reset(1)
    assert torch.equal(cache.state[:, 2], other) and cache.positions.tolist()[:3] == [-1, 0, 7]
    inputs = layers.inputs(1, TOKENS)
    outputs = layers.run(cache.decode(torch.tensor([1])), inputs)
    cache.commit()
    check(outputs, inputs, [Sequence(layers)], torch.tensor([TOKENS]), torch.tensor([TOKENS]))


@pytest.mark.parametrize("conv", [True, False], ids=["conv", "no_conv"])
@pytest.mark.parametrize("family", FAMILIES)
def test_export_and_restore(family, conv):
    """A sequence moves to another slot of a cache with a longer ring and goes on bit for bit as where it was."""
    if not conv:
        cache = make(family, conv_width=0)
        cache.reset(1)
        moved = make(family, conv_width=0)
        moved.restore(2, cache.export(1))
        assert moved.positions.tolist() == [-1, -1, 0, -1, -1]
        return
    cache, layers = started(family)
    decode(cache, layers)
    cache.commit(torch.tensor([2, 3]))
    moved = make(family, ring_len=11)
    moved.restore(4, cache.export(2))
    inputs = layers.inputs(1, TOKENS)
    for want, got in zip(layers.run(cache.decode(torch.tensor([2])), inputs),
                         layers.run(moved.decode(torch.tensor([4])), inputs)):
        assert_close("output", got, want, 1e-6)
    assert int(moved.positions[4]) == 10


@pytest.mark.parametrize("layout", ["vk", "kv", "pn"])
@pytest.mark.parametrize("family", FAMILIES)
def test_state_for_others(family, layout):
    """The exported state is the truth's, ring folded in, in the layout asked for, and the cache keeps its own; it comes
    back as the same sequence. Another family's layout is named."""
    cache, owners = trace(family, 20, eager, seed=3)
    slot = max(owners, key=lambda at: int(cache.ring_committed[0, at]))
    assert cache.ring_committed[0, slot] > 0
    if (layout == "pn") != (family == "mamba2"):
        with pytest.raises(ValueError, match="layout is '.*', expected one of"):
            cache.export_state(slot, layout=layout)
        return
    before = cache.state.clone()
    exported = cache.export_state(slot, layout=layout)
    assert torch.equal(cache.state, before)
    for layer, want in enumerate(owners[slot].states):
        assert_close("state", exported["state"][layer], want.mT if layout == "kv" else want, 1e-5)
    for layer, raw in enumerate(owners[slot].raw):
        assert torch.equal(exported["conv"][layer], torch.stack(raw[1 - WIDTH :], -1).float())
    other = make(family)
    other.import_state(2, exported["state"], torch.nn.functional.pad(exported["conv"], (1, 0)),
                       int(exported["position"]), layout=layout)
    layers = owners[slot].layers
    inputs = layers.inputs(1, TOKENS)
    outputs = layers.run(other.decode(torch.tensor([2])), inputs)
    check(outputs, inputs, [owners[slot]], torch.tensor([TOKENS]), torch.tensor([TOKENS]))


def test_transposed_import():
    """[K, V] for [V, K] is refused by shape; where both are equal the layout has no default."""
    cache, _ = started()
    exported = cache.export_state(1, layout="vk")
    given = exported["conv"], 7
    with pytest.raises(ValueError, match=r"state is of shape \(2, 4, 5, 6\), expected \(2, 4, 6, 5\) as vk"):
        cache.import_state(2, exported["state"].mT, *given, layout="vk")
    cache.import_state(2, exported["state"].mT, *given, layout="kv")
    assert torch.equal(cache.state[:, 2], cache.state[:, 1])
    with pytest.raises(TypeError, match="layout"):
        cache.import_state(2, exported["state"], *given)
    for change in (dict(conv=None), dict(conv=given[0][..., :2]), dict(slot=0), dict(position=-1)):
        with pytest.raises(ValueError, match="import_state: (conv|slot) is"):
            right = dict(slot=2, state=exported["state"], conv=given[0], position=7, layout="vk")
            cache.import_state(**(right | change))


@pytest.mark.parametrize("options, message", [
    (dict(layers=0), "layers is 0"), (dict(window=2), "window is 2"), (dict(ring_len=6), "ring_len is 6"),
    (dict(key_heads=3), "key_heads is 3"), (dict(slots=0), "slots is 0"),
])
def test_bad_sizes(options, message):
    sizes = dict(layers=1, slots=2, window=4, tokens=3, heads=4, value_dim=6, key_dim=5) | options
    with pytest.raises(ValueError, match=message):
        ReplayCache.for_gdn(**sizes)
