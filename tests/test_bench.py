"""The benchmark's own arithmetic, and a run of the whole on a CPU at sizes where times mean nothing."""

import argparse
import json
import types

import numpy as np
import pytest
import torch
from tiny import tiny_model

import torch_replay.command.bench as bench
from torch_replay.ops.registry import OPS, override_kernel
from torch_replay_command import parser

contestants, families, ops, report, schedule, small_ops = (
    bench.load(name) for name in ("contestants", "families", "ops", "report", "schedule", "small_ops"))
drift = bench.load("drift")
CPU = torch.device("cpu")


def parse(*arguments: str) -> argparse.Namespace:
    return parser().parse_args(["bench", *arguments])


def options(**changed) -> types.SimpleNamespace:
    values = dict(device="cpu", geometry=None, batch=[2], quick=True, seconds=1e-4, time_limit=None, quiet=True,
                  command="torch-replay bench ops")
    return types.SimpleNamespace(**{**values, **changed})


def test_bytes_by_hand():
    """H = 4, P = N = 16, two groups; HV = 4, H = 2, K = V = 16: counted with a pencil."""
    mamba2, gdn = families.GEOMETRIES["tiny-mamba2"], families.GEOMETRIES["tiny-gdn"]
    assert families.state_bytes(mamba2, torch.float32) == 4096
    assert families.state_bytes(gdn, torch.bfloat16) == 2048
    # ring row: x 128 + B 64 + dt 16; token: x and y 256, dt 8, B and C 128; parameters: 48
    assert (mamba2.ring_row_bytes, mamba2.token_bytes, mamba2.param_bytes) == (208, 392, 48)
    # ring row: u 128 + k 64 + g 16; token: v and o 256, q and k 128, a and b 16; parameters: 32
    assert (gdn.ring_row_bytes, gdn.token_bytes, gdn.param_bytes) == (208, 400, 32)
    assert families.replay_bytes(mamba2, 3, 1, torch.float32, 8.5, 1 / 16) == 3 * (4352 + 208 * 9.5 + 392 + 12) + 48
    assert families.replay_bytes(gdn, 2, 4, torch.bfloat16, 10.0, 0.25) == 2 * (2560 + 208 * 14 + 1600 + 12) + 32
    assert families.update_bytes(mamba2, 2, 4, torch.float32, 4) == 2 * (5 * 4096 + 4 * 392 + 4) + 48
    assert families.update_bytes(gdn, 1, 1, torch.float32, 1) == 2 * 4096 + 400 + 4 + 32


def test_public_geometry_bytes():
    """Nemotron-H: 4 MiB of state a row. 256 rows between flushes are 1.07 GB, and a little for their rings."""
    nemotron = families.GEOMETRIES["nemotron-h"]
    assert families.state_bytes(nemotron, torch.float32) == 1 << 22
    moved = families.replay_bytes(nemotron, 256, 1, torch.float32, 8.0, 0.0)
    assert 1.0 < moved / (256 << 22) < 1.05


@pytest.mark.parametrize("window, tokens, accepted, expected", [
    (16, 1, 1, list(range(1, 17))), (16, 4, 4, [4, 8, 12, 16]), (16, 4, 3, [3, 6, 9, 12, 15]), (4, 4, 4, [4]),
    (7, 3, 2, [2, 4, 6])])
def test_committed_cycle(window, tokens, accepted, expected):
    """The steady cycle, its last step the one and only that flushes."""
    assert schedule.committed_cycle(window, tokens, accepted) == expected
    assert [c + tokens > window for c in expected] == [False] * (len(expected) - 1) + [True]


def test_committed_cycle_refuses():
    """Nothing accepted never fills a ring."""
    with pytest.raises(ValueError, match="accepted 0"):
        schedule.committed_cycle(16, 1, 0)


