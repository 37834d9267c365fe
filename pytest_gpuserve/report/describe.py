"""The words all reports share: what a cell's row says, in which order, and which known-bad entries should go."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from pytest_gpuserve.model.outcome import Outcome
from pytest_gpuserve.model.versions import admits, orderable, unversioned

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = [
    "COLUMNS",
    "IMPORTANT",
    "MARKUP",
    "Retirement",
    "blame",
    "bounded",
    "by_hand",
    "by_severity",
    "counts",
    "few",
    "matrix_names",
    "narrowings",
    "one_line",
    "retirements",
    "row_of",
    "seconds",
    "single_stream",
    "speed",
    "unordered",
    "versions_of",
    "why",
]

Cell = dict[str, Any]

# The stack under test, in the order a reader looks for what moved.
IMPORTANT = ("sglang", "sglang-kernel", "flashinfer", "torch", "triton", "transformers", "nccl", "cuda", "driver")
COLUMNS = ("cell", "outcome", "failure", "tok/s", "seconds", "why")
MARKUP = {
    Outcome.INFRA: {"red": True, "bold": True},
    Outcome.FAILED: {"red": True, "bold": True},
    Outcome.CHANGED: {"red": True, "bold": True},
    Outcome.BLOCKED: {"red": True},
    Outcome.XFAILED: {"yellow": True},
    Outcome.XPASSED: {"yellow": True, "bold": True},
    Outcome.PASSED: {"green": True},
    Outcome.SKIPPED: {"yellow": True},
    Outcome.NOT_RUN: {"purple": True},
}
# Red first; then what asks for an edit, then what was expected.
_ORDER = (
    Outcome.FAILED,
    Outcome.CHANGED,
    Outcome.INFRA,
    Outcome.BLOCKED,
    Outcome.XPASSED,
    Outcome.NOT_RUN,
    Outcome.XFAILED,
    Outcome.SKIPPED,
    Outcome.PASSED,
)
_RANK = {str(outcome): rank for rank, outcome in enumerate(_ORDER)}
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def one_line(text: str, limit: int = 300) -> str:
    """The first line that says something, without control characters (logs hold escape codes), at most `limit` long."""
    for line in text.splitlines():
        clean = _CONTROL.sub("", line.replace("\t", " ")).strip()
        if clean:
            return clean if len(clean) <= limit else clean[: limit - 1] + "…"
    return ""


def by_severity(cells: Iterable[Cell]) -> list[Cell]:
    """Failures first, passes last, each group in the run's order."""
    return sorted(cells, key=lambda cell: _RANK[cell["outcome"]])


def blame(cell: Cell) -> str:
    """`hang in graph-capture`, or nothing for a cell that did not fail."""
    failure = cell.get("failure")
    return f"{failure['kind']} in {failure['phase']}" if failure else ""


def why(cell: Cell) -> str:
    """One line: the known-bad entry that explains the outcome, then the failure's message or the reason."""
    known = cell.get("known_bad") or {}
    failure = cell.get("failure") or {}
    entry = known.get("id", "")
    text = str(cell.get("reason") or failure.get("message") or known.get("reason") or "")
    # The record holds the address; in one line of a table it only hides what follows it.
    text = one_line(text.replace(f"{known['issue']} ", "") if known.get("issue") else text)
    if not entry or entry in text:
        return text
    return f"{entry}: {text}" if text else entry


def speed(cell: Cell) -> float | None:
    """Output tokens a second, of a single stream where that was measured, and of the built-in check first."""
    found = [item for item in cell.get("measurements") or () if item.get("metric") == "output_throughput"]
    found.sort(key=lambda item: (item.get("load") != "single-stream", bool(item.get("test"))))
    return next((float(item["median"]) for item in found if item.get("median") is not None), None)


def single_stream(cell: Cell) -> float | None:
    """The built-in check's median output throughput of one stream, tok/s; None if it was not measured."""
    for item in cell.get("measurements") or ():
        which = (item.get("metric"), item.get("load"), item.get("test") or "")
        if which == ("output_throughput", "single-stream", "") and item.get("median") is not None:
            return float(item["median"])
    return None


def seconds(cell: Cell) -> float | None:
    """How long the cell took in all: `timings.total`, None if it was never started."""
    total = (cell.get("timings") or {}).get("total")
    return float(total) if isinstance(total, (int, float)) else None


def row_of(cell: Cell) -> tuple[str, ...]:
    """The cell's texts under `COLUMNS`; empty where nothing is known."""
    rate, took = speed(cell), seconds(cell)
    return (
        one_line(cell["id"]),
        cell["outcome"],
        blame(cell),
        "" if rate is None else f"{rate:.1f}",
        "" if took is None else f"{took:.1f}",
        why(cell),
    )


def counts(run: Mapping[str, Any]) -> str:
    """`2 failed, 1 xpassed, 12 passed`, red first."""
    counted = Counter(cell["outcome"] for cell in run["cells"])
    return ", ".join(f"{counted[outcome]} {outcome}" for outcome in _RANK if counted[outcome]) or "no cells"


