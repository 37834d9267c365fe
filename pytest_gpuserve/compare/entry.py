"""New known-bad entries for what broke: whom they name, since when, and the failure they expect."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from pytest_gpuserve.compare.edit import scalar
from pytest_gpuserve.compare.stack import asked, flags_of
from pytest_gpuserve.matrix.known_bad import ISSUE_PLACEHOLDER
from pytest_gpuserve.model.failure import ADDRESS, NEVER_EXPECTED, NUMBER, Kind, normalise
from pytest_gpuserve.report.describe import IMPORTANT, one_line
from pytest_gpuserve.report.scrub import HIDDEN

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pytest_gpuserve.compare.values import Moved, Row

__all__ = ["new_entries", "salient", "says_too_little"]

Cell = dict[str, Any]

# What a message says of these is our own wording and our own numbers: the kind and the phase are what recurs.
_NO_PATTERN = frozenset({Kind.HANG, Kind.SLOW, Kind.WRONG_OUTPUT, Kind.FALLBACK})
# What `model.failure.normalise` takes for variable, and what may differ in spelling between two logs.
_VARIABLE = re.compile(
    r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x1f\x7f]|\b(?:GPU|MIG)-[0-9a-fA-F-]{8,}\b|(?:/[\w.+@~-]+){2,}/?|"
    rf"{ADDRESS}|{NUMBER}"
)
# `[2026-11-29 04:12:09 TP0]`: which rank says it first differs from run to run.
_LOG_PREFIX = re.compile(r"^\s*\[[^\]]*\]\s*")
# What every assertion begins with: as a pattern it would match each of them.
_ANY_ASSERTION = re.compile(r"^\s*(?:[\w.]+(?:Error|Exception|Failed)?: *)?(?:assert\b)? *")
_LEAST, _MOST = 4, 100


def new_entries(
    rows: Iterable[Row], after: Mapping[str, Any], moved: Sequence[Moved], *, simulated: bool = False
) -> list[tuple[dict[str, str], list[Row]]]:
    """One entry for each failure that the same difference from the baseline causes, with the rows it is for.

    Fields are YAML already, in the order of docs; `id` and dates are the caller's. `infra` and `leak` get none, nor
    does what `says_too_little`.
    """
    baselines = {
        (cell["arch"], cell["model"]): cell for cell in after["cells"] if cell["axes"] == (cell.get("baseline") or None)
    }
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        cell = row.b
        failure = cell.get("failure") if cell else None
        if not cell or not failure or failure["kind"] in NEVER_EXPECTED or says_too_little(failure):
            continue
        delta = _delta(dict(cell), baselines.get((cell["arch"], cell["model"])))
        key = (cell["arch"], failure["kind"], failure["phase"], failure["signature"], tuple(sorted(delta.items())))
        groups.setdefault(key, []).append(row)
    # A simulated failure is marked as one, wherever the entry is copied to.
    source = "SIMULATED, gpuserve compare" if simulated else "gpuserve compare"
    versions = _since(moved)
    return [(_fields(rows_of, dict(key[-1]), versions, source), rows_of) for key, rows_of in groups.items()]


def says_too_little(failure: Mapping[str, Any]) -> bool:
    """True where an entry would match any failure of its kind in that cell: an error without a text of its own."""
    return failure["kind"] not in (*_NO_PATTERN, *NEVER_EXPECTED) and not salient(failure)


def _fields(rows: Sequence[Row], delta: Mapping[str, str], versions: str, source: str) -> dict[str, str]:
    cell = rows[0].b
    assert cell is not None
    failure = cell["failure"]
    models = list(dict.fromkeys(scalar(row.b["model"]) for row in rows if row.b))
    when = {"arch": scalar(cell["arch"]), "model": models[0] if len(models) == 1 else f"[{', '.join(models)}]"}
    when.update(delta)
    expect = {"kind": failure["kind"], "phase": failure["phase"]}
    pattern = salient(failure)
    if pattern:
        expect["match"] = scalar(pattern)
    fields = {"when": _flow(when)}
    if versions:
        fields["versions"] = versions
    return fields | {
        "expect": _flow(expect),
        "mode": "xfail",
        # Seen in one run on one machine; a person who has seen it again, or read the cause, says `confirmed`.
        "confidence": "reported",
        "source": scalar(f"{source}, {cell['id']}"),
        "issue": scalar(ISSUE_PLACEHOLDER),
        "reason": scalar(one_line(str(failure["message"]), 160)),
    }


def salient(failure: Mapping[str, Any]) -> str:
    """The longest literal piece of the line behind the signature that holds in every run: no number, path or address.

    Empty where the kind and the phase say all, or where no piece is long enough to mean anything.
    """
    if failure["kind"] in _NO_PATTERN:
        return ""
    wanted = str(failure["signature"]).rpartition(" #")[0]
    lines = str(failure.get("text") or failure.get("message") or "").splitlines()
    line = next((line for line in lines if wanted and normalise(line)[:160] == wanted), "")
    if not line:
        line = next((line for line in reversed(lines) if line.strip()), "")
    line = _LOG_PREFIX.sub("", line)
    if failure["kind"] == Kind.ASSERTION:
        line = _ANY_ASSERTION.sub("", line)
    pieces = [piece.strip() for piece in _VARIABLE.split(line)]
    best = max(pieces, key=len, default="")
    if len(best) > _MOST:
        best = best[:_MOST].rpartition(" ")[0] or best[:_MOST]
    return best if len(best) >= _LEAST and re.search(r"[^\W\d_]", best) else ""


def _delta(cell: Cell, baseline: Cell | None) -> dict[str, str]:
    """What sets the cell apart from its baseline: flags and variables, which hold in anybody's matrix, else levels."""
    levels = cell.get("baseline") or {}
    axes = {scalar(axis): scalar(level) for axis, level in cell["axes"].items() if levels.get(axis) != level}
    if not axes or baseline is None:
        return axes
    found = {}
    flags = flags_of(cell), flags_of(baseline)
    for prefix, (mine, theirs) in (("flag", flags), ("env", (asked(cell), asked(baseline)))):
        for key in mine.keys() | theirs.keys():
            value = mine.get(key)
            if value == theirs.get(key):
                continue
            if value is None or isinstance(value, list) or value in (False, HIDDEN):
                # That a flag is absent, or what a hidden value is, cannot be said of flags.
                return axes
            found[scalar(f"{prefix}.{key}")] = scalar(value)
    return found or axes


def _since(moved: Sequence[Moved]) -> str:
    """The range of the new version of SGLang, else of what else moved; nothing if no version did."""
    versions = {one.what: one for one in moved if one.what in IMPORTANT and one.before and one.after}
    name = next((name for name in IMPORTANT if name in versions), None)
    order = versions[name].order if name else None
    if order is None:
        # What moved first in importance orders with nothing: the next one that moved would be blamed for it.
        return ""
    before, after = map(Version, order)
    return f'{{{name}: "{">=" if after >= before else "<="}{after.public}"}}'


def _flow(values: Mapping[str, str]) -> str:
    return f"{{{', '.join(f'{key}: {value}' for key, value in values.items())}}}"
