"""The process tree: titles, parent-death signals, the ring that joins the processes, and SGLang's ways to end it."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Child", "descendants", "die_with_parent", "end_as", "fork", "kill_tree", "run_compiler", "set_title"]

_PR_SET_PDEATHSIG = 1


def set_title(title: str) -> None:
    """What `ps` shows: the command line is overwritten in place, as setproctitle does; its first word, cut at 15 bytes,
    is the comm.

    The environment, which lies behind the arguments in memory, stays: it carries the marks that a sweep looks for.
    """
    with suppress(OSError):
        Path("/proc/self/comm").write_text(title.split(maxsplit=1)[0][:15])
    with suppress(OSError, ValueError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])
        data = title.encode()[: max(0, end - start - 1)]
        with Path("/proc/self/mem").open("r+b", buffering=0) as memory:
            memory.seek(start)
            memory.write(data.ljust(end - start, b"\0"))


def die_with_parent() -> None:
    """SIGKILL when the parent ends. A parent that is gone already is not noticed: as in SGLang (sglang#31645)."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class Child:
    """A forked process of the server. `name` is SGLang's for it in messages; `exit_code` once it was reaped."""

    def __init__(self, pid: int, name: str) -> None:
        self.pid = pid
        self.name = name
        self.exit_code: int | None = None

    def reap(self, *, block: bool = False) -> bool:
        """True once it has ended; negative exit codes are signals."""
        if self.exit_code is None:
            try:
                pid, status = os.waitpid(self.pid, 0 if block else os.WNOHANG)
            except ChildProcessError:
                self.exit_code = 0
            else:
                if pid:
                    self.exit_code = os.waitstatus_to_exitcode(status)
        return self.exit_code is not None


def fork(name: str, body: Callable[[], None], *, close: tuple[int, ...] = ()) -> Child:
    """A child that runs `body` and then ends: 0, or 1 after a traceback. `close` are descriptors not meant for it."""
    pid = os.fork()
    if pid:
        return Child(pid, name)
    code = 1
    try:
        for descriptor in close:
            os.close(descriptor)
        body()
        code = 0
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 1
    except BaseException:  # noqa: BLE001 - what a process of its own does: print it and end
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def descendants(pid: int) -> list[int]:
    """Pids of the living children of `pid` and theirs; what a double fork took away is not among them."""
    parents: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208 - half the time of Path.iterdir
        if entry.isdigit():
            with suppress(OSError, ValueError, IndexError):
                fields = Path(f"/proc/{entry}/stat").read_text(errors="replace").rpartition(")")[2].split()
                if fields[0] not in "ZX":
                    parents.setdefault(int(fields[1]), []).append(int(entry))
    found: list[int] = []
    queue = [pid]
    while queue:
        children = parents.get(queue.pop(), [])
        found += children
        queue += children
    return found


def kill_tree() -> None:
    """SIGKILL to every descendant of this process, as SGLang's `kill_process_tree`."""
    for pid in descendants(os.getpid()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def end_as(code: int) -> NoReturn:
    """Ends this process with an exit code as `subprocess` shows it: negative, or above 128, by that signal."""
    if code < 0 or code > 128:
        number = -code if code < 0 else code - 128
        with suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        time.sleep(1)
    os._exit(code & 0xFF)


def run_compiler(seconds: float) -> None:
    """What a kernel's just-in-time compile looks like: nvcc waits, its child cicc burns CPU, nobody writes a line."""

    def cicc() -> None:
        set_title("cicc --c++17 --orig_src_file_name /tmp/kernel.cu -arch compute_120a -m64 kernel.ptx")
        die_with_parent()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            sum(range(20_000))

    def nvcc() -> None:
        set_title("nvcc -std=c++17 -arch=sm_120a -c kernel.cu -o kernel.o")
        die_with_parent()
        fork("cicc", cicc).reap(block=True)

    if seconds > 0:
        fork("nvcc", nvcc).reap(block=True)
