"""Real processes that are ranks of one group, and what the tests of `parallel` have them do.

A module of its own, for processes import it. Each body gets its rank's `StepAgreement` and returns what it saw.
"""

import contextlib
import io
import multiprocessing
import os
import sys
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import forkserver
from types import SimpleNamespace
from typing import Any, Optional

import pytest
import torch
import torch.distributed as dist
from tiny import tiny_model

import torch_replay.engine.engine
from torch_replay import Engine, EngineConfig, SamplingParams
from torch_replay.engine.parallel import StepAgreement

context = multiprocessing.get_context("forkserver")


def start_server() -> None:
    """Starts the process that imports torch and this module once, and then makes each rank by a fork of itself."""
    context.set_forkserver_preload(["parallel_ranks"])
    with pytest.MonkeyPatch.context() as patch:  # before Python 3.13 it does not get this process's sys.path
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()


@dataclass
class Outcome:
    """How a rank ended. exit_code is the process's; value is None if it died before it could tell."""

    exit_code: Optional[int]
    value: Any = None
    error: Optional[BaseException] = None
    seconds: float = 0.0


def run_ranks(folder, world_size: int, body, *args, timeout: float = 20.0, deadline: float = 40.0) -> list[Outcome]:
    """Runs body(agreement, *args) in as many processes. Those still running after `deadline` seconds are killed and
    have exit_code None: they hang."""
    pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
    path = str(folder / f"store-{time.monotonic_ns()}")
    ranks = [context.Process(target=_rank, args=(body, args, rank, world_size, path, timeout, pipe[1]))
             for rank, pipe in enumerate(pipes)]
    for rank, pipe in zip(ranks, pipes):
        rank.start()
        pipe[1].close()
    end = time.monotonic() + deadline
    outcomes = []
    for rank, pipe in zip(ranks, pipes):
        rank.join(max(end - time.monotonic(), 0.0))
        hangs = rank.is_alive()
        if hangs:
            rank.kill()
            rank.join()
        try:
            outcome = pipe[0].recv()
        except EOFError:
            outcome = Outcome(None)
        outcomes.append(replace(outcome, exit_code=None if hangs else rank.exitcode))
    return outcomes


def _rank(body, args, rank: int, world_size: int, path: str, timeout: float, pipe) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(path, world_size)
    dist.init_process_group("gloo", store=dist.PrefixStore("default", store), rank=rank, world_size=world_size,
                            timeout=timedelta(seconds=60))
    agreement = StepAgreement(dist.PrefixStore("agreement", store), timeout)
    agreement.meet()
    outcome, begin = Outcome(0), time.monotonic()
    try:
        outcome.value = body(agreement, *args)
    except BaseException as error:  # interrupts too
        outcome.error = error
    outcome.seconds = time.monotonic() - begin
    pipe.send(outcome)


def tail_model(window: int = 6, context: int = 96):
    """A model whose last three sublayers run on the last window of a prompt; two windows, so that it shows."""
    pattern = ("mamba2", "engram", "full", "swa", "mlp", "swa")
    model = tiny_model(5, pattern=pattern, window=window, vocab=31, context=context)
    model.config = replace(model.config, decoder_replay_layers=3)
    return model


