"""Ranks that agree once a step: same text as one process, trims agreed everywhere, failures told in time."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from parallel_ranks import (
    Seen,
    bad_logits,
    bad_prompt,
    callback_raises,
    command,
    drafting,
    failing,
    failing_twice,
    run_ranks,
    start_server,
    staying_away,
    tails,
    texts,
    waiting_for_another,
)

from torch_replay.engine.parallel import RankFailure, StepAgreement
from torch_replay.engine.stats import add_up, summarize
from torch_replay_command import main

ROOT = Path(__file__).resolve().parent.parent
SLACK_SECONDS = 5.0  # for two busy cores


@pytest.fixture(scope="module", autouse=True)
def server():
    start_server()


def values(outcomes) -> list:
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
        assert outcome.exit_code == 0, "a rank died or hangs"
    return [outcome.value for outcome in outcomes]


REQUESTS = [(40, 6), (3, 9), (23, 1), (17, 12), (30, 4)]


@pytest.mark.parametrize("world_size, count, options", [
    (2, 5, {}), (3, 5, {"num_spec": 2, "prefix_cache": True, "block_size": 4, "state_block_size": 3}),
    (3, 2, {}),  # the last has nothing to do from the start
], ids=str)
def test_same_text_as_one_process(tmp_path, world_size, count, options):
    """Uneven shares that end at different times, trims that come and go, two rounds: every text is that of one run."""
    want = texts(None, REQUESTS[:count], options)
    shares = values(run_ranks(tmp_path, world_size, texts, REQUESTS[:count], options))
    for turn in range(2):
        merged = [None] * count
        for rank, share in enumerate(shares):
            merged[rank::world_size] = share[turn]
        assert merged == want[turn]


def test_idle_rank_joins_a_trim(tmp_path):
    """A trims 300 to 128 while B is idle: B runs the replay batch with counts (128, 0), and its memory keeps its bits.

    So it does where nobody trims, without a replay batch."""
    shares = [[(300, 3, 0), (100, 2, 2)], []]
    (seen, _, _), (idle, kept, _) = values(run_ranks(tmp_path, 2, tails, shares, 128))
    assert seen == [Seen((128, 0), 128), Seen(None, None)]
    assert idle == [Seen((128, 0), 0), Seen(None, None)] and kept


def test_a_rank_that_trims_nothing_joins(tmp_path):
    """B's prompt is short, C decodes: all run the replay batch with everyone's counts, B on its whole prompt."""
    shares = [[(300, 4, 1)], [(20, 4, 1), (7, 4, 1)], [(9, 8, 0)]]
    results = values(run_ranks(tmp_path, 3, tails, shares, 128))
    first = Seen(None, None)
    assert [seen for seen, _, _ in results] == [
        [first, Seen((128, 27, 0), own)] for own in (128, 27, 0)]
    alone = [[(length, count, 0) for length, count, _ in share] for share in shares]
    assert [text for _, _, text in results] == [
        values(run_ranks(tmp_path, 1, tails, [share], 128))[0][2] for share in alone]


@pytest.mark.parametrize("how, error, reason", [
    ("forward", ValueError, "ValueError: boom"), ("schedule", ValueError, "ValueError: boom"),
    ("interrupt", KeyboardInterrupt, "KeyboardInterrupt")], ids=["forward", "schedule", "interrupt"])
def test_a_rank_that_raises(tmp_path, how, error, reason):
    """It raises its own error, and the others learn of it by the next message: whose it is and what it says."""
    first, failed, last = run_ranks(tmp_path, 3, failing, how)
    assert type(failed.error) is error and str(failed.error) == ("boom" if error is ValueError else "")
    for outcome in (first, last):
        assert type(outcome.error) is RankFailure
        assert str(outcome.error) == f"rank 1 failed: {reason}" and outcome.error.ranks == [1]
        assert outcome.seconds < SLACK_SECONDS < 20


def test_logits_that_are_not_finite(tmp_path):
    """End one request of one rank with an error; its neighbour and the other rank go on as if it had not been there."""
    untouched, both = values(run_ranks(tmp_path, 2, bad_logits, True))
    without = values(run_ranks(tmp_path, 2, bad_logits, False))
    assert both.pop("bad") == ("error", [])
    assert [untouched, both] == without
    assert [(end["good"][0], len(end["good"][1])) for end in without] == [("length", 6)] * 2


def test_padded_rows_count_nothing(tmp_path):
    """One row of three, or none, has a request: drafted, accepted and decoded are those of the requests alone."""
    shares = [[(9, 13)], [], [(20, 7), (3, 13)]]
    counts = values(run_ranks(tmp_path, 3, drafting, shares))
    # 12 tokens after the first in steps of 3, 3, 3, 2, 1, and 6 in steps of 3, 2, 1: one more than the right drafts
    assert [(each["decode_tokens"], each["drafted"], each["accepted_drafts"]) for each in counts] == [
        (12, 11, 7), (0, 0, 0), (18, 16, 10)]
    assert summarize(add_up(counts))["acceptance_rate"] == 17 / 27


def test_nothing_runs_after_a_failure(tmp_path):
    """A further step fails at once on each rank."""
    for message in values(run_ranks(tmp_path, 2, failing_twice)):
        assert message == "the ranks have stopped: rank 1 failed: ValueError: boom"


def test_a_callback_that_raises(tmp_path):
    """Ends its request alone: the caller goes on, and the other rank never knows. The output comes with the next."""
    untouched, raised = values(run_ranks(tmp_path, 2, callback_raises))
    assert untouched == {"bad": 6, "good": 6} and raised == {"raised": True, "bad": 2, "good": 6}


def test_a_prompt_that_is_refused(tmp_path):
    """What `generate` refuses on one rank before its first step stops the others too."""
    waiting, failed = run_ranks(tmp_path, 2, bad_prompt)
    assert type(failed.error) is ValueError and "prompt holds token 99" in str(failed.error)
    assert "rank 1 failed: ValueError: prompt holds token 99" in str(waiting.error)
    assert waiting.seconds < SLACK_SECONDS


def test_a_rank_that_dies(tmp_path):
    """The others notice long before the timeout, and name it."""
    first, dead, last = run_ranks(tmp_path, 3, failing, "die")
    assert dead.exit_code == 7 and dead.value is dead.error is None
    for outcome in (first, last):
        assert type(outcome.error) is RankFailure and outcome.error.ranks == [1]
        assert str(outcome.error).startswith("rank 1 died or hangs (")
        assert outcome.seconds < 2 + SLACK_SECONDS < 20


def test_who_waits_for_another(tmp_path):
    """A rank that waits for one which has noticed is told by that one's leaving, and is not taken for dead itself."""
    first, dead, last = run_ranks(tmp_path, 3, waiting_for_another)
    assert dead.exit_code == 7
    for outcome in (first, last):
        assert type(outcome.error) is RankFailure and outcome.error.ranks == [1]
        assert outcome.seconds < SLACK_SECONDS


