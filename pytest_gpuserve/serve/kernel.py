"""What the kernel says: its messages, and how many processes of our cgroup it has killed for memory."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from pytest_gpuserve.serve.faults import KERNEL

__all__ = ["messages", "oom_kills"]

_MOST = 2_000


def messages(since: float, *, device: str = "/dev/kmsg") -> tuple[list[str], str]:
    """The kernel's messages of interest since `since` (seconds since the epoch), as `[seconds since boot] text`, and
    why they cannot be read, empty if they can. Reading takes none away from other readers.
    """
    earliest = time.monotonic() - (time.time() - since)
    try:
        fd = os.open(device, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        return [], f"{device}: {error.strerror}"
    found: list[str] = []
    try:
        for _ in range(1 << 17):
            try:
                record = os.read(fd, 8192)
            except BlockingIOError:
                break
            except BrokenPipeError:  # overwritten while we read
                continue
            if not record:
                break
            head, _, text = record.decode(errors="replace").partition(";")
            fields = head.split(",")
            seconds = int(fields[2]) / 1e6 if len(fields) > 2 and fields[2].isdigit() else 0.0
            line = text.partition("\n")[0]
            if seconds >= earliest and KERNEL.search(line):
                found.append(f"[{seconds:.3f}] {line}")
    except OSError as error:
        return found, f"{device}: {error.strerror}"
    finally:
        os.close(fd)
    return found[-_MOST:], ""


def oom_kills() -> int:
    """The kernel's count of out-of-memory kills in this process's cgroup, 0 where it cannot be read. Take it before
    and after: the difference counts.
    """
    for path in _counters():
        try:
            text = path.read_text(encoding="ascii")
        except OSError:
            continue
        if match := re.search(r"^oom_kill (\d+)$", text, re.MULTILINE):
            return int(match[1])
    return 0


def _counters() -> list[Path]:
    """Version 2 of cgroups, then 1; inside a container the path given is often the host's, and the root is ours."""
    root = Path("/sys/fs/cgroup")
    found: list[Path] = []
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return found
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found += [root / path.lstrip("/") / "memory.events", root / "memory.events"]
        elif "memory" in controllers.split(","):
            old = root / "memory"
            found += [old / path.lstrip("/") / "memory.oom_control", old / "memory.oom_control"]
    return found
