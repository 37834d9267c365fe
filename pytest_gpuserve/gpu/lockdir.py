"""The directory of the locks: one for the machine, usable by every user, never on a network file system.

In a sticky directory (`/tmp` itself) the second user is refused his own lock, so the locks have a directory of their
own with mode 0777 (or a group's, 2770). Locks on NFS hang for ever or fail with ESTALE (zc.lockfile#26).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from pathlib import Path, PurePath

from pytest_gpuserve.errors import MachineError, UsageError

__all__ = ["default_lock_dir", "filesystem_of", "is_network", "make_shared", "prepare", "stem"]

_NEXT = (
    "Choose another with --gpu-lock-dir (GPUSERVE_LOCK_DIR); "
    "every user and container of this machine must name the same one."
)
_NETWORK = re.compile(
    r"nfs\d*|cifs|smb\d*|smbfs|ncpfs|afs|ceph|lustre|gpfs|beegfs\w*|9p|glusterfs|orangefs|pvfs2|panfs|wekafs|ocfs2"
    r"|gfs2?|coda|fuse\.(sshfs|ceph\S*|gluster\w*|s3fs|gcsfuse|rclone|smb\w*|mfs|juicefs|goofys|mount-s3|blobfuse2?|davfs\w*|nfs\w*)"
)


def default_lock_dir() -> Path:
    """The same for every user: /run/lock/gpuserve where all may write to /run/lock, else /var/tmp/gpuserve-locks.

    An administrator's own /run/lock/gpuserve is always preferred.
    """
    run_lock = Path("/run/lock")
    ours = run_lock / "gpuserve"
    try:
        if ours.is_dir() or run_lock.stat().st_mode & stat.S_IWOTH:
            return ours
    except OSError:
        pass
    return Path("/var/tmp/gpuserve-locks")  # noqa: S108 - machine-wide on purpose; `prepare` refuses what is unsafe


def stem(uuid: str) -> str:
    """The file name a GPU's files begin with. Old MIG UUIDs hold slashes (`MIG-GPU-…/1/0`)."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", uuid).lstrip(".") or "_"


def prepare(path: Path) -> Path:
    """Make the lock directory if it is missing, and check it; returns it as an absolute path.

    UsageError if it can never hold locks (a symlink, not a directory, sticky, on a network file system); MachineError
    if it cannot be made or written to now.
    """
    path = path.absolute()
    _refuse_network(path)
    try:
        found = path.lstat()
    except FileNotFoundError:
        try:
            make_shared(path)
        except OSError as error:
            raise MachineError(
                f"the lock directory {path} is missing and cannot be made: {_why(error)}. {_NEXT}"
            ) from error
        found = path.lstat()
    except OSError as error:
        raise MachineError(f"the lock directory {path} cannot be read: {_why(error)}. {_NEXT}") from error
    if stat.S_ISLNK(found.st_mode):
        raise UsageError(f"the lock directory {path} is a symlink, which could lead the locks anywhere. {_NEXT}")
    if not stat.S_ISDIR(found.st_mode):
        raise UsageError(f"the lock directory {path} is not a directory. {_NEXT}")
    if found.st_mode & stat.S_ISVTX:
        raise UsageError(
            f"the lock directory {path} is sticky (mode {stat.S_IMODE(found.st_mode):o}): in it a second user cannot "
            f"take a lock that the first one made. Use a directory of its own, such as {path / 'gpuserve'}. {_NEXT}"
        )
    _refuse_network(path.resolve())
    if os.access(path, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
        return path
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        raise MachineError(
            f"the lock directory {path} cannot be written to: its file system is read-only (EROFS). {_NEXT}"
        )
    raise MachineError(
        f"the lock directory {path} (owner uid {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}) is not "
        f"writable for uid {os.geteuid()} (EACCES). Its owner can open it: chmod 0777 {path}. {_NEXT}"
    )


def _why(error: OSError) -> str:
    return f"{error.strerror} ({errno.errorcode.get(error.errno or 0, 'no errno')})"


def make_shared(path: Path, *, attempts: int = 8) -> None:
    """Make the directory `path` 0777 in one step, whatever the umask: another user may look between mkdir and chmod.

    Missing parents come with it, 0755. One that is there already is left as it is. OSError if it cannot be made.
    """
    if path.is_dir():
        return
    top = path
    while not top.parent.exists():
        top = top.parent
    draft = top.with_name(f".{top.name}.{os.urandom(8).hex()}")
    made = [draft]
    try:
        draft.mkdir(mode=0o700)
        for name in path.relative_to(top).parts:
            made.append(made[-1] / name)
            made[-1].mkdir(mode=0o700)
        for folder in made:
            folder.chmod(0o777 if folder is made[-1] else 0o755)
        draft.rename(top)
    except OSError:
        for folder in reversed(made):
            with contextlib.suppress(OSError):
                folder.rmdir()
        if attempts == 1 or not top.parent.is_dir() or (top.exists() and not top.is_dir()):
            raise
        # Somebody else made it meanwhile: renaming onto a directory with files in it fails, and one that is empty
        # still can be replaced by another's.
        make_shared(path, attempts=attempts - 1)


def _refuse_network(path: Path) -> None:
    try:
        mountinfo = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return
    kind = filesystem_of(path, mountinfo)
    if is_network(kind):
        raise UsageError(
            f"the lock directory {path} is on a network file system ({kind}), where locks hang or hold nothing. {_NEXT}"
        )


def is_network(kind: str) -> bool:
    """True for the type of a network or cluster file system, as mountinfo spells it."""
    return _NETWORK.fullmatch(kind) is not None


def filesystem_of(path: PurePath, mountinfo: str) -> str:
    """The type of the file system an absolute `path` is on, by the longest mount point that leads to it. Pure.

    Of two mounts on one point the later one counts. Empty if nothing fits.
    """
    best, kind = -1, ""
    for line in mountinfo.splitlines():
        before, separator, after = line.partition(" - ")
        fields = before.split(" ")
        if not separator or len(fields) < 5:
            continue
        mount = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
        if path.is_relative_to(mount) and len(mount) >= best:
            best, kind = len(mount), after.split(" ")[0]
    return kind
