"""Reads `/proc`: who is ours, what it does, and how to signal it without ever hitting a stranger.

A process is known by its pid *and* its start time, so that a recycled pid is a different process. "Ours" are the
processes of the server's session, those that carry its mark in their environment, orphans the supervisor adopted
(it is a child subreaper), and whatever once was one of these.
"""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpuserve.gpu import process

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Family", "Proc", "Stat", "describe", "identity", "is_alive", "read_stat", "send_signal"]

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
GONE = (FileNotFoundError, ProcessLookupError, PermissionError)


@dataclass(frozen=True, slots=True)
class Stat:
    """One line of `/proc/PID/stat`. `started` in clock ticks since boot, times in seconds, `rss` in bytes.

    `status` is the wait status of a zombie, 0 where it may not be read.
    """

    pid: int
    ppid: int
    pgid: int
    sid: int
    state: str
    comm: str
    started: int
    cpu: float
    children_cpu: float
    rss: int
    status: int

    @property
    def zombie(self) -> bool:
        """Dead: only its exit status is left."""
        return self.state in "ZX"


@dataclass(frozen=True, slots=True)
class Proc:
    """A process of ours in detail: `Stat` plus command line, I/O counters (bytes, calls) and wait channel."""

    pid: int
    ppid: int
    sid: int
    state: str
    comm: str
    cmdline: str
    started: float
    cpu: float
    children_cpu: float
    rss: int
    read_bytes: int
    rchar: int
    write_bytes: int
    wchar: int
    syscw: int
    wchan: str


def _read(pid: int, name: str) -> bytes:
    try:
        with open(f"/proc/{pid}/{name}", "rb", buffering=0) as file:  # noqa: PTH123 (hundreds of times a second)
            return file.read() or b""
    except OSError:
        return b""


def read_stat(pid: int) -> Stat | None:
    """The process now, or None when there is none."""
    raw = _read(pid, "stat")
    if not raw:
        return None
    head, _, tail = raw.rpartition(b")")
    field = tail.split()
    return Stat(
        pid=pid,
        ppid=int(field[1]),
        pgid=int(field[2]),
        sid=int(field[3]),
        state=field[0].decode(),
        comm=head.partition(b"(")[2].decode(errors="replace"),
        started=int(field[19]),
        cpu=(int(field[11]) + int(field[12])) / _TICKS,
        children_cpu=(int(field[13]) + int(field[14])) / _TICKS,
        rss=int(field[21]) * _PAGE,
        status=int(field[49]) if len(field) > 49 else 0,
    )


def command_of(pid: int) -> str:
    """The command line joined by blanks, empty for a zombie or a kernel thread."""
    return _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()


def in_detail(stat: Stat) -> Proc:
    """`stat` with what costs more to read; a counter that may not be read is 0."""
    io = {}
    for line in _read(stat.pid, "io").splitlines():
        name, _, value = line.partition(b": ")
        io[name] = int(value)
    return Proc(
        pid=stat.pid,
        ppid=stat.ppid,
        sid=stat.sid,
        state=stat.state,
        comm=stat.comm,
        cmdline=command_of(stat.pid),
        started=stat.started / _TICKS,
        cpu=stat.cpu,
        children_cpu=stat.children_cpu,
        rss=stat.rss,
        read_bytes=io.get(b"read_bytes", 0),
        rchar=io.get(b"rchar", 0),
        write_bytes=io.get(b"write_bytes", 0),
        wchar=io.get(b"wchar", 0),
        syscw=io.get(b"syscw", 0),
        wchan=_read(stat.pid, "wchan").decode(errors="replace").strip("\0\n"),
    )


def environment_of(pid: int) -> bytes:
    """The environment the process was started with, as `NAME=value` ended by NULs; empty when unreadable."""
    return _read(pid, "environ")


