"""Run folders: `.gpuserve/runs/<UTC time>-<id>/`, with `latest` and a bounded history."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from pytest_gpuserve.errors import MachineError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["EVENTS", "KEEP", "LATEST", "new_run_folder"]

EVENTS = "events.jsonl"
KEEP = 30
LATEST = "latest"
_NAME = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{6}")


def new_run_folder(report_dir: Path, started: datetime | None = None, *, keep: int = KEEP) -> Path:
    """A new, empty folder for one run under `report_dir/runs`; `latest` names it, all but the last `keep` are removed.

    `started` is an aware time (default: now). Only folders that this function made are ever removed, and none whose
    run still goes on. UsageError if the directory cannot be written, MachineError if the disk is full.
    """
    started = (started or datetime.now(UTC)).astimezone(UTC)
    runs = report_dir / "runs"
    try:
        runs.mkdir(parents=True, exist_ok=True)
        folder = _create(runs, f"{started:%Y%m%dT%H%M%SZ}")
        # This file marks the folder as ours and, locked by `store.Events`, as in use.
        (folder / EVENTS).touch()
        (folder / "cells").mkdir()
    except OSError as error:
        kind = MachineError if error.errno in (errno.ENOSPC, errno.EDQUOT) else UsageError
        raise kind(
            f"the report directory {report_dir} cannot be written: {error.strerror} ({error.filename}). "
            "Choose another with --gpu-report DIR."
        ) from error
    _point_latest(runs, folder)
    _prune(runs, keep, folder)
    return folder


def _create(runs: Path, stamp: str) -> Path:
    while True:
        folder = runs / f"{stamp}-{secrets.token_hex(3)}"
        with suppress(FileExistsError):
            folder.mkdir()
            return folder


def _point_latest(runs: Path, folder: Path) -> None:
    """Replaces the link in one step. A file system without links, or a folder of that name, costs only the link."""
    temporary = runs / f".{LATEST}-{folder.name}"
    try:
        temporary.symlink_to(folder.name, target_is_directory=True)
        temporary.replace(runs / LATEST)
    except OSError:
        with suppress(OSError):
            temporary.unlink()


def _prune(runs: Path, keep: int, newest: Path) -> None:
    ours = sorted(
        entry.name for entry in os.scandir(runs) if _NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
    )
    for name in ours[: max(len(ours) - keep, 0)]:
        folder = runs / name
        if folder == newest or not (folder / EVENTS).is_file():
            continue
        with _unused(folder / EVENTS) as unused:
            if unused:
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _unused(events: Path) -> Iterator[bool]:
    """True if no run holds the folder. Where locks do not work, every folder counts as in use."""
    try:
        descriptor = os.open(events, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except OSError:
        yield False
    finally:
        os.close(descriptor)
