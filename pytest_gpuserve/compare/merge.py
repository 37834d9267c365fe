"""`gpuserve merge`: the records of shards, of machines and of archs, put together into one.

Nothing is mixed: a cell keeps the part it came from, and where parts ran on different stacks the merged record has no
versions of its own but each part's. What would make a merged record say more than its parts do is refused, by name:
cells in two records, cells that a shard should have brought, one arch on two stacks, a simulation among real runs.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpuserve.errors import UsageError
from pytest_gpuserve.model.outcome import Outcome
from pytest_gpuserve.model.record import SCHEMA
from pytest_gpuserve.model.words import number
from pytest_gpuserve.report.describe import few
from pytest_gpuserve.report.store import LATEST, RUN, read_run, write_json_atomic

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

__all__ = ["ALLOWED", "Part", "merge", "merge_main"]

# What can be told to be all right, and what each means.
ALLOWED = {
    "missing": "cells that shards should have brought are left out",
    "duplicates": "of a cell in several records, the one that started last counts",
    "stacks": "one arch may have run on several stacks; each cell keeps its own",
    "simulated": "simulated and real records are put together, marked SIMULATED as a whole",
}
_HEAD = ("simulated", "complete", "started", "finished", "command", "versions", "driver", "host", "gpus", "matrices")


@dataclass(frozen=True, slots=True)
class Part:
    """One record to merge, and where it was read: the path is named in messages."""

    path: Path
    record: Mapping[str, Any]

    @property
    def folder(self) -> Path:
        """The folder that the paths of its cells are relative to."""
        if not self.path.is_dir():
            return self.path.parent
        return next(one for one in (self.path, self.path / LATEST, self.path / "runs" / LATEST) if (one / RUN).exists())

    @property
    def stack(self) -> tuple[tuple[str, str], ...]:
        """The versions and the driver: what makes results comparable."""
        versions = {**(self.record.get("driver") or {}), **(self.record.get("versions") or {})}
        return tuple(sorted((name, str(version)) for name, version in versions.items()))


def merge(parts: Sequence[Part], allow: Collection[str] = (), beside: Path | None = None) -> dict[str, Any]:
    """One record of all parts. UsageError names everything that stands against it, and how to allow it.

    `beside` is the folder of the file to be written: the cells' own folders are named from there.
    """
    problems = [
        *_simulations(parts, allow),
        *_shards(parts, allow),
        *_duplicates(parts, allow),
        *_stacks(parts, allow),
    ]
    if problems:
        raise UsageError("\n".join(["these records do not make one:", *(f"  {text}" for text in problems)]))
    order = _order(parts)
    cells: dict[str, dict[str, Any]] = {}
    source: dict[str, int] = {}
    for index in sorted(range(len(parts)), key=lambda index: str(parts[index].record.get("started") or "")):
        for cell in parts[index].record["cells"]:
            source[cell["id"]] = index
            cells[cell["id"]] = {**cell, "part": index, "folder": _folder(cell, parts[index], beside)}
    checks = [
        check
        for index, part in enumerate(parts)
        for check in part.record.get("checks") or ()
        if source.get(check["cell"]) == index
    ]
    return _head(parts) | {
        "server_starts": sum(int(part.record.get("server_starts") or 0) for part in parts),
        "outcomes": _counts(cells.values()),
        "parts": [_part(part) for part in parts],
        "cells": [cells[name] for name in sorted(cells, key=lambda name: order[name])],
        "checks": checks,
    }


def _simulations(parts: Sequence[Part], allow: Collection[str]) -> list[str]:
    simulated = [str(part.path) for part in parts if part.record["simulated"]]
    if not simulated or len(simulated) == len(parts) or "simulated" in allow:
        return []
    return [f"{few(simulated)}: SIMULATED, among real runs (--allow simulated)"]


def _shards(parts: Sequence[Part], allow: Collection[str]) -> list[str]:
    """What the shards themselves say is missing: of one whole, every shard names all its cells."""
    shards = [(part, part.record["shard"]) for part in parts if part.record.get("shard")]
    problems = []
    of: dict[int, str] = {int(shard["of"]): str(part.path) for part, shard in shards}
    counts = sorted(of)
    if len(counts) > 1:
        examples = [f"{path} is of {count}" for count, path in sorted(of.items())]
        problems.append(f"shards of different counts: {'; '.join(examples)}. They were dealt out differently.")
    have = {cell["id"] for part in parts for cell in part.record["cells"]}
    wholes: dict[tuple[str, ...], list[int]] = {}
    for _, shard in shards:
        wholes.setdefault(tuple(shard["whole"]), []).append(int(shard["index"]))
    for whole, indices in wholes.items():
        missing = [name for name in whole if name not in have]
        if missing and "missing" not in allow:
            absent = [str(index) for index in range(1, counts[0] + 1) if index not in indices] if counts else []
            which = f" (of shard {', '.join(absent)}, which is not here)" if absent else ""
            problems.append(f"{number(len(missing), 'cell')} missing{which}: {few(missing)} (--allow missing)")
    return problems


def _duplicates(parts: Sequence[Part], allow: Collection[str]) -> list[str]:
    places: dict[str, list[str]] = {}
    for part in parts:
        for cell in part.record["cells"]:
            places.setdefault(cell["id"], []).append(str(part.path))
    twice = [name for name, paths in places.items() if len(paths) > 1]
    if not twice or "duplicates" in allow:
        return []
    where = few(list(dict.fromkeys(path for name in twice for path in places[name])))
    hint = "two versions beside each other: gpuserve report; the later one counts: --allow duplicates"
    return [f"{number(len(twice), 'cell')} in several records: {few(twice)} ({where}). {hint}"]


def _stacks(parts: Sequence[Part], allow: Collection[str]) -> list[str]:
    if "stacks" in allow:
        return []
    first: dict[str, Part] = {}
    problems: dict[str, str] = {}
    for part in parts:
        for arch in {str(cell["arch"]) for cell in part.record["cells"]}:
            other = first.setdefault(arch, part)
            if other.stack != part.stack:
                moved = dict(set(part.stack) ^ set(other.stack))
                differ = few(sorted(moved))
                problems.setdefault(arch, f"{arch} on two stacks: {other.path} and {part.path} differ in {differ}")
    return [f"{text} (--allow stacks)" for text in problems.values()]


def _order(parts: Sequence[Part]) -> dict[str, int]:
    """The order of the whole where shards know it, else that of the records."""
    names: dict[str, None] = {}
    for part in parts:
        names |= dict.fromkeys((part.record.get("shard") or {}).get("whole", ()))
    for part in parts:
        names |= dict.fromkeys(cell["id"] for cell in part.record["cells"])
    return {name: place for place, name in enumerate(names)}


def _head(parts: Sequence[Part]) -> dict[str, Any]:
    records = [part.record for part in parts]
    gpus = {str(gpu.get("uuid")): gpu for record in records for gpu in record.get("gpus") or ()}
    matrices = {str(item): item for record in records for item in record.get("matrices") or ()}
    return {
        "schema": SCHEMA,
        "simulated": any(record["simulated"] for record in records),
        "complete": all(record["complete"] for record in records),
        "started": min((str(record["started"]) for record in records if record.get("started")), default=None),
        "finished": max((str(record["finished"]) for record in records if record.get("finished")), default=None),
        "command": ["gpuserve", "merge", *(str(part.path) for part in parts)],
        "versions": _common(records, "versions"),
        "driver": _common(records, "driver"),
        "host": ", ".join(dict.fromkeys(str(record.get("host") or "") for record in records)),
        "gpus": list(gpus.values()),
        "matrices": list(matrices.values()),
    }


def _common(records: Sequence[Mapping[str, Any]], name: str) -> dict[str, str]:
    """What all parts agree on: a value that only some have is none of the whole's."""
    first, *others = [dict(record.get(name) or {}) for record in records]
    return {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}


