"""The audit passes this project's decode step, and each of its rules finds the example that breaks it, by line."""

import json
import re
from pathlib import Path

import audit_examples as examples
import pytest
import torch
from tiny import engine, tiny_model

from torch_replay import SamplingParams
from torch_replay.command.audit import _preset, decode_target
from torch_replay.graphs.audit import RULES, AuditError, audit
from torch_replay.graphs.audit_cuda import CudaWatch
from torch_replay.graphs.audit_report import render_html, render_text
from torch_replay.testing import assert_one_graph
from torch_replay_command import PRESETS, main

FOLDER = Path(examples.__file__).parent
GPU_RULES = ("skips", "partitions", "copied", "recordings", "launches")


def run(fn, *args, **options):
    return audit(fn, lambda call: call(*args), **options)


def line_of(mark: str) -> int:
    lines = (FOLDER / "audit_examples.py").read_text().splitlines()
    return next(i for i, text in enumerate(lines, 1) if text.endswith(f"# line of {mark}"))


@pytest.mark.parametrize("temperature", [0.0, 0.9], ids=["greedy", "sampled"])
def test_own_decode_step(temperature):
    """One graph, no recompile, clone or wait, while rings wrap, drafts vary and requests come and go."""
    model = tiny_model(pattern=("gdn", "swa") if temperature else ("mamba2", "full"))
    runner = engine(model, max_num_seqs=2, num_spec=2)
    params = SamplingParams(max_tokens=22, ignore_eos=True, temperature=temperature)
    report = audit(*decode_target(runner, [[5, 6, 7], [1], [9, 9]], params))
    assert report.ok, render_text(report)
    assert report.calls > 22 and runner.stats.flushes > 3 and report["graphs"].value == 1
    for rule in GPU_RULES if not torch.cuda.is_available() else ():
        assert report[rule].status == "not checked" and report[rule].value is None


BAD = {
    "break": (examples.broken, "breaks", "breaks", "graph_break"),
    "item": (examples.waits, "syncs", "syncs", "the host reads a value"),
    "tolist": (examples.lists, "syncs", "tolist", "reads all values"),
    "mask": (examples.masks, "syncs", "masks", "indexing with a mask"),
    "no fake": (examples.fakeless, "ops", "fakeless", "doubled: does not run on fake tensors"),
    "no fake, custom_op": (examples.fakeless_custom_op, "ops", "custom_op", "no fake impl registered"),
    "no op": (examples.unregistered, "ops", "unregistered", "disable"),
    "does not compile": (examples.fakeless_custom_op, "breaks", "custom_op", "does not compile"),
    "sliced cache": (examples.SlicedCache().step, "clones", "clones", "cloned at every step"),
    "stale cache": (examples.StaleCache().step, "clones", "stale", "cloned at every step"),
    "viewed cache": (examples.ViewedCache().step, "clones", "dtype", "at every step"),
    "counting": (examples.Counting().step, "recompiles", "recompiles", "self.length"),
}


@pytest.mark.parametrize("fn, rule, mark, message", BAD.values(), ids=BAD)
def test_rule_fires(fn, rule, mark, message):
    """Each rule names the line that breaks it and what is wrong there."""
    report = run(fn, torch.full((64, 32), 2.0))
    assert not report.ok and rule in report.broken
    finding = report[rule].findings[0]
    assert message in finding.message
    assert (Path(finding.file).name, finding.line) == ("audit_examples.py", line_of(mark))
    assert finding.code.endswith(f"# line of {mark}")
    assert f"audit_examples.py:{finding.line}" in render_text(report)


def test_clone_has_name_and_bytes():
    """A clone is reported by the name of its tensor in the source and by its bytes, here the two slices together."""
    report = run(examples.SlicedCache().step, torch.zeros(64, 32))
    assert report.broken == ["clones"]
    [clone] = report["clones"].findings
    assert clone.tensor == "self.values" and clone.bytes == report["clones"].value == 2 * 64 * 32 * 4


def test_no_rule_fires_without_cause():
    """A function that keeps every rule; one that breaks one keeps the others."""
    x = torch.zeros(64, 32)
    assert run(examples.Cache().step, x).ok
    assert run(examples.broken, x).broken == ["breaks"]
    assert run(examples.Counting().step, x).broken == ["recompiles"]


def test_counter_beyond_the_graph(monkeypatch):
    """Bytes that only torch's counter of missed chances knows are reported, too, once a graph and without a name."""
    counts = iter(range(0, 1000, 64))
    monkeypatch.setattr(torch._dynamo.utils.ReinplaceCounters, "get_total_missed_bytes", lambda: next(counts))
    report = run(examples.Cache().step, torch.zeros(64, 32))
    assert report.broken == ["clones"] and report["clones"].value == 64
    assert report["clones"].findings[0].tensor is None


def test_too_many_variants():
    """A function that Dynamo gives up on, and then runs eagerly, does not pass because it no longer compiles."""
    counting = examples.Counting()
    report = audit(counting.step, lambda call: [call(torch.zeros(64, 32)) for _ in range(10)])
    assert "recompiles" in report.broken and report["recompiles"].findings


def test_allowances():
    """A rule passes up to the value given, and no further; an unknown one is refused."""
    x = torch.zeros(64, 32)
    report = run(examples.broken, x, allow={"breaks": 1})
    assert report.ok and report["breaks"].status == "allowed" and report["breaks"].findings
    assert run(examples.waits, x, allow={"breaks": None, "syncs": None}).broken == ["graphs"]
    assert run(examples.waits, x, allow={"breaks": 0, "syncs": 1, "graphs": 2}).broken == ["breaks"]
    with pytest.raises(ValueError, match="rule 'brakes'"):
        run(examples.broken, x, allow={"brakes": 1})


