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
from pytest_gpuserve.matrix.find import packaged_dir
from pytest_gpuserve.matrix.merge import facts_for
from pytest_gpuserve.matrix.schema import load_matrix
from pytest_gpuserve.matrix.source import parse_yaml
from pytest_gpuserve.matrix.types import METRICS
from pytest_gpuserve.measure.stats import proposed_floor
from pytest_gpuserve.model.words import counted, number

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pytest_gpuserve.matrix.types import Floor, Matrix

__all__ = ["Proposal", "propose"]

# Throughput only: a floor under a latency's median follows from it at a fixed concurrency, and its tail is noise.
_METRIC = "output_throughput"
_NAMED = 3  # of the cells that are left out for one reason; the others are counted


@dataclass(frozen=True, slots=True)
class Proposal:
    """`patch` is one diff over all matrices, relative to `root`, empty if nothing is proposed; `said` explains it."""

    patch: str
    root: Path
    said: tuple[str, ...]


def propose(record: Mapping[str, Any], matrices: Iterable[Matrix], rootdir: Path) -> Proposal:
    """What `record`, a run.json, supports. A cell that has an absolute floor for the load keeps it, and is named, as is
    every cell that no floor can be proposed for.

    The floors of a matrix that is not the project's own, such as a packaged one, go into a copy that is.
    """
    diffs: list[str] = []
    said: list[str] = []
    rootdir = rootdir.resolve()
    top = repository_above(rootdir, rootdir)
    for matrix in matrices:
        entries, told = _entries(record, matrix)
        said += told
        if not entries:
            continue
        path = _own(matrix, rootdir, top)
        name = path.relative_to(top).as_posix()
        try:
            diffs.append(_diff(matrix, entries, path, name))
        except Uneditable as error:
            said.append(f"{name}: {error}")
            continue
        copied = path != matrix.path.resolve()
        use = f", a copy of {matrix.path} that the patch makes: use it with --gpu-matrix {path.stem}" if copied else ""
        said.append(f"{number(len(entries), 'floor')} proposed for {name}{use}")
    return Proposal("".join(diffs), top, tuple(said))


def _own(matrix: Matrix, rootdir: Path, top: Path) -> Path:
    """The project's file that the floors go to. Those of an installed package, even below the project, are not its own:
    the next installation would take the floors away.
    """
    path, own = matrix.path.resolve(), rootdir / "matrices"
    packaged = packaged_dir().resolve()
    if path.is_relative_to(top) and (path.parent != packaged or packaged == own):
        return path
    return own / f"{path.stem}.yaml"


def _diff(matrix: Matrix, entries: Sequence[Sequence[str]], path: Path, name: str) -> str:
    """The entries as a patch to `path`, or one that makes it. Uneditable if a person must add them."""
    copied = path != matrix.path.resolve()
    if copied and path.exists():
        raise Uneditable(f"the floors are of {matrix.path}, and this file is there already: add them by hand.")
    # Bytes, not text: newlines must stay as they are, or the patch does not apply.
    text = matrix.path.read_bytes().decode("utf-8")
    new = _added(text, entries)
    _prove(new, matrix, len(entries))
    return unified(name, None if copied else text, new)


def _entries(record: Mapping[str, Any], matrix: Matrix) -> tuple[list[list[str]], list[str]]:
    """The lines of each new entry, the first beginning with a dash; and what is left as it is, or out, and why."""
    entries: list[list[str]] = []
    told: list[str] = []
    left: dict[str, list[str]] = {}
    for cell in record["cells"]:
        if cell["matrix"] != matrix.name:
            continue
        if cell["outcome"] != "passed":
            left.setdefault(cell["outcome"], []).append(cell["id"])
            continue
        rows = [one for one in cell["measurements"] if one["metric"] == _METRIC and _is_of_the_check(one)]
        if not rows:
            left.setdefault("not measured", []).append(cell["id"])
        facts = facts_for(matrix, matrix.models[cell["model"]], cell["arch"], cell["axes"])
        for one in rows:
            if one["verdict"] == "invalid":
                left.setdefault("invalid", []).append(f"{cell['id']}: {one['load']}")
                continue
            value = proposed_floor(one["samples"])
            if value <= 0:
                noise = f"{one['median']:g} {one['unit']} with a MAD of {one['spread']:.3g}"
                told.append(f"none for {cell['id']}, {one['load']}: the windows vary too much ({noise})")
                continue
            floor = _rounded(value)
            old = next((known for known in matrix.floors if _is_for(known, one, facts)), None)
            if old is not None:
                told.append(f"{old.where.file}:{old.where.line} stays at {old.limit:g}; {cell['id']} supports {floor}")
                continue
            when = {"model": cell["model"], **cell["axes"]}
            if len(matrix.archs) > 1:
                when = {"arch": cell["arch"], **when}
            entries.append(_lines(when, one, floor, _source(cell, one, record)))
    if left:
        told.append(f"left out: {', '.join(f'{len(ids)} {why} ({_some(ids)})' for why, ids in left.items())}")
    return entries, told


def _is_of_the_check(measurement: Mapping[str, Any]) -> bool:
    """Not a user's test's, which may measure under conditions of its own, or a load that it changed."""
    return not measurement.get("test") and not measurement["load"].endswith("]")


def _some(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else ""
    return ", ".join(ids[:_NAMED]) + more


def _is_for(floor: Floor, measurement: Mapping[str, Any], facts: Mapping[str, object]) -> bool:
    named = (floor.load, floor.metric.name) == (measurement["load"], measurement["metric"])
    return named and floor.limit is not None and floor.when.matches(facts)


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
        path.write_bytes(text.encode())
        root = parse_yaml(path).root
    assert root is not None  # it was loaded for the run
    lines = re.findall(r"[^\n]*\n|[^\n]+", text)
    newline = "\r\n" if lines[0].endswith("\r\n") else "\n"
    if not lines[-1].endswith("\n"):
        lines[-1] += newline
    node = (root.fields or {}).get("floors")
    indent = "  "
    if node is None:
        lines += [f"floors:{newline}"]
        end = len(lines)
    elif node.items:
        key = root.keys["floors"].line
        first = lines[node.items[0].where.line - 1]
        indent = first[: len(first) - len(first.lstrip())]
        if not first.lstrip().startswith("-"):
            raise Uneditable("its floors are not one entry a line group: add the proposed ones by hand.")
        following = [place.line for place in root.keys.values() if place.line > key]
        end = min(following, default=len(lines) + 1) - 1
        while not lines[end - 1].strip() or lines[end - 1].startswith("#"):
            end -= 1
    else:
        end = root.keys["floors"].line
        head, _, tail = lines[end - 1].partition(":")
        lines[end - 1] = f"{head}:" + re.sub(r"^ *\[ *\]", "", tail)
    lines[end:end] = [f"{indent}{line}{newline}" for entry in entries for line in entry]
    return "".join(lines)


def _prove(text: str, matrix: Matrix, added: int) -> None:
    """The new text must be the same matrix with that many floors more."""
    with tempfile.TemporaryDirectory(prefix="gpuserve-") as folder:
        path = Path(folder) / matrix.path.name
        path.write_bytes(text.encode())
        try:
            new = load_matrix(path)
        except Exception as error:
            raise Uneditable(f"the proposed floors do not fit into it: {error}") from error
    if len(new.floors) != len(matrix.floors) + added or list(new.axes) != list(matrix.axes):
        raise Uneditable("its layout is unusual: add the proposed floors by hand.")
