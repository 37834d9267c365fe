"""Births and deaths among a server's processes, by the kernel's word (a closed pipe, pidfds), not by asking around."""

from __future__ import annotations

import os
from time import monotonic
from typing import TYPE_CHECKING

from pytest_gpuserve.serve import procs

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from pytest_gpuserve.serve.loop import Loop

__all__ = ["Deaths", "Handover"]

_TITLE = "sglang::"


class Deaths:
    """Watches main from the start, and schedulers and detokenizers from when they have their names.

    `exit` is main's, as `Popen.returncode`, None while it lives; `ended_at` when it was noticed. `first` describes the
    first process that died, other than main: `sglang::scheduler (pid 4242), signal 9`. SGLang does not always notice
    itself: with the detokenizer killed, the others lived on (0.5.17).
    """

    def __init__(self, loop: Loop, pid: int, *, on_main: Callable[[], object], on_other: Callable[[], object]) -> None:
        self.exit: int | None = None
        self.ended_at = float("inf")
        self.first: str | None = None
        self._loop, self._pid = loop, pid
        self._on_main, self._on_other = on_main, on_other
        self._fds = {pid: os.pidfd_open(pid)}
        loop.watch(self._fds[pid], self._main_ended)

    def follow(self, tree: Collection[procs.Proc]) -> None:
        """Takes in a new look at the server's processes.

        A compiler that a scheduler starts has the scheduler's own title until it has executed: such a fork is no
        scheduler, and its end is nothing to report.
        """
        titles = {proc.pid: _title(proc) for proc in tree}
        for proc in tree:
            title = titles[proc.pid]
            if not title or proc.pid in self._fds or proc.state in "ZX" or titles.get(proc.ppid) == title:
                continue
            try:
                fd = os.pidfd_open(proc.pid)
            except OSError:
                continue
            self._fds[proc.pid] = fd
            self._loop.watch(fd, lambda pid=proc.pid, title=title: self._other_ended(pid, title))  # type: ignore[misc]

    def close(self) -> None:
        """Watches nothing any more."""
        for fd in self._fds.values():
            self._loop.unwatch(fd)
            os.close(fd)
        self._fds.clear()

    def _main_ended(self) -> None:
        self._loop.unwatch(self._fds[self._pid])
        # WNOWAIT: while main is a zombie its pid, which is its session's too, cannot be given to anybody else.
        info = os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        self.exit = 0
        if info:
            self.exit = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
        self.ended_at = monotonic()
        self._on_main()

    def _other_ended(self, pid: int, title: str) -> None:
        self._loop.unwatch(self._fds[pid])
        if self.first is None:
            stat = procs.read_stat(pid)
            how = ""
            if stat and stat.zombie and stat.status:
                code = os.waitstatus_to_exitcode(stat.status)
                how = f", signal {-code}" if code < 0 else f", exit {code}"
            self.first = f"{title} (pid {pid}){how}"
        self._on_other()


class Handover:
    """Did the shim become the server? Its pipe `fd` ends with the `exec`; else it says why that failed."""

    def __init__(
        self, loop: Loop, fd: int, *, on_success: Callable[[], object], on_failure: Callable[[str], object]
    ) -> None:
        self._loop, self._fd = loop, fd
        self._on_success, self._on_failure = on_success, on_failure
        self._settled = False
        loop.watch(fd, self.settle)

    def settle(self) -> None:
        """Reads the outcome, once: when it is there, or at the latest when main has ended."""
        if self._settled:
            return
        self._settled = True
        reason = os.read(self._fd, 4096).decode(errors="replace")
        self._loop.unwatch(self._fd)
        os.close(self._fd)
        if reason:
            self._on_failure(reason)
        else:
            self._on_success()


def _title(proc: procs.Proc) -> str:
    """What SGLang calls this process: `sglang::scheduler_TP0`; empty for any other."""
    if proc.cmdline.startswith(_TITLE):
        return proc.cmdline.split(" ", 1)[0]
    return proc.comm if proc.comm.startswith(_TITLE) else ""