def test_failures():
    """A function that fails, or is never called, is one line."""
    with pytest.raises(AuditError, match="RuntimeError: no such luck"):
        run(examples.fails, torch.zeros(1))
    with pytest.raises(AuditError, match="never called"):
        audit(examples.broken, lambda call: None)


def test_assert_one_graph():
    """The helper for tests returns the report, or fails with the line; rules are relaxed by name."""
    x = torch.zeros(64, 32)
    assert assert_one_graph(examples.Cache().step, x).ok
    with pytest.raises(AssertionError, match=f"audit_examples.py:{line_of('breaks')}"):
        assert_one_graph(examples.broken, x)
    assert assert_one_graph(examples.broken, x, breaks=1)["breaks"].value == 1


def test_cuda_counters():
    """What needs a GPU is read from counters that Inductor raises; here they are raised by hand."""
    from torch._dynamo.utils import counters
    from torch._inductor.cudagraph_utils import log_cudagraph_skip_and_bump_counter

    watch = CudaWatch()
    with watch.running():
        with watch.compiling():
            counters["inductor"]["cudagraph_partitions"] += 3
        with watch.compiling():
            pass
        log_cudagraph_skip_and_bump_counter(
            f'skipping cudagraphs due to mutated inputs. Found from : \n  File "{examples.__file__}", line 9, in step')
    log_cudagraph_skip_and_bump_counter("skipping cudagraphs, but nobody watches")
    assert watch.partitions == 3
    [skip] = watch.skips
    assert "mutated inputs" in skip.message and skip.line == 9


def command(capsys, *arguments) -> tuple[int, str, str]:
    try:
        status = main(["audit", *arguments])
    except SystemExit as stop:
        status = stop.code
    return status, *capsys.readouterr()


def test_preset():
    """A preset drives the step of the route that its name says, often enough that rings flush."""
    step, drive = _preset(PRESETS["small-sampled"], "cpu")
    assert step.__name__ == "sampled_step"
    calls = []
    drive(lambda: calls.append(step()) or calls[-1])
    assert len(calls) > 6 and any(call[:, -1].any() for call in calls)


def test_command(capsys, tmp_path, monkeypatch):
    """Status 1 and the line for a broken rule, 0 once it is allowed; text, JSON and a page."""
    monkeypatch.chdir(FOLDER)
    target = ("audit_examples:broken", "--inputs", "audit_examples:calls")
    status, out, _ = command(capsys, *target)
    assert status == 1 and f"audit_examples.py:{line_of('breaks')}: torch._dynamo.graph_break()" in out
    page = tmp_path / "report.html"
    status, out, _ = command(capsys, *target, "--json", "--html", str(page))
    report = json.loads(out)
    assert status == 1 and report["broken"] == ["breaks"] and report["calls"] == 2
    assert [result["rule"] for result in report["results"]] == list(RULES)
    assert "audit_examples.py" in page.read_text()
    assert command(capsys, *target, "--allow", "breaks=1")[0] == 0
    assert command(capsys, *target, "--allow", "breaks")[0] == 0


BAD_TARGETS = {
    "no device": (["small", "--device", "cuda:99"], "--device cuda:99: this machine has no such device"),
    "no colon": (["tiny"], "TARGET tiny: expected package.module:callable, a Hugging Face model folder or small"),
    "no module": (["no_such_module:f"], "cannot import no_such_module"),
    "no name": (["audit_examples:nothing"], "audit_examples has no nothing"),
    "no callable": (["audit_examples:NOT_CALLABLE"], "is int, expected something to call"),
    "no inputs": (["audit_examples:broken"], "TypeError"),
    "bad inputs": (["audit_examples:broken", "--inputs", "builtins:list"], "never called"),
    "fails": (["audit_examples:fails", "--inputs", "audit_examples:calls"], "no such luck"),
    "preset with inputs": (["small", "--inputs", "audit_examples:calls"], "preset small makes its own"),
    "no rule": (["small", "--allow", "brakes"], "'brakes', expected one of graphs"),
    "no number": (["small", "--allow", "breaks=few"], "expected breaks=N"),
    "no folder": (["audit_examples:broken", "--inputs", "audit_examples:calls", "--html", "no/such/f"], "No such file"),
}


@pytest.mark.parametrize("arguments, message", BAD_TARGETS.values(), ids=BAD_TARGETS)
def test_bad_targets(capsys, monkeypatch, arguments, message):
    """Status 2 and one clear line, nothing on stdout."""
    monkeypatch.chdir(FOLDER)
    status, out, err = command(capsys, *arguments)
    assert status == 2 and out == "" and message in err and "Traceback" not in err
    assert len([line for line in err.splitlines() if line.startswith("torch-replay")]) == 1


def test_page_stands_alone():
    """The page loads nothing, names each rule, and shows source as text."""
    report = run(examples.waits, torch.full((64, 32), 2.0), name="<script>alert(1)</script>")
    page = render_html(report)
    assert not re.search(r"https?:|//|\b(src|href)\s*=|<script|@import|url\(", page)
    assert all(f"({rule})" in page for rule in RULES)
    assert "x[0, 0].item()" in page and page.count('class="finding"') == 2
