"""Processes as /proc shows them. The fault suite reads them itself: code under test must not count its own proof."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Process", "carrying", "look"]


@dataclass(frozen=True, slots=True)
class Process:
    """One process: `start` is in ticks since boot, `command` its arguments, `environ` that of its start."""

    pid: int
    ppid: int
    start: int
    state: str
    command: str
    environ: frozenset[bytes]

    @property
    def ours(self) -> bool:
        """Whether it carries the tool's mark: a supervisor, or anything under one."""
        return any(entry.startswith(b"GPUSERVE_RUN_ID=") for entry in self.environ)

    @property
    def role(self) -> str:
        """`supervisor`, `main`, `scheduler`, `worker` (xdist's), `pytest`, or `other`."""
        command = self.command
        if "pytest_gpuserve.serve.supervisor" in command:
            return "supervisor"
        if command.startswith("sglang::scheduler"):
            return "scheduler"
        if "pytest_gpuserve.sim.server" in command and self.leader:
            return "main"
        if "sys.stdin.readline" in command:
            return "worker"
        return "pytest" if "-m pytest" in command else "other"

    @property
    def leader(self) -> bool:
        """Whether it leads its session, as a server's main process does and its forks do not."""
        try:
            return os.getsid(self.pid) == self.pid
        except ProcessLookupError:
            return False

    def __str__(self) -> str:
        return f"{self.role} {self.pid} ({self.command[:60] or '-'}, {self.state})"


def look(pid: int) -> Process | None:
    """That process now; None if there is none."""
    folder = Path("/proc", str(pid))
    try:
        stat = (folder / "stat").read_bytes()
        command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        environ = (folder / "environ").read_bytes()
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 1 :].split()
    return Process(
        pid=pid,
        ppid=int(fields[1]),
        start=int(fields[19]),
        state=fields[0].decode(),
        command=command,
        environ=frozenset(environ.split(b"\0")),
    )


def carrying(entry: str) -> list[Process]:
    """The living processes with `NAME=value` in their environment; zombies, which have none, are not among them."""
    wanted = entry.encode()
    found = (look(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return [process for process in found if process and wanted in process.environ and process.state not in "ZX"]
