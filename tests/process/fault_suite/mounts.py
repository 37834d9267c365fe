"""File systems of a fault's own: small, read-only or on a network, in a private mount namespace that a process keeps.

What lies in them is read through that process's root, and is gone with it: nothing has to be unmounted.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Mounts", "no_fuse", "no_mounts"]

_FUSE = """
import ctypes, os
fd = os.open("/dev/fuse", os.O_RDWR)
options = f"fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
if ctypes.CDLL(None, use_errno=True).mount(b"host:/export", b"PLACE", b"fuse.sshfs", 0, options):
    raise OSError(ctypes.get_errno(), "mount")
"""


class Mounts:
    """`script` is a shell script of mounts, run in the folder `where`. End it with `close`, or use `with`."""

    def __init__(self, script: str, where: Path) -> None:
        self.process = subprocess.Popen(
            ["unshare", "-m", "--propagation", "private", "sh", "-ec", f"{script}\necho ready\nexec sleep 600"],
            cwd=where,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self.process.stdout
        assert self.process.stderr
        if self.process.stdout.readline() != b"ready\n":
            self.process.wait()
            raise OSError(self.process.stderr.read().decode().strip() or "no mount namespace")
        # A command that starts another in there, in the same folder.
        self.via: Sequence[str] = ["nsenter", "-m", "-w", "-t", str(self.process.pid), "--"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def place(self, path: Path) -> Path:
        """Where a path of in there is seen from here."""
        return Path(f"/proc/{self.process.pid}/root{path}")

    def close(self) -> None:
        """The mounts go once no process is left in there."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout
        assert self.process.stderr
        self.process.stdout.close()
        self.process.stderr.close()


@cache
def no_mounts() -> str:
    """Why there are no private mounts here; empty if there are."""
    try:
        Mounts("mount -t tmpfs -o size=64k small /mnt", Path("/")).close()
    except OSError as error:
        return f"no private mounts ({error})"
    return ""


@cache
def no_fuse() -> str:
    """Why a network file system cannot be pretended here; empty if it can."""
    try:
        Mounts(fuse("/mnt"), Path("/")).close()
    except OSError as error:
        return f"no FUSE mounts ({error})"
    return ""


def fuse(place: str) -> str:
    """A script that mounts something of type fuse.sshfs that never answers, as a dead server's mount does."""
    # The shell has to have the descriptor: the mount is gone when its last holder is.
    code = _FUSE.replace("PLACE", place).replace('os.open("/dev/fuse", os.O_RDWR)', "9")
    return f"exec 9<>/dev/fuse\n{shlex.quote(sys.executable)} -I -S -c {shlex.quote(code)}"
