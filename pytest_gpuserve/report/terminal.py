"""The terminal summary: a table of cells within the terminal's width, what to do next, where the run is."""

from __future__ import annotations

from textwrap import wrap
from typing import TYPE_CHECKING, Any

from pytest_gpuserve.model.outcome import RED, Outcome
from pytest_gpuserve.model.words import number
from pytest_gpuserve.report.describe import (
    COLUMNS,
    MARKUP,
    by_severity,
    counts,
    few,
    narrowings,
    retirements,
    row_of,
    versions_of,
)
from pytest_gpuserve.report.remarks import remarks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["Line", "next_steps", "summary", "table"]

# A text and the markup pytest's `write_line` takes with it.
Line = tuple[str, dict[str, bool]]

_GAP = 2
_ROWS = 200
_MIN_CELL = 28
_MIN_WHY = 24


def summary(run: Mapping[str, Any], width: int, folder: Path | None = None) -> list[Line]:
    """Everything the terminal shows of a run that has ended; no line is wider than `width` columns but paths and edits.

    `folder` is the run's folder, named at the end with the command that compares it.
    """
    lines: list[Line] = []
    if run["simulated"]:
        lines.append(("SIMULATED: no GPU and no SGLang were used; times and speeds are invented", {"purple": True}))
    if not run["complete"]:
        lines.append(("INCOMPLETE: the run did not end by itself", {"red": True}))
    lines += [(line, {"yellow": True}) for text in remarks(run) for line in wrap(text, max(width - 1, 20))]
    lines += table(run, width)
    told = "SIMULATED: " if run["simulated"] else ""
    cells, starts = number(len(run["cells"]), "cell"), number(run["server_starts"], "server start")
    lines.append((f"{told}{cells}: {counts(run)}; {starts}", {}))
    versions = versions_of(run)
    if versions:
        lines.append((_end("with " + ", ".join(f"{name} {text}" for name, text in versions.items()), width), {}))
    lines += next_steps(run)
    if folder is not None:
        lines.append((f"records and logs: {folder}", {}))
    return lines


def table(run: Mapping[str, Any], width: int) -> list[Line]:
    """One line a cell, red first: cell, outcome, kind and phase, tok/s where measured, seconds, why.

    Of more than 200 cells, those that passed are left to the counts. A failure's reason that does not fit beside it
    stands on a line of its own.
    """
    cells = by_severity(run["cells"])
    hidden = 0
    if len(cells) > _ROWS:
        kept = [cell for cell in cells if cell["outcome"] != Outcome.PASSED][:_ROWS]
        hidden, cells = len(cells) - len(kept), kept
    rows = [row_of(cell) for cell in cells]
    widths = _widths([COLUMNS, *rows], width)
    lines: list[Line] = [(_end(_join(COLUMNS, widths), width - 1), {"bold": True})] if rows else []
    for cell, row in zip(cells, rows, strict=True):
        outcome = Outcome(cell["outcome"])
        apart = outcome in RED and len(row[5]) > widths[5]
        shown = [*row[:5], ""] if apart else row
        lines.append((_end(_join(shown, widths), width - 1), MARKUP[outcome]))
        if apart:
            lines.append((_end(f"    {row[5]}", width - 1), {}))
    if hidden:
        lines.append((f"… and {hidden} more, which passed" if len(cells) < _ROWS else f"… and {hidden} more", {}))
    return lines


def next_steps(run: Mapping[str, Any]) -> list[Line]:
    """What a person can do now: the edit that retires each entry whose bug is gone, and which entries say too much."""
    lines: list[Line] = []
    told = "SIMULATED: " if run["simulated"] else ""
    for entry in retirements(run):
        passes = f"{told}{entry.file}:{entry.line}: {entry.id} passes ({number(len(entry.cells), 'cell')})"
        if entry.confirmed:
            lines.append((f"{passes}; retire it: {entry.edit}", {"yellow": True}))
        else:
            lines.append((f"{passes}; it was only reported, never confirmed", {}))
    for entry in narrowings(run):
        text = f"{entry.id} passes in {few(entry.cells)} and still fails in {few(entry.still)}: narrow its 'when'"
        lines.append((f"{told}{entry.file}:{entry.line}: {text}", {"yellow": True}))
    return lines


def _widths(rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """The columns' widths: first the reason gives way, then the cell's name. A column with no value has width 0."""
    natural = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for index in (2, 3, 4, 5):
        if not any(row[index] for row in rows[1:]):
            natural[index] = 0
    fixed = sum(size + _GAP for size in natural[1:5] if size)
    room = max(width - 1 - fixed, 1)
    cell = min(natural[0], room)
    # The reason may take room from the name, but not so much that cells cannot be told apart.
    if natural[5] and room - cell - _GAP < _MIN_WHY and room >= _MIN_CELL + _GAP + _MIN_WHY:
        cell = room - _GAP - _MIN_WHY
    reason = room - cell - _GAP
    return [cell, *natural[1:5], min(natural[5], reason) if reason >= _MIN_WHY else 0]


def _join(row: Sequence[str], widths: Sequence[int]) -> str:
    parts = []
    for index, (text, size) in enumerate(zip(row, widths, strict=True)):
        if size:
            fitted = _middle(text, size) if index == 0 else _end(text, size)
            parts.append(fitted.rjust(size) if index in (3, 4) else fitted.ljust(size))
    return (" " * _GAP).join(parts).rstrip()


def _middle(text: str, size: int) -> str:
    """A cell's id tells most at its ends: the arch and the last delta."""
    if len(text) <= size:
        return text
    head = (size - 1) // 3
    return f"{text[:head]}…{text[len(text) - (size - 1 - head) :]}"


def _end(text: str, size: int) -> str:
    return text if len(text) <= size else text[: size - 1] + "…"