def prompt(length: int) -> list[int]:
    return torch.randint(1, 31, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def tail_engine(agreement=None, model=None, drafter=None, **options) -> Engine:
    return Engine(tail_model() if model is None else model, None,
                  EngineConfig(**{"max_num_seqs": 3, "compiled": False, **options}), drafter, agreement)


def texts(agreement, requests, options) -> list[list[list[int]]]:
    """Two rounds of the rank's share of `requests` of (prompt length, output tokens), every world_size-th."""
    runner, rounds = tail_engine(agreement, **options), []
    rank, world_size = (0, 1) if agreement is None else (agreement.rank, agreement.world_size)
    for _ in range(2):
        if agreement is not None:
            agreement.open()
        names = [runner.add_request(prompt(length), SamplingParams(max_tokens=count, ignore_eos=True))
                 for length, count in requests[rank::world_size]]
        final = {}
        while runner.has_work:
            final.update((output.id, output.token_ids) for output in runner.step())
        rounds.append([final[name] for name in names])
    return rounds


@dataclass
class Seen:
    """What a step's prefill looked like: tail tokens by rank, this rank's own, None without a tail."""

    rank_tokens: Optional[tuple]
    own: Optional[int]


def tails(agreement, shares, window) -> tuple[list[Seen], bool, list]:
    """Prefills of a rank whose share is shares[rank], (prompt length, output tokens) and when they come.

    Returns what each prefill saw, whether the memory of a rank without requests kept its bits, and the texts.
    """
    runner, seen = tail_engine(agreement, tail_model(window, 512), chunk_size=512), []
    prepare = runner.state.prepare_attn

    def watching(batch, inputs):
        prepare(batch, inputs)
        if inputs.is_prefilling is not None:
            tail = batch.tail
            seen.append(Seen(None, None) if tail is None else Seen(tail.rank_tokens, len(tail.rows)))

    runner.state.prepare_attn = watching
    memory = [cache for caches in runner.memory.kv.values() for cache in caches]
    for states in runner.memory.states.values():
        memory += [states.state, *states.rings, states.conv_ring, states.ring_start, states.ring_committed]
    generator = torch.Generator().manual_seed(3)
    for tensor in memory:
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    before, final, step = [tensor.clone() for tensor in memory], {}, 0
    while runner.has_work:
        for length, count, at in shares[agreement.rank]:
            if at == step:
                runner.add_request(prompt(length), SamplingParams(max_tokens=count, ignore_eos=True))
        final.update((output.id, output.token_ids) for output in runner.step())
        step += 1
    kept = all(torch.equal(old, new) for old, new in zip(before, memory))
    return seen, kept, list(final.values())


def failing(agreement, how: str) -> None:
    """Rank 1 stops in the middle of its run: `how` says in what way. The others go on for as long as they can."""
    runner = tail_engine(agreement, num_spec=2)
    if agreement.rank == 1:
        fail = {"forward": _raise, "schedule": _raise, "interrupt": _interrupt, "die": lambda *_: os._exit(7)}[how]
        if how == "schedule":
            runner.scheduler.drafter.propose = fail
        else:
            steps, decode = [], runner.decode.run
            runner.decode.run = {route: (lambda run=run: steps.append(0) or (fail() if len(steps) == 3 else run()))
                                 for route, run in decode.items()}
    runner.generate([prompt(9)] * 2, SamplingParams(max_tokens=40, ignore_eos=True))


BAD = 30  # the token whose embedding is NaN


def bad_logits(agreement, bad: bool) -> dict[str, tuple]:
    """Rank 0 has one good request; rank 1 another and, if `bad`, one whose prompt holds BAD. How each ends."""
    model = tail_model()
    model.embedding.weight[BAD] = float("nan")
    head = model.logits
    model.logits = lambda hidden: head(hidden).index_fill(-1, torch.tensor([BAD]), -torch.inf)
    runner, final = tail_engine(agreement, model), {}
    prompts = {"good": [3, 4, 5, 6, 7, 8, 9, 10 + agreement.rank]}
    if agreement.rank == 1 and bad:
        prompts["bad"] = [5, 6, 7, BAD, 9, 10, 11]
    for name, ids in prompts.items():
        runner.add_request(ids, SamplingParams(max_tokens=6, ignore_eos=True), name)
    while runner.has_work:
        final.update((output.id, (output.finish_reason, output.token_ids)) for output in runner.step())
    return final


class Echo:
    """Proposes what a text went on with, its last draft wrong."""

    def __init__(self, texts: list[list[int]]):
        self.texts = texts

    def propose(self, tokens, limit: int) -> list[int]:
        text = next(text for text in self.texts if tokens == text[: len(tokens)])
        drafts = text[len(tokens) : len(tokens) + limit]
        return drafts[:-1] + [(token + 1) % 31 for token in drafts[-1:]]


def drafting(agreement, shares) -> dict:
    """Counters of a rank whose share of (prompt length, output tokens) is shares[rank], in steps of three rows, with
    three drafts a row of which two are right."""
    share = shares[agreement.rank]
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for _, count in share]
    solo = tail_engine().generate([prompt(length) for length, _ in share], params)
    known = [prompt(length) + output.token_ids for (length, _), output in zip(share, solo)]
    runner = tail_engine(agreement, drafter=Echo(known), num_spec=3)
    outputs = runner.generate([prompt(length) for length, _ in share], params)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in solo]
    return runner.stats.counters()


