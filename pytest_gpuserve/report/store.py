"""Writes and reads what a run leaves in its folder: `run.json`, `events.jsonl`, one `cell.json` a cell.

Workers write `cell.json`; only the controller writes events and `run.json`. Every field: docs/record.md.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import re
import secrets
from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime
from enum import Enum
from typing import TYPE_CHECKING, Any

from pytest_gpuserve.errors import MachineError, UsageError
from pytest_gpuserve.model.outcome import RED, Outcome, worst
from pytest_gpuserve.model.record import SCHEMA, CellRecord, CheckRecord
from pytest_gpuserve.report.folder import EVENTS, LATEST, new_run_folder
from pytest_gpuserve.report.scrub import scrub_argv, scrub_cell, scrub_event, scrub_values
from pytest_gpuserve.report.shape import run_problem
from pytest_gpuserve.report.upgrade import upgrade

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

__all__ = [
    "LATEST",
    "RUN",
    "Events",
    "cell_folder",
    "dump_json",
    "new_run_folder",
    "read_cell",
    "read_events",
    "read_json",
    "read_run",
    "run_header",
    "run_record",
    "write_cell",
    "write_json_atomic",
    "write_text_atomic",
]

RUN = "run.json"
CELL = "cell.json"
_NAME_LIMIT = 120


def write_text_atomic(path: Path, text: str) -> None:
    """`path` holds the old content or all of the new one, whatever happens. MachineError says why it could not."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(3)}")
    try:
        with temporary.open("wb") as file:
            # A log's undecodable byte arrives as a lone surrogate: in JSON this spells its escape.
            file.write(text.encode("utf-8", "backslashreplace"))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise MachineError(
            f"cannot write {path}: {error.strerror}. The file is as it was before. "
            "Free some space there, or choose another directory with --gpu-report DIR."
        ) from error


def write_json_atomic(path: Path, data: Mapping[str, Any]) -> None:
    """Writes `data` as JSON, one element of a list of objects a line, so that records can be read by line and diffed.

    NaN and infinities, which JSON has not, become null.
    """
    write_text_atomic(path, dump_json(data))


def dump_json(data: Mapping[str, Any]) -> str:
    """`data` as the files of a run hold it: see `write_json_atomic`."""
    # The fast encoder writes no indentation: lines are made here, by hand, for the two outer levels only.
    parts = []
    for name, value in data.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            body = "[\n  " + ",\n  ".join(map(_dumps, value)) + "\n ]"
        else:
            body = _dumps(value)
        parts.append(f" {json.dumps(name)}: {body}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _dumps(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain)
    except ValueError:
        return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, default=_plain)


def _plain(value: Any) -> Any:
    """A record must never fail for a value's type at the very end of a run of hours: the rest is written as text."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    return value.isoformat() if isinstance(value, datetime) else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


class Events:
    """`events.jsonl`: every event as it happens, one JSON object a line, in the kernel's hands when `write` returns.

    A killed run loses at most the cell in flight. While it is open, the run's folder counts as in use.
    `write` never raises: a full disk must not end a run; `problem` then says what was lost.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / EVENTS
        self.problem: str | None = None
        self._torn = False
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        with suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def write(self, event: str, **fields: Any) -> None:
        """Appends one event with the time it was written, secrets scrubbed; values as for `write_json_atomic`."""
        text = _dumps({"t": _now(), "event": event} | scrub_event(event, fields))
        line = text.encode("utf-8", "backslashreplace") + b"\n"
        if self._torn:
            line = b"\n" + line
        try:
            # A disk that fills up takes a part first, and only then says so.
            while line:
                line = line[os.write(self._file, line) :]
                self._torn = bool(line)
        except OSError as error:
            self.problem = f"cannot write {self.path}: {error.strerror}"

    def close(self) -> None:
        """Ends the folder's use."""
        os.close(self._file)


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events of a file; a line that a kill or a full disk tore is left out."""
    events = []
    with path.open("rb") as file:
        for line in file:
            with suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict) and {"t", "event"} <= event.keys():
                    events.append(event)
    return events


def cell_folder(run_folder: Path, cell_id: str) -> Path:
    """`cells/<id>` of a run; what no file system takes as a name is changed and ends in a hash of the whole id."""
    name = re.sub(r"[^\w.+=@-]|^\.+$", "_", cell_id)
    if len(name) > _NAME_LIMIT or name != cell_id:
        digest = hashlib.sha256(cell_id.encode()).hexdigest()[:8]
        name = f"{name[: _NAME_LIMIT - 9]}-{digest}"
    return run_folder / "cells" / name


def write_cell(folder: Path, record: CellRecord) -> None:
    """Writes `folder/cell.json` (see `cell_folder`), secrets scrubbed."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json_atomic(folder / CELL, {"schema": SCHEMA} | scrub_cell(record.to_json()))


def read_cell(folder: Path) -> CellRecord | None:
    """The record of a cell's folder; None while there is none. UsageError if it is not one of ours or is newer."""
    path = folder / CELL
    if not path.exists():
        return None
    data = read_json(path)
    return CellRecord.from_json(upgrade(data | {"cells": [data]}, str(path))["cells"][0])


