"""Two preflight records compared: what a bump of SGLang changes before any GPU is touched."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from pytest_gpuserve.compare.pair import pairs
from pytest_gpuserve.compare.stack import moved
from pytest_gpuserve.preflight.record import VOLATILE, VOLATILE_ENV, failure_of
from pytest_gpuserve.report.describe import one_line

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from pytest_gpuserve.compare.values import Moved
    from pytest_gpuserve.model.failure import Failure

__all__ = ["FINDINGS", "Bump", "BumpReport", "BumpRow", "OptionChange", "compare_preflights"]

Record = dict[str, Any]

_CHOICES = re.compile(r"\s*\(choose from .*?\)", re.DOTALL)


class Bump(StrEnum):
    """What became of a cell, in the order reports list it."""

    REJECTED = "NEWLY REJECTED"
    REJECTED_OTHERWISE = "REJECTED OTHERWISE"
    REWRITTEN = "NEWLY REWRITTEN"
    RESOLVED = "RESOLVED OTHERWISE"
    ACCEPTED = "NEWLY ACCEPTED"
    UNAVAILABLE = "NOT ASKED"
    GONE = "GONE"
    NEW = "NEW"
    STILL_REJECTED = "STILL REJECTED"
    SAME = "SAME"


FINDINGS = frozenset(
    {Bump.REJECTED, Bump.REJECTED_OTHERWISE, Bump.REWRITTEN, Bump.RESOLVED, Bump.UNAVAILABLE, Bump.GONE}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionChange:
    """One difference of SGLang's option table.

    `what` is `flag gone`, `choice gone`, `default`, `deprecated`, `flag new` or `choice new`; `archs` are those whose
    tables show it, empty for all of them.
    """

    what: str
    flag: str
    before: str = ""
    after: str = ""
    archs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BumpRow:
    """One cell. `text` is what SGLang said.

    `changes` are `(name, before, after)` of the record's `settings`, what decides how a cell serves; `others` of any
    other argument, which make no finding.
    """

    change: Bump
    id: str
    arch: str
    text: str = ""
    changes: tuple[tuple[str, str, str], ...] = ()
    others: tuple[tuple[str, str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BumpReport:
    """What two preflights differ in. `comparable` is False when no cell has an answer in both."""

    before: str
    after: str
    warnings: tuple[str, ...]
    moved: tuple[Moved, ...]
    options: tuple[OptionChange, ...]
    rows: tuple[BumpRow, ...]
    comparable: bool

    @property
    def title(self) -> str:
        """`Bump report: sglang 0.5.10.post1 → 0.5.23`."""
        return f"Bump report: sglang {self.before} → {self.after}"

    @property
    def findings(self) -> int:
        """How many cells make `gpuserve compare` exit with 1: what SGLang takes otherwise, or was not asked."""
        return sum(row.change in FINDINGS for row in self.rows)

    @property
    def exit_code(self) -> int:
        """0 without findings, 1 with some, 2 when nothing could be compared."""
        return int(self.findings > 0) if self.comparable else 2


def compare_preflights(a: list[Record], b: list[Record]) -> BumpReport:
    """Compares the records of two environments, one a arch on each side, `a` before and `b` after."""
    before, after = ({record["arch"]: record for record in side} for side in (a, b))
    common = [arch for arch in before if arch in after]
    rows = [row for arch in common for row in _rows(before[arch], after[arch])]
    rows += [
        BumpRow(change=change, id=cell["id"], arch=arch, text=f"{arch} is in one record only")
        for change, mine, other in ((Bump.GONE, before, after), (Bump.NEW, after, before))
        for arch, record in mine.items()
        if arch not in other
        for cell in record["cells"]
    ]
    order = {change: number for number, change in enumerate(Bump)}
    rows.sort(key=lambda row: order[row.change])
    without = (Bump.UNAVAILABLE, Bump.GONE, Bump.NEW)
    return BumpReport(
        before=_sglang(a),
        after=_sglang(b),
        warnings=tuple(_warnings(before, after)),
        moved=moved(_environment(a), _environment(b)),
        options=tuple(_options([(before[arch], after[arch]) for arch in common])),
        rows=tuple(rows),
        comparable=any(row.change not in without for row in rows),
    )


def _sglang(records: list[Record]) -> str:
    return next((str(record["versions"].get("sglang", "(unknown)")) for record in records), "(nothing)")


def _environment(records: list[Record]) -> Record:
    versions = dict(records[0]["versions"]) if records else {}
    python = next((record["python"] for record in records if record.get("python")), None)
    return {"versions": versions | ({"python": python} if python else {})}


def _warnings(before: Mapping[str, Record], after: Mapping[str, Record]) -> Iterator[str]:
    for side, records in (("first", before), ("second", after)):
        for arch, record in records.items():
            if record["status"] != "ok":
                yield f"the {side} record has no answer for {arch}: {record.get('reason')}"
    for arch in sorted(before.keys() ^ after.keys()):
        yield f"{arch} is in one record only"
    for arch in sorted(before.keys() & after.keys()):
        difference = _pretence(before[arch], after[arch])
        if difference and before[arch]["status"] == after[arch]["status"] == "ok":
            yield f"{arch}: not the same was pretended, which may itself change answers: {difference}"


def _pretence(a: Record, b: Record) -> str:
    """In which GPU or kernel packages (by name: their versions follow SGLang's) two pretences differ."""
    before, after = (record.get("pretended") or {} for record in (a, b))
    gpus = [
        f"{gpu.get('count')} × {gpu.get('name')}" if (gpu := one.get("gpu")) else "no GPU" for one in (before, after)
    ]
    told = [] if gpus[0] == gpus[1] else [f"{gpus[0]}, then {gpus[1]}"]
    mine, theirs = (set(one.get("modules") or ()) for one in (before, after))
    for side, names in (("first", mine - theirs), ("second", theirs - mine)):
        told += [f"only in the {side}: {', '.join(sorted(names))}"] if names else []
    return "; ".join(told)


def _options(pairs_of_records: list[tuple[Record, Record]]) -> list[OptionChange]:
    """Differences of the option tables, each once, with the archs whose tables show it."""
    found: dict[OptionChange, list[str]] = {}
    asked = [(a, b) for a, b in pairs_of_records if a["options"] and b["options"]]
    for a, b in asked:
        for change in _table(a["options"], b["options"]):
            found.setdefault(change, []).append(a["arch"])
    result = []
    for change, archs in found.items():
        shown = () if len(archs) == len(asked) else tuple(archs)
        result.append(
            OptionChange(what=change.what, flag=change.flag, before=change.before, after=change.after, archs=shown)
        )
    rank = {what: number for number, what in enumerate(_WHAT)}
    return sorted(result, key=lambda change: (rank[change.what], change.flag, change.before, change.after))


_WHAT = ("flag gone", "choice gone", "default", "deprecated", "flag new", "choice new")


def _table(a: Mapping[str, Record], b: Mapping[str, Record]) -> Iterator[OptionChange]:
    for flag in a.keys() - b.keys():
        yield OptionChange(what="flag gone", flag=flag)
    for flag in b.keys() - a.keys():
        yield OptionChange(what="flag new", flag=flag)
    for flag in a.keys() & b.keys():
        old, new = a[flag], b[flag]
        before, after = (_choices(one) for one in (old, new))
        if before is not None and after is not None:
            yield from (OptionChange(what="choice gone", flag=flag, before=one) for one in before if one not in after)
            yield from (OptionChange(what="choice new", flag=flag, after=one) for one in after if one not in before)
        if old.get("dest") not in VOLATILE and old.get("default") != new.get("default"):
            yield OptionChange(
                what="default", flag=flag, before=_shown(old.get("default")), after=_shown(new.get("default"))
            )
        if new.get("deprecated") and not old.get("deprecated"):
            text = new["deprecated"] if isinstance(new["deprecated"], str) else ""
            yield OptionChange(what="deprecated", flag=flag, after=text)


def _choices(option: Mapping[str, Any]) -> list[str] | None:
    choices = option.get("choices")
    return [str(choice) for choice in choices] if choices else None


def _rows(a: Record, b: Record) -> Iterator[BumpRow]:
    defaults = _defaults(a["options"], b["options"])
    for old, new in pairs(a["cells"], b["cells"]):
        if old is None or new is None:
            cell = old or new or {}
            side = "first" if new is None else "second"
            change = Bump.GONE if new is None else Bump.NEW
            yield BumpRow(change=change, id=cell["id"], arch=cell["arch"], text=f"in the {side} record only")
        else:
            yield _row(old, new, defaults)


def _row(old: Record, new: Record, defaults: Collection[tuple[str, str, str]]) -> BumpRow:
    def row(change: Bump, text: str = "") -> BumpRow:
        return BumpRow(change=change, id=new["id"], arch=new["arch"], text=text, changes=changes, others=others)

    changes: tuple[tuple[str, str, str], ...] = ()
    others: tuple[tuple[str, str, str], ...] = ()
    for cell, side in ((new, "second"), (old, "first")):
        if cell["outcome"] in ("unavailable", "skipped"):
            return row(Bump.UNAVAILABLE, f"not asked in the {side} record: {cell.get('reason')}")
    before, after = failure_of(old), failure_of(new)
    if after is not None:
        if before is None:
            return row(Bump.REJECTED, _said(after))
        if before.signature != after.signature:
            return row(Bump.REJECTED_OTHERWISE, f"{_said(after)} (was: {_said(before)})")
        return row(Bump.STILL_REJECTED, _said(after))
    changes, others = _settings(old, new), _others(old, new, defaults)
    if before is not None:
        return row(Bump.ACCEPTED, f"was {_said(before)}")
    known = old.get("rewritten") or {}
    told = [
        f"{name}: asked {_shown(value['asked'])}, resolved {_shown(value['resolved'])}"
        for name, value in sorted((new.get("rewritten") or {}).items())
        if name not in known
    ]
    if told:
        return row(Bump.REWRITTEN, ", ".join(told))
    return row(Bump.RESOLVED if changes else Bump.SAME)


def _said(failure: Failure) -> str:
    """What SGLang refused with, without the list of all choices."""
    return one_line(_CHOICES.sub("", failure.message))


def _settings(old: Record, new: Record) -> tuple[tuple[str, str, str], ...]:
    """Changed settings, those that merely follow the common attention backend left out."""
    found = {
        name: (before, after) for name, before, after in _changed(old.get("settings"), new.get("settings"), VOLATILE)
    }
    for name in ("prefill_attention_backend", "decode_attention_backend"):
        if found.get(name) == found.get("attention_backend"):
            found.pop(name, None)
    return tuple((name, before, after) for name, (before, after) in found.items())


def _others(old: Record, new: Record, defaults: Collection[tuple[str, str, str]]) -> tuple[tuple[str, str, str], ...]:
    """Every other argument that both versions resolve, and the variables SGLang sets; not what a default explains."""
    told = new.get("settings") or {}
    found = [
        change
        for change in _changed(old.get("resolved"), new.get("resolved"), VOLATILE)
        if change not in defaults and change[0] not in told
    ]
    found += [
        (f"${name}", before, after)
        for name, before, after in _changed(old.get("env_set"), new.get("env_set"), VOLATILE_ENV)
    ]
    return tuple(found)


def _changed(old: Record | None, new: Record | None, left_out: Collection[str]) -> Iterator[tuple[str, str, str]]:
    for name, before in (old or {}).items():
        if name in (new or {}) and name not in left_out and before != (new or {})[name]:
            yield name, _shown(before), _shown((new or {})[name])


def _defaults(a: Mapping[str, Record], b: Mapping[str, Record]) -> set[tuple[str, str, str]]:
    """`(argument, default before, default after)` of the options in both tables."""
    return {
        (str(a[flag].get("dest")), _shown(a[flag].get("default")), _shown(b[flag].get("default")))
        for flag in a.keys() & b.keys()
    }


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
