"""What a reader of a run must know beside its cells: said in the header, in the plan and in every report."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from pytest_gpuserve.model.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["builds", "mostly_skipped", "remarks"]


def remarks(run: Mapping[str, Any]) -> list[str]:
    """The remarks about a run's record, worst first."""
    skipped = [str(cell.get("reason") or "") for cell in run["cells"] if cell["outcome"] == Outcome.SKIPPED]
    mostly = mostly_skipped(skipped, len(run["cells"]))
    return [*([mostly] if mostly else []), *builds(run)]


def builds(run: Mapping[str, Any]) -> list[str]:
    """What each build without a version counts as, one line a build; `run` is a record, or as much of one."""
    lines = []
    for name, taken in (run.get("taken_for") or {}).items():
        commit = f", commit {taken['commit']}" if taken.get("commit") else ""
        counts_as = taken.get("version") or "newer than every release"
        lines.append(
            f"{name} {run['versions'].get(name, '')} is a build without a version{commit}: "
            f"it is taken for {counts_as} ({taken['reason']})"
        )
    return lines


# `level attention.fa3 needs sglang>=0.5.9, installed is 0.5.6`: which level and which bound differ from cell to cell.
_UNMET = re.compile(r"(?:level|model) \S+ needs ([\w.-]+?)[<>=!~][^:;]*?(?:: its version here, |, installed is )(.*)")
_NOT_KNOWN = re.compile(r"(?:level|model) \S+ needs .*: (the version of \S+ is not known)")


def mostly_skipped(reasons: Sequence[str], cells: int) -> str:
    """Says so where more than half of the `cells` are skipped for one reason; empty else.

    `reasons` has the text of each cell that is skipped. A night that tests half a matrix must not read like one that
    tested it.
    """
    counted = Counter(shared for reason in reasons for shared in {_shared(part) for part in reason.split("; ")})
    reason, most = counted.most_common(1)[0] if counted else ("", 0)
    return f"{most} of {cells} cells are skipped for one reason: {reason}" if most * 2 > cells else ""


def _shared(reason: str) -> str:
    """The reason without what is only one cell's."""
    if (unmet := _UNMET.fullmatch(reason)) is not None:
        return f"they need another {unmet[1]} than {unmet[2].removesuffix(', cannot be compared')}"
    known = _NOT_KNOWN.fullmatch(reason)
    return known[1] if known else reason
