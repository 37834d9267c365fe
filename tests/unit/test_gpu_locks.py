"""Lock files that several accounts share: what another one may see while they are made."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from typing import TYPE_CHECKING

import pytest

from pytest_gpuserve.gpu import lockdir
from pytest_gpuserve.gpu.locks import is_held, take
from pytest_gpuserve.gpu.sim import create
from pytest_gpuserve.serve.ports import acquire_block

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def tight_umask() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


def test_lock_file_is_open_to_everybody_from_the_moment_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "GPU-1.lock"
    seen = []
    flock = fcntl.flock

    def look_and_lock(fd: int, operation: int) -> None:
        seen.append(stat.S_IMODE(path.stat().st_mode))
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", look_and_lock)
    lock = take(path, 0)
    assert lock is not None
    lock.release()
    assert seen[0] == 0o666
    assert list(tmp_path.iterdir()) == [path]


def test_lock_is_taken_where_files_cannot_be_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "GPU-1.lock"
    lock = take(path, 0)
    assert lock is not None
    assert is_held(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666
    assert list(tmp_path.iterdir()) == [path]
    lock.release()


def test_lock_that_somebody_else_makes_meanwhile_is_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "GPU-1.lock"
    theirs = take(tmp_path / "theirs", 0)
    assert theirs is not None
    link = os.link

    def come_second(source: Path, target: Path) -> None:
        if not target.exists():
            (tmp_path / "theirs").rename(target)
        link(source, target)

    monkeypatch.setattr(os, "link", come_second)
    assert take(path, 0) is None
    assert list(tmp_path.iterdir()) == [path]
    theirs.release()


def test_folder_of_the_ports_is_open_to_everybody_from_the_moment_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renamed = []
    rename = lockdir.Path.rename

    def look_and_rename(draft: Path, target: Path) -> Path:
        renamed.append((target.name, target.exists(), stat.S_IMODE(draft.stat().st_mode)))
        return rename(draft, target)

    monkeypatch.setattr(lockdir.Path, "rename", look_and_rename)
    acquire_block(tmp_path).release()
    assert renamed == [("ports", False, 0o777)]


def test_shared_simulated_machine_is_open_to_everybody_from_the_moment_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = set()
    mkdir = os.mkdir

    def make_and_look(path: Path, *mode: int) -> None:
        mkdir(path, *mode)
        there = [one for one in tmp_path.rglob("*") if one.is_dir() and "/." not in str(one)]
        modes.update(stat.S_IMODE(one.stat().st_mode) for one in there)

    monkeypatch.setattr(os, "mkdir", make_and_look)
    create(tmp_path / "machine", "2xsm120")
    assert modes == {0o777}


def test_only_the_lock_directory_itself_may_be_written_to_by_everybody(tmp_path: Path) -> None:
    made = lockdir.prepare(tmp_path / "srv" / "ci" / "locks")
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (made, made.parent, made.parent.parent)]
    assert modes == [0o777, 0o755, 0o755]
    assert [path.name for path in tmp_path.iterdir()] == ["srv"]


def test_shared_folder_is_made_although_its_parent_is_replaced_by_somebody_elses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty folder can be renamed onto an empty one, which is then no folder to make anything in."""
    mkdir, lost = os.mkdir, []
    (tmp_path / "machine").mkdir()

    def lose_once(path: Path, *mode: int) -> None:
        if path.parent.name == "machine" and not lost:
            lost.append(path)
            (tmp_path / "theirs").mkdir()
            (tmp_path / "theirs").rename(path.parent)
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        mkdir(path, *mode)

    monkeypatch.setattr(os, "mkdir", lose_once)
    lockdir.make_shared(tmp_path / "machine" / "locks")
    assert lost
    assert stat.S_IMODE((tmp_path / "machine" / "locks").stat().st_mode) == 0o777
    assert [path.name for path in (tmp_path / "machine").iterdir()] == ["locks"]


def test_shared_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "ports").touch()
    with pytest.raises(NotADirectoryError):
        lockdir.make_shared(tmp_path / "ports")
    assert [path.name for path in tmp_path.iterdir()] == ["ports"]
