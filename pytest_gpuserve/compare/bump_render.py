"""The bump report as text, Markdown or JSON."""

from __future__ import annotations

from textwrap import wrap
from typing import TYPE_CHECKING

from pytest_gpuserve.compare.bump import Bump
from pytest_gpuserve.model.words import number
from pytest_gpuserve.report.markdown import escape, rows
from pytest_gpuserve.report.store import dump_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pytest_gpuserve.compare.bump import BumpReport, BumpRow, OptionChange

__all__ = ["as_json", "markdown", "text"]

WORDS = "'accepted' means by SGLang's arguments, never that it works: no GPU was asked"
_TITLES = {
    "flag gone": "Flags gone",
    "choice gone": "Choices gone",
    "default": "Defaults that changed",
    "deprecated": "Flags newly deprecated",
    "flag new": "Flags new",
    "choice new": "Choices new",
}
_CELLS = 5
_LISTED = 200
_MOVED = 30


def text(report: BumpReport) -> str:
    """For a terminal: what moved, cells by class, then the option table's differences."""
    lines = [report.title, f"({WORDS})", ""]
    lines += [f"WARNING: {warning}" for warning in report.warnings]
    lines += [""] if report.warnings else []
    lines += ["What moved:", *[f"  {one}" for one in report.moved[:_MOVED]]]
    lines += [f"  … and {len(report.moved) - _MOVED} more"] if len(report.moved) > _MOVED else []
    lines += ["  nothing"] if not report.moved else []
    lines += ["", _headline(report)]
    for change, found in _sections(report):
        lines += ["", f"{change} ({len(found)})"]
        for said, cells in _grouped(found):
            lines += [f"  {said}", f"      {cells}"]
    others = _other(report)
    for title, told in [
        *_options(report.options),
        ("Other arguments resolved otherwise", [": ".join(one) for one in others]),
    ]:
        if told:
            lines += ["", title]
            lines += [
                wrapped
                for line in told
                for wrapped in wrap(line, 116, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False)
            ]
    return "\n".join(lines) + "\n"


def markdown(report: BumpReport) -> str:
    """For a pull request or a step summary."""
    lines = [f"## {escape(report.title)}", "", f"*{escape(WORDS)}*", ""]
    lines += [f"> **WARNING**: {escape(warning)}\n" for warning in report.warnings]
    lines += [f"**{escape(_headline(report))}**", ""]
    if report.moved:
        moved = report.moved[:_MOVED]
        lines += rows(("moved", "before", "after"), ((one.what, one.before or "–", one.after or "–") for one in moved))
        lines += ["", f"… and {len(report.moved) - _MOVED} more."] if len(report.moved) > _MOVED else []
        lines.append("")
    for change, found in _sections(report):
        lines += [f"### {change} ({len(found)})", "", *rows(("what", "cells"), _grouped(found)), ""]
    for title, told in _options(report.options):
        lines += [f"### {title}", "", *[f"- {escape(line)}" for line in told], ""]
    others = _other(report)
    lines += ["### Other arguments resolved otherwise", "", *rows(("what", "cells"), others), ""] if others else []
    return "\n".join(lines)


def as_json(report: BumpReport) -> str:
    """Every row; fields as in docs/record.md."""
    data = {
        "schema": 1,
        "kind": "bump-report",
        "title": report.title,
        "comparable": report.comparable,
        "warnings": list(report.warnings),
        "moved": [{"what": one.what, "before": one.before, "after": one.after} for one in report.moved],
        "findings": report.findings,
        "options": [{name: getattr(one, name) for name in one.__slots__} for one in report.options],
        "rows": [
            {
                "change": str(row.change),
                "id": row.id,
                "arch": row.arch,
                "text": row.text,
                "changes": [{"name": name, "before": before, "after": after} for name, before, after in row.changes],
                "others": [{"name": name, "before": before, "after": after} for name, before, after in row.others],
            }
            for row in report.rows
        ],
    }
    return dump_json(data)


def _headline(report: BumpReport) -> str:
    counts: dict[Bump, int] = {}
    for row in report.rows:
        counts[row.change] = counts.get(row.change, 0) + 1
    told = ", ".join(f"{counts[change]} {change}" for change in Bump if change in counts) or "no cells"
    if not report.comparable:
        return f"nothing could be compared: {told}"
    return f"{told}: {number(report.findings, 'finding')}"


def _sections(report: BumpReport) -> list[tuple[Bump, list[BumpRow]]]:
    found: dict[Bump, list[BumpRow]] = {}
    for row in report.rows:
        found.setdefault(row.change, []).append(row)
    return [(change, found[change]) for change in Bump if change in found and change is not Bump.SAME]


def _grouped(found: Iterable[BumpRow]) -> list[tuple[str, str]]:
    """What happened, with the cells it happened to: one setting that changes for an arch is one line, not fifty."""
    return _by_text((said, row.id) for row in found for said in [row.text, *_changes(row.changes)] if said)


def _other(report: BumpReport) -> list[tuple[str, str]]:
    return _by_text((said, row.id) for row in report.rows for said in _changes(row.others))


def _changes(changes: Iterable[tuple[str, str, str]]) -> list[str]:
    return [f"{name}: {before} → {after}" for name, before, after in changes]


def _by_text(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    groups: dict[str, list[str]] = {}
    for said, cell in pairs:
        groups.setdefault(said, []).append(cell)
    lines = [(said, _cells(cells)) for said, cells in groups.items()]
    left = len(lines) - _LISTED
    return lines if left <= 0 else [*lines[:_LISTED], (f"… and {left} more", "--format json has all")]


def _cells(cells: Sequence[str]) -> str:
    shown = ", ".join(cells[:_CELLS])
    return f"{shown} and {len(cells) - _CELLS} more" if len(cells) > _CELLS else shown


def _options(options: Iterable[OptionChange]) -> list[tuple[str, list[str]]]:
    """Sections with lines: names of flags together, the choices of one flag together."""
    sections: dict[str, list[OptionChange]] = {}
    for change in options:
        sections.setdefault(change.what, []).append(change)
    return [(f"{_TITLES[what]} ({len(found)})", list(_lines(what, found))) for what, found in sections.items()]


def _lines(what: str, changes: Iterable[OptionChange]) -> Iterator[str]:
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for change in changes:
        where = f" (on {', '.join(change.archs)})" if change.archs else ""
        if what == "default":
            yield f"{change.flag}: {change.before} → {change.after}{where}"
        elif what.startswith("choice"):
            groups.setdefault((f"{change.flag}: ", change.archs), []).append(change.before or change.after)
        elif change.after:
            yield f"{change.flag}: {change.after}{where}"
        else:
            groups.setdefault(("", change.archs), []).append(change.flag)
    for (flag, archs), names in groups.items():
        yield f"{flag}{', '.join(names)}" + (f" (on {', '.join(archs)})" if archs else "")