@pytest.mark.parametrize("tokens", [1, 4])
def test_schedule_visits_every_phase(tokens):
    """Each slot walks through the whole cycle as the commit rule says, and each step has its share of flushes."""
    slots, steps, ring_len = 32, 16 // tokens, 16 + tokens
    plan = schedule.make_schedule(16, tokens, tokens, slots, ring_len, True, torch.Generator().manual_seed(1))
    assert plan.committed.shape == (steps, slots) and plan.committed.dtype == torch.int32
    for column in plan.committed.T:
        assert sorted(column.tolist()) == schedule.committed_cycle(16, tokens, tokens)
    assert (plan.flushing.sum(1) == slots // steps).all()
    assert plan.flush_fraction == pytest.approx(tokens / 16) and plan.mean_committed == (16 + tokens) / 2
    start, committed = plan.start[0].clone(), plan.committed[0].clone()
    for step in range(steps):
        assert torch.equal(plan.start[step], start) and torch.equal(plan.committed[step], committed)
        flush = committed + tokens > 16
        start = torch.where(flush, (start + committed) % ring_len, start)
        committed = torch.where(flush, 0, committed) + tokens


def test_schedule_without_flushes():
    """The mode that leaves flushes out says so, and a window that one step fills has none."""
    plan = schedule.make_schedule(16, 1, 1, 9, 17, False, torch.Generator().manual_seed(1))
    assert plan.flush_fraction == 0.0 and sorted(plan.committed[:, 4].tolist()) == list(range(1, 16))
    with pytest.raises(ValueError, match="every step flushes"):
        schedule.make_schedule(4, 4, 4, 9, 8, False, torch.Generator())


def test_pools_rotate_and_kept_slots_turn():
    """Sets of rows share no slot; in an update of several tokens the slot of the last one is read next."""
    case = contestants.Case(families.GEOMETRIES["tiny-gdn"], "plain", 3, 4, torch.float32, CPU).rotating()
    update = contestants.Update(case, families.Draw(CPU, 0))
    assert case.sets >= 2 and update.slots.unique().numel() == case.sets * 3 * 5
    for step in range(5):
        read, written = update.places(update.slots[0], step)
        assert written.shape == (3, 4) and not torch.isin(read, written).any()
        assert torch.equal(update.places(update.slots[0], step + 1)[0], written[:, -1])
    assert len(update.launches()) == 5 * case.sets


def test_run_on_a_cpu():
    """Every op gets a number, every replay row its share of flushes and its ratio to the plain update."""
    result = json.loads(json.dumps(ops.run(options())))
    assert set(result) == {"benchmark", "device", "commit", "python", "versions", "command", "method", "window",
                           "peers", "bandwidth_gb_per_s", "seconds", "rows"}
    measured = {row["op"] for row in result["rows"]}
    assert measured == {f"{family}_{verb}" for family in ("mamba2", "gdn") for verb in (
        "replay", "update", "materialize")} | {"conv_replay", "ring_commit"}
    for row in result["rows"]:
        assert set(row) == set(report.ROW_FIELDS) and row["status"] == "ok", row
        assert row["us"] > 0 and len(row["us_runs"]) == 2 and row["bytes"] > 0
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["us"] * 1e-3)
        assert row["of_read"] == pytest.approx(row["gb_per_s"] / result["bandwidth_gb_per_s"]["read"])
        if row["op"].endswith("_replay") and row["op"] != "conv_replay":
            assert row["flush_fraction"] == (1 / 16 if row["mode"] == "cycle" else 0.0)
            assert row["times_as_fast"]["plain"] > 0
    text = report.table(result)
    assert "mamba2_replay" in text and "no number" not in text


def test_several_tokens_are_checked():
    """T = 4 with a bf16 state: right within tolerance for replay and for the update with a slot for each token."""
    for family in ("tiny-mamba2", "tiny-gdn"):
        for mode, maker in (("cycle", contestants.Replay), ("plain", contestants.Update)):
            case = contestants.Case(families.GEOMETRIES[family], mode, 8, 4, torch.bfloat16, CPU)
            assert 0 < contestants.check(maker, case) < contestants.tolerance(case)


def _nan(*args, out, **kwargs):
    out.fill_(float("nan"))


