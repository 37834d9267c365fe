"""Files a server may leave: its private TMPDIR, and shared memory and semaphores in `/dev/shm`.

A file in `/dev/shm` is ours only if it came after the server was started, belongs to this user, and either was open
or mapped in a process of ours or has one of our pids in its name; and no living process of others uses it. Whatever
else came meanwhile is at most listed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpuserve.serve import procs

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

__all__ = ["SharedMemory", "folder_owner", "mark_folder", "remove_folder", "remove_remains"]

_SHM = "/dev/shm"  # noqa: S108 (where Linux keeps POSIX shared memory)
_MARK = ".gpuserve"
_SHM_LIST = ".gpuserve-shm"
_NUMBERS = re.compile(r"\d+")
_LOOKS = 10


def mark_folder(path: str) -> None:
    """Writes into the private TMPDIR whose it is."""
    Path(path, _MARK).write_text(procs.identity(os.getpid()), encoding="ascii")


def folder_owner(path: Path) -> str | None:
    """The `identity` of the supervisor that made the folder, None if it is not one of ours."""
    try:
        who = (path / _MARK).read_text(encoding="ascii")
        return who if who.count(":") >= 2 and path.stat().st_uid == os.getuid() else None
    except (OSError, ValueError):
        return None


def remove_folder(path: str) -> bool:
    """Removes a private TMPDIR; True if nothing of it is left."""
    shutil.rmtree(path, ignore_errors=True)
    return not os.path.lexists(path)


def remove_remains(path: str) -> bool:
    """`remove_folder`, and the shared memory that its supervisor had noted in it: for when that one is dead."""
    try:
        noted = [line.rpartition(" ") for line in Path(path, _SHM_LIST).read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        noted = []
    in_use = _in_use(_SHM) if noted else set()
    for name, _, inode in noted:
        file = Path(_SHM, name)
        with contextlib.suppress(OSError):
            stat = file.lstat()
            if stat.st_ino not in in_use and stat.st_uid == os.getuid() and str(stat.st_ino) == inode:
                file.unlink()
    return remove_folder(path)


def _in_use(folder: str, pids: Iterable[int] | None = None) -> set[int]:
    """The inodes of files in `folder` that processes (these, or all) have open or mapped."""
    found: set[int] = set()
    for pid in procs.all_pids() if pids is None else pids:
        found |= procs.opened(pid, f"{folder}/")
    return found


class SharedMemory:
    """What lies in `/dev/shm` since this object was made, and what of it is ours."""

    def __init__(self, tmpdir: str, folder: str = _SHM) -> None:
        self._folder = folder
        self._list = Path(tmpdir, _SHM_LIST)
        self._before = self._listing()
        self._used: dict[str, int] = {}
        self._looks: dict[int, int] = {}

    def _listing(self) -> dict[str, int]:
        """Name → inode."""
        try:
            with os.scandir(self._folder) as entries:
                return {entry.name: entry.inode() for entry in entries if not entry.is_dir(follow_symlinks=False)}
        except OSError:
            return {}

    def _new(self) -> dict[str, int]:
        return {name: inode for name, inode in self._listing().items() if self._before.get(name) != inode}

    def observe(self, pids: Iterable[int], *, thorough: bool = False) -> None:
        """Notes which new files these processes use, for `clean` and, in the private TMPDIR, for whoever has to clean
        in our place.

        To be called often: a server that crashes lives for half a second with its files. Cheap while nothing is new:
        a file that none of ours used at the first looks is a stranger's, and only looked at again if `thorough`.
        """
        new = self._new()
        unknown = {
            name: inode
            for name, inode in new.items()
            if self._used.get(name) != inode and (thorough or self._looks.get(inode, 0) < _LOOKS)
        }
        if not unknown:
            return
        in_use = _in_use(self._folder, pids)
        self._looks |= {inode: self._looks.get(inode, 0) + 1 for inode in unknown.values()}
        found = {name: inode for name, inode in unknown.items() if inode in in_use}
        if not found:
            return
        self._used |= found
        # Added, never written anew: what is noted stays so if the disk is full, or this process is killed here.
        with contextlib.suppress(OSError), self._list.open("a", encoding="utf-8") as file:
            file.writelines(f"{name} {inode}\n" for name, inode in sorted(found.items()))

    def clean(self, pids: Collection[int]) -> tuple[list[str], list[str]]:
        """After the server's end: the paths that were removed, and new ones nobody uses that were not ours.

        `pids` are all that ever belonged to the server.
        """
        new = self._new()
        if not new:
            return [], []
        in_use = _in_use(self._folder)
        removed, left = [], []
        for name, inode in sorted(new.items()):
            if inode in in_use:
                continue
            path = Path(self._folder, name)
            named = any(int(number) in pids for number in _NUMBERS.findall(name) if len(number) < 10)
            try:
                if path.lstat().st_uid != os.getuid():
                    continue
                if self._used.get(name) == inode or named:
                    path.unlink()
                    removed.append(str(path))
                else:
                    left.append(str(path))
            except OSError:
                continue
        return removed, left
