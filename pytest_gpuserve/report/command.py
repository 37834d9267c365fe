"""`gpuserve report` and `gpuserve history`: what records say, for people."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpuserve.errors import GpuserveError, UsageError
from pytest_gpuserve.matrix.walk import did_you_mean
from pytest_gpuserve.preflight.record import records_of
from pytest_gpuserve.report.bug_report import bug_report
from pytest_gpuserve.report.describe import one_line
from pytest_gpuserve.report.folder import EVENTS, LATEST
from pytest_gpuserve.report.history import Night, history_of, moved_between, steps
from pytest_gpuserve.report.html import LOG_END, Side, page, past_of
from pytest_gpuserve.report.markdown import summary
from pytest_gpuserve.report.parts import by_stack
from pytest_gpuserve.report.store import RUN, read_json, read_run, write_text_atomic

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["earlier_runs", "history_main", "report_main"]

# Records that a history reads, and bytes of them: the rest is left out, and said.
_RUNS = 30
_BYTES = 200_000_000


def report_main(arguments: Sequence[str]) -> int:
    """0 when the report is written, 2 (by the caller, for an error) when a record cannot be read."""
    options = _parser().parse_args(arguments)
    if options.issue is not None:
        text = _issue(options.records, options.issue)
        if options.output is None:
            print(text, end="")
            return 0
    elif options.output is None:
        raise UsageError("name the file to write with -o FILE (.html, or .md for one run)")
    else:
        text = _text(options.records, options.output)
    write_text_atomic(options.output, text)
    print(options.output)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpuserve report",
        description="One self-contained page of a record, or of several side by side; or a bug report for one cell.",
        epilog="A RECORD is a run.json, a run's folder (also of a run that was killed: it is rebuilt from its events), "
        "a report folder (its latest run), or what `gpuserve preflight -o FILE` wrote.",
    )
    parser.add_argument("records", type=Path, nargs="+", metavar="RECORD", help="in the order they are to stand")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help=".html: the page; .md: one run's summary")
    parser.add_argument(
        "--issue",
        metavar="CELL",
        help="instead: a bug report for that failed cell, in the form SGLang's issue tracker asks for",
    )
    return parser


def _text(paths: Sequence[Path], output: Path) -> str:
    if output.suffix == ".md":
        if len(paths) != 1:
            raise UsageError(f"{output}: a summary (.md) is of one run; for {len(paths)} records write .html")
        return summary(read_run(paths[0]))
    if output.suffix not in (".html", ".htm"):
        raise UsageError(f"{output}: a report is .html, or .md for one run's summary")
    return page([side for path in paths for side in _sides(path)])


def _sides(path: Path) -> list[Side]:
    """A run is one side of the page, a preflight's file one for each arch in it."""
    if path.is_file():
        data = read_json(path)
        if data.get("kind") == "preflight":
            return [Side(record) for record in records_of(data, str(path))]
    run = read_run(path)
    folder = _folder_of(path)
    past = past_of(earlier_runs(folder, run)) if (folder / EVENTS).is_file() else {}
    return [Side(record, folder, past) for record in by_stack(run)]


def _folder_of(path: Path) -> Path:
    """The folder that the cells' own folders in this record are relative to."""
    if path.is_file():
        return path.resolve().parent
    places = (path, path / LATEST, path / "runs" / LATEST)
    return next((one for one in places if (one / EVENTS).is_file()), path).resolve()


def earlier_runs(folder: Path, run: dict[str, Any], most: int = _RUNS) -> list[dict[str, Any]]:
    """The runs beside `folder` that started before `run`, oldest first, of its kind (simulated or real).

    A record that cannot be read is left out; so are the oldest beyond `most`, or beyond what is read at most.
    """
    runs: list[dict[str, Any]] = []
    room = _BYTES
    for other in sorted((one for one in folder.parent.iterdir() if not one.is_symlink()), reverse=True):
        record = other / RUN
        if other.name >= folder.name or not (other / EVENTS).is_file() or not record.is_file():
            continue
        room -= record.stat().st_size
        if room < 0 or len(runs) == most:
            break
        try:
            earlier = read_run(record)
        except GpuserveError:
            continue
        if bool(earlier["simulated"]) == bool(run["simulated"]):
            runs.append(earlier)
    return runs[::-1]


