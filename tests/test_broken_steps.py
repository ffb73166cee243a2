"""A step that is interrupted anywhere, at any line of any object, loses nothing: every text is the request's solo run.

Errors and interrupts are raised from a trace function, before a line runs and where a function returns, so that no
place between two changes is left out.
"""

import random
import sys
from collections import Counter
from pathlib import Path

import pytest
from test_engine import RandomDrafter
from tiny import engine, greedy, tiny_model

import torch_replay
from torch_replay import SamplingParams
from torch_replay.engine.block_pool import BlockPool
from torch_replay.engine.output import Stream
from torch_replay.engine.scheduler import Scheduler
from torch_replay.graphs import transfer

PATTERN = ("mamba2", "swa", "full")
COUNT = 7
RUNS = 8
PARAMS = SamplingParams(max_tokens=COUNT, ignore_eos=True)
ROOT = Path(torch_replay.__file__).parent
PACKAGES = {ROOT / "engine", ROOT / "states", Path(transfer.__file__).parent}
HOST = {"engine.py", "scheduler.py", "block_pool.py", "prefix_cache.py", "output.py", "detokenizer.py", "transfer.py",
        "request_state.py", "model_state.py", "decode_step.py", "prefill_step.py", "stats.py", "request.py"}
OPTIONS = {
    "drafts": {"num_spec": 2},
    "preempted": {"num_blocks": 9},
    "ahead": {"run_ahead": True},
}
ALWAYS = {"block_size": 4, "chunk_size": 6, "prefill_budget": 8, "prefix_cache": True, "state_block_size": 4}


class Injector:
    """Counts the places in which a step can be interrupted, and interrupts it at one of them, or at some.

    at: numbers of the places.
    """

    def __init__(self, error, at=()):
        self.error, self.at, self.count, self.raised = error, set(at), 0, Counter()
        self.lines: dict[tuple, list[int]] = {}  # places by line, when none is interrupted
        self.then = None  # the injector of the recovery that follows

    def __call__(self, frame, event, arg):
        path = Path(frame.f_code.co_filename)
        if event == "call" and (path.name not in HOST or path.parent not in PACKAGES):
            return None
        if frame.f_code.co_name in ("step", "_run", "<lambda>") and path.name == "engine.py":
            return self  # what happens there is outside of the step, or is what hands outputs out
        return self.place

    def place(self, frame, event, arg):
        if event in ("line", "return"):
            self.count += 1
            if not self.at:
                place = Path(frame.f_code.co_filename).name, frame.f_lineno, event
                self.lines.setdefault(place, []).append(self.count)
            if self.count in self.at:
                self.raised[Path(frame.f_code.co_filename).name, frame.f_code.co_name] += 1
                raise self.error
        return self.place


class Injected(RuntimeError):
    pass


@pytest.fixture(scope="module")
def model():
    return tiny_model(4, pattern=PATTERN, window=4, vocab=31)


@pytest.fixture(scope="module")
def prompts():
    return [[3, 4, 5, 6, 7, 8, 9, 10, 11], [12, 13], [14, 15, 16, 17, 18, 19, 20]]


@pytest.fixture(scope="module")
def want(model, prompts):
    return [greedy(model, prompt, COUNT) for prompt in prompts]


def run(model, prompts, want, options, injector) -> int:
    """Checks all texts and what the callbacks saw; returns how often `step` raised."""
    runner = engine(model, max_num_seqs=3, **ALWAYS, **options)
    if options.get("num_spec"):
        runner.scheduler.drafter = RandomDrafter([p + w for p, w in zip(prompts, want)])
    if injector.then is not None:
        recover = runner._recover

        def traced():
            sys.settrace(injector.then)  # raising has ended the other
            recover()

        runner._recover = traced
    final, seen, raised, steps = {}, {}, 0, 0
    for name, prompt in enumerate(prompts):
        runner.add_request(prompt, PARAMS, str(name), lambda output: seen.setdefault(output.id, []).append(output))
    while runner.has_work:
        steps += 1
        assert steps < 400, "no step gets anywhere"
        before = sys.gettrace()
        sys.settrace(injector)
        try:
            outputs = runner.step()
        except (Injected, KeyboardInterrupt) as error:
            assert error is injector.error
            raised += 1
            continue
        finally:
            sys.settrace(before)
        final.update((output.id, output) for output in outputs)
    assert [final[str(name)].token_ids for name in range(len(prompts))] == want
    for name in final:
        lengths = [len(output.token_ids) for output in seen.get(name, [])]
        assert lengths == sorted(set(lengths)), "a callback is told nothing twice"
    check_nothing_held(runner)
    return raised