def waiting_for_another(agreement) -> None:
    """Rank 1 dies while rank 2 waits for rank 0, which comes late to the message and is the first to notice."""
    if agreement.rank == 1:
        time.sleep(0.5)
        os._exit(7)
    if agreement.rank == 0:
        time.sleep(1.0)
    agreement.agree(True, False, False, 0)


def failing_twice(agreement) -> str:
    """After a failure every further step fails at once, on each rank, and says why."""
    runner = tail_engine(agreement)
    if agreement.rank == 1:
        runner.decode.run = dict.fromkeys(runner.decode.run, _raise)
    runner.add_request(prompt(9), SamplingParams(max_tokens=40))
    try:
        while runner.has_work:
            runner.step()
    except (ValueError, RuntimeError):
        return str(_error_of(runner.step))
    raise AssertionError("expected a failure")


def bad_prompt(agreement) -> None:
    """Rank 1's only prompt is refused."""
    tail_engine(agreement).generate([[99]] if agreement.rank == 1 else [prompt(9)], SamplingParams(max_tokens=40))


def staying_away(agreement) -> None:
    """Negative control: a rank without requests steps only while it has some, as one that knew of no others would."""
    runner = tail_engine(agreement)
    if agreement.rank == 0:
        runner.generate([prompt(9)], SamplingParams(max_tokens=40))
    while runner.scheduler.has_work:
        runner.step()
    time.sleep(4)  # alive until it is missed


def _raise(*_):
    raise ValueError("boom")


def _interrupt(*_):
    raise KeyboardInterrupt


def _error_of(call) -> Exception:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("expected a failure")


def callback_raises(agreement) -> list[int]:
    """Rank 1's callback fails in its second token; its caller goes on. Returns how many tokens each request got."""
    runner, counts = tail_engine(agreement), {}

    def on_output(output):
        if agreement.rank == 1 and output.id == "bad" and len(output.token_ids) == 2:
            _raise()

    for name in ("bad", "good"):
        runner.add_request(prompt(9), SamplingParams(max_tokens=6, ignore_eos=True), name, on_output)
    while runner.has_work:
        try:
            counts.update((output.id, len(output.token_ids)) for output in runner.step())
        except ValueError:
            counts["raised"] = True
    return counts


def eager_command(fail_on_rank: Optional[int] = None, argv: Optional[list[str]] = None) -> int:
    """`torch-replay` with a decode step that is not compiled; prefill fails on the rank named."""
    import torch_replay.engine.decode_step as step
    from torch_replay_command import main

    step.compile_alone = lambda method, **options: method
    if fail_on_rank is not None and int(os.environ["RANK"]) == fail_on_rank:
        torch_replay.engine.engine.prefill = _raise
    return main(argv)


def command(agreement, argv: list[str]) -> tuple[int, str, str]:
    """The command as `torchrun` starts it, in a process that is a rank already: status, stdout, stderr."""
    from torch_replay.command import generate

    generate.launched_by_torchrun = lambda: True
    generate.StepAgreement = SimpleNamespace(from_torchrun=lambda cuda, timeout: agreement)
    os.environ.update(RANK=str(agreement.rank), LOCAL_RANK=str(agreement.rank))
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = eager_command(argv=["generate", *argv])
    return status, out.getvalue(), err.getvalue()
