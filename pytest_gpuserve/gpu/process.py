"""Other processes, as /proc shows them: alive or not, whose, and with which environment mark.

A pid alone names nobody for long: pids are used again. A pid with its start time does (`/proc/PID/stat`, field 22, in
ticks since boot, so a clock that is set back changes nothing).
"""

from __future__ import annotations

import os
import pwd
import re
from pathlib import Path

__all__ = ["describe", "gpu_user", "is_alive", "marked", "pid_namespace", "start_of", "user_name"]

_PROC = Path("/proc")
# The kernel's fixed inode number of the first PID namespace (PROC_PID_INIT_INO), in which every pid is valid.
_FIRST_NAMESPACE = "pid:[4026531836]"
_COMPUTE_DEVICE = re.compile(r"/dev/nvidia(?:\d+|-uvm)$")


def start_of(pid: int) -> int | None:
    """The process's start time in clock ticks since boot; None if it is gone, or a zombie that holds nothing more."""
    try:
        stat = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    # The command stands in brackets and may hold anything, brackets and spaces too.
    state, *fields = stat[stat.rindex(b")") + 1 :].split()
    return None if state in {b"Z", b"X"} else int(fields[18])


def is_alive(pid: int, start: int | None = None) -> bool:
    """True if that process runs; with `start` given, only if it is still the same one."""
    now = start_of(pid)
    return now is not None and start in {None, now}


def pid_namespace() -> str:
    """Pids can be compared only inside one namespace: a container with the lock directory mounted has its own."""
    try:
        return str((_PROC / "self/ns/pid").readlink())
    except OSError:
        return "unknown"


def gpu_user(pid: int) -> int | None:
    """The start time of the process that NVML means by `pid`; None unless it is known to be the one that /proc shows.

    NVML in a container, or in a virtual machine that forwards calls to the host's driver, may report the host's pids:
    there pid 1 is not the init that is seen here. A process that computes on a GPU has its device file open. Where
    that may not be looked at (another user's process), the pid is believed only in the machine's first PID namespace.
    """
    start = start_of(pid)
    if start is None:
        return None
    try:
        files = list((_PROC / str(pid) / "fd").iterdir())
    except PermissionError:
        return start if pid_namespace() == _FIRST_NAMESPACE else None
    except OSError:  # it is gone
        return None
    return start if any(_COMPUTE_DEVICE.match(_target(file)) for file in files) else None


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:  # closed meanwhile
        return ""


def describe(pid: int, *, identified: bool = True) -> str:
    """`pid 4242 (python, alice)`, or that it cannot be seen from here (NVML in a container reports the host's pids).

    A pid that is not `identified` gets no name: the process of that number here may be another one.
    """
    if not identified:
        known = "not identified: it may be of another PID namespace" if is_alive(pid) else "not visible from here"
        return f"pid {pid} ({known})"
    folder = _PROC / str(pid)
    try:
        command = (folder / "comm").read_text(errors="replace").strip()
        owner = folder.stat().st_uid
    except OSError:
        return f"pid {pid} (not visible from here)"
    return f"pid {pid} ({command}, {user_name(owner)})"


def user_name(uid: int) -> str:
    """The account's name, or `uid 1234` where there is none (containers)."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def marked(name: str, values: set[str]) -> list[int]:
    """Live processes whose environment at their start had `name` with one of `values`.

    Other users' environments cannot be read without privileges: such processes are not found.
    """
    wanted = {f"{name}={value}".encode() for value in values}
    found = []
    for entry in os.scandir(_PROC):
        if not entry.name.isdigit():
            continue
        try:
            environ = (_PROC / entry.name / "environ").read_bytes()
        except OSError:
            continue
        if not wanted.isdisjoint(environ.split(b"\0")) and is_alive(int(entry.name)):
            found.append(int(entry.name))
    return sorted(found)
