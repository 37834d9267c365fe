"""Lock files: taken through filelock, looked at without it.

The kernel frees a lock when the last descriptor of the holder is closed, so kill -9 leaves none behind. The
descriptor does not survive an exec, and filelock closes it in a forked child: a test that forks and outlives its
supervisor must not keep a GPU (aws-c-common#1192 is the same mistake elsewhere).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from typing import TYPE_CHECKING

from pytest_gpuserve.errors import MachineError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from filelock import BaseFileLock

__all__ = ["is_held", "take"]


def take(path: Path, timeout: float) -> BaseFileLock | None:
    """Take the lock file `path` within `timeout` seconds (0: at once or not at all); None if it stays held.

    The lock may be released in another thread. UsageError if the path is a symlink or no file; MachineError if the
    file cannot be opened or the file system has no locks.
    """
    from filelock import FileLock, Timeout  # 30 ms of imports, needed only by those who take a lock

    # Not thread-local: a supervisor may take a lease in one thread and give it up in another. Never the soft kind,
    # which is a file that outlives its owner.
    lock = FileLock(path, mode=0o666, thread_local=False, fallback_to_soft=False)
    if not os.path.lexists(path):
        _make(path)
    try:
        lock.acquire(timeout=timeout, poll_interval=0.005)
    except Timeout:
        return None
    except (OSError, NotImplementedError) as error:
        raise _explain(path, error) from error
    return lock


def is_held(path: Path) -> bool:
    """True if somebody holds the lock `path` now. Takes nothing away: the look is a shared lock for an instant."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise _explain(path, error) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _make(path: Path) -> None:
    """Make the lock file 0666 in one step, whatever the umask.

    filelock opens the mode of a new file only when it has locked it: another account that comes in between is refused.
    """
    draft = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    with contextlib.suppress(OSError):  # made by somebody else meanwhile; or what is wrong here, the taking will say
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(fd, 0o666)
            os.link(draft, path)
        finally:
            os.close(fd)
            draft.unlink()


def _explain(path: Path, error: Exception) -> MachineError | UsageError:
    code = getattr(error, "errno", None)
    if code in {errno.ELOOP, errno.EISDIR, errno.ENXIO}:
        return UsageError(
            f"the lock {path} is not a plain file (a symlink, a directory or a pipe), so somebody else put it there: "
            f"look at it with `ls -l {path}`, remove it, or choose another directory with --gpu-lock-dir"
        )
    if code in {errno.EACCES, errno.EPERM, errno.EROFS}:
        return MachineError(
            f"the lock {path} cannot be opened by uid {os.geteuid()}: {os.strerror(code)}. Another account made it "
            f"without sharing it: its owner can `chmod 0666 {path}`, or choose another directory with --gpu-lock-dir"
        )
    return MachineError(
        f"the lock {path} cannot be taken: {error or type(error).__name__}. If this file system has no locks, choose "
        "a local directory with --gpu-lock-dir"
    )
