"""Directories that fail: a full disk under the report, and lock directories of every bad kind."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpuserve.gpu.notes import Note, note_path, write_json

from .mounts import Mounts, fuse, no_fuse, no_mounts
from .scene import ONE
from .table import fault
from .users import AS_NOBODY, NOBODY, another_user

if TYPE_CHECKING:
    from .scene import Scene

__all__: list[str] = []

FILLS = """
def test_first(sglang_server): pass
def test_fill(sglang_server):
    with open(REPORT + "/ballast", "wb", buffering=0) as ballast:
        try:
            while True: ballast.write(bytes(65536))
        except OSError: pass
"""


@fault("the disk under the report directory is full", missing=no_mounts)
def disk_full(scene: Scene) -> None:
    report = scene.project / "report-0"
    scene.tests(FILLS.replace("REPORT", repr(str(report))))
    with Mounts("mkdir report-0 && mount -t tmpfs -o size=2m small report-0", scene.project) as mounts:
        run = scene.start("test_mine.py", "-k", "baseline or graphs", via=mounts.via, place=mounts.place)
        run.disk_full = True
        run.until(lambda: run.checked("test_first"), "the first result")
        run.remember()
        assert run.wait(60) == 1
        assert "INTERNALERROR" not in run.text
        assert "No space left on device" in run.text
        assert run.checked("test_first")["outcome"] == "passed"
        # The table on the terminal is all that is left of the rest.
        assert "sm120-m-graphs.off  infra" in run.text
        lost = run.lost()
        assert not lost, lost
    scene.runs.remove(run)


@fault(
    "the disk under the report directory is full, while another worker waits for the result",
    missing=no_mounts,
    slow=True,
)
def disk_full_waited_for(scene: Scene) -> None:
    report = scene.project / "report-0"
    scene.tests(FILLS.replace("REPORT", repr(str(report))))
    with Mounts("mkdir report-0 && mount -t tmpfs -o size=2m small report-0", scene.project) as mounts:
        run = scene.start("test_mine.py", "-n2", "-k", "baseline or graphs", via=mounts.via, place=mounts.place)
        run.disk_full = True
        run.until(lambda: run.checked("test_first"), "the first result")
        run.remember()
        assert run.wait(60) == 1
        assert "INTERNALERROR" not in run.text
        assert "sm120-m-graphs.off  blocked" in run.text
        assert "it could not be written" in run.text
        lost = run.lost()
        assert not lost, lost
    scene.runs.remove(run)


@fault("a lock directory that is not there, nor its parent", slow=True)
def locks_missing(scene: Scene) -> None:
    scene.locks = scene.folder / "not" / "there"
    run = scene.run(*ONE)
    assert run.outcomes() == {"baseline": "passed"}
    assert scene.locks.stat().st_mode & 0o7777 == 0o777


@fault("a lock directory on a read-only file system", slow=True, missing=no_mounts)
def locks_read_only(scene: Scene) -> None:
    (scene.folder / "read-only").mkdir()
    with Mounts(f"cd {scene.project}; mount -t tmpfs -o ro,mode=777 none ../read-only", scene.project) as mounts:
        scene.run(*ONE, locks=scene.folder / "read-only", via=mounts.via)
    _refused(scene, "its file system is read-only (EROFS)")


@fault("a lock directory on a network file system whose server is dead", missing=no_fuse)
def locks_on_network(scene: Scene) -> None:
    network = scene.folder / "network"
    network.mkdir()
    with Mounts(fuse(str(network)), scene.project) as mounts:
        run = scene.start(*ONE, locks=network, via=mounts.via)
        run.wait(60)
    _refused(scene, "is on a network file system (fuse.sshfs)")


@fault("a lock directory of another user", slow=True, missing=another_user)
def locks_of_another_user(scene: Scene) -> None:
    scene.locks.mkdir(mode=0o755)
    scene.project.chmod(0o777)
    scene.run(*ONE, via=AS_NOBODY)
    _refused(scene, f"is not writable for uid {NOBODY}")


def _refused(scene: Scene, reason: str) -> None:
    """A usage error, with the reason and the way out, before anything was started or written."""
    run = scene.runs[-1]
    assert run.code == 4, run.text
    assert reason in run.text
    assert "--gpu-lock-dir" in run.text
    assert run.folder is None


@fault("a note whose pid is used again, by a stranger", gpus=1)
def recycled_pid(scene: Scene) -> None:
    scene.locks.mkdir()
    scene.locks.chmod(0o777)
    stranger = scene.strangers[0].pid
    note = Note.of_this_process(
        uuid=scene.gpus[0],
        index=0,
        lease="a-dead-lease",
        run_id="a-dead-run",
        cell="cell",
        phase="weights",
        pids=((stranger, 1),),
    )
    write_json(note_path(scene.locks, scene.gpus[0]), asdict(note) | {"pid": stranger, "start": 1})
    Path(scene.locks, f"{scene.gpus[0]}.lock").touch()
    run = scene.run(*ONE)
    assert run.outcomes() == {"baseline": "passed"}, run.message()
    assert run.cells["baseline"]["timings"]["lease_wait"] < 5