def matrix_names(run: Mapping[str, Any]) -> str:
    """The matrices' names, else the archs of the cells: what a report is about."""
    names = [str(item.get("name", "")) if isinstance(item, dict) else str(item) for item in run.get("matrices") or ()]
    return ", ".join(filter(None, names)) or ", ".join(sorted({cell["arch"] for cell in run["cells"]})) or "nothing"


def versions_of(run: Mapping[str, Any]) -> dict[str, str]:
    """The important versions that are known, driver included, in reading order."""
    versions = {**(run.get("driver") or {}), **(run.get("versions") or {})}
    return {name: str(versions[name]) for name in IMPORTANT if versions.get(name)}


def bounded(spec: str, version: str, old: str | None = None) -> str | None:
    """`spec` (PEP 440) cut so that `version`, where the bug is gone, lies outside; None if that cannot be.

    With `old`, a version where the bug is known to be there, the result still holds for it; if `old` is the newer of
    the two, the bound is a lower one.
    """
    try:
        new = Version(version)
        sign = ">" if old is not None and Version(old) > new else "<"
        parts = [part.strip() for part in spec.split(",") if part.strip()]
        wider = [part for part in parts if part.startswith(sign) and _beyond(_bound(part), new, sign)]
        result = ",".join([*(part for part in parts if part not in wider), f"{sign}{new.public}"])
        SpecifierSet(result)
        if old is not None and not admits(result, old):
            return None
    except (InvalidVersion, InvalidSpecifier):
        return None
    lower = any(part.startswith((">", "=", "~")) for part in parts)
    # `==NEW` or `>=NEW` cut at NEW leaves nothing: then the entry goes as a whole.
    if old is None and lower and any(_bound(part) >= new for part in parts if part.startswith((">", "=", "~"))):
        return None
    return result


def unordered(run: Mapping[str, Any]) -> dict[str, str]:
    """The important builds of a run that have no version, and that nobody said what to take for, with their texts."""
    known = orderable(run)
    return {name: text for name, text in versions_of(run).items() if unversioned(text) and name not in known}


def by_hand(unknown: Mapping[str, str]) -> str:
    """What to do with an entry that passes with builds that order with no release."""
    builds = " and ".join(f"{name} {text}" for name, text in unknown.items())
    first = next(iter(unknown))
    return (
        f"bound it by hand, with the first release that has the fix: {builds} orders with no release "
        f"(--gpu-version {first}=VERSION says what a run's build is to be taken for)"
    )


def _beyond(bound: Version, new: Version, sign: str) -> bool:
    """True if a part with this `bound` says nothing beside the new one of the same sign."""
    return bound >= new if sign == "<" else bound <= new


def _bound(part: str) -> Version:
    return Version(part.lstrip("<>=~!").strip().removesuffix(".*"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Retirement:
    """A known-bad entry that passes in `cells`. `edit` is the one line that retires it, unless some `still` fail."""

    id: str
    file: str
    line: int
    cells: tuple[str, ...]
    still: tuple[str, ...]
    strict: bool
    confirmed: bool
    edit: str


def few(names: Sequence[str]) -> str:
    """The first three, and how many more."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def retirements(run: Mapping[str, Any]) -> list[Retirement]:
    """The entries to retire: at least one cell of theirs xpassed and none still fails. In the files' order."""
    return [entry for entry in _passing(run) if not entry.still]


def narrowings(run: Mapping[str, Any]) -> list[Retirement]:
    """The confirmed entries that pass in some of their cells and still fail in others: they say too much."""
    return [entry for entry in _passing(run) if entry.still and entry.confirmed]


def _passing(run: Mapping[str, Any]) -> list[Retirement]:
    passing: dict[str, list[Cell]] = {}
    failing: dict[str, list[str]] = {}
    for cell in run["cells"]:
        known = cell.get("known_bad")
        if known and cell["outcome"] == Outcome.XPASSED:
            passing.setdefault(known["id"], []).append(cell)
        elif known and cell.get("failure"):
            failing.setdefault(known["id"], []).append(cell["id"])
    found = [_retirement(cells, failing.get(entry, ()), run) for entry, cells in passing.items()]
    return sorted(found, key=lambda entry: (entry.file, entry.line, entry.id))


def _retirement(cells: list[Cell], still: Sequence[str], run: Mapping[str, Any]) -> Retirement:
    known = cells[0]["known_bad"]
    return Retirement(
        id=known["id"],
        file=str(known.get("file") or ""),
        line=int(known.get("line") or 1),
        cells=tuple(cell["id"] for cell in cells),
        still=tuple(still),
        strict=bool(known.get("strict")),
        confirmed=bool(known.get("confirmed", True)),
        edit=_edit(known, run),
    )


def _edit(known: Mapping[str, Any], run: Mapping[str, Any]) -> str:
    ranges, versions = dict(known.get("versions") or {}), orderable(run)
    unknown = unordered(run)
    if unknown:
        # Deleted or bounded by such a version, the entry would be lost to whoever runs a release that has the bug.
        return by_hand(unknown)
    name = next((name for name in ranges if versions.get(name)), "sglang")
    spec = bounded(str(ranges.get(name, "")), versions[name]) if name in versions else None
    if spec is None:
        return "delete the entry"
    text = ", ".join(f'{key}: "{value}"' for key, value in (ranges | {name: spec}).items())
    return f"versions: {{{text}}}"
