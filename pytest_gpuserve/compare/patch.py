"""The patch to `known_bad.yaml` that follows from a comparison, as a unified diff that `git apply` takes."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from datetime import date, timedelta
from typing import TYPE_CHECKING, Any

from pytest_gpuserve.compare.edit import EMPTY, KnownBadText, Uneditable
from pytest_gpuserve.compare.entry import new_entries, says_too_little
from pytest_gpuserve.compare.values import Change
from pytest_gpuserve.model.outcome import Outcome
from pytest_gpuserve.model.words import number
from pytest_gpuserve.report.describe import IMPORTANT, bounded, by_hand

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pytest_gpuserve.compare.values import Comparison, Row

__all__ = ["REVIEW_DAYS", "Edit", "Patch", "make_patch", "unified"]

REVIEW_DAYS = 90
MOST_NEW = 50
_ID = re.compile(r"KB-(\d+)")


@dataclass(frozen=True, slots=True)
class Edit:
    """One thing the patch does, or that a person must do. `action` is `remove`, `bound`, `add` or `none`."""

    action: str
    entry: str
    file: str
    why: str

    def __str__(self) -> str:
        verb = {"remove": "removed from", "bound": "bounded in", "add": "added to", "none": "left alone in"}
        return f"{self.entry} {verb[self.action]} {self.file}: {self.why}"


@dataclass(frozen=True, slots=True)
class Patch:
    """`text` is the diff (empty if nothing follows); `edits` what it does and what it does not, and why."""

    text: str
    edits: tuple[Edit, ...]


def make_patch(
    comparison: Comparison,
    after: Mapping[str, Any],
    files: Mapping[str, str | None],
    target: str,
    taken: Iterable[str] = (),
) -> Patch:
    """What follows from `comparison`, whose second record is `after`.

    `files` maps the lists' paths, relative to the root of the repository with `/`, to their text (None: no such
    file); `target` is the one that new entries go to. No new entry gets an id that is `taken` by a list that is read
    beside them. Pure: dates come from the record.
    """
    documents = {name: KnownBadText(text, name) for name, text in files.items() if text is not None}
    edits = [*_retire(comparison, documents), *_add(comparison, after, documents, target, taken)]
    diffs = [unified(name, files.get(name), document.text) for name, document in documents.items()]
    return Patch("".join(diffs), tuple(edits))


def unified(name: str, before: str | None, after: str) -> str:
    """The diff of one file in git's form; `before` None means that the file is made. Empty if nothing differs."""
    if before == after:
        return ""
    lines = [f"diff --git a/{name} b/{name}\n"]
    if before is None:
        lines.append("new file mode 100644\n")
    # git ends a name that holds a space with a tab.
    tab = "\t" if " " in name else ""
    head = (f"a/{name}{tab}" if before is not None else "/dev/null", f"b/{name}{tab}")
    old, new = (re.findall(r"[^\n]*\n|[^\n]+", text or "") for text in (before, after))
    lines += (
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
        for line in difflib.unified_diff(old, new, *head)
    )
    return "".join(lines)


def _retire(comparison: Comparison, documents: Mapping[str, KnownBadText]) -> Iterable[Edit]:
    passing: dict[str, list[Row]] = {}
    failing: dict[str, str] = {}
    for row in comparison.rows:
        entry_a, entry_b = _entry(row.a), _entry(row.b)
        if row.b is not None and row.b["outcome"] == Outcome.XPASSED:
            passing.setdefault(entry_b, []).append(row)
        elif entry_b and row.b is not None and row.b["outcome"] in (Outcome.XFAILED, Outcome.CHANGED):
            failing.setdefault(entry_b, f"it still fails in {row.id}")
        elif entry_a and row.change is Change.NOT_RUN:
            failing.setdefault(entry_a, f"{row.id} failed before and was not run now")
    for entry, rows in passing.items():
        document = next((one for one in documents.values() if entry in one.ids), None)
        file = document.name if document else str((rows[0].b or {})["known_bad"].get("file") or "known_bad.yaml")
        cells = rows[0].id + (f" and {len(rows) - 1} more" if len(rows) > 1 else "")
        if entry in failing:
            yield Edit("none", entry, file, f"it passes in {cells}, but {failing[entry]}: narrow its 'when'")
        elif document is None:
            yield Edit("none", entry, file, f"it passes in {cells}; give the list that holds it with --known-bad")
        else:
            yield _retire_one(entry, rows, cells, document, comparison)


