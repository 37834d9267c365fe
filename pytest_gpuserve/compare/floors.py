"""Floors proposed from measured noise, as a patch to the matrix that `git apply` takes (`--gpu-floors record`)."""

from __future__ import annotations

import math
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpuserve.compare.edit import Uneditable, scalar
from pytest_gpuserve.compare.lists import repository_above
from pytest_gpuserve.compare.patch import unified
from pytest_gpuserve.matrix.schema import load_matrix
from pytest_gpuserve.matrix.source import parse_yaml
from pytest_gpuserve.matrix.types import METRICS
from pytest_gpuserve.measure.stats import proposed_floor
from pytest_gpuserve.model.words import counted, number

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pytest_gpuserve.matrix.types import Matrix

__all__ = ["Proposal", "propose"]

# Throughput only: a floor under a latency's median follows from it at a fixed concurrency, and its tail is noise.
_METRIC = "output_throughput"


@dataclass(frozen=True, slots=True)
class Proposal:
    """`patch` is one diff over all matrices, relative to `root`, empty if nothing is proposed; `said` explains it."""

    patch: str
    root: Path
    said: tuple[str, ...]


def propose(record: Mapping[str, Any], matrices: Iterable[Matrix], rootdir: Path) -> Proposal:
    """What `record`, a run.json, supports. A cell that has an absolute floor for the load keeps it, and is named."""
    diffs: list[str] = []
    said: list[str] = []
    top = repository_above(rootdir, rootdir)
    for matrix in matrices:
        entries, kept = _entries(record, matrix)
        said += kept
        if not entries:
            continue
        text = matrix.path.read_text(encoding="utf-8")
        try:
            new = _added(text, entries)
            _prove(new, matrix, len(entries))
        except Uneditable as error:
            said.append(str(error))
            continue
        path = matrix.path.resolve()
        name = path.relative_to(top) if path.is_relative_to(top) else Path("matrices") / path.name
        diffs.append(unified(name.as_posix(), text, new))
        said.append(f"{number(len(entries), 'floor')} proposed for {name.as_posix()}")
    return Proposal("".join(diffs), top, tuple(said))


def _entries(record: Mapping[str, Any], matrix: Matrix) -> tuple[list[list[str]], list[str]]:
    """The lines of each new entry, the first beginning with a dash; and what is left as it is."""
    entries, kept = [], []
    for cell in record["cells"]:
        if cell["matrix"] != matrix.name or cell["outcome"] != "passed":
            continue
        facts = {**cell["axes"], "model": cell["model"], "arch": cell["arch"]}
        for one in cell["measurements"]:
            if one["metric"] != _METRIC or one["verdict"] == "invalid" or one["load"].endswith("]"):
                continue
            floor = _rounded(proposed_floor(one["samples"]))
            old = next((f for f in matrix.floors if _is_for(f, one, facts)), None)
            if old is not None:
                kept.append(f"{old.where.file}:{old.where.line} stays at {old.limit:g}; {cell['id']} supports {floor}")
                continue
            when = {"model": cell["model"], **cell["axes"]}
            if len(matrix.archs) > 1:
                when = {"arch": cell["arch"], **when}
            entries.append(_lines(when, one, floor, _source(cell, one, record)))
    return entries, kept


def _is_for(floor: Any, measurement: Mapping[str, Any], facts: Mapping[str, object]) -> bool:
    named = (floor.load, floor.metric.name) == (measurement["load"], measurement["metric"])
    return (
        named
        and floor.limit is not None
        and all(name in facts for name in floor.when.names)
        and floor.when.matches(facts)
    )


def _rounded(value: float) -> str:
    """Down to three digits: a floor must not be tighter than what was measured."""
    digits = 2 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{math.floor(value * 10**digits) / 10**digits:.{max(digits, 0)}f}"


def _source(cell: Mapping[str, Any], one: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    """How it was measured, for whoever reads the floor."""
    gpus = counted(gpu["name"] for gpu in cell["gpus"]) or "no GPU"
    simulated = "SIMULATED, " if record.get("simulated") else ""
    versions = record.get("versions") or {}
    return (
        f"{simulated}{one['median']:g} {one['unit']} (MAD {one['spread']:.3g}) in "
        f"{number(len(one['samples']), 'window')}, {gpus}, sglang {versions.get('sglang', 'unknown')}, "
        f"{str(record.get('started'))[:10]}"
    )


def _lines(when: Mapping[str, str], one: Mapping[str, Any], floor: str, source: str) -> list[str]:
    terms = ", ".join(f"{scalar(name)}: {scalar(value)}" for name, value in when.items())
    unit = METRICS[one["metric"]].unit
    return [
        f"# {source}",
        f"- when: {{{terms}}}",
        f"  load: {scalar(one['load'])}",
        f"  {one['metric']}: {{at-least: {floor}, unit: {unit}}}",
    ]


def _added(text: str, entries: Sequence[Sequence[str]]) -> str:
    """The file's text with the entries at the end of its `floors`."""
    with tempfile.TemporaryDirectory(prefix="gpuserve-") as folder:
        path = Path(folder) / "matrix.yaml"
        path.write_text(text, encoding="utf-8")
        root = parse_yaml(path).root
    assert root is not None  # it was loaded for the run
    lines = re.findall(r"[^\n]*\n|[^\n]+", text)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    node = (root.fields or {}).get("floors")
    indent = "  "
    if node is None:
        lines += ["floors:\n"]
        end = len(lines)
    elif node.items:
        key = root.keys["floors"].line
        first = lines[node.items[0].where.line - 1]
        indent = first[: len(first) - len(first.lstrip())]
        if not first.lstrip().startswith("-"):
            raise Uneditable("the matrix' floors are not one entry a line group: add the proposed ones by hand.")
        following = [place.line for place in root.keys.values() if place.line > key]
        end = min(following, default=len(lines) + 1) - 1
        while not lines[end - 1].strip() or lines[end - 1].startswith("#"):
            end -= 1
    else:
        end = root.keys["floors"].line
        head = lines[end - 1].partition(":")[0]
        lines[end - 1] = f"{head}:\n"
    lines[end:end] = [f"{indent}{line}\n" for entry in entries for line in entry]
    return "".join(lines)


def _prove(text: str, matrix: Matrix, added: int) -> None:
    """The new text must be the same matrix with that many floors more."""
    with tempfile.TemporaryDirectory(prefix="gpuserve-") as folder:
        path = Path(folder) / matrix.path.name
        path.write_text(text, encoding="utf-8")
        try:
            new = load_matrix(path)
        except Exception as error:
            raise Uneditable(f"the proposed floors do not fit into {matrix.path}: {error}") from error
    if len(new.floors) != len(matrix.floors) + added or list(new.axes) != list(matrix.axes):
        raise Uneditable(f"the layout of {matrix.path} is unusual: add the proposed floors by hand.")
