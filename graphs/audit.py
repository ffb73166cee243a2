"""The audit: what torch.compile makes of a function, rule by rule, with the source lines that break a rule.

A function is judged by what happens when it runs. It runs three times over the same calls: eagerly, to see waits for
the device and custom ops where they stand; compiled, to see graphs, breaks and what functionalisation left behind; and
compiled again, when nothing may be compiled any more. Rules about CUDA graphs need a GPU and say "not checked" without.
"""

import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Optional

import torch

from .audit_finding import Finding, first_line
from .audit_watch import CompileWatch, EagerWatch

Call = Callable  # what a sweep calls in place of the function, with its arguments
Drive = Callable[[Call], None]

CACHE_BYTES = 4096


@dataclass(frozen=True)
class Rule:
    """A rule: what is counted, and how much of it is allowed by default."""

    name: str
    title: str
    limit: int = 0


RULES = {rule.name: rule for rule in (
    Rule("graphs", "graphs a call", 1),
    Rule("breaks", "graph breaks"),
    Rule("recompiles", "graphs compiled in a second sweep"),
    Rule("clones", "bytes a step in clones of persistent tensors"),
    Rule("syncs", "lines that wait for the device"),
    Rule("ops", "custom ops without registration or fake"),
    # on CUDA devices only
    Rule("skips", "CUDA-graph skips"),
    Rule("partitions", "partitions of a graph", 1),
    Rule("copied", "inputs copied at every replay"),
    Rule("recordings", "recordings of a graph", 1),
    Rule("launches", "graph launches a call", 1),
)}


@dataclass
class Result:
    """A rule's outcome. status: "ok", "broken", "allowed" (broken, but by less than the limit that was given) or "not
    checked"; `note` says why in the last case. limit: None where any value is allowed."""

    rule: str
    title: str
    status: str
    value: Optional[int]
    limit: Optional[int]
    findings: list[Finding] = field(default_factory=list)
    note: str = ""


@dataclass
class AuditReport:
    """What an audit found. calls: of the function, in each of the sweeps."""

    target: str
    torch: str
    device: str
    calls: int
    results: list[Result]

    @property
    def ok(self) -> bool:
        return not self.broken

    @property
    def broken(self) -> list[str]:
        """Names of the rules that are broken."""
        return [result.rule for result in self.results if result.status == "broken"]

    def __getitem__(self, rule: str) -> Result:
        return next(result for result in self.results if result.rule == rule)

    def as_dict(self) -> dict:
        return {"ok": self.ok, "broken": self.broken, **asdict(self)}


class AuditError(Exception):
    """The function could not be run; the message is one line."""


@torch.no_grad()
def audit(fn: Callable, drive: Drive, *, name: Optional[str] = None, allow: Optional[Mapping[str, int | None]] = None,
          cache_bytes: int = CACHE_BYTES) -> AuditReport:
    """Audits `fn`, which `drive(call)` runs by calling `call` with fn's arguments, once or often.

    `drive` is called three times and more and must then make calls of the same kind: what `fn` writes stays written.
    It runs without gradients. Code that was compiled before in this process compiles anew afterwards, for Dynamo is
    reset.

    allow: rule -> the value up to which it passes, None for any. cache_bytes: allocations in the generated code are
    compared with mutated inputs of at least this size; smaller ones equal some activation's size too often.

    Raises:
        ValueError: a rule that does not exist. AuditError: `fn` fails, or `drive` never calls it.
    """
    allow = dict(allow or {})
    for rule in allow:
        if rule not in RULES:
            raise ValueError(f"allow names rule {rule!r}, expected one of {', '.join(RULES)}")
    eager, compiled = EagerWatch(), CompileWatch(cache_bytes)
    calls = _sweep(drive, eager.wrap(fn))
    if not calls:
        raise AuditError("the function was never called")
    with compiled.running():
        step = compiled.compile(fn)
        _sweep(drive, step)
        graphs = max(compiled.graphs_by_call, default=0)
        first, compiled.second_sweep = compiled.graphs, True
        _sweep(drive, step)
        recompiles = compiled.graphs - first
        cuda = compiled.cuda.observe(lambda: _sweep(drive, step), calls, first) if compiled.on_cuda else {}
    unregistered = eager.op_findings() + compiled.unregistered()
    found = {
        "graphs": (graphs, [] if graphs else [Finding("nothing was compiled: no call of a torch function was traced")]),
        "breaks": (len(compiled.breaks), compiled.breaks),
        "recompiles": (max(recompiles, len(compiled.recompiles)), compiled.recompiles),
        "clones": (sum(clone.bytes for clone in compiled.clones), compiled.clones),
        "syncs": (len(eager.syncs), list(eager.syncs.values())),
        "ops": (len(unregistered), unregistered),
        **cuda,
    }
    results = [_judge(rule, found.get(rule.name), allow) for rule in RULES.values()]
    device = torch.cuda.get_device_name() if compiled.on_cuda else "cpu"
    name = name or getattr(fn, "__qualname__", type(fn).__name__)
    return AuditReport(name, torch.__version__, device, calls, results)


def _judge(rule: Rule, found: Optional[tuple[int, list[Finding]]], allow: dict) -> Result:
    limit = allow.get(rule.name, rule.limit)
    if found is None:
        return Result(rule.name, rule.title, "not checked", None, limit, note="needs a CUDA device")
    value, findings = found
    # nothing compiled, or no graph launched, is no success
    exceeds = value > rule.limit or (rule.name in ("graphs", "launches") and value == 0)
    if not exceeds:
        status = "ok"
    elif rule.name in allow and (limit is None or value <= limit):
        status = "allowed"
    else:
        status = "broken"
    return Result(rule.name, rule.title, status, value, limit, findings)


def _sweep(drive: Drive, call: Call) -> int:
    """Runs a sweep and returns how often it called."""
    count = 0

    def counted(*args, **kwargs):
        nonlocal count
        count += 1
        return call(*args, **kwargs)

    try:
        drive(counted)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__}: {first_line(str(error))} ({place.filename}:{place.lineno})"
        raise AuditError(reason) from error
    return count
