"""An audit's report as text and as one HTML page that needs nothing else."""

import os
from html import escape
from typing import Optional

from .audit import AuditReport, Result
from .audit_finding import Finding

MARKS = {"ok": "ok", "broken": "BROKEN", "allowed": "allowed", "not checked": "not checked"}
COLOURS = {"ok": "#1a7f37", "broken": "#b3261e", "allowed": "#8a6100", "not checked": "#5f6673"}
STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin-bottom: .2rem; }
h1, td, p, pre { overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; }
tr { border-bottom: 1px solid #8884; }
th, td { text-align: left; vertical-align: top; padding: .4rem .6rem; }
th { font-weight: 600; }
.state { color: #fff; border-radius: .3rem; padding: .1rem .5rem; white-space: nowrap; font-size: .85rem; }
.finding { margin: .4rem 0 0; }
.where { font-family: ui-monospace, monospace; font-size: .85rem; }
pre { background: #8882; padding: .4rem .6rem; margin: .2rem 0; white-space: pre-wrap; font-size: .85rem; }
@media (max-width: 40rem) { thead { display: none; } tr, td { display: block; } }
"""


def render_text(report: AuditReport) -> str:
    """The report as lines of text: a table of rules, and below each that is broken or allowed, its findings."""
    lines = [f"{report.target}: {_summary(report)}",
             f"torch {report.torch}, {report.device}, calls in a sweep: {report.calls}"]
    width = max(len(result.title) for result in report.results)
    for result in report.results:
        lines.append(f"  {MARKS[result.status]:<11}  {result.title:<{width}}  {_value(result)}")
        for finding in result.findings:
            lines.append(f"      {_message(finding)}")
            if finding.file:
                lines.append(f"        {_place(finding)}: {finding.code}")
    return "\n".join(lines)


def render_html(report: AuditReport) -> str:
    """The report as a page with its style inside and nothing to load."""
    rows = "\n".join(_row(result) for result in report.results)
    state = "ok" if report.ok else "broken"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Audit of {escape(report.target)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{escape(report.target)}</h1>
<p>{_badge(state, _summary(report))} torch {escape(report.torch)}, {escape(report.device)},
calls in a sweep: {report.calls}</p>
<table>
<thead><tr><th>Rule</th><th>Result</th><th>Found</th></tr></thead>
<tbody>
{rows}
</tbody>
</table>
</body>
</html>
"""


def _row(result: Result) -> str:
    findings = "".join(_block(finding) for finding in result.findings)
    return (f"<tr><td>{escape(result.title)} <span class=\"where\">({escape(result.rule)})</span></td>"
            f"<td>{_badge(result.status, result.status)}</td><td>{escape(_value(result))}{findings}</td></tr>")


def _block(finding: Finding) -> str:
    source = ""
    if finding.file:
        source = f"<div class=\"where\">{escape(_place(finding))}</div><pre>{escape(finding.code)}</pre>"
    return f"<div class=\"finding\">{escape(_message(finding))}{source}</div>"


def _badge(status: str, text: str) -> str:
    return f"<span class=\"state\" style=\"background: {COLOURS[status]}\">{escape(text)}</span>"


def _summary(report: AuditReport) -> str:
    checked = sum(result.status != "not checked" for result in report.results)
    if report.ok:
        return f"keeps {checked} of {len(report.results)} rules, the others not checked" if checked < len(
            report.results) else "keeps every rule"
    return f"breaks {', '.join(report.broken)}"


def _value(result: Result) -> str:
    if result.value is None:
        return result.note
    limit = "any" if result.limit is None else f"{result.limit:,}"
    return f"{result.value:,} ({limit} allowed)"


def _message(finding: Finding) -> str:
    tensor = f"{finding.tensor}: " if finding.tensor else ""
    size = f" ({finding.bytes:,} bytes)" if finding.bytes is not None else ""
    return f"{tensor}{finding.message}{size}"


def _place(finding: Finding) -> str:
    return f"{_short(finding.file)}:{finding.line}"


def _short(file: Optional[str]) -> str:
    """Relative to the current folder if it lies inside."""
    relative = os.path.relpath(file)
    return file if relative.startswith("..") else relative
