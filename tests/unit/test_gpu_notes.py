"""Notes beside the locks, and what `holders` makes of them."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import resource
import stat
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpuserve.gpu import notes, process
from pytest_gpuserve.gpu.notes import (
    Note,
    holders,
    note_path,
    quarantined,
    read_json,
    read_note,
    write_json,
    write_note,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

UUID = "GPU-1"


def note(**facts: object) -> Note:
    given = {"uuid": UUID, "index": 3, "lease": "r-1", "run_id": "r", "cell": "sm90-x-baseline", "phase": "weights"}
    return Note.of_this_process(**given | facts)


@contextmanager
def locked(lock_dir: Path, uuid: str = UUID) -> Iterator[None]:
    with (lock_dir / f"{uuid}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def test_note_comes_back_as_it_was_written(tmp_path: Path) -> None:
    written = note(pids=((1, 2), (3, 4)), orphans=("r-0",))
    write_note(tmp_path, written)
    assert read_note(tmp_path, UUID) == written
    assert stat.S_IMODE(note_path(tmp_path, UUID).stat().st_mode) == 0o666
    assert [path.name for path in tmp_path.iterdir()] == ["GPU-1.note.json"]


def test_holder_is_told_in_one_line(tmp_path: Path) -> None:
    write_note(tmp_path, dataclasses.replace(note(), monotonic=notes.time.monotonic() - 754))
    with locked(tmp_path):
        (holder,) = holders(tmp_path)
    assert (holder.held, holder.stale, holder.uuid) == (True, None, UUID)
    user = process.user_name(os.geteuid())
    assert str(holder) == (
        f"GPU 3: held by {user}, pid {os.getpid()}, sm90-x-baseline, phase weights, for 12 min (run r)"
    )


def test_note_whose_lock_is_free_is_stale(tmp_path: Path) -> None:
    write_note(tmp_path, note())
    (tmp_path / f"{UUID}.lock").touch()
    (holder,) = holders(tmp_path)
    assert not holder.held
    assert holder.stale == "the lock is free: the holder ended without giving the GPU up"
    assert "GPU 3: last held by" not in str(holder)
    assert "last by" in str(holder)


@pytest.mark.parametrize("facts", [{"pid": 4_000_000}, {"start": 1}, {"boot": "before"}])
def test_note_of_a_process_that_is_gone_or_whose_pid_was_used_again_is_stale(
    tmp_path: Path, facts: dict[str, object]
) -> None:
    write_note(tmp_path, dataclasses.replace(note(), **facts))
    with locked(tmp_path):
        (holder,) = holders(tmp_path)
    assert holder.held
    assert holder.stale == "the note is of a process that is gone"
    assert "held by an unknown process" in str(holder)


@pytest.mark.parametrize("facts", [{"namespace": "pid:[1]"}, {"host": "another"}])
def test_note_from_another_container_is_believed_and_names_its_host(tmp_path: Path, facts: dict[str, object]) -> None:
    write_note(tmp_path, dataclasses.replace(note(), pid=1, **facts))
    with locked(tmp_path):
        (holder,) = holders(tmp_path)
    assert holder.stale is None
    assert " on " in str(holder)


def test_clock_set_back_changes_no_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_note(tmp_path, note())
    monkeypatch.setattr(notes.time, "time", lambda: 0.0)
    read = read_note(tmp_path, UUID)
    assert read is not None
    assert read.alive
    assert 0 <= (read.seconds or -1) < 60
    assert dataclasses.replace(read, boot="before").seconds is None


def test_held_lock_without_a_note_is_a_holder_too(tmp_path: Path) -> None:
    with locked(tmp_path):
        (holder,) = holders(tmp_path)
    assert str(holder) == "GPU-1: held by a process that left no note"


def test_queue_free_locks_and_a_missing_directory_are_no_holders(tmp_path: Path) -> None:
    (tmp_path / "GPU-2.lock").touch()
    with locked(tmp_path, "queue"):
        assert holders(tmp_path) == []
    assert holders(tmp_path / "missing") == []
    assert quarantined(tmp_path / "missing") == {}


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "{}", '{"pid": "x"}', "[" * 9999, "\0\xff", "1" * 99999])
def test_garbage_is_no_note(tmp_path: Path, content: str) -> None:
    note_path(tmp_path, UUID).write_text(content, encoding="latin-1")
    assert read_note(tmp_path, UUID) is None


def test_terminal_escapes_of_other_users_are_defused(tmp_path: Path) -> None:
    write_note(tmp_path, note(cell="\x1b]0;pwned\x07\n"))
    read = read_note(tmp_path, UUID)
    assert read is not None
    assert read.cell == "?]0;pwned??"


def test_note_that_cannot_be_written_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"n": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_json(path, {"n": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert read_json(path) == {"n": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_symlink_in_place_of_a_note_is_neither_read_nor_written_through(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text(json.dumps(dataclasses.asdict(note())))
    note_path(tmp_path, UUID).symlink_to(target)
    assert read_note(tmp_path, UUID) is None
    before = target.read_text()
    write_note(tmp_path, note(cell="other"))
    assert target.read_text() == before
    assert not note_path(tmp_path, UUID).is_symlink()


def test_directory_and_pipe_in_place_of_a_file_do_not_block(tmp_path: Path) -> None:
    (tmp_path / "dir").mkdir()
    os.mkfifo(tmp_path / "pipe")
    assert read_json(tmp_path / "dir") is None
    assert read_json(tmp_path / "pipe") is None


VALUES = st.recursive(st.none() | st.integers() | st.text(max_size=5) | st.floats(), st.lists, max_leaves=4)


@given(st.dictionaries(st.sampled_from([field.name for field in dataclasses.fields(Note)]), VALUES))
def test_note_of_any_shape_is_a_note_or_none(data: dict[str, object]) -> None:
    full = dataclasses.asdict(note()) | data
    found = Note.from_json(full)
    assert found is None or isinstance(str(notes.Holder(uuid="x", held=True, note=found)), str)


def test_quarantine_tells_reason_and_evidence(tmp_path: Path) -> None:
    write_json(
        tmp_path / "GPU-1.quarantine.json", {"uuid": UUID, "reason": "leak", "evidence": "76 GiB", "since": "now"}
    )
    write_json(tmp_path / "GPU-2.quarantine.json", {"no": "uuid"})
    assert quarantined(tmp_path) == {UUID: "leak; 76 GiB (now)"}


def test_process_with_brackets_and_blanks_in_its_name_is_read() -> None:
    code = "open('/proc/self/comm', 'w').write('a) R (b c'); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-Sc", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout
        child.stdout.readline()
        assert process.describe(child.pid) == f"pid {child.pid} (a) R (b c, {process.user_name(os.geteuid())})"
        assert process.is_alive(child.pid, process.start_of(child.pid))
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert process.start_of(child.pid) is None
    assert process.describe(child.pid) == f"pid {child.pid} (not visible from here)"