def _issue(paths: Sequence[Path], cell_id: str) -> str:
    if len(paths) != 1:
        raise UsageError("a bug report is of one run: name one RECORD beside --issue CELL")
    run = read_run(paths[0])
    cells = {cell["id"]: cell for cell in run["cells"]}
    if cell_id not in cells:
        raise UsageError(f"{paths[0]}: no cell {cell_id!r}{did_you_mean(cell_id, cells)}")
    cell = cells[cell_id]
    if not cell.get("failure"):
        raise UsageError(f"{paths[0]}: {cell_id} is {cell['outcome']} and has no failure to report")
    file = _folder_of(paths[0]) / str(cell.get("folder") or "") / LOG_END
    end = file.read_bytes()[-6000:].decode("utf-8", "replace") if file.is_file() else ""
    part = next(one for one in by_stack(run) if any(other["id"] == cell_id for other in one["cells"]))
    return bug_report(part, cell, end)


def history_main(arguments: Sequence[str]) -> int:
    """0 when the cell is in a run, 2 (by the caller, for an error) when it is in none."""
    parser = argparse.ArgumentParser(
        prog="gpuserve history",
        description="A cell over the runs of a report folder: outcome, tok/s of each load, what moved in the stack.",
    )
    parser.add_argument("cell", metavar="CELL", help="the cell's id")
    parser.add_argument(
        "--gpu-report", type=Path, default=Path(".gpuserve"), metavar="DIR", help="default: .gpuserve, here"
    )
    parser.add_argument("--simulated", action="store_true", help="the simulated runs; default: the real ones")
    options = parser.parse_args(arguments)
    folders = sorted(one for one in (options.gpu_report / "runs").glob("*") if one.is_dir() and not one.is_symlink())
    runs, unread = [], []
    for folder in folders[-_RUNS:]:
        try:
            runs.append(read_run(folder))
        except GpuserveError as error:
            unread.append(str(error))
    wanted = [run for run in runs if bool(run["simulated"]) == options.simulated]
    nights = history_of(wanted, options.cell)
    for problem in unread:
        print(f"left out: {one_line(problem)}")
    if not nights:
        names = dict.fromkeys(cell["id"] for run in wanted for cell in run["cells"])
        kind = "simulated" if options.simulated else "real"
        hint = did_you_mean(options.cell, names)
        raise UsageError(
            f"{options.gpu_report}: no {kind} run has a cell {options.cell!r}{hint}; "
            f"read: {len(wanted)} {kind} runs of {len(folders)}"
        )
    for line in history_lines(nights):
        print(line)
    return 0


def history_lines(nights: Sequence[Night]) -> list[str]:
    """A line a run, under it what moved since the run before, and where each load's speed steps."""
    loads = list(dict.fromkeys(load for night in nights for load in night.speeds))
    stepped = {load: steps([night.speeds.get(load) for night in nights]) for load in loads}
    lines = ["SIMULATED: times and speeds are invented"] if any(night.simulated for night in nights) else []
    for index, night in enumerate(nights):
        if index and (moved := moved_between(nights[index - 1], night)):
            lines.append(f"  {'; '.join(moved)}")
        speeds = [
            f"{load} {night.speeds[load]:.1f} tok/s{' ← steps here' if index in stepped[load] else ''}"
            for load in loads
            if load in night.speeds
        ]
        lines.append("  ".join([night.started[:19], f"{night.outcome:<8}", night.failure, *speeds]).rstrip())
    if any(stepped.values()):
        lines.append(
            "A step: the medians of up to five runs on each side differ by more than 15 % and by more than four "
            "median absolute deviations."
        )
    return lines
