"""`gpuserve preflight`: what the SGLang of an environment says of a matrix's cells, and the record for `compare`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpuserve.errors import GpuserveError, UsageError
from pytest_gpuserve.preflight.record import SCHEMA, failure_of, summary
from pytest_gpuserve.preflight.run import PRETENDED, preflight

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pytest_gpuserve.model.cell import Cell
    from pytest_gpuserve.model.knownbad import KnownBad

__all__ = ["Request", "ask", "preflight_main", "write_records"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked: the cells of all archs, and the environment that is to answer (see `preflight()`).

    `entries` holds the known-bad entries that match a cell, by its id: a rejection they explain is no finding.
    `notes` is what a reader must know of how it was asked.
    """

    cells: Sequence[Cell]
    python: str
    env: Mapping[str, str]
    versions: Mapping[str, str]
    model_dirs: Mapping[str, Path]
    entries: Mapping[str, Sequence[KnownBad]] = field(default_factory=dict)
    notes: Sequence[str] = ()


def ask(request: Request, **pretended: Any) -> list[dict[str, Any]]:
    """One record an arch, in the order in which the archs first occur; `pretended` goes to `preflight()`."""
    return [
        preflight(
            [cell for cell in request.cells if cell.arch == arch],
            arch=arch,
            python=request.python,
            env=request.env,
            versions=request.versions,
            model_dirs=request.model_dirs,
            **pretended,
        )
        for arch in dict.fromkeys(cell.arch for cell in request.cells)
    ]


def findings(record: Mapping[str, Any], entries: Mapping[str, Sequence[KnownBad]]) -> list[str]:
    """The ids of cells whose refusal no known-bad entry explains."""
    found = []
    for cell in record["cells"]:
        failure = failure_of(cell)
        if failure and not any(entry.expect.explains(failure) for entry in entries.get(cell["id"], ())):
            found.append(cell["id"])
    return found


def write_records(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """One arch's record as it is, several under `runs`; whole or not at all. UsageError where it cannot be written."""
    data = records[0] if len(records) == 1 else {"schema": SCHEMA, "kind": "preflight", "runs": list(records)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(draft, "w") as file:
                json.dump(data, file, ensure_ascii=False)
            Path(name).chmod(0o644)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}; name another file with -o") from error


def preflight_main(argv: Sequence[str], prepare: Callable[[argparse.Namespace], Request]) -> int:
    """The command: 0 where every answer is as expected, 1 with findings, 2 where SGLang could not be asked.

    `prepare` turns the options (`matrix`, `driver`, `cuda`, `gpu_server_python`, `gpu_server_env`, `gpu_version`,
    `gpu_known_bad`, `gpu_strategy`) into the request: it reads matrices and versions, and makes the models' folders
    without weights.
    """
    options = _parser().parse_args(argv)
    try:
        request = prepare(options)
        if not request.cells:
            raise UsageError(f"--matrix {options.matrix}: no cell is left to ask about")
        records = ask(request, cuda=options.cuda, driver=options.driver, gpus=options.gpus)
        if options.output:
            write_records(options.output, records)
    except GpuserveError as error:
        print(error, file=sys.stderr)
        return 2
    for note in request.notes:
        print(f"note: {note}")
    found: list[str] = []
    for record in records:
        print("\n".join(summary(record)))
        found += findings(record, request.entries)
    if any(record["status"] != "ok" for record in records):
        return 2
    if found:
        print(f"not explained by a known-bad entry: {', '.join(found)}")
    return int(bool(found))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpuserve preflight", description=__doc__)
    parser.add_argument("--matrix", required=True, help="names or files of matrices, separated by commas")
    parser.add_argument("--gpu-server-python", metavar="PATH", help="the interpreter of the environment under test")
    parser.add_argument("--gpu-server-env", metavar="NAME[=VALUE]", action="append", default=[])
    parser.add_argument(
        "--gpu-version", metavar="DIST=VERSION", action="append", default=[], help="see docs/bumping.md"
    )
    parser.add_argument("--gpu-known-bad", metavar="PATH", type=Path, action="append", default=[])
    parser.add_argument("--gpu-strategy", metavar="NAME", help="overrides the matrix's strategy")
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="write the record here, for gpuserve compare")
    for name, default in PRETENDED.items():
        parser.add_argument(f"--{name}", default=default, help=f"the {name} version to pretend (default: %(default)s)")
    parser.add_argument("--gpus", type=int, default=8, help="how many GPUs to pretend (default: %(default)s)")
    return parser
