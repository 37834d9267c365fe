"""What moved between two records' environments, and what makes comparing them doubtful."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from pytest_gpuserve import engine
from pytest_gpuserve.compare.values import Moved
from pytest_gpuserve.model.versions import orderable
from pytest_gpuserve.model.words import number
from pytest_gpuserve.report.describe import IMPORTANT

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["asked", "flags_of", "moved", "speed_refusal", "warnings"]

Record = dict[str, Any]


def moved(a: Record, b: Record) -> tuple[Moved, ...]:
    """Every version, driver, GPU, host and matrix that differs; the stack under test first, then by name."""
    before, after = _facts(a), _facts(b)
    rank = {name: number for number, name in enumerate(IMPORTANT)}
    names = sorted(before.keys() | after.keys(), key=lambda name: (rank.get(name, len(rank)), name))
    order_a, order_b = orderable(a), orderable(b)
    return tuple(
        Moved(
            what=name,
            before=before.get(name, ""),
            after=after.get(name, ""),
            order=(order_a[name], order_b[name]) if name in order_a and name in order_b else None,
        )
        for name in names
        if before.get(name, "") != after.get(name, "")
    )


def warnings(a: Record, b: Record, pairs: list[tuple[Record | None, Record | None]]) -> list[str]:
    """What a reader must know before any class is believed, worst first."""
    told = []
    if a["simulated"] != b["simulated"]:
        which = "first" if a["simulated"] else "second"
        told.append(f"the {which} record is SIMULATED and the other is real: nothing here is about hardware")
    elif a["simulated"]:
        told.append("SIMULATED: both records are of simulated GPUs and servers")
    both = [(old, new) for old, new in pairs if old is not None and new is not None]
    if not both:
        told.append(f"no cell is in both records: {_about(a)}, and {_about(b)}")
    elif _archs(a) != _archs(b):
        told.append(f"the records are of different architectures: {_about(a)}, and {_about(b)}")
    for side, record in (("first", a), ("second", b)):
        if not record["complete"]:
            told.append(f"the {side} run did not end by itself: what it did not reach is NOT-RUN or GONE")
    if _same_run(a, b):
        told.append("both records are of the same run")
    elif a.get("started") and b.get("started") and str(b["started"]) < str(a["started"]):
        told.append(f"the second run ({b['started']}) is older than the first ({a['started']}): are they swapped?")
    refusal = speed_refusal(a, b)
    if refusal:
        told.append(f"speeds are not compared: {refusal}")
    return told + _other_launches(both)


def speed_refusal(a: Record, b: Record) -> str:
    """Why speeds of these two records say nothing about each other; empty if they do."""
    if a["simulated"] != b["simulated"]:
        return "one of the records is simulated"
    before, after = (sorted({str(gpu.get("name")) for gpu in record.get("gpus") or ()}) for record in (a, b))
    if before and after and before != after:
        return f"other GPUs ({', '.join(before)}; {', '.join(after)})"
    return ""


def _facts(record: Record) -> dict[str, str]:
    facts = {str(name): str(version) for name, version in (record.get("versions") or {}).items()}
    facts |= {str(name): str(version) for name, version in (record.get("driver") or {}).items()}
    names = Counter(str(gpu.get("name")) for gpu in record.get("gpus") or ())
    facts["gpus"] = ", ".join(f"{count} × {name}" for name, count in sorted(names.items()))
    facts["host"] = str(record.get("host") or "")
    facts["matrices"] = ", ".join(
        str(item.get("name") or item.get("path")) if isinstance(item, dict) else str(item)
        for item in record.get("matrices") or ()
    )
    return facts


def _archs(record: Record) -> set[str]:
    return {str(cell["arch"]) for cell in record["cells"]}


def _about(record: Record) -> str:
    models = sorted({str(cell["model"]) for cell in record["cells"]})
    shown = ", ".join(models[:4]) + (", …" if len(models) > 4 else "")
    return f"{', '.join(sorted(_archs(record))) or 'no cell'} with {shown or 'no model'}"


def _same_run(a: Record, b: Record) -> bool:
    return bool(a.get("started")) and all(a.get(name) == b.get(name) for name in ("started", "host", "command"))


_PLACE = ("CUDA_VISIBLE_DEVICES", "TMPDIR")


def _other_launches(both: list[tuple[Record, Record]]) -> list[str]:
    """Cells that pair by name but were launched with other flags: the matrix was edited under the same names."""
    other = [
        (new["id"], text)
        for old, new in both
        if (text := _differences(flags_of(old), flags_of(new), "--"))
        or (_launched(old) and _launched(new) and (text := _differences(asked(old), asked(new), "")))
    ]
    if not other:
        return []
    cell, text = other[0]
    launched = f"{number(len(other), 'cell was', 'cells were')} launched with other flags than before"
    return [f"{launched} under the same name, as {cell}: {text}"]


def _launched(cell: Mapping[str, Any]) -> bool:
    """The record of a cell that no server was started for has not what this tool sets for a start."""
    return bool(cell.get("server_starts") != 0)


def flags_of(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Its flags by SGLang's own names: an older record has them as its matrix spelt them."""
    return {engine.canonical(name): value for name, value in (cell.get("flags") or {}).items()}


def asked(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Its environment, without what this tool sets to say where it runs: the free GPUs of that night."""
    return {name: value for name, value in (cell.get("env") or {}).items() if name not in _PLACE}


def _differences(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str) -> str:
    if before == after:
        return ""
    names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    return ", ".join(f"{prefix}{name} {before.get(name, '(unset)')} → {after.get(name, '(unset)')}" for name in names)
