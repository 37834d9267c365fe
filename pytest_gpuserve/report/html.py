"""`report.html`: one record, or several side by side, in one file that needs no network.

The page is `page/page.html` with its style and its script put in, and the data of the records as compressed JSON. The
script builds everything it shows from that data with `textContent`, never from markup, and the page's content security
policy lets it load nothing: a log line is text, whatever stands in it.
"""

from __future__ import annotations

import base64
import gzip
import json
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from pytest_gpuserve.model.outcome import Outcome
from pytest_gpuserve.preflight.record import failure_of
from pytest_gpuserve.report.describe import IMPORTANT, blame, matrix_names, single_stream

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

__all__ = ["LOG_END", "Side", "identity", "page", "past_of"]

# Bytes of log text in one page, before it is compressed; and of one cell's.
_LOG_ROOM = 1_500_000
_LOG_EACH = 6_000
LOG_END = "log-end.txt"

# What a person opens first: its log ends are read first, as long as there is room.
_URGENT = (
    Outcome.FAILED,
    Outcome.CHANGED,
    Outcome.INFRA,
    Outcome.XPASSED,
    Outcome.XFAILED,
    Outcome.BLOCKED,
)

# What the page shows of a cell. `axes` and `baseline` become `delta`.
_SHOWN = (
    "outcome",
    "failure",
    "known_bad",
    "reason",
    "flags",
    "env",
    "argv",
    "resolved",
    "timings",
    "measurements",
    "output",
    "control",
    "notes",
    "images",
    "kernels",
    "depth",
    "steps",
    "rejection",
    "rewritten",
    "gate",
    "warnings",
)


@dataclass(frozen=True, slots=True)
class Side:
    """One record of the page. `folder` is the run's, where the log ends are; None if there is none.

    `history` holds for a cell's identity (see `identity`) what earlier runs said of it, oldest first.
    """

    record: Mapping[str, Any]
    folder: Path | None = None
    history: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)


class _LogEnds:
    """Reads the ends of logs, as many as fit in one page."""

    def __init__(self, room: int = _LOG_ROOM) -> None:
        self._room = room
        self.left_out = 0

    def of(self, folder: Path) -> str:
        """The last lines of the cell's log, or "" if there are none or the page has no room left for them."""
        try:
            data = (folder / LOG_END).read_bytes()[-_LOG_EACH:]
        except OSError:
            return ""
        if len(data) > self._room:
            self.left_out += 1
            return ""
        self._room -= len(data)
        return data.decode("utf-8", "replace")


def page(sides: Sequence[Side]) -> str:
    """The whole file for these records (`report.store.read_run`, or preflight records), in the order given."""
    ends = _LogEnds()
    shown = [_side(side, ends) for side in sides]
    data = {"records": shown, "logs_left_out": ends.left_out}
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), default=str)
    packed = base64.b64encode(gzip.compress(text.encode("utf-8", "backslashreplace"), mtime=0)).decode()
    title = " beside ".join(dict.fromkeys(str(one["label"]) for one in shown)) or "no record"
    fill = {
        "{{title}}": escape(f"gpuserve: {title}"),
        "{{style}}": _asset("page.css"),
        "{{script}}": _asset("page.js"),
        "{{data}}": packed,
    }
    text = _asset("page.html")
    for name, value in fill.items():
        text = text.replace(name, value)
    return text


def _asset(name: str) -> str:
    return (files("pytest_gpuserve.report") / "page" / name).read_text(encoding="utf-8")


