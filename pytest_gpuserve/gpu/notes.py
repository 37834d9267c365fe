"""Notes beside the locks: who holds a GPU and why, and which GPU is quarantined. The lock decides, a note only tells.

A note outlives a holder that was killed; then it says what to look for: the lease id is in the environment of that
lease's server processes (`GPUSERVE_LEASE`).
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pytest_gpuserve.gpu import process
from pytest_gpuserve.gpu.lockdir import stem
from pytest_gpuserve.gpu.locks import is_held

__all__ = [
    "Holder",
    "Note",
    "boot_id",
    "holders",
    "note_path",
    "quarantine_path",
    "quarantined",
    "read_json",
    "read_note",
    "write_json",
    "write_note",
]

_LIMIT = 1 << 16
_TEXTS = ("uuid", "lease", "run_id", "cell", "phase", "namespace", "host", "since", "boot")


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What the holder of one GPU writes beside its lock.

    `pid`, `start` and `namespace` say which process, beyond the reuse of pids; `pids` are its server's processes with
    their start times. `since` is UTC for people; ages come from `monotonic` (seconds since boot, valid within `boot`),
    which a clock that is set does not change. `orphans` are earlier leases whose processes may still live.
    """

    uuid: str
    index: int
    lease: str
    run_id: str
    cell: str
    phase: str
    pid: int
    start: int
    namespace: str
    host: str
    uid: int
    since: str
    boot: str
    monotonic: float
    pids: tuple[tuple[int, int], ...] = ()
    orphans: tuple[str, ...] = ()

    @classmethod
    def of_this_process(cls, **facts: Any) -> Note:
        """A note of which this process, this user and this moment are the holder."""
        pid = os.getpid()
        return cls(
            pid=pid,
            start=process.start_of(pid) or 0,
            namespace=process.pid_namespace(),
            host=os.uname().nodename,
            uid=os.geteuid(),
            since=datetime.now(UTC).isoformat(timespec="seconds"),
            boot=boot_id(),
            monotonic=time.monotonic(),
            **facts,
        )

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Note | None:
        """None if the data is no note: any user of the machine can write in the directory."""
        try:
            return cls(
                index=int(data["index"]),
                pid=int(data["pid"]),
                start=int(data["start"]),
                uid=int(data["uid"]),
                monotonic=float(data["monotonic"]),
                pids=tuple((int(pid), int(start)) for pid, start in data["pids"]),
                orphans=tuple(str(lease) for lease in data["orphans"]),
                **{name: _printable(data[name]) for name in _TEXTS},
            )
        except (KeyError, TypeError, ValueError, OverflowError):
            return None

    @property
    def seconds(self) -> float | None:
        """How long ago it was written; None if the machine was booted since."""
        return max(0.0, time.monotonic() - self.monotonic) if self.boot == boot_id() else None

    @property
    def alive(self) -> bool | None:
        """Whether the process that wrote it lives; None if that cannot be told from here (another container)."""
        if self.namespace != process.pid_namespace() or self.host != os.uname().nodename:
            return None
        return self.boot == boot_id() and process.is_alive(self.pid, self.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A GPU's lock and its note. `held` is the lock's own word.

    `stale` says why the note cannot be believed, None if it can: after kill -9 of the holder the lock is free; or a
    pid was used again. `note` is None while a holder has not yet written it.
    """

    uuid: str
    held: bool
    note: Note | None
    stale: str | None = None

    def __str__(self) -> str:
        """`GPU 3: held by alice, pid 4242, cell x, phase weights, for 12 min (run r1)`."""
        note = self.note
        if note is None:
            return f"{self.uuid}: held by a process that left no note"
        name = "the CPUs" if note.uuid == "CPU" else f"GPU {note.index}"
        verb = "held"
        if self.stale:
            verb = "held by an unknown process, last" if self.held else "last"
        since = f"since {note.since}" if note.seconds is None else f"for {_duration(note.seconds)}"
        where = "" if note.alive is not None else f" on {note.host}"
        stale = f"; {self.stale}" if self.stale else ""
        return (
            f"{name}: {verb} by {process.user_name(note.uid)}, pid {note.pid}{where}, {note.cell}, "
            f"phase {note.phase}, {since} (run {note.run_id}){stale}"
        )


def holders(lock_dir: Path) -> list[Holder]:
    """Every GPU that is held, or whose last holder left a note without giving the GPU up; by index.

    Reads only, works for the notes of other users, and for a missing directory (empty).
    """
    found = []
    for lock in lock_dir.glob("*.lock"):
        note = read_note(lock_dir, lock.stem)
        held = is_held(lock)
        if lock.name != "queue.lock" and (held or note):
            found.append(Holder(uuid=note.uuid if note else lock.stem, held=held, note=note, stale=_stale(note, held)))
    return sorted(found, key=lambda holder: (holder.note.index if holder.note else -1, holder.uuid))


def _stale(note: Note | None, held: bool) -> str | None:  # noqa: FBT001 - the lock's one bit
    if note is None:
        return None
    if not held:
        return "the lock is free: the holder ended without giving the GPU up"
    if note.alive is False:
        return "the note is of a process that is gone"
    return None


def quarantined(lock_dir: Path) -> dict[str, str]:
    """UUID → why it is quarantined. Lasts until an admission finds the GPU free."""
    reasons = {}
    for path in lock_dir.glob("*.quarantine.json"):
        data = read_json(path) or {}
        if isinstance(data.get("uuid"), str):
            reasons[data["uuid"]] = f"{data.get('reason')}; {data.get('evidence')} ({data.get('since')})"
    return reasons


def read_note(lock_dir: Path, uuid: str) -> Note | None:
    """The note beside that GPU's lock; None if there is none or it is not one."""
    data = read_json(note_path(lock_dir, uuid))
    return Note.from_json(data) if data else None


def note_path(lock_dir: Path, uuid: str) -> Path:
    """Where the holder's note of that GPU lies."""
    return lock_dir / f"{stem(uuid)}.note.json"


def quarantine_path(lock_dir: Path, uuid: str) -> Path:
    """Where a quarantine of that GPU is noted."""
    return lock_dir / f"{stem(uuid)}.quarantine.json"


def write_note(lock_dir: Path, note: Note) -> None:
    """Put it beside the lock; only the lock's holder may."""
    write_json(note_path(lock_dir, note.uuid), asdict(note))


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Atomically, readable and replaceable by every user, never through a symlink that lies at `path`."""
    # No pid in its name: containers that share the directory have the same ones.
    draft = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            os.fchmod(fd, 0o666)
            json.dump(data, file)
        draft.replace(path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a small JSON file; None if it is missing, not a plain file, too large or not an object."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        with os.fdopen(fd, "rb") as file:
            data = json.loads(file.read(_LIMIT))
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def boot_id() -> str:
    """Changes with every boot; the same in containers."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"


def _printable(text: object) -> str:
    """Notes are shown on other people's terminals: no escapes in them."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(text))


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min" if minutes else f"{rest} s"
