"""`summary.md`: what is new first, then what fails, then every cell; bounded to what GitHub takes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from pytest_gpuserve.model.outcome import RED, Outcome
from pytest_gpuserve.model.words import machine, number
from pytest_gpuserve.report.describe import (
    COLUMNS,
    blame,
    by_severity,
    counts,
    few,
    matrix_names,
    narrowings,
    one_line,
    retirements,
    row_of,
    versions_of,
    why,
)
from pytest_gpuserve.report.github import STEP_LIMIT
from pytest_gpuserve.report.remarks import remarks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["escape", "fit", "rows", "summary"]

_SPECIAL = re.compile(r"([\\`*_{}\[\]|~#!])")
# Room for the lines that say what was left out.
_RESERVE = 400


def escape(text: str) -> str:
    """`text` as one line of a table cell or paragraph that shows exactly it: no Markdown, HTML, mention or link."""
    flat = one_line(text)
    flat = flat.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    # A zero-width joiner would change what is copied: the entity for `@` and `:` keeps names and links from being made.
    return _SPECIAL.sub(r"\\\1", flat).replace("@", "&#64;").replace("://", "&#58;//")


def rows(titles: Sequence[str], values: Iterable[Sequence[str]]) -> list[str]:
    """A table's lines; the values are escaped, the titles are not."""
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    return lines + [f"| {' | '.join(map(escape, row))} |" for row in values]


def fit(lines: Sequence[str], limit: int, what: str = "lines") -> str:
    """`lines` joined, as many as fit in `limit` bytes of UTF-8; the last line says how many were left out."""
    sizes = [len(line.encode("utf-8", "backslashreplace")) + 1 for line in lines]
    if sum(sizes) <= limit:
        return "".join(f"{line}\n" for line in lines)
    room, kept = limit - _RESERVE, 0
    for size in sizes:
        if size > room:
            break
        room -= size
        kept += 1
    left = f"\n… {len(lines) - kept} {what} left out here: the report would be over {limit} bytes. run.json has all."
    return "\n".join([*lines[:kept], left]) + "\n" if limit > _RESERVE else ""


def summary(run: Mapping[str, Any], comparison: str | None = None, limit: int = STEP_LIMIT) -> str:
    """A run's report in at most `limit` bytes. `comparison` is `compare.render.markdown(...)`, put first.

    Order: what changed against the other record; known-bad entries that fail otherwise or pass; failures; versions;
    all cells. When it is too long, the cells that matter least are left out, and their number is said.
    """
    head = [f"# gpuserve: {escape(matrix_names(run))}: {counts(run)}", ""]
    if run["simulated"]:
        head += ["> **SIMULATED**: no GPU and no SGLang were used; times and speeds are invented.", ""]
    if not run["complete"]:
        head += ["> **INCOMPLETE**: the run did not end by itself. What was not reached is `not-run`.", ""]
    for text in remarks(run):
        head += [f"> {escape(text)}", ""]
    if comparison:
        head += [fit(comparison.rstrip("\n").split("\n"), max(limit // 2, 0), "lines of the comparison"), ""]
    head += _news(run) + _failures(run) + _stack(run)
    cells = by_severity(run["cells"])
    table = rows(COLUMNS, map(row_of, cells))
    lines = [*head, f"## All cells ({len(cells)})", "", *table]
    return fit(lines, limit, "cells or lines")


def _news(run: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    changed = [cell for cell in run["cells"] if cell["outcome"] == Outcome.CHANGED]
    if changed:
        lines += ["## Known-bad cells that fail in another way", ""]
        lines += [*rows(("cell", "entry", "failure", "why"), map(_failure_row, changed)), ""]
    entries = retirements(run)
    if entries:
        lines += ["## Known-bad entries to retire", ""]
        values = (
            (
                entry.id,
                f"{entry.file}:{entry.line}",
                few(entry.cells),
                entry.edit if entry.confirmed else "only reported, never confirmed",
            )
            for entry in entries
        )
        lines += [*rows(("entry", "where", "passes in", "edit"), values), ""]
    narrow = narrowings(run)
    if narrow:
        lines += ["## Known-bad entries to narrow", ""]
        values = ((entry.id, f"{entry.file}:{entry.line}", few(entry.cells), few(entry.still)) for entry in narrow)
        lines += [*rows(("entry", "where", "passes in", "still fails in"), values), ""]
    return lines


def _failures(run: Mapping[str, Any]) -> list[str]:
    failing = [cell for cell in by_severity(run["cells"]) if cell["outcome"] in RED - {Outcome.CHANGED}]
    if not failing:
        return []
    table = rows(("cell", "outcome", "failure", "why"), (_failure_row(cell, "outcome") for cell in failing))
    return ["## Failures", "", *table, ""]


def _failure_row(cell: dict[str, Any], second: str = "entry") -> tuple[str, ...]:
    entry = (cell.get("known_bad") or {}).get("id", "")
    return cell["id"], entry if second == "entry" else cell["outcome"], blame(cell), why(cell)


def _stack(run: Mapping[str, Any]) -> list[str]:
    names = versions_of(run)
    gpus = [(str(gpu.get("name", "")), str(gpu.get("arch", ""))) for gpu in run.get("gpus") or ()]
    lines = ["## What it ran on", ""]
    lines += [f"- {escape(name)} {escape(text)}" for name, text in names.items()]
    if gpus:
        lines.append(f"- {escape(machine(gpus, {str(cell.get('arch')) for cell in run['cells']}))}")
    return [*lines, f"- {number(run['server_starts'], 'server start')}, {escape(str(run['started']))}", ""]
