"""What the workers of one run tell each other: through small files in the run's folder, and nothing else."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from pytest_gpuserve.errors import GpuserveError
from pytest_gpuserve.gpu.lockdir import stem
from pytest_gpuserve.model.words import number
from pytest_gpuserve.report.store import cell_folder, read_cell, write_cell, write_json_atomic

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from pytest_gpuserve.manager.plan import Plan
    from pytest_gpuserve.model.record import CellRecord

__all__ = ["Run"]

_POLL = 0.1
_UNWRITTEN = "unwritten"
_LAST_WORDS = "last-words.txt"


class Run:
    """The run's folder as the workers and the controller see it."""

    def __init__(self, plan: Plan) -> None:
        assert plan.folder is not None
        self.folder: Path = plan.folder
        self._budget = plan.settings.budget
        self._began = plan.began
        self._stop = self.folder / "stop"
        self._quarantine = self.folder / "quarantine"
        self._sick: dict[str, str] = {}

    def cell(self, cell_id: str) -> Path:
        """The folder of one cell."""
        return cell_folder(self.folder, cell_id)

    def result_of(self, cell_id: str) -> CellRecord | None:
        """The record of a cell that is through, None while it is not."""
        try:
            return read_cell(self.cell(cell_id))
        except GpuserveError:
            return None

    def keep(self, record: CellRecord) -> None:
        """Write the record of a cell that is through, for whoever waits for it.

        If that fails (a full disk), they learn at least that nothing will come: an empty file takes no space.
        """
        folder = self.cell(record.id)
        try:
            write_cell(folder, record)
        except (GpuserveError, OSError) as error:
            record.notes.append(f"this record is in no file of its own: {error}")
            with suppress(OSError):
                (folder / _UNWRITTEN).touch()

    def leave(self, cell_id: str, text: str) -> None:
        """The last words of a worker that ends itself in that cell."""
        folder = self.cell(cell_id)
        with suppress(OSError):
            # A test that needs no server may be the first to write there.
            folder.mkdir(parents=True, exist_ok=True)
            (folder / _LAST_WORDS).write_text(text)

    def last_words(self, cell_id: str) -> str:
        """What a worker left; empty if it was ended from outside."""
        try:
            return (self.cell(cell_id) / _LAST_WORDS).read_text()
        except OSError:
            return ""

    def wait_for(self, cell_id: str, seconds: float) -> CellRecord | None:
        """The record of a cell that another worker runs; None after `seconds`, when the run is being stopped, or if the
        record could not be written.
        """
        deadline = time.monotonic() + seconds
        unwritten = self.cell(cell_id) / _UNWRITTEN
        while (record := self.result_of(cell_id)) is None:
            if time.monotonic() > deadline or self._stop.exists() or unwritten.exists():
                return None
            time.sleep(_POLL)
        return record

    def stop(self, reason: str) -> None:
        """No worker starts another cell: `-x`, `--maxfail`, an interrupt."""
        with suppress(OSError):
            self._stop.write_text(reason)

    def closed(self) -> str | None:
        """Why no new cell may start, or None."""
        with suppress(OSError):
            return self._stop.read_text() or "the run is being stopped"
        if self._budget is not None and time.monotonic() - self._began > self._budget * 60:
            return f"the budget of {number(self._budget, 'minute')} was used up"
        return None

    def quarantine(self, uuids: Iterable[str], reason: str) -> None:
        """Keep GPUs out of the rest of this run; of this process' rest, if the disk is full."""
        for uuid in uuids:
            self._sick[uuid] = reason
            with suppress(GpuserveError, OSError):
                self._quarantine.mkdir(exist_ok=True)
                write_json_atomic(self._quarantine / f"{stem(uuid)}.json", {"uuid": uuid, "reason": reason})

    def quarantined(self) -> dict[str, str]:
        """UUID → reason of the GPUs that this run must not use any more."""
        found = dict(self._sick)
        for path in self._quarantine.glob("*.json"):
            with suppress(OSError, ValueError):
                note = json.loads(path.read_text())
                found[note["uuid"]] = note["reason"]
        return found
