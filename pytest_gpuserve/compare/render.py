"""A comparison as text, Markdown or JSON: what moved first, then what it broke."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_gpuserve.compare.values import Change
from pytest_gpuserve.model.words import number
from pytest_gpuserve.report.describe import IMPORTANT
from pytest_gpuserve.report.markdown import escape, rows
from pytest_gpuserve.report.store import dump_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpuserve.compare.patch import Patch
    from pytest_gpuserve.compare.values import Comparison, Moved, Row

__all__ = ["MEANING", "SCHEMA", "as_json", "markdown", "text"]

SCHEMA = 1
MEANING = {
    Change.BROKE: "worked before, fails now",
    Change.CHANGED: "failed before, fails in another way now",
    Change.SLOWER: "works, slower than its noise allows",
    Change.FIXED: "failed before, works now",
    Change.FASTER: "works, faster than its noise explains",
    Change.NOT_RUN: "no result on one side: this is not 'no change'",
    Change.GONE: "in the first record only",
    Change.NEW: "in the second record only",
    Change.STILL_BAD: "fails as before",
    Change.SAME: "works as before, with a remark",
}
# A report is read by people; the JSON holds every row.
_LISTED = 200
_OTHERS = 30


def text(comparison: Comparison, patch: Patch | None = None) -> str:
    """For a terminal: warnings, what moved, the counts, every class, the patch."""
    lines = [f"Compared: {comparison.title}", ""]
    lines += [f"WARNING: {warning}" for warning in comparison.warnings]
    lines += [""] if comparison.warnings else []
    lines += ["What moved:", *[f"  {line}" for line in _moved(comparison.moved)], "", _headline(comparison)]
    for change, found in _sections(comparison):
        lines += ["", f"{change} ({len(found)}): {MEANING[change]}"]
        for row in found[:_LISTED]:
            lines.append(f"  {row.id}: {row.before} → {row.after}")
            if row.reason:
                lines.append(f"      {row.reason}")
        lines += [f"  … and {len(found) - _LISTED} more; --format json has all"] if len(found) > _LISTED else []
    if patch and patch.edits:
        lines += ["", "Known-bad entries:", *[f"  {edit}" for edit in patch.edits]]
    if patch and patch.text:
        lines += ["", "Patch (git apply):", "", patch.text.rstrip("\n")]
    return "\n".join(lines) + "\n"


def markdown(comparison: Comparison, patch: Patch | None = None) -> str:
    """For a step summary or a pull request: what is new first, long lists folded by their cap."""
    lines = [f"## Compared: {escape(comparison.title)}", ""]
    lines += [f"> **WARNING**: {escape(warning)}\n" for warning in comparison.warnings]
    lines += [f"**{escape(_headline(comparison))}**", ""]
    if comparison.moved:
        shown = _important(comparison.moved)
        lines += rows(("moved", "before", "after"), ((one.what, one.before or "–", one.after or "–") for one in shown))
        lines.append("")
        rest = [one for one in comparison.moved if one not in shown]
        lines += [f"Also moved: {escape(', '.join(map(str, rest[:_OTHERS])))}{_more(rest)}", ""] if rest else []
    else:
        lines += ["Nothing of the environment moved.", ""]
    for change, found in _sections(comparison):
        lines += [f"### {change} ({len(found)}): {escape(MEANING[change])}", ""]
        lines += rows(
            ("cell", "before", "after", "why"),
            ((row.id, row.before, row.after, row.reason) for row in found[:_LISTED]),
        )
        lines += ["", f"… and {len(found) - _LISTED} more."] if len(found) > _LISTED else []
        lines.append("")
    if patch and patch.edits:
        lines += ["### Known-bad entries", "", *[f"- {escape(str(edit))}" for edit in patch.edits], ""]
    if patch and patch.text:
        fence = "```" if "```" not in patch.text else "~~~~~~"
        lines += [f"{fence}diff", patch.text.rstrip("\n"), fence, ""]
    return "\n".join(lines)


def as_json(comparison: Comparison, patch: Patch | None = None) -> str:
    """Every row, for other tools; fields as in docs/record.md."""
    data: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": "comparison",
        "title": comparison.title,
        "simulated": comparison.simulated,
        "comparable": comparison.comparable,
        "warnings": list(comparison.warnings),
        "moved": [{"what": one.what, "before": one.before, "after": one.after} for one in comparison.moved],
        "counts": {str(change): number for change, number in comparison.counts.items()},
        "findings": comparison.findings,
        "rows": [_row(row) for row in comparison.rows],
        "edits": [
            {"action": edit.action, "entry": edit.entry, "file": edit.file, "why": edit.why}
            for edit in (patch.edits if patch else ())
        ],
        "patch": patch.text if patch else "",
    }
    return dump_json(data)


def _row(row: Row) -> dict[str, Any]:
    cell = row.b if row.b is not None else row.a or {}
    return {
        "change": str(row.change),
        "finding": row.finding,
        "id": row.id,
        "arch": cell.get("arch"),
        "model": cell.get("model"),
        "axes": dict(cell.get("axes") or {}),
        "before": row.before,
        "after": row.after,
        "reason": row.reason,
        "measures": [{name: getattr(measure, name) for name in measure.__slots__} for measure in row.measures],
    }


def _headline(comparison: Comparison) -> str:
    counted = ", ".join(f"{number} {change}" for change, number in comparison.counts.items()) or "no cells"
    simulated = "SIMULATED: " if comparison.simulated else ""
    if not comparison.comparable:
        return f"{simulated}nothing could be compared: {counted}"
    found = number(comparison.findings, "finding") if comparison.findings else "no findings"
    return f"{simulated}{counted}: {found}"


def _sections(comparison: Comparison) -> list[tuple[Change, list[Row]]]:
    by_change: dict[Change, list[Row]] = {}
    for row in comparison.rows:
        by_change.setdefault(row.change, []).append(row)
    if Change.SAME in by_change:
        # What stayed as it was is only counted, unless something must be said of it.
        by_change[Change.SAME] = [row for row in by_change[Change.SAME] if row.reason]
    return [(change, by_change[change]) for change in Change if by_change.get(change)]


def _moved(moved: Sequence[Moved]) -> list[str]:
    if not moved:
        return ["nothing"]
    shown = _important(moved)
    rest = [one for one in moved if one not in shown]
    lines = [str(one) for one in shown]
    if rest:
        lines.append(f"also: {'; '.join(map(str, rest[:_OTHERS]))}{_more(rest)}")
    return lines


def _important(moved: Sequence[Moved]) -> list[Moved]:
    return [one for one in moved if one.what in (*IMPORTANT, "gpus", "host", "matrices")]


def _more(rest: Sequence[Moved]) -> str:
    return f"; … and {len(rest) - _OTHERS} more" if len(rest) > _OTHERS else ""