def _part(part: Part) -> dict[str, Any]:
    record = part.record
    shard = record.get("shard")
    found = {name: record[name] for name in _HEAD if name in record}
    return found | ({"shard": {"index": shard["index"], "of": shard["of"]}} if shard else {})


def _folder(cell: Mapping[str, Any], part: Part, beside: Path | None) -> str:
    own = str(cell.get("folder") or "")
    return os.path.relpath(part.folder / own, beside) if own and beside is not None else own


def _counts(cells: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    outcomes = [str(cell["outcome"]) for cell in cells]
    return {str(outcome): outcomes.count(str(outcome)) for outcome in Outcome if str(outcome) in outcomes}


def merge_main(arguments: Sequence[str]) -> int:
    """0 when the file is written, 2 (by the caller, for an error) when the records do not make one."""
    parser = argparse.ArgumentParser(
        prog="gpuserve merge",
        description="One record of several: shards, machines, archs. Reports and comparisons take it as any record.",
        epilog="A RECORD is a run.json or a run's folder.",
    )
    parser.add_argument("records", type=Path, nargs="+", metavar="RECORD")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the record to write")
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        choices=sorted(ALLOWED),
        help="; ".join(f"{name}: {meaning}" for name, meaning in ALLOWED.items()),
    )
    options = parser.parse_args(arguments)
    parts = [Part(path, read_run(path)) for path in options.records]
    merged = merge(parts, options.allow, options.output.absolute().parent)
    write_json_atomic(options.output, merged)
    cells = number(len(merged["cells"]), "cell")
    state = "" if merged["complete"] else "; INCOMPLETE: a part of it did not end by itself"
    print(f"{options.output}: {cells} of {number(len(parts), 'record')}{state}")
    return 0