def run_header(
    *,
    simulated: bool,
    started: datetime,
    command: Sequence[str],
    versions: Mapping[str, str],
    taken_for: Mapping[str, Mapping[str, Any]],
    driver: Mapping[str, str],
    host: str,
    gpus: Sequence[Mapping[str, Any]],
    matrices: Sequence[Mapping[str, Any] | str],
    shard: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What is known of a run when it begins; also the fields of the event `run`, with `planned` beside them."""
    return {
        "schema": SCHEMA,
        "simulated": simulated,
        "complete": False,
        "started": _iso(started),
        "finished": None,
        "command": scrub_argv(command),
        "versions": dict(versions),
        "taken_for": {name: dict(taken) for name, taken in taken_for.items()},
        "driver": dict(driver),
        "host": host,
        "gpus": [dict(gpu) for gpu in gpus],
        "matrices": list(matrices),
        **({} if shard is None else {"shard": dict(shard)}),
    }


def run_record(
    header: Mapping[str, Any],
    *,
    cells: Iterable[CellRecord | Mapping[str, Any]],
    checks: Iterable[CheckRecord | Mapping[str, Any]],
    finished: datetime | None = None,
    complete: bool = True,
) -> dict[str, Any]:
    """`run.json` as DESIGN section 5 lists it: the header, counts, cells and checks. Secrets are scrubbed here."""
    plain = [scrub_cell(cell.to_json() if isinstance(cell, CellRecord) else cell) for cell in cells]
    counts = Counter(str(cell["outcome"]) for cell in plain)
    return dict(header) | {
        "complete": complete,
        "finished": _iso(finished or datetime.now(UTC)),
        "server_starts": sum(cell.get("server_starts", 0) for cell in plain),
        "outcomes": {str(outcome): counts[outcome] for outcome in Outcome if counts[outcome]},
        "cells": plain,
        "checks": [scrub_values(check.to_json() if isinstance(check, CheckRecord) else check) for check in checks],
    }


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; UsageError says what is wrong with it, MachineError that it cannot be read."""
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise UsageError(f"{path}: no such file.") from error
    except OSError as error:
        raise MachineError(f"{path}: cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not a record: {error}. Was it cut off while it was copied?") from error
    if not isinstance(data, dict):
        raise UsageError(f"{path}: not a record: it holds {type(data).__name__}, not an object.")
    return data


def read_run(path: Path) -> dict[str, Any]:
    """A run's record, from `run.json`, a run's folder, or a report directory (its latest run).

    A run that was killed before it wrote `run.json` is rebuilt from its events and cells, with `complete` false.
    Older schemas are upgraded. UsageError names the file and what is wrong with it.
    """
    if not path.is_dir():
        return _read_file(path)
    for folder in (path, path / LATEST, path / "runs" / LATEST):
        if (folder / RUN).exists():
            return _read_file(folder / RUN)
        if (folder / EVENTS).exists():
            return _rebuild(folder)
    raise UsageError(f"{path}: no run in this folder: neither {RUN} nor {EVENTS}, nor a link '{LATEST}'.")


def _read_file(path: Path) -> dict[str, Any]:
    record = upgrade(read_json(path), str(path))
    problem = run_problem(record)
    if problem:
        raise UsageError(f"{path}: not a record of a run: {problem}.")
    return record


def _rebuild(folder: Path) -> dict[str, Any]:
    events = read_events(folder / EVENTS)
    header = next((event for event in events if event["event"] == "run"), None)
    if header is None:
        raise UsageError(f"{folder}: the run was ended before it planned a cell; there is nothing to read.")
    upgraded = upgrade(header | {"cells": header.get("planned", [])}, str(folder / EVENTS))
    checks = [_without_event(event) for event in events if event["event"] == "check"]
    seen: dict[str, list[Mapping[str, Any]]] = {}
    for check in checks:
        seen.setdefault(check["cell"], []).append(check)
    cells = []
    for planned in upgraded.pop("cells"):
        written = read_cell(cell_folder(folder, planned["id"]))
        cell = written.to_json() if written else dict(planned)
        if cell["outcome"] == Outcome.NOT_RUN:
            cell |= _begun(seen.get(planned["id"], []))
        cells.append(cell)
    last = datetime.fromisoformat(events[-1]["t"])
    top = {name: value for name, value in _without_event(upgraded).items() if name != "planned"}
    return run_record(top, cells=cells, checks=checks, finished=last, complete=False)


def _begun(checks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The result of a cell that a kill cut short: a failure that was seen, else none, however many checks passed."""
    if not checks:
        return {"reason": "the run was killed before it"}
    told = "the run was killed during it"
    bad = [one for one in checks if Outcome(one["outcome"]) in RED | {Outcome.XFAILED}]
    if not bad:
        return {"reason": f"{told}: only {', '.join(one['name'] for one in checks)} had ended"}
    outcome = worst(Outcome(one["outcome"]) for one in bad)
    failure = next((one["failure"] for one in bad if one["outcome"] == outcome), None)
    return {"outcome": str(outcome), "failure": failure, "reason": f"{told}: only some checks ended"}


def _without_event(event: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name not in ("event", "t")}


def _now() -> str:
    return _iso(datetime.now(UTC))


def _iso(time: datetime) -> str:
    return time.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
