"""Snapshots at block edges: each is the state of exactly its tokens, and taking one disturbs nobody.

The cases are failures that other engines had. Those of cursors and plans alone (window edge, wrap, nothing accepted,
padding, aliasing, groups with null slots, several edges in one step) are vectors in `test_ring_commit.py`, those of
chains and swaps of slots in `test_ring.py`, of moves between pools in `test_ring_transfer.py`.
"""

import random

import pytest
import torch
from harness import assert_close, failing_kernel
from prefix_harness import Watch, poison_free
from test_engine import Injected, RandomDrafter
from tiny import engine, greedy, tiny_model
from truth_model import TruthModel

from torch_replay import SamplingParams
from torch_replay.engine.prefix_cache import extend_keys
from torch_replay.engine.scheduler import Plan
from torch_replay.ops.mamba2 import naive as mamba2
from torch_replay.ops.registry import override_kernel

PATTERN = ("mamba2", "gdn", "mlp")
TOKENS = 24
PARAMS = SamplingParams(max_tokens=TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def model():
    return tiny_model(2, pattern=PATTERN, vocab=31)


@pytest.fixture(scope="module")
def prompt():
    rng = random.Random(1)
    return [rng.randint(1, 30) for _ in range(33)]


@pytest.fixture(scope="module")
def text(model, prompt):
    return greedy(model, prompt, TOKENS)


@pytest.fixture(scope="module")
def states(model, prompt, text):
    """By number of tokens, the float64 states of the prompt and its text, token by token."""
    truth, found = TruthModel(model), {}
    for count, token in enumerate(prompt + text, 1):
        truth.step(token)
        found[count] = {kind: state.clone() for kind, state in zip(PATTERN, truth.states) if kind != "mlp"}
    return found


class Scripted:
    """Drafts by a script: in each decode step so many right tokens, then so many wrong ones."""

    def __init__(self, answer, script):
        self.answer, self.script = answer, iter(script)

    def propose(self, tokens, limit):
        right, wrong = next(self.script, (0, 0))
        drafts = self.answer[len(tokens) : len(tokens) + right]
        following = self.answer[len(tokens) + right] if len(tokens) + right < len(self.answer) else 0
        return (drafts + [following % 30 + 1] * wrong)[:limit]


def check_snapshots(watch, tokens, states) -> list[int]:
    """Every published snapshot holds the state of its tokens, canonical; returns the edges."""
    size, step, keys = watch.prefix.state_block_size, watch.prefix.key_step, []
    extend_keys(keys, tokens, step)
    edges = []
    for edge in range(size, len(tokens) + 1, size):
        snapshot = watch.prefix.snapshots.find(keys[edge // step - 1])
        if snapshot is None:
            continue
        edges.append(edge)
        slot = watch.memory.snapshot_slots(snapshot)[0]
        for context in watch.contexts:
            assert_close(f"edge {edge}", context.state[0, slot], states[edge][context.family], 1e-5)
            assert not context.ring_start[0, slot] and not context.ring_committed[0, slot]
    assert len(edges) == len(watch.prefix.snapshots._block_of), "published under other tokens"
    return edges


def run_checked(watch, prompt, tokens, states) -> tuple[list[int], list[int]]:
    """A request's text, and all edges at which a snapshot was ever published; each is checked after each step."""
    name, edges, text = watch.runner.add_request(prompt, PARAMS), set(), None
    while watch.runner.has_work:
        for output in watch.step():
            text = output.token_ids if output.id == name else text
        edges.update(check_snapshots(watch, tokens, states))
    return text, sorted(edges)


# name: engine options, draft script (right, wrong) of each decode step, edges published
EDGES = {
    "no_drafts": (dict(state_block_size=4), [], list(range(4, 57, 4))),
    "small_chunks": (dict(state_block_size=4, chunk_size=7), [], list(range(4, 57, 4))),
    "chunks_end_mid_block": (dict(state_block_size=16, chunk_size=7), [], [16, 32, 48]),
    "edge_at_the_first_accepted": (dict(state_block_size=34, num_spec=3), [(3, 0)], [34]),
    "edge_at_the_last_accepted": (dict(state_block_size=37, num_spec=3), [(3, 0)], [37]),
    "edge_inside_the_accepted": (dict(state_block_size=35, num_spec=3), [(3, 0)], [35]),
    "edge_beyond_the_accepted": (dict(state_block_size=36, num_spec=3), [(1, 2), (0, 3), (3, 0)], [36]),
    "edge_with_one_accepted": (dict(state_block_size=34, num_spec=3), [(0, 3)], [34]),
    "edge_in_a_flush": (dict(state_block_size=5, num_spec=3, window=4, ring_len=9), [(3, 0)] * 6,
                        list(range(5, 56, 5))),
    "several_edges_in_a_step": (dict(state_block_size=2, num_spec=7), [(7, 0)] * 3,
                                [*range(4, 33, 4), 40, 48, 56]),
    "a_window_of_one": (dict(state_block_size=3, window=1), [], [6, 12, 18, 24, *range(30, 55, 3)]),
    "kv_block_is_another": (dict(state_block_size=6, block_size=16), [], [6, 12, 18, 24, 30, 36, 42, 48, 54]),
}


@pytest.mark.parametrize("options, script, edges", EDGES.values(), ids=EDGES)
def test_every_snapshot_is_the_state_at_its_edge(model, prompt, text, states, options, script, edges):
    """Each edge of a run, and no more; the text is that of a run without snapshots; a second run hits."""
    watch = Watch(model, num_snapshots=40, **options)
    watch.runner.scheduler.drafter = Scripted(prompt + text, script)
    poison_free(watch.runner)
    assert run_checked(watch, prompt, prompt + text, states) == (text, edges)
    assert watch.counts.published_snapshots == len(edges)
    last = max(edge for edge in edges if edge <= len(prompt + text) - 1)
    second = prompt + text
    watch.runner.scheduler.drafter = Scripted([], [])
    before = watch.runner.stats.prefill_tokens
    poison_free(watch.runner)
    assert watch.run([second], SamplingParams(max_tokens=3, ignore_eos=True)) == [greedy(model, second, 3)]
    assert watch.counts.hits == 1 and watch.counts.hit_tokens == last
    assert watch.runner.stats.prefill_tokens - before == len(second) - last


def test_recycled_slot(model, prompt, text):
    """A slot whose last owner left start 7, 9 live rows and a state of 1e4 is used as if it were new."""
    watch = Watch(model, max_num_seqs=1, state_block_size=4, num_snapshots=4)
    for context in watch.contexts:
        context.state.fill_(1e4)
        context.ring_start[:, 1:], context.ring_committed[:, 1:] = 7, 9
        for ring in (*context.rings, context.conv_ring):
            ring.fill_(float("nan"))
    watch.runner.add_request(prompt, PARAMS)
    watch.step()
    for context in watch.contexts:
        index = watch.runner.scheduler.running[0].index
        assert not context.ring_start[0, index + 1]
    assert watch.run([], PARAMS) == [] and not watch.runner.has_work


def test_preempted_and_resumed(model, prompt, text):
    """Prompt 10, 5 tokens, preempted, resumed with 15: the cursors are 0, 0, and the next step commits 1."""
    want = greedy(model, prompt[:10], 12)
    watch = Watch(model, state_block_size=4, num_snapshots=8)
    watch.runner.add_request(prompt[:10], SamplingParams(max_tokens=12, ignore_eos=True))
    request = next(iter(watch.runner._live.values())).request
    while len(request.output_ids) < 5:
        watch.step()
    watch.runner.scheduler._preempt(request, Plan())
    poison_free(watch.runner)
    while len(request.output_ids) < 6:
        watch.step()
    assert request.hit_tokens == 12 and watch.counts.hits == 1
    cursors = [(int(c.ring_start[0, request.index + 1]), int(c.ring_committed[0, request.index + 1]))
               for c in watch.contexts]
    assert cursors == [(0, 0)] * 2
    watch.step()
    assert [int(c.ring_committed[0, request.index + 1]) for c in watch.contexts] == [1, 1]
    while watch.runner.has_work:
        watch.step()
    assert request.output_ids == want


@pytest.mark.parametrize("length, chunks", [(65, [64, 1]), (69, [64, 1, 4])], ids=str)
def test_one_token_chunks(model, length, chunks):
    """A last prompt chunk of one token, and one in the middle: the state counts it."""
    rng = random.Random(3)
    tokens = [rng.randint(1, 30) for _ in range(length)]
    truth = TruthModel(model)
    for token in tokens:
        truth.step(token)
    watch = Watch(model, state_block_size=4 if length == 69 else 64, num_snapshots=8, chunk_size=64)
    scheduler, planned = watch.runner.scheduler, []
    request_id = watch.runner.add_request(tokens, SamplingParams(max_tokens=5, ignore_eos=True))
    request = watch.runner._live[request_id].request
    for scheduler.chunk_size in chunks:
        planned.append(request.num_computed)
        watch.step()
    assert request.output_ids and planned == [sum(chunks[:i]) for i in range(len(chunks))]
    for context in watch.contexts:
        want = truth.states[PATTERN.index(context.family)]
        assert_close(context.family, context.state[0, request.index + 1], want, 1e-5)
    while watch.runner.has_work:
        watch.step()
    assert request.output_ids == greedy(model, tokens, 5)


# name: draft script; T is 4
SCRIPTS = {
    "lengths_4_1_4": [(3, 0), (0, 0), (3, 0)],
    "no_draft_in_a_draft_engine": [(0, 0)] * 30,
    "one_rejection_then_full_accepts": [(1, 2), *[(3, 0)] * 10],
    "all_wrong": [(0, 3)] * 30,
    "wrong_and_right_in_turn": [(0, 3), (3, 0)] * 10,
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
@pytest.mark.parametrize("window, ring_len", [(16, 20), (4, 8), (5, 11)], ids=str)
def test_acceptance(model, prompt, text, states, script, window, ring_len):
    """Drafts of every kind, on rings that wrap: text and every snapshot as without drafts."""
    watch = Watch(model, state_block_size=3, num_snapshots=40, num_spec=3, window=window, ring_len=ring_len)
    watch.runner.scheduler.drafter = Scripted(prompt + text, script)
    got, edges = run_checked(watch, prompt, prompt + text, states)
    assert got == text
    # 30, where the same prompt would hit, 33, where it ends, others, and what the drafts do not jump over
    assert edges[:6] == [6, 12, 18, 24, 30, 33] and len(edges) >= 10


@pytest.mark.parametrize("op", ["mamba2_materialize", "gdn_materialize", "copy_slots", "compact_active"])
@pytest.mark.parametrize("after", [1, 5])
def test_a_failed_step_publishes_nothing(model, prompt, text, op, after):
    """An op of the publication itself fails: what is published stays as it was, and the text too."""
    watch = Watch(model, state_block_size=4, num_snapshots=20, chunk_size=8, num_spec=2)
    watch.runner.scheduler.drafter = RandomDrafter([prompt + text])
    request_id = watch.runner.add_request(prompt, PARAMS)
    final, raised = None, 0
    with override_kernel(op, "cpu", failing_kernel(op, after, Injected)):
        while watch.runner.has_work:
            before, count = set(watch.prefix.snapshots._block_of), watch.counts.published_snapshots
            try:
                final = watch.step()[-1:] or final
            except Injected:
                raised += 1
                assert set(watch.prefix.snapshots._block_of) == before
                assert watch.counts.published_snapshots == count and not watch.prefix.snapshots._holders
    assert raised == 1 and final[0].id == request_id and final[0].token_ids == text


def test_a_wrong_snapshot_shows(model, prompt, text, states):
    """Negative control: a fold of one ring row too few is seen in the state, and in the text of the next request."""

    def short(*args, **kwargs):
        args = list(args)
        args[8] = torch.where(args[8] > 0, args[8] - 1, args[8])
        return mamba2.mamba2_materialize(*args, **kwargs)

    with override_kernel("mamba2_materialize", "cpu", short):
        watch = Watch(model, state_block_size=4, num_snapshots=20)
        assert watch.run([prompt], PARAMS) == [text], "the live request goes on undisturbed"
        with pytest.raises(AssertionError, match="edge 56"):
            check_snapshots(watch, prompt + text, states)


def test_few_snapshots(model, prompt, text):
    """With room for one snapshot runs go on, the newest replaces the one before, and hits are right."""
    watch = Watch(model, state_block_size=4, num_snapshots=1, max_num_seqs=2)
    assert watch.run([prompt, prompt], PARAMS) == [text, text]
    assert watch.prefix.evictions > 0
    second = prompt + text
    assert watch.run([second], SamplingParams(max_tokens=2, ignore_eos=True)) == [greedy(model, second, 2)]


def test_refusals(model):
    """Snapshots need the ring context; a window that is no multiple of the state block is refused at the start."""
    with pytest.raises(ValueError, match="prefix_cache is True, expected False with replay=False"):
        engine(model, prefix_cache=True, replay=False)
    with pytest.raises(ValueError, match="state_block_size: expected a divisor of the attention window 9.*got 4"):
        engine(tiny_model(pattern=("mamba2", "swa")), prefix_cache=True, block_size=4)
    attention = tiny_model(pattern=("full", "mlp"))
    engine(attention, prefix_cache=True, replay=False)  # no states, no rule
    with pytest.raises(ValueError, match="num_snapshots is 0"):
        engine(model, prefix_cache=True, num_snapshots=0)


@pytest.mark.parametrize("steps", [5, 21])
def test_export_and_import_of_a_live_slot(model, prompt, text, steps):
    """A request's state, ring rows and conv inputs move to another slot of an engine with another ring, which goes on
    with the same text; its own state there is overwritten."""
    runners = [engine(model, window=16, ring_len=17), engine(model, window=32, ring_len=40)]
    requests = []
    for runner in runners:
        name = runner.add_request(prompt, PARAMS)
        requests.append(runner._live[name].request)
        for _ in range(steps):
            runner.step()
    source, target = requests
    assert source.output_ids == target.output_ids == text[:steps]
    for family, context in runners[1].memory.states.items():
        origin = runners[0].memory.states[family]
        for pool in (context.state, *context.rings, context.conv_ring):
            pool.fill_(float("nan"))
        assert origin.ring_committed[0, source.index + 1] > 0
        context.import_slot(target.index + 1, origin.export_slot(source.index + 1, source.num_computed))
    while runners[1].has_work:
        runners[1].step()
    assert target.output_ids == text
