"""Does somebody's living compile hold a lock that our server may be waiting for?

JIT caches are shared between runs and users' sessions, and each kernel is compiled under a lock: FlashInfer, tvm-ffi
and SGLang's own JIT use `flock` on a file in their cache (polled or blocking, so the waiting side cannot be told from
`/proc/locks`), torch's extensions use a file named `lock` that merely exists (FileBaton). So the question is asked
from the other end: is there a compiler, not of our tree, using CPU, below a process that has such a lock?

It errs towards patience: a server that hangs for another reason is called hung only when that compile has ended.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpuserve.serve.procs import all_pids, in_detail, read_stat
from pytest_gpuserve.serve.progress import is_compiler

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from pytest_gpuserve.serve.procs import Proc

__all__ = ["CompileLocks", "cache_folders"]


def cache_folders(env: Mapping[str, str]) -> tuple[str, ...]:
    """Where a server with this environment keeps what it compiles, each with a slash at its end."""
    home = env.get("HOME") or str(Path.home())
    named = [
        value
        for name, value in env.items()
        if name.endswith(("_CACHE_DIR", "_CACHE_HOME", "_WORKSPACE_BASE", "_WORKSPACE_DIR", "_EXTENSIONS_DIR"))
    ]
    return tuple(f"{folder.rstrip('/')}/" for folder in (f"{home}/.cache", f"{home}/.triton", *named) if folder)


class CompileLocks:
    """Callable for `Watch(compile_lock=…)`. `env` is the server's environment, `ours` gives the pids of its tree."""

    def __init__(self, env: Mapping[str, str], ours: Callable[[], Collection[int]]) -> None:
        self._folders = cache_folders(env)
        self._ours = ours
        self._cpu: dict[tuple[int, float], float] = {}

    def __call__(self) -> str | None:
        """Text such as `ninja (pid 4242), which holds …/.cache/flashinfer/…/tmp/x.lock`, or None."""
        ours = set(self._ours())
        procs = {stat.pid: in_detail(stat) for pid in all_pids() if (stat := read_stat(pid))}
        working = [proc for proc in procs.values() if proc.pid not in ours and is_compiler(proc) and self._works(proc)]
        self._cpu = {(proc.pid, proc.started): proc.cpu for proc in procs.values() if is_compiler(proc)}
        for proc in working:
            lock = self._baton(proc) or self._flock(proc, procs, ours)
            if lock:
                return f"{proc.comm} (pid {proc.pid}), which compiles under {lock}"
        return None

    def _works(self, proc: Proc) -> bool:
        """It used CPU since the last question; at the first it is believed."""
        return proc.state not in "TZX" and proc.cpu > self._cpu.get((proc.pid, proc.started), -1.0)

    def _baton(self, proc: Proc) -> str | None:
        try:
            folder = os.readlink(f"/proc/{proc.pid}/cwd")  # noqa: PTH115
        except OSError:
            return None
        inside = f"{folder}/".startswith(self._folders)
        return f"{folder}/lock" if inside and Path(folder, "lock").exists() else None

    def _flock(self, proc: Proc, procs: Mapping[int, Proc], ours: set[int]) -> str | None:
        """The lock that the compiler or one of its ancestors holds."""
        holders = _flock_holders()
        ancestor: Proc | None = proc
        while ancestor is not None and ancestor.pid > 1 and ancestor.pid not in ours:
            for inode in holders.get(ancestor.pid, ()):
                path = _open_file(ancestor.pid, inode)
                if path and path.startswith(self._folders):
                    return path
            ancestor = procs.get(ancestor.ppid)
        return None


def _flock_holders() -> dict[int, set[int]]:
    """Pid → inodes of the files it holds an flock on. Not the device: on btrfs and overlays `stat` says another."""
    holders: dict[int, set[int]] = {}
    try:
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return holders
    for line in lines:
        words = line.split()
        if len(words) < 6 or words[1] != "FLOCK":  # a waiter's line has `->` there
            continue
        holders.setdefault(int(words[4]), set()).add(int(words[5].rpartition(":")[2]))
    return holders


def _open_file(pid: int, inode: int) -> str | None:
    """The path under which a process has that file open, None where its descriptors may not be read."""
    try:
        with os.scandir(f"/proc/{pid}/fd") as entries:
            for entry in entries:
                try:
                    if entry.stat().st_ino == inode:
                        return os.readlink(entry.path)  # noqa: PTH115
                except OSError:
                    continue
    except OSError:
        return None
    return None
