"""Known-bad lists: which cells are expected to fail, how, in which versions, and who says so."""

from __future__ import annotations

import re
from datetime import date
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pytest_gpuserve.matrix.sample import matches_anything
from pytest_gpuserve.matrix.walk import Reader, did_you_mean
from pytest_gpuserve.matrix.when import OPEN, read_ranges, read_when, version_of
from pytest_gpuserve.model.cell import facts_of
from pytest_gpuserve.model.failure import NEVER_EXPECTED, Kind
from pytest_gpuserve.model.knownbad import Expectation, KnownBad, Mode
from pytest_gpuserve.model.phase import Phase
from pytest_gpuserve.model.versions import admits

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from pytest_gpuserve.errors import Problem, Where
    from pytest_gpuserve.matrix.source import Node
    from pytest_gpuserve.model.cell import Cell

__all__ = ["ISSUE_PLACEHOLDER", "in_range", "load_known_bad", "matching", "read_known_bad"]

# What `gpuserve compare` writes into a new entry: refused here until somebody names the real issue.
ISSUE_PLACEHOLDER = "https://example.invalid/fill-in-the-issue"

_KEYS = (
    "id",
    "when",
    "versions",
    "expect",
    "mode",
    "strict",
    "confidence",
    "source",
    "grade",
    "issue",
    "reason",
    "added",
    "review-by",
)
_EXPECT_KEYS = ("kind", "phase", "match", "match-re")
_KINDS = tuple(str(kind) for kind in Kind if kind not in NEVER_EXPECTED)
# These always leave an error text; expecting any such failure at all would hide the next, different one.
_NEED_PATTERN = frozenset({Kind.REJECTED, Kind.CRASH, Kind.ASSERTION})
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PLACEHOLDER = re.compile(r"\b(?:todo|fixme|tbd|xxx|placeholder|fill[-_ ]?in)\b|<.*>|…|\.\.\.", re.IGNORECASE)


def load_known_bad(paths: Sequence[Path]) -> tuple[KnownBad, ...]:
    """The entries of all files, in order. FileProblems with every problem of every file."""
    entries, problems = read_known_bad(paths)
    reader = Reader()
    reader.problems = list(problems)
    reader.finish()
    return tuple(entry for entry, _ in entries)


def read_known_bad(paths: Sequence[Path]) -> tuple[list[tuple[KnownBad, Node]], tuple[Problem, ...]]:
    """As `load_known_bad`, with the problems handed back, and beside each entry that could be read where it is from."""
    reader = Reader()
    entries: list[tuple[KnownBad, Node]] = []
    places: dict[str, Where] = {}
    for path in paths:
        root = reader.open(path)
        fields = reader.fields(root, ("schema", "entries"), required=("entries",)) if root is not None else {}
        for node in reader.items(fields["entries"]) if "entries" in fields else ():
            entry = _read_entry(reader, node)
            if entry is None:
                continue
            assert entry.where is not None
            if entry.id in places:
                reader.add(entry.where, f"the id {entry.id} is given twice (first at {places[entry.id]})")
            places.setdefault(entry.id, entry.where)
            entries.append((entry, node))
    return entries, tuple(sorted(set(reader.problems)))


def matching(entries: Sequence[KnownBad], cell: Cell, versions: Mapping[str, str]) -> tuple[KnownBad, ...]:
    """The entries that hold for `cell` in an environment with these `versions`, most specific first.

    An entry that names a fact the cell does not have (another matrix' axis, say) does not match, nor does one with a
    range over a version that is not known. Of two equally specific ones, a confirmed one comes first.
    """
    facts = facts_of(cell)
    found = [entry for entry in entries if entry.when.matches(facts) and in_range(entry, versions)]
    if len(found) > 1:
        found.sort(key=lambda entry: (-entry.specificity[0], -entry.specificity[1], not entry.confirmed, entry.id))
    return tuple(found)


def in_range(entry: KnownBad, versions: Mapping[str, str]) -> bool:
    """True if every version that the entry bounds is known and in its range."""
    for name, wanted in entry.versions.items():
        installed = version_of(name, versions)
        if installed is None or not admits(wanted, installed):
            return False
    return True


