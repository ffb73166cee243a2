"""Assertions for test suites of code that uses these ops, or of any other code that must stay one graph."""

from collections.abc import Callable
from typing import Optional

from .graphs.audit import AuditReport, audit
from .graphs.audit_report import render_text


def assert_one_graph(fn: Callable, *args, **allow: Optional[int]) -> AuditReport:
    """Audits `fn(*args)` and raises AssertionError, with the source lines, unless it keeps every rule.

        assert_one_graph(step, cache, token)
        assert_one_graph(step, cache, token, clones=4096, syncs=None)

    It is called several times with the same `args`; what it writes stays written. allow: for a rule of
    `graphs.audit.RULES` the value up to which it passes, None for any. Rules that need a GPU are skipped without one.
    """
    report = audit(fn, lambda call: call(*args), allow=allow)
    if not report.ok:
        raise AssertionError("\n" + render_text(report))
    return report
