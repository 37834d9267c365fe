"""Ends what dead runs left: servers whose supervisor is gone, and their private folders.

A supervisor that lives ends its own server, whatever became of its owners, so nothing below a living one is touched.
Left over is a process that carries `GPUSERVE_SUPERVISOR=pid:start:namespace` (see `procs.identity`) of a process that
is no more: then supervisor *and* worker were killed at once. Only such processes are ever signalled. A pid of another
container cannot be judged from here and is left alone.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from pytest_gpuserve.gpu.lease import Holder, holders
from pytest_gpuserve.serve import procs
from pytest_gpuserve.serve.litter import folder_owner, remove_remains

__all__ = ["Leftover", "end_by_force", "find_leftovers", "reap"]

_SUPERVISOR = b"GPUSERVE_SUPERVISOR="
_RUN = b"GPUSERVE_RUN_ID="


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """Something of a dead run. `kind` is `process`, `folder` (private TMPDIR) or `note` (of a GPU that is not held).

    `what` describes it for a person; `stat` is the process, `path` the folder. A `note` is only reported: the next
    lease of that GPU deals with it.
    """

    kind: str
    what: str
    run_id: str = ""
    stat: procs.Stat | None = None
    path: Path | None = None


def find_leftovers(lock_dir: Path | None = None) -> list[Leftover]:
    """All there is on this machine, as far as this user may see it; with `lock_dir` its stale notes too."""
    return [*_processes(), *_folders(), *(_notes(holders(lock_dir)) if lock_dir else ())]


def reap(lock_dir: Path | None = None, *, timeout: float = 15.0) -> tuple[list[Leftover], list[Leftover]]:
    """Ends the processes (SIGTERM, after two seconds SIGKILL), then removes the folders.

    Returns what is gone now, and what is not: within `timeout` seconds, or not permitted to this user.
    """
    found = [item for item in find_leftovers(lock_dir) if item.kind != "note"]
    began = time.monotonic()
    number = signal.SIGTERM
    while (left := _processes()) and time.monotonic() - began < timeout:
        for item in left:
            assert item.stat
            procs.send_signal(item.stat, number)
        number = signal.SIGKILL
        _until_gone([item.stat for item in left if item.stat], 2.0)
    for item in found:
        if item.path and not _processes():
            remove_remains(str(item.path))
    remaining = find_leftovers(lock_dir)
    gone = [item for item in found if item not in remaining and (item.path is None or not item.path.exists())]
    return gone, [item for item in remaining if item.kind != "note"]


def end_by_force(family: procs.Family, *, timeout: float = 5.0, tmpdir: str = "") -> list[procs.Stat]:
    """SIGKILL for every process of the family until none is left; for when the supervisor cannot do it any more.

    Returns the survivors (zombies are none).
    """
    deadline = time.monotonic() + timeout
    while left := [stat for stat in family.members(thorough=True) if not stat.zombie]:
        for stat in left:
            procs.send_signal(stat, signal.SIGKILL)
        if time.monotonic() > deadline:
            return left
        time.sleep(0.01)
    if tmpdir:
        remove_remains(tmpdir)
    return []


def _until_gone(stats: list[procs.Stat], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        now = [procs.read_stat(stat.pid) for stat in stats]
        if not any(new and new.started == old.started and not new.zombie for new, old in zip(now, stats, strict=True)):
            return
        time.sleep(0.02)


def _processes() -> list[Leftover]:
    found = []
    for pid in procs.all_pids():
        marks = dict.fromkeys((_SUPERVISOR, _RUN), "")
        for entry in procs.environment_of(pid).split(b"\0"):
            for mark in marks:
                if entry.startswith(mark):
                    marks[mark] = entry.removeprefix(mark).decode(errors="replace")
        supervisor, run = marks.values()
        if supervisor.count(":") < 2 or procs.is_alive(supervisor) is not False:
            continue
        stat = procs.read_stat(pid)
        if stat and not stat.zombie and pid != os.getpid():
            what = f"{procs.describe(stat)} of run {run}: its supervisor (pid {supervisor.split(':')[0]}) is gone"
            found.append(Leftover(kind="process", what=what, run_id=run, stat=stat))
    return found


def _folders() -> list[Leftover]:
    found = []
    for parent in {tempfile.gettempdir(), "/tmp"}:  # noqa: S108 (where make_tmpdir puts them)
        for path in Path(parent).glob("gpuserve-*"):
            owner = folder_owner(path)
            if owner and procs.is_alive(owner) is False:
                found.append(Leftover(kind="folder", what=f"{path}: private TMPDIR of a dead run", path=path))
    return found


def _notes(notes: list[Holder]) -> list[Leftover]:
    return [Leftover(kind="note", what=str(holder)) for holder in notes if holder.stale]