def _retire_one(entry: str, rows: Sequence[Row], cells: str, document: KnownBadText, comparison: Comparison) -> Edit:
    if comparison.simulated:
        why = f"it passes in {cells}, which was SIMULATED: that says nothing of the bug"
        return Edit("none", entry, document.name, why)
    versions = document.versions(entry)
    names = _moved_names(comparison, versions)
    if comparison.unordered and not any(name in versions for name in names):
        # Without an order nobody knows which releases have the bug: whoever runs one of them would lose the entry.
        return Edit("none", entry, document.name, f"it passes in {cells}; {by_hand(comparison.unordered)}")
    try:
        if any(row.change is Change.FIXED for row in rows):
            for name in names:
                before, after = next(one.order for one in comparison.moved if one.what == name and one.order)
                spec = bounded(versions.get(name, ""), after, before)
                if spec is not None:
                    document.bound(entry, name, spec)
                    others = [one.what for one in comparison.moved if one.what in IMPORTANT and one.what != name]
                    also = f" ({', '.join(others)} moved too)" if others else ""
                    return Edit("bound", entry, document.name, f"{cells} passes now: {name} {spec}{also}")
            why = f"{cells} passes now, and no version says since when"
        else:
            why = f"{cells} passes, and did not fail in the first record either"
        document.remove(entry)
    except Uneditable as error:
        return Edit("none", entry, document.name, str(error))
    return Edit("remove", entry, document.name, why)


def _moved_names(comparison: Comparison, versions: Mapping[str, str]) -> list[str]:
    """The distributions that may bound an entry: those it names, else SGLang, else the only one that moved."""
    moved = [one.what for one in comparison.moved if one.order is not None]
    named = [name for name in versions if name in moved]
    important = [name for name in IMPORTANT if name in moved]
    if named:
        return named
    return ["sglang"] if "sglang" in important else important if len(important) == 1 else []


def _add(
    comparison: Comparison,
    after: Mapping[str, Any],
    documents: dict[str, KnownBadText],
    target: str,
    taken: Iterable[str],
) -> Iterable[Edit]:
    broken = [
        row
        for row in comparison.rows
        if row.change in (Change.BROKE, Change.CHANGED)
        and row.b is not None
        and row.b["outcome"] in (Outcome.FAILED, Outcome.CHANGED)
    ]
    used = [number for document in documents.values() for number in map(_number, document.ids)]
    used += map(_number, taken)
    used += [_number(_entry(cell)) for row in comparison.rows for cell in (row.a, row.b)]
    first = max(used, default=0) + 1
    if comparison.mixed:
        # What "broke" is the difference between a simulation and a real machine.
        if broken:
            why = "one of the records is SIMULATED and the other is real"
            yield Edit("none", "what broke", target, why)
        return
    new = new_entries(broken, after, comparison.moved, simulated=comparison.simulated)
    for row in broken:
        failure = (row.b or {}).get("failure")
        if failure and says_too_little(failure):
            why = f"{row.id} ({row.after}): its text says too little to tell it from others of its kind"
            yield Edit("none", "no entry", target, why)
    if not new:
        return
    named = [(f"KB-{first + number:04d}", fields, rows) for number, (fields, rows) in enumerate(new[:MOST_NEW])]
    dates = _dates(after)
    try:
        document = documents.setdefault(target, KnownBadText(EMPTY, target))
        document.add([{"id": entry} | fields | dates for entry, fields, _ in named])
    except Uneditable as error:
        yield Edit("none", "what broke", target, str(error))
        return
    for entry, _, rows in named:
        todo = "fill in its issue" + (f", and {_first(comparison.unordered)}" if comparison.unordered else "")
        yield Edit("add", entry, target, f"{', '.join(row.id for row in rows[:3])}: {rows[0].after}; {todo}")
    if len(new) > MOST_NEW:
        rest = number(len(new) - MOST_NEW, "more failure")
        yield Edit("none", rest, target, "too many for a list: find their cause first")


def _first(unordered: Mapping[str, str]) -> str:
    """What a new entry lacks that was seen with builds that order with no release."""
    return f"the first release that has the bug ({', '.join(f'{name} {text}' for name, text in unordered.items())})"


def _entry(cell: Mapping[str, Any] | None) -> str:
    return str((cell.get("known_bad") or {}).get("id", "")) if cell else ""


def _number(entry: str) -> int:
    found = _ID.fullmatch(entry)
    return int(found.group(1)) if found else 0


def _dates(record: Mapping[str, Any]) -> dict[str, str]:
    """The day of the run, and the day to look again; nothing where the record does not say when it was."""
    try:
        added = date.fromisoformat(str(record.get("finished") or record.get("started"))[:10])
    except ValueError:
        return {}
    return {"added": str(added), "review-by": str(added + timedelta(days=REVIEW_DAYS))}
