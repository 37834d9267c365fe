"""What a dependency bump fixed, broke, changed and slowed: two records compared, cell by cell."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pytest_gpuserve.compare.judge import WORKS, Checks, judge
from pytest_gpuserve.compare.pair import pairs
from pytest_gpuserve.compare.stack import moved, speed_refusal, warnings
from pytest_gpuserve.compare.values import FINDINGS, Change, Comparison, Measure, Moved, Row
from pytest_gpuserve.errors import UsageError
from pytest_gpuserve.model.outcome import Outcome
from pytest_gpuserve.report.describe import matrix_names, unordered
from pytest_gpuserve.report.parts import archs_of, by_stack, of_arch

__all__ = ["FINDINGS", "Change", "Comparison", "Measure", "Moved", "Row", "compare"]

_ORDER = {change: number for number, change in enumerate(Change)}


def compare(a: dict[str, Any], b: dict[str, Any]) -> Comparison:
    """Compares two runs (`report.store.read_run`), `a` before and `b` after. Pure; neither is changed.

    Every cell of either record is in exactly one row, and what has no result on either side is NOT-RUN, never SAME.
    """
    olds, news = by_stack(a), by_stack(b)
    if len(olds) == len(news) == 1:
        return _one_stack(olds[0], news[0])
    return _several_stacks(olds, news)


def _several_stacks(olds: list[dict[str, Any]], news: list[dict[str, Any]]) -> Comparison:
    """Merged records of several archs: each arch's cells are compared with that arch's, on their own stacks."""
    found = []
    for arch in sorted({arch for record in (*olds, *news) for arch in archs_of(record)}):
        old, new = _of_arch(olds, arch, "first"), _of_arch(news, arch, "second")
        found.append((arch, _one_stack(old, new)))
    rows = [row for _, comparison in found for row in comparison.rows]
    return Comparison(
        title="; ".join(comparison.title for _, comparison in found),
        warnings=tuple(f"{arch}: {text}" for arch, comparison in found for text in comparison.warnings),
        moved=tuple(
            replace(item, what=f"{arch}: {item.what}") for arch, comparison in found for item in comparison.moved
        ),
        rows=tuple(sorted(rows, key=lambda row: _ORDER[row.change])),
        simulated=any(comparison.simulated for _, comparison in found),
        comparable=any(comparison.comparable for _, comparison in found),
        unordered={name: text for _, comparison in found for name, text in comparison.unordered.items()},
    )


def _of_arch(records: list[dict[str, Any]], arch: str, which: str) -> dict[str, Any]:
    """The one record of an arch; an empty one where there is none. UsageError where it ran on several stacks."""
    having = [record for record in records if arch in archs_of(record)]
    if len(having) > 1:
        raise UsageError(
            f"the {which} record holds {arch} on {len(having)} stacks: which of them is meant? Compare the records "
            "that were merged, or look at them side by side with gpuserve report"
        )
    return of_arch(having[0] if having else records[0], arch)


def _one_stack(a: dict[str, Any], b: dict[str, Any]) -> Comparison:
    paired = list(pairs(_whole(a), _whole(b)))
    refusal = speed_refusal(a, b)
    fail = _failing(paired)
    checks_a, checks_b = _checks(a, fail), _checks(b, fail)
    rows = [judge(old, new, checks_a, checks_b, refusal) for old, new in paired]
    rows.sort(key=lambda row: _ORDER[row.change])
    names = dict.fromkeys((matrix_names(a), matrix_names(b)))
    return Comparison(
        title=f"{' and '.join(names)}: {_sglang(a)} → {_sglang(b)}",
        warnings=tuple(warnings(a, b, paired)),
        moved=moved(a, b),
        rows=tuple(rows),
        simulated=bool(a["simulated"] or b["simulated"]),
        comparable=any(old is not None and new is not None for old, new in paired),
        mixed=bool(a["simulated"]) is not bool(b["simulated"]),
        unordered={**unordered(a), **unordered(b)},
    )


def _whole(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The cells; one that passed as far as it came, in a run that was cut off, has no result."""
    cut: dict[str, list[str]] = {}
    for check in record.get("checks") or ():
        if check["outcome"] == Outcome.NOT_RUN:
            cut.setdefault(check["cell"], []).append(check["name"])
    return [
        {
            **cell,
            "outcome": str(Outcome.NOT_RUN),
            "reason": f"passed until the run ended, without {', '.join(cut[cell['id']])}",
        }
        if cell["id"] in cut and cell["outcome"] in WORKS
        else cell
        for cell in record["cells"]
    ]


def _sglang(record: dict[str, Any]) -> str:
    return f"sglang {(record.get('versions') or {}).get('sglang', '(unknown)')}"


def _failing(paired: list[tuple[dict[str, Any] | None, dict[str, Any] | None]]) -> set[str]:
    """The ids of cells in both records that failed in the first: only their checks are looked at one by one."""
    both = [(old, new) for old, new in paired if old and new and old["outcome"] not in WORKS]
    return {cell["id"] for pair in both for cell in pair}


def _checks(record: dict[str, Any], wanted: set[str]) -> Checks:
    found: Checks = {}
    for check in record.get("checks") or ():
        if check["cell"] in wanted:
            found.setdefault(check["cell"], {})[check["name"]] = check["outcome"]
    return found