def check_nothing_held(runner) -> None:
    scheduler = runner.scheduler
    assert not runner._live and not scheduler._live and not scheduler.running and not scheduler.waiting
    for pool in [*scheduler.pools.values(), scheduler.prefix.snapshots]:
        pool.begin_step()
        assert pool.num_used == 0 and pool.num_free == pool.num_blocks - 1
    scheduler.indices.begin_step()
    assert scheduler.indices.num_used == 1, "the one that tests withhold"
    assert not runner.stats._ring_rows


@pytest.mark.slow
@pytest.mark.parametrize("error", [Injected(), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("name", OPTIONS)
def test_any_place(model, prompts, want, name, error):
    """Once a run, in each of the files that a step runs through in turn: at one of its lines, at one of its times."""
    counter = Injector(error)
    run(model, prompts, want, OPTIONS[name], counter)
    order = random.Random(f"{name} {error!r}")
    files, where = sorted({line[0] for line in counter.lines}), Counter()
    first = order.randrange(len(files))
    for turn in range(RUNS):
        file = files[(first + turn) % len(files)]
        line = order.choice([line for line in sorted(counter.lines) if line[0] == file])
        injector = Injector(error, [order.choice(counter.lines[line])])
        assert run(model, prompts, want, OPTIONS[name], injector) <= 1
        where += injector.raised
    assert where.total() >= RUNS and len({file for file, _ in where}) > 5


class Interrupted(dict):
    """Interrupts right after its first removal."""

    done = False

    def pop(self, *args):
        value = super().pop(*args)
        if not self.done:
            self.done = True
            raise KeyboardInterrupt
        return value


def test_interrupt_once_a_request_is_forgotten(model, prompts, want):
    """Between the last two objects that know of a request that has ended: none keeps it, and its output arrives."""
    runner, final = engine(model, max_num_seqs=3, **ALWAYS), []
    runner._live = Interrupted()
    runner.add_request(prompts[0], PARAMS)
    with pytest.raises(KeyboardInterrupt):
        while runner.has_work:
            final += runner.step()
    while runner.has_work:
        final += runner.step()
    assert final[-1].token_ids == want[0]
    check_nothing_held(runner)


@pytest.mark.slow
def test_recovery_that_is_interrupted(model, prompts, want):
    """An interrupt while a step is being taken back: the next step begins with the rest of it."""
    counter = Injector(KeyboardInterrupt())
    run(model, prompts, want, OPTIONS["drafts"], counter)
    first, last = counter.count // 2, 0
    for place in range(1, 100_000, 97):
        second = Injector(KeyboardInterrupt(), [place])
        error = Injector(second.error, [first])
        error.then = second
        run(model, prompts, want, OPTIONS["drafts"], error)
        assert error.raised.total() == 1
        last = place
        if not second.raised:
            break
    assert last > 100 and not second.raised, "all places of a recovery were tried"


@pytest.mark.slow
@pytest.mark.parametrize("kind, method", [(Scheduler, "recover"), (BlockPool, "restore"), (Stream, "rewind")])
def test_negative_control(model, prompts, want, monkeypatch, kind, method):
    """Without any one part of the recovery some interrupts show."""
    counter = Injector(KeyboardInterrupt())
    run(model, prompts, want, OPTIONS["drafts"], counter)
    monkeypatch.setattr(kind, method, lambda self, *args: setattr(self, "_torn", False))
    with pytest.raises((AssertionError, ValueError, KeyError, IndexError, RuntimeError)):
        places = range(counter.count // 3, counter.count, 97)
        if kind is Stream:
            places = [times[len(times) // 2] for line, times in counter.lines.items() if line[0] == "output.py"]
        for place in places:
            run(model, prompts, want, OPTIONS["drafts"], Injector(counter.error, [place]))
