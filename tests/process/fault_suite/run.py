"""One pytest run of a fault: started in the background, watched by what it writes, read afterwards."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pytest_gpuserve.report.store import cell_folder, read_events, read_run

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Sequence
    from pathlib import Path

__all__ = ["LIMIT", "Run", "until"]

LIMIT = 90.0
_PRINTED = re.compile(r"^(?:\[(?P<worker>gw\d+)\] \[ *\d+%\] [A-Z-]+ (?P<late>\S+::\S+)|(?P<node>\S+::\S+) [A-Z-]{4,})")


def until(condition: Callable[[], Any], what: str, limit: float = LIMIT) -> Any:
    """The first true value of the condition."""
    deadline = time.monotonic() + limit
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {limit:g} s: {what}"
        time.sleep(0.02)
    return value


class Run:
    """A pytest process in a session of its own; what it prints goes to a file. `place` maps its paths to ours (it may
    run in another mount namespace).
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        cwd: Path,
        env: dict[str, str],
        output: Path,
        report: Path,
        place: Callable[[Path], Path],
    ) -> None:
        self.output = output
        self._report = place(report)
        # What had been reported when the fault was caused; whether run.json is to be expected at all.
        self.seen: list[dict[str, Any]] = []
        self.disk_full = False
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                argv, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )
        self.pid = self.process.pid

    # -- watching ------------------------------------------------------------------------------------------------------

    @property
    def code(self) -> int | None:
        """Pytest's exit status; negative for a signal; None while it runs."""
        return self.process.poll()

    @property
    def text(self) -> str:
        """All that was printed so far."""
        return self.output.read_text(errors="replace")

    @property
    def folder(self) -> Path | None:
        """The run's folder once there is one."""
        runs = [path for path in (self._report / "runs").glob("*Z-*") if path.is_dir() and not path.is_symlink()]
        return runs[0] if runs else None

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """What events.jsonl holds now."""
        folder = self.folder
        if folder is None or not (folder / "events.jsonl").exists():
            return []
        return [event for event in read_events(folder / "events.jsonl") if kind in (None, event["event"])]

    def checked(self, name: str, cell: str = "baseline") -> dict[str, Any] | None:
        """The event of a check that is through."""
        wanted = (name, f"sm120-m-{cell}")
        return next((event for event in self.events("check") if (event["name"], event["cell"]) == wanted), None)

    def status(self, worker: str = "gw0") -> str:
        """A worker's line for the controller: its cell, its phase, how long."""
        folder = self.folder
        with suppress(OSError, ValueError, KeyError):
            return str(json.loads((folder / f"status-{worker}.json").read_text())["text"]) if folder else ""
        return ""

    def until(self, condition: Callable[[], Any], what: str, limit: float = LIMIT) -> Any:
        """Waits for a condition while the run goes on; what it printed is in the error if it does not come."""
        try:
            return until(lambda: condition() or self.code is not None, what, limit) and (
                condition() or self._ended(what)
            )
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.text[-3000:]}") from None

    def _ended(self, what: str) -> None:
        raise AssertionError(f"pytest ended with {self.code} before: {what}\n{self.text[-3000:]}")

    def wait(self, limit: float = LIMIT) -> int:
        """Pytest's exit status, when it has ended."""
        try:
            return self.process.wait(limit)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"pytest did not end within {limit:g} s\n{self.text[-3000:]}") from None

    # -- faults --------------------------------------------------------------------------------------------------------

    def remember(self) -> None:
        """Now comes the fault: what is reported by now may not be lost."""
        self.seen = self.events()

    def signal(self, number: signal.Signals, *, group: bool = False) -> None:
        """To pytest alone, or, as a terminal does, to its whole process group."""
        self.remember()
        if group:
            os.killpg(self.pid, number)
        else:
            self.process.send_signal(number)

    def end(self) -> None:
        """Whatever the fault left of pytest itself."""
        if self.code is None:
            self.process.kill()
            self.process.wait()

    # -- reading -------------------------------------------------------------------------------------------------------

    @property
    def record(self) -> dict[str, Any]:
        """run.json; or, of a run that was killed, what the tool makes of its events and cells."""
        assert self.folder, self.text[-3000:]
        return read_run(self.folder)

    @property
    def cells(self) -> dict[str, dict[str, Any]]:
        """The cells' records by id, without the common beginning."""
        return {cell["id"].removeprefix("sm120-m-"): cell for cell in self.record["cells"]}

    def outcomes(self) -> dict[str, str]:
        """Every cell's outcome."""
        return {name: cell["outcome"] for name, cell in self.cells.items()}

    def message(self, cell: str = "baseline") -> str:
        """The message of that cell's failure."""
        failure = self.cells[cell]["failure"]
        assert failure, f"{cell} has no failure: {self.cells[cell]['outcome']}\n{self.text[-3000:]}"
        return str(failure["message"])

    def log(self, cell: str = "baseline", name: str = "server.log") -> bytes:
        """A server's log."""
        assert self.folder
        return (cell_folder(self.folder, f"sm120-m-{cell}") / name).read_bytes()

    # -- what was lost -------------------------------------------------------------------------------------------------

    def lost(self) -> list[str]:
        """Results that had been reported and cannot be read now."""
        folder = self.folder
        if folder is None:
            return []
        now = self.events()
        checks = {event["nodeid"]: event["outcome"] for event in now if event["event"] == "check"}
        lost = [f"event {event}" for event in self.seen if event not in now]
        if not self.disk_full:
            lost += [
                f"printed, and not in events.jsonl: {nodeid}" for nodeid in self._printed() if nodeid not in checks
            ]
        for event in now:
            if event["event"] == "cell" and (path := cell_folder(folder, event["id"]) / "cell.json"):
                kept = _outcome_of(path)
                if kept != event["outcome"] and not (self.disk_full and kept is None):
                    lost.append(f"{path.name} of {event['id']}: {kept}, the event says {event['outcome']}")
        if self.code is not None and self.code >= 0 and not self.disk_full and self._ended_itself():
            lost += self._missing_in_record(folder, checks)
        return lost

    def _ended_itself(self) -> bool:
        """Whether pytest came to the end of its session; os._exit by pytest-timeout is no such end."""
        return "+ Timeout +" not in self.text

    def _missing_in_record(self, folder: Path, checks: dict[str, str]) -> list[str]:
        try:
            record = json.loads((folder / "run.json").read_text())
        except (OSError, ValueError) as error:
            return [f"run.json: {error}"]
        kept = {check["nodeid"]: check["outcome"] for check in record["checks"]}
        return [f"run.json lacks {nodeid}" for nodeid, outcome in checks.items() if kept.get(nodeid) != outcome]

    def _printed(self) -> list[str]:
        """Node ids whose outcome stands on the terminal, but each process's last: its teardown may not be through."""
        by_worker: dict[str | None, list[str]] = {}
        for line in self.text.splitlines():
            match = _PRINTED.match(line)
            if match:
                nodes = by_worker.setdefault(match["worker"], [])
                nodeid = match["late"] or match["node"]
                if nodeid not in nodes:
                    nodes.append(nodeid)
        return [nodeid for nodes in by_worker.values() for nodeid in nodes[:-1]]


def _outcome_of(path: Path) -> str | None:
    try:
        return str(json.loads(path.read_text())["outcome"])
    except (OSError, ValueError, KeyError):
        return None
