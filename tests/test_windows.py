"""Windows by size of a step: W or 0, whatever was faster; steps of both kinds may follow one another."""

import itertools

import pytest
import torch
from test_warmup import FAMILIES, SLOTS, context, fill, live_tensors, recorded, untouched
from tiny import PATTERN, engine, tiny_model

from torch_replay import ReplayContext, SamplingParams
from torch_replay.ops import backends
from torch_replay.states import warmup

ROUTES = {
    "decode": {},
    "drafts": {"num_spec": 2},
    "snapshots": {"num_spec": 2, "prefix_cache": True, "block_size": 3, "state_block_size": 3},
}
PROMPTS = [[3, 4] * 10, [5, 6, 7], [9] * 11, [2, 2]]
LENGTHS = (40, 9, 25, 17)  # requests end one after the other, so that steps of every size run


def generated(windows: dict, **options) -> tuple[list[list[int]], object]:
    runner = engine(tiny_model(3, pattern=PATTERN), max_num_seqs=3, window=5, decode_sizes=(1, 2, 3, 4), **options)
    for states in runner.memory.states.values():
        states.windows.update(windows)
    for prompt, length in zip(PROMPTS, LENGTHS):
        runner.add_request(prompt, SamplingParams(max_tokens=length, ignore_eos=True))
    texts = {}
    while runner.has_work:
        texts.update((output.id, output.token_ids) for output in runner.step() if output.finish_reason)
    return [texts[key] for key in sorted(texts)], runner


@pytest.mark.parametrize("options", ROUTES.values(), ids=ROUTES)
def test_text_is_the_same(options):
    """Sizes with window 0 among sizes with W give the text of W alone, and fold the ring at every step."""
    sizes = itertools.product((1, 3), (1, 2, 3))
    want, without = generated({}, **options)
    got, runner = generated(dict.fromkeys(sizes, 0), **options)
    assert got == want
    assert runner.stats.flushes > 2 * without.stats.flushes > 0
    run, kept = (each.stats.as_dict() for each in (runner, without))
    assert kept["state_bytes_per_token"] == kept["state_bytes_per_token_replay"] == run["state_bytes_per_token_replay"]
    assert run["state_bytes_per_token"] > kept["state_bytes_per_token"]


def test_negative_control(monkeypatch):
    """A commit with another window than the forward's shows in the text."""
    want, _ = generated({}, num_spec=2)
    commit = ReplayContext.postprocess
    monkeypatch.setattr(ReplayContext, "postprocess",
                        lambda self, *args, **kwargs: commit(self, *args, **{**kwargs, "window": self.window}))
    assert generated({(1, 3): 0, (3, 3): 0}, num_spec=2)[0] != want


@pytest.fixture
def timed(monkeypatch):
    """Made-up times on the CPU: a flush costs `flush`, another step 10, each for all layers. Yields the costs."""
    costs = {"flush": 30.0}

    def median_us(call, repeats, device):
        with recorded(*(f"{family}_replay" for family in SLOTS)) as calls:
            call()
        flushes, = {_flushes(name, args, kwargs["window"]) for name, args, kwargs, _ in calls}  # layers are alike
        return costs["flush"] if flushes else 10.0

    monkeypatch.setattr(backends, "MEASURED_DEVICES", ("cpu",))
    monkeypatch.setattr(backends, "median_us", median_us)
    return costs


def _flushes(name: str, args: list, window: int) -> bool:
    """Whether all rows of a replay flush."""
    at, committed = SLOTS[name.removesuffix("_replay")], args[5]
    slots, lens = args[at : at + 2]
    return bool((committed[slots.long()] + lens > window).all())


@FAMILIES
@pytest.mark.parametrize("flush, want", [(30.0, 6), (10.0, 6), (9.0, 0)])
def test_choice(family, flush, want, timed):
    """W through a cycle of steps against 0, whose every step flushes; 0 must win by a twentieth. States stay as they
    are, more rows than a few are not measured, and what was chosen stays."""
    timed["flush"] = flush
    ctx = context(groups=2, family=family)
    assert ctx.window == 6
    fill(ctx)
    with untouched(live_tensors(ctx)):
        warmup.choose_windows(ctx, [(1, 1), (3, 3), (warmup.FEW_ROWS + 1, 1)])
    assert ctx.windows == {(1, 1): want, (3, 3): want}
    assert ctx.window_us[3, 3] == {6: pytest.approx((10 + flush) / 2), 0: flush}
    assert ctx.window_us[1, 1] == {6: pytest.approx((50 + flush) / 6), 0: flush}
    timed["flush"] = 1.0
    warmup.choose_windows(ctx, [(1, 1)])
    assert ctx.windows[1, 1] == want


def test_no_choice_on_a_cpu():
    ctx = context()
    warmup.choose_windows(ctx, [(1, 1)])
    assert not ctx.windows


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_choice_on_a_gpu():
    """Warm-up measures every small size, and leaves the states alone."""
    runner = engine(tiny_model(3).cuda(), max_num_seqs=11, num_spec=2)
    before = [states.state.clone() for states in runner.memory.states.values()]
    runner.warm_up(quiet=True)
    for states, kept in zip(runner.memory.states.values(), before):
        assert set(states.windows) == {(1, 1), (4, 1), (1, 3), (4, 3)} and set(states.windows.values()) <= {0, 16}
        assert all(us > 0 for times in states.window_us.values() for us in times.values())
        assert torch.equal(states.state, kept)