def _side(side: Side, ends: _LogEnds) -> dict[str, Any]:
    record = side.record
    preflight = record.get("kind") == "preflight"
    cells = record["cells"]
    urgency = {str(outcome): rank for rank, outcome in enumerate(_URGENT)}
    shown: list[dict[str, Any]] = [{}] * len(cells)
    for index in sorted(range(len(cells)), key=lambda index: urgency.get(cells[index]["outcome"], len(urgency))):
        shown[index] = _cell(cells[index], side, ends, urgent=cells[index]["outcome"] in urgency)
    checks: dict[str, list[list[Any]]] = {}
    for check in record.get("checks") or ():
        checks.setdefault(check["cell"], []).append([check["name"], check["outcome"], check.get("reason") or ""])
    for cell in shown:
        cell["checks"] = checks.get(cell["id"], [])
    archs = sorted({str(cell["arch"]) for cell in cells})
    versions = {**(record.get("driver") or {}), **(record.get("versions") or {})}
    return {
        "label": " ".join([", ".join(archs) or "no cells", f"sglang {versions.get('sglang', 'unknown')}"]),
        "archs": archs,
        "proof": _proof(record, preflight=preflight),
        "preflight": preflight,
        "simulated": bool(record.get("simulated")),
        "complete": bool(record.get("complete", True)),
        "title": matrix_names(record),
        "started": record.get("started"),
        "finished": record.get("finished"),
        "command": record.get("command") or [],
        "host": record.get("host") or "",
        "versions": {name: versions[name] for name in IMPORTANT if versions.get(name)},
        "gpus": sorted({str(gpu.get("name", "")) for gpu in record.get("gpus") or ()}),
        "gpu_count": len(record.get("gpus") or ()),
        "cells": shown,
    }


def _proof(record: Mapping[str, Any], *, preflight: bool) -> str:
    """How the results of a record were come by: the strongest thing that can be said of all of it."""
    if preflight:
        depths = {str(cell["depth"]) for cell in record["cells"] if cell.get("depth")}
        return f"preflight ({', '.join(sorted(depths)) or 'arguments'}): nothing was launched"
    return "SIMULATED: no GPU was used" if record.get("simulated") else "real run"


def _cell(cell: Mapping[str, Any], side: Side, ends: _LogEnds, *, urgent: bool) -> dict[str, Any]:
    delta = _delta(cell)
    shown = {name: cell[name] for name in _SHOWN if cell.get(name)}
    if side.record.get("kind") == "preflight" and (failure := failure_of(cell)) is not None:
        shown["failure"] = failure.to_json()
        if cell["outcome"] in ("accepted", "rewritten"):
            shown["outcome"] = "foretold-failure"
    shown |= {
        "id": cell["id"],
        "arch": cell["arch"],
        "model": cell["model"],
        "delta": delta,
        "gpus": _devices(cell.get("gpus") or ()),
    }
    if urgent and side.folder is not None and cell.get("folder"):
        end = ends.of(side.folder / str(cell["folder"]))
        if end:
            shown["log_end"] = end
    past = side.history.get(identity(cell))
    if past:
        shown["history"] = list(past)
    return shown


def _devices(gpus: Iterable[Mapping[str, Any]]) -> list[str]:
    """`NVIDIA H200 (GPU 0, 1)` for each model of GPU."""
    indices: dict[str, list[str]] = {}
    for gpu in gpus:
        indices.setdefault(str(gpu.get("name")), []).append(str(gpu.get("index")))
    return [f"{name} (GPU {', '.join(numbers)})" for name, numbers in indices.items()]


def _delta(cell: Mapping[str, Any]) -> list[str]:
    """`attention.flashinfer` for each axis that is not at its baseline; a preflight's cell has it in its id only."""
    baseline = cell.get("baseline") or {}
    if baseline:
        return [f"{axis}.{level}" for axis, level in cell["axes"].items() if level != baseline.get(axis, level)]
    rest = str(cell["id"]).removeprefix(f"{cell['arch']}-{cell['model']}-")
    return [] if rest == "baseline" else rest.split("+")


def identity(cell: Mapping[str, Any]) -> str:
    """What makes two cells of two runs the same one: arch, model, and the level of each axis off its baseline."""
    return " ".join([str(cell["arch"]), str(cell["model"]), *sorted(_delta(cell))])


def past_of(runs: Iterable[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """What `runs`, oldest first, say of each cell: outcome, failure, single-stream tok/s, and SGLang's version."""
    past: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        versions = {name: str(run["versions"][name]) for name in IMPORTANT if (run.get("versions") or {}).get(name)}
        for cell in run["cells"]:
            entry = {
                "started": run.get("started"),
                "outcome": cell["outcome"],
                "failure": blame(cell),
                "versions": versions,
                "speed": single_stream(cell),
            }
            past.setdefault(identity(cell), []).append(entry)
    return past