@pytest.mark.parametrize("broken", ["no flush", "nan"])
def test_wrong_kernels_get_no_number(broken):
    """Negative control: a kernel that forgets to fold, and one that returns NaN, are named and not timed."""
    right = OPS["mamba2_replay"].kernel("cpu")

    def forgetful(state, *args, **kwargs):
        right(state.clone(), *args, **kwargs)

    with override_kernel("mamba2_replay", "cpu", forgetful if broken == "no flush" else _nan):
        result = ops.run(options(geometry=["tiny-mamba2"]))
    for row in result["rows"]:
        wrong = row["op"] == "mamba2_replay"
        assert (row["us"] is None) == wrong and row["status"].startswith("wrong" if wrong else "ok")
        assert "plain" not in row["times_as_fast"]
    assert "no number for torch_replay mamba2_replay" in report.table(result)


def test_wrong_small_ops_get_no_number():
    """The same for an op whose check compares with the reference kernel; one that raises costs no other row."""
    def off_by_one(start, *args, **kwargs):
        OPS["ring_commit"].body(start, *args, **kwargs)
        start += 1

    def broken(*args, **kwargs):
        raise RuntimeError("no such luck")

    job = small_ops.Task("ring_commit", families.GEOMETRIES["tiny-gdn"], 2, 1, torch.int32, CPU), small_ops.Commit
    reference = OPS["ring_commit"].kernel("cpu")
    for kernel, status in ((off_by_one, "wrong"), (broken, "failed: RuntimeError: no such luck")):
        with override_kernel("ring_commit", "cpu", kernel), pytest.MonkeyPatch.context() as patch:
            patch.setattr(ops, "reference_of", lambda name: reference)
            row = ops.measure_job(job, {}, 1e-4)
        assert row["us"] is None and row["status"].startswith(status)


def test_time_limit_and_ratios():
    """Rows that are cut off say so; ratios are a peer's time over ours, on the same task only."""
    result = ops.run(options(time_limit=1e-9))
    assert {row["status"] for row in result["rows"]} == {"out of time"} and "out of time" in report.table(result)
    same = dict(geometry="g", batch=8, tokens=1, state_dtype="float32")
    ours = dict(same, contestant="torch_replay", op="mamba2_replay", mode="cycle", us=10.0, times_as_fast={})
    plain = dict(same, contestant="torch_replay", op="mamba2_update", mode="plain", us=20.0, times_as_fast={})
    rows = [ours, plain, dict(ours, contestant="flashinfer", us=15.0), dict(plain, contestant="vllm", us=30.0),
            dict(ours, contestant="vllm", us=12.0, mode="no flush"), dict(plain, contestant="fla", us=5.0, batch=1)]
    report.add_ratios(rows)
    assert ours["times_as_fast"] == {"plain": 2.0, "flashinfer": 1.5, "vllm update": 3.0}
    assert plain["times_as_fast"] == {"vllm update": 1.5}


def test_command_line(capsys, tmp_path):
    """`bench ops --json --output F` prints and writes the same object."""
    arguments = parse("ops", "--device", "cpu", "--batch", "1", "--quick", "--seconds", "0.0001", "--json",
                      "--geometry", "tiny-mamba2", "--output", str(tmp_path / "rows.json"))
    assert bench.run(arguments) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "rows.json").read_text())


def test_without_a_clone(monkeypatch, tmp_path):
    """An installed package has no benchmarks folder, and says what to do."""
    from torch_replay.command.options import UserError

    monkeypatch.setattr(bench, "FOLDER", tmp_path / "benchmarks")
    monkeypatch.chdir(tmp_path)
    arguments = parse("ops", "--device", "cpu")
    with pytest.raises(UserError, match="from a clone of the repository"):
        bench.run(arguments)


def test_installed_package_in_a_clone(monkeypatch, tmp_path):
    """After README's install the package lies elsewhere: the scripts are those of the clone that one stands in."""
    scripts = bench.FOLDER
    monkeypatch.setattr(bench, "FOLDER", tmp_path / "benchmarks")
    monkeypatch.chdir(scripts.parent / "tests")
    assert bench.folder() == scripts