def all_pids() -> list[int]:
    """Every process this one may see."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208


def identity(pid: int) -> str:
    """`pid:start:namespace`, which no later process of this machine shares; of a process that is gone, start 0."""
    return f"{pid}:{process.start_of(pid) or 0}:{process.pid_namespace()}"


def is_alive(who: str) -> bool | None:
    """Whether the process an `identity` names lives (a zombie does not); None if it is of another pid namespace."""
    pid, started, namespace = who.split(":", 2)
    if namespace != process.pid_namespace():
        return None
    return process.is_alive(int(pid), int(started))


def send_signal(target: Stat, number: int) -> bool:
    """Signals exactly that process: the pidfd is opened first, then the start time is compared."""
    try:
        fd = os.pidfd_open(target.pid)
    except OSError:
        return False
    try:
        now = read_stat(target.pid)
        if now is None or now.started != target.started:
            return False
        signal.pidfd_send_signal(fd, number)
        return True
    except GONE:
        return False
    finally:
        os.close(fd)


def describe(stat: Stat) -> str:
    """`sglang::scheduler (pid 4242, state D)` for messages."""
    command = command_of(stat.pid)
    title = command if command.startswith("sglang") else stat.comm
    return f"{title[:80]} (pid {stat.pid}, state {stat.state})"


class Family:
    """The processes of one server. `mark` is `NAME=value` in their environment; `adopter` the supervisor's pid."""

    def __init__(self, mark: str, *, session: int | None = None, adopter: int | None = None) -> None:
        self.session = session
        self.seen: dict[int, int] = {}
        self._mark = mark.encode()
        self._adopter = adopter
        self._own_session = os.getsid(0)
        self._foreign: set[int] = set()

    def members(self, *, thorough: bool = False) -> list[Stat]:
        """Who is there now, zombies included.

        Otherwise than `thorough`, pids that were a stranger's before are not looked at again: cheap, and blind only
        to a pid recycled by us since. Teardown is thorough.
        """
        pids = all_pids()
        if thorough:
            self._foreign.clear()
        else:
            self._foreign.intersection_update(pids)
        found = []
        for pid in pids:
            if pid in self._foreign or pid == self._adopter:
                continue
            stat = read_stat(pid)
            if stat is None:
                continue
            if self._is_ours(stat):
                self.seen[pid] = stat.started
                found.append(stat)
            else:
                self._foreign.add(pid)
        return found

    def started(self, pid: int) -> int | None:
        """The start time of a process that is or was one of these; None if `pid` is a stranger's, or nobody's."""
        if pid not in self.seen and (stat := read_stat(pid)) is not None and self._is_ours(stat):
            self.seen[pid] = stat.started
        return self.seen.get(pid)

    def _is_ours(self, stat: Stat) -> bool:
        if self.seen.get(stat.pid) == stat.started:
            return True
        if self.session is not None and stat.sid == self.session:
            return True
        if self._adopter is not None and stat.ppid == self._adopter and stat.sid != self._own_session:
            return True
        return stat.pid != os.getpid() and carries(environment_of(stat.pid), self._mark)


def carries(environ: bytes, mark: bytes) -> bool:
    """Whether an environment block holds exactly `mark`, not a longer value that begins with it."""
    return mark in environ.split(b"\0")


def listens(port: int, pids: Iterable[int]) -> bool:
    """Whether one of these processes has a listening TCP socket at `port`."""
    inodes = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        try:
            with open(table, encoding="ascii") as file:  # noqa: PTH123
                rows = [line.split() for line in file][1:]
        except OSError:
            continue
        inodes |= {row[9] for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port}
    return bool(inodes) and any(f"socket:[{inode}]" in _links(pid) for pid in pids for inode in inodes)


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208
    except OSError:
        return []


def _links(pid: int) -> set[str]:
    links = set()
    for name in _names(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            links.add(os.readlink(f"/proc/{pid}/fd/{name}"))  # noqa: PTH115
    return links


def opened(pid: int, prefix: str) -> set[int]:
    """The inodes of the files under `prefix` that a process has open or mapped.

    Not their paths: `sem_open` maps a file under another name than the one it leaves (glibc links it afterwards).
    """
    inodes = set()
    for name in _names(f"/proc/{pid}/fd"):
        link = f"/proc/{pid}/fd/{name}"
        with contextlib.suppress(OSError):
            if os.readlink(link).startswith(prefix):  # noqa: PTH115
                inodes.add(os.stat(link).st_ino)  # noqa: PTH116
    for line in _read(pid, "maps").splitlines():
        if prefix.encode() in line:
            inodes.add(int(line.split(maxsplit=5)[4]))
    return inodes
