"""GitHub Actions: annotations on the lines of known-bad entries that should go, and the step summary."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pytest_gpuserve.model.words import number
from pytest_gpuserve.report.describe import retirements

__all__ = ["ANNOTATIONS", "STEP_LIMIT", "annotations", "append_step_summary"]

# GitHub shows at most ten annotations of a kind a step, and takes at most 1 MiB of step summary.
ANNOTATIONS = 10
STEP_LIMIT = 1 << 20


def annotations(run: Mapping[str, Any], workspace: Path | None = None, limit: int = ANNOTATIONS) -> list[str]:
    """Workflow commands, one a known-bad entry that passes, on the entry's own line; at most `limit`.

    An error for a strict entry, a warning for another, a notice for one that was only reported. Files are named
    relative to `workspace` (`$GITHUB_WORKSPACE`), as GitHub needs them.
    """
    rank = {"error": 0, "warning": 1, "notice": 2}
    commands = []
    for entry in retirements(run):
        level = "notice" if not entry.confirmed else "error" if entry.strict else "warning"
        simulated = " (SIMULATED)" if run["simulated"] else ""
        title = f"{entry.id} passes{simulated}"
        text = f"{entry.id} passes in {', '.join(entry.cells[:3])}{', …' if len(entry.cells) > 3 else ''}{simulated}."
        text += f"\nRetire it: {entry.edit}" if entry.confirmed else "\nIt was only reported, never confirmed."
        place = f"file={_property(_relative(entry.file, workspace))},line={entry.line}," if entry.file else ""
        commands.append((rank[level], f"::{level} {place}title={_property(title)}::{_data(text)}"))
    commands.sort(key=lambda command: command[0])
    lines = [line for _, line in commands]
    if len(lines) > limit:
        more = len(lines) - limit + 1
        rest = number(more, "more known-bad entry passes", "more known-bad entries pass")
        lines[limit - 1 :] = [f"::notice title=gpuserve::{rest}; the summary lists them."]
    return lines


def append_step_summary(render: Callable[[int], str], path: Path) -> None:
    """Adds a report to the file `$GITHUB_STEP_SUMMARY` names. `render(limit)` is given the bytes still free in it."""
    with path.open("ab") as file:
        free = STEP_LIMIT - os.fstat(file.fileno()).st_size
        file.write(render(free).encode("utf-8", "backslashreplace")[: max(free, 0)])


def _relative(file: str, workspace: Path | None) -> str:
    path = Path(file)
    if workspace is not None and path.is_relative_to(workspace):
        return str(path.relative_to(workspace))
    return file


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