@pytest.mark.parametrize("cuda", [False, True])
def test_default_device(monkeypatch, capsys, cuda):
    """`bench ops` takes a GPU where there is one, and says what it took; a device that is asked for needs no word."""
    seen = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: cuda)
    monkeypatch.setattr("torch.cuda.device_count", lambda: int(cuda))
    monkeypatch.setattr(bench, "load", lambda name: types.SimpleNamespace(
        run=lambda arguments: seen.append(arguments.device) or {}))
    for given in ([], ["--device", "cpu"]):
        assert bench.run(parse("ops", "--json", *given)) == 0
    assert seen == ["cuda" if cuda else "cpu", "cpu"]
    assert capsys.readouterr().err == f"torch-replay: measures on {seen[0]} (--device)\n"


def test_drift_on_a_few_cycles():
    """Every combination of dtypes has an error, in the order of their digits; bf16 inputs fit a bf16 ring exactly."""
    result = json.loads(json.dumps(drift.run(types.SimpleNamespace(device="cpu", cycles=4, quiet=True, command=""))))
    error = {(row["op"], row["state"], row["ring"]): row for row in result["rows"]}
    assert len(error) == len(result["rows"]) == 2 * (7 * 3 + 3)
    for op in ("mamba2_replay", "gdn_replay"):
        assert error[op, "float32", "float32"]["error"] < 1e-6
        for state in drift.STATES:
            assert 0 < error[op, state, "float32"]["error"] < 0.1
    lossless = error["mamba2_replay", "float32", "bfloat16"]
    assert lossless["error"] < 1e-6 < 1e-4 < lossless["error_float32_inputs"]
    assert error["gdn_replay", "float32", "float16"]["error"] < error["gdn_replay", "float32", "bfloat16"]["error"] / 4
    assert set(result["recommendation"]) == {f"{op} {state}" for op in ("mamba2_replay", "gdn_replay")
                                             for state in drift.STATES}
    assert "gdn_replay float32" in drift.table(result)


def test_replay_accuracy(monkeypatch, tmp_path):
    """A whole run on a tiny model: replay moves losses where windows stack, and nothing in the two exact settings."""
    accuracy = bench.load("replay_accuracy")
    model = tiny_model(pattern=("mamba2", "full", "swa", "mlp", "gdn", "swa", "mlp"), window=16)
    monkeypatch.setattr(accuracy.HybridModel, "from_pretrained", lambda folder: model)
    monkeypatch.setattr(accuracy, "NEAR", (4, 8))
    for part in ("code", "text"):
        np.save(tmp_path / f"valid_{part}.npy", np.random.default_rng(1).integers(1, 61, 400).astype(np.uint16))
    arguments = parse("replay-accuracy", "--corpus", str(tmp_path), "--segments", "2", "--hits", "80")
    arguments.quiet, arguments.command = True, "torch-replay bench replay-accuracy"
    result = accuracy.run(arguments)
    assert [row["replayed_tokens"] for row in result["rows"] + result["exact"]] == [16, 16, 16, 0]
    moved = "replay - cold"
    assert all(row["largest_difference_of_a_loss"][moved] > 1e-2 for row in result["rows"])
    assert all(row["largest_difference_of_a_loss"][moved] < 1e-3 for row in result["exact"])
    for row in result["rows"] + result["exact"]:
        assert row["largest_difference_of_a_loss"]["window_cached - cold"] < 1e-3
        assert set(row["following"]) == {4, 8}
    # 2 (keys, values) x 2 heads x 8 x 4 bytes a layer; two of three attention layers are windows
    assert result["kv_bytes_per_token"] == {"kept": 128, "with_window_kv": 384, "saved": 256, "saved_share": 2 / 3}
    json.dumps(result)
    assert "67% saved" in accuracy.table(result)
    with pytest.raises(ValueError, match="segments is 9, expected at most 4 of 89 tokens in code"):
        accuracy.segments(tmp_path, "code", 9, 89)