def _read_entry(reader: Reader, node: Node) -> KnownBad | None:
    fields = reader.fields(node, _KEYS, required=("id", "when", "expect", "issue"))
    name = reader.text(fields.get("id"))
    if name is not None and not _ID.fullmatch(name):
        reader.add(fields["id"], f"{node.path}.id: '{name}' is not an id: letters, digits, . _ and -, as in KB-0007")
        name = None
    when = read_when(reader, fields.get("when"), OPEN)
    if "when" in fields and fields["when"].fields == {}:
        reader.add(fields["when"], f"{node.path}.when is empty: that would expect a failure of every cell")
    expect = _read_expectation(reader, fields["expect"]) if "expect" in fields else None
    issue = _read_issue(reader, fields.get("issue"))
    mode = reader.one_of(fields.get("mode"), tuple(str(mode) for mode in Mode)) or Mode.XFAIL
    confidence = reader.one_of(fields.get("confidence"), ("confirmed", "reported"))
    rejected = expect is not None and expect.kind is Kind.REJECTED
    dates = [_read_date(reader, fields.get(key)) for key in ("added", "review-by")]
    if all(dates) and dates[0] > dates[1]:
        reader.add(fields["review-by"], f"{node.path}.review-by is before added ({dates[0]})")
    entry = KnownBad(
        id=name or "",
        when=when,
        expect=expect or Expectation(kind=Kind.CRASH),
        versions=read_ranges(reader, fields.get("versions")),
        mode=Mode(mode),
        strict=reader.boolean(fields.get("strict"), default=rejected),
        confirmed=confidence != "reported",
        source=reader.text(fields.get("source")) or "",
        grade=reader.text(fields.get("grade")) or "",
        issue=issue or "",
        reason=reader.text(fields.get("reason")) or "",
        added=dates[0],
        review_by=dates[1],
        where=node.where,
    )
    return entry if name and when.terms and expect else None


def _read_expectation(reader: Reader, node: Node) -> Expectation | None:
    fields = reader.fields(node, _EXPECT_KEYS, required=("kind",))
    kind_node = fields.get("kind")
    kind: str | None = None
    if kind_node is not None and kind_node.text in {str(kind) for kind in NEVER_EXPECTED}:
        reader.add(kind_node, f"{kind_node.path}: '{kind_node.text}' can never be expected: it is not the cell's doing")
    else:
        kind = reader.one_of(kind_node, _KINDS)
    known = [str(phase) for phase in Phase]
    phases = []
    for item in reader.one_or_more(fields["phase"]) if "phase" in fields else ():
        text = reader.text(item, wanted="a phase or a list of phases")
        if text is not None and text not in known:
            reader.add(item, f"{item.path}: unknown phase '{text}'{did_you_mean(text, known)}")
        elif text is not None:
            phases.append(Phase(text))
    match, match_re = reader.text(fields.get("match")), reader.text(fields.get("match-re"))
    if "match" in fields and "match-re" in fields:
        reader.add(node.keys["match-re"], f"{node.path} has both match and match-re: one of them")
    elif kind in _NEED_PATTERN and "match" not in fields and "match-re" not in fields:
        reader.add(node, f"{node.path} needs match or match-re: without a text, any {kind} would count as this one")
    for text, key in ((match and re.escape(match), "match"), (match_re, "match-re")):
        if text:
            _check_pattern(reader, fields[key], text)
    return Expectation(kind=Kind(kind), phases=tuple(phases), match=match, match_re=match_re) if kind else None


def _check_pattern(reader: Reader, node: Node, text: str) -> None:
    try:
        pattern = re.compile(text, re.MULTILINE)
    except (re.error, OverflowError, RecursionError) as error:
        reader.add(node, f"{node.path}: '{node.text}' is not a regular expression: {error}")
        return
    if matches_anything(pattern):
        reader.add(node, f"{node.path}: '{node.text}' matches everything, so it would explain any failure")


def _read_issue(reader: Reader, node: Node | None) -> str | None:
    issue = reader.text(node, wanted="the URL of an issue")
    if issue is None or node is None:
        return None
    try:
        url = urlsplit(issue)
        host = url.hostname or ""
    except ValueError:
        url, host = urlsplit(""), ""
    invalid = host.endswith((".invalid", ".example")) or host in ("example.com", "example.org")
    if issue == ISSUE_PLACEHOLDER or invalid or _PLACEHOLDER.search(issue):
        reader.add(node, f"{node.path}: '{issue}' is a placeholder: open an issue, or find it, and write its URL here")
    elif url.scheme not in ("http", "https") or "." not in host or len(url.path) < 2 or " " in issue:
        reader.add(node, f"{node.path} must be the URL of an issue (https://…), got '{issue}'")
    else:
        return issue
    return None


def _read_date(reader: Reader, node: Node | None) -> str:
    text = reader.text(node, wanted="a date as YYYY-MM-DD")
    if text is None or node is None:
        return ""
    try:
        if len(text) == len("2026-11-29"):
            return date.fromisoformat(text).isoformat()
    except ValueError:
        pass
    reader.wrong(node, "a date as YYYY-MM-DD")
    return ""