def test_a_rank_that_stays_away(tmp_path):
    """Negative control: ranks that skip the message when idle make the others time out, after 1 second and 2 more."""
    waiting, absent = run_ranks(tmp_path, 2, staying_away, timeout=1.0)
    assert absent.error is None
    assert type(waiting.error) is RankFailure and re.match(
        r"rank 1 died or hangs \(.*Timed out waiting 1000ms", str(waiting.error))
    assert 1 <= waiting.seconds < 1 + 2 + SLACK_SECONDS


def test_refuses():
    """A timeout that is no time, and ranks that have not met."""
    with pytest.raises(ValueError, match="timeout is 0, expected seconds above 0"):
        StepAgreement(None, 0)
    with pytest.raises(RuntimeError, match="not initialised, expected init_process_group"):
        StepAgreement(None)


def torchrun(tmp_path, ranks: int, *arguments, fail_on_rank=None):
    script = tmp_path / "command.py"
    script.write_text(f"import parallel_ranks as p\nraise SystemExit(p.eager_command({fail_on_rank}))\n")
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), str(script),
         "generate", *arguments], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=60)


PROMPTS = ["import os\n", "And God said", "class Error(Exception):"]


@pytest.mark.slow
def test_command(tmp_path, capsys, monkeypatch):
    """torchrun: one JSON object, from the first rank, with every prompt's text in order and everybody's numbers."""
    options = [*PROMPTS, "--max-tokens", "8", "--json", "--temperature", "0.5", "--seed", "0"]
    done = torchrun(tmp_path, 2, *options)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    monkeypatch.setattr("torch_replay.engine.decode_step.compile_alone", lambda method, **options: method)
    assert main(["generate", *options]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert result["requests"] == alone["requests"]
    for name in ("prefill_tokens", "decode_tokens", "replay", "state_bytes_per_token"):
        assert result["stats"][name] == alone["stats"][name]
    assert [rank["decode_tokens"] for rank in result["stats"]["ranks"]] == [14, 7]


def test_command_with_an_idle_rank(tmp_path):
    """As text: prompts in order, each once, and one table, all from the first rank; the others print nothing."""
    argv = [*PROMPTS[:2], "--max-tokens", "5"]
    first, *others = values(run_ranks(tmp_path, 3, command, argv))
    status, out, err = first
    assert status == 0 and "warming up" in err and "waiting for the other ranks" in err
    order = ["--- prompt 1 of 2\nimport os", "--- prompt 2 of 2\nAnd God said"]
    assert sorted(order, key=out.index) == order
    assert [(out + err).count(line) for line in ("--- prompt", "graph breaks", "rank 0 ", "rank 1 ")] == [2, 1, 1, 1]
    assert re.search(r"^rank 2 +0 tokens prefilled, 0 decoded in 0 steps$", err, re.M)
    assert others == [(0, "", "")] * 2
    alone = values(run_ranks(tmp_path, 1, command, argv))[0][1]
    assert out == alone, "the same text"


def test_command_refuses_on_one_rank(tmp_path):
    """A prompt too long for the rank that has it: its line of reason, status 2 there and 1 elsewhere, soon."""
    first, refused = run_ranks(tmp_path, 2, command, ["short", "long " * 3000])
    assert refused.value[0] == 2 and "torch-replay: prompt 2: PROMPT: expected 1 to" in refused.value[2]
    assert first.value[0] == 1 and "torch-replay: rank 0 stops: rank 1 died or hangs" in first.value[2]
    assert first.value[1] == refused.value[1] == "" and first.seconds < 2 + SLACK_SECONDS


@pytest.mark.parametrize("device, message", [
    ("cuda:0", "--device cuda:0: expected cuda under torchrun"), ("cuda", "--device cuda:1: this machine has no")])
def test_command_gives_each_rank_a_device(capsys, monkeypatch, device, message):
    """Rank 1 of a machine takes its second GPU; a device for all of them is refused. (Here: no second GPU.)"""
    monkeypatch.setattr("torch_replay.command.generate.launched_by_torchrun", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert main(["generate", "x", "--device", device]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_command_that_fails(tmp_path):
    """A status that is not 0, nothing on stdout but text, and one clear line from the rank that did not fail."""
    done = torchrun(tmp_path, 2, *PROMPTS, "--json", fail_on_rank=1)
    assert done.returncode != 0 and done.stdout == ""
    assert "torch-replay: rank 0 stops: rank 1 failed: ValueError: boom" in done.stderr
