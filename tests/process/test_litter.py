"""What a server leaves in /dev/shm: removed when it was ours, never when it was not."""

from __future__ import annotations

import multiprocessing
import os
import resource
import subprocess
import sys
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from pytest_gpuserve.serve.litter import SharedMemory, remove_remains

_HOLDER = """
import multiprocessing, sys
from multiprocessing import shared_memory, synchronize
memory = shared_memory.SharedMemory(create=True, size=4096)
# As the spawn method makes them: named until the tracker removes them.
semaphore = multiprocessing.get_context("spawn").Semaphore(1)
print(memory.name, semaphore._semlock.name.lstrip("/"), flush=True)
sys.stdin.read()
"""


def hold() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _HOLDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.fixture
def holder():
    """A process with a shared memory file and a semaphore, which removes them when its input ends."""
    process = hold()
    yield process
    process.communicate()


def test_files_and_semaphores_of_a_killed_process_are_removed(tmp_path, holder):
    ours = SharedMemory(str(tmp_path))
    process = hold()
    memory, semaphore = process.stdout.readline().split()
    foreign = holder.stdout.readline().split()
    files = [f"/dev/shm/{memory}", f"/dev/shm/sem.{semaphore}"]
    assert all(Path(file).exists() for file in files)
    ours.observe([process.pid])
    os.killpg(process.pid, 9)
    process.communicate()
    removed, left = ours.clean([process.pid])
    assert set(files) <= set(removed)
    assert not [file for file in files if Path(file).exists()]
    # Those of the other process are in use: neither removed nor listed.
    assert all(Path(f"/dev/shm/{name}").exists() for name in (foreign[0], f"sem.{foreign[1]}"))
    assert not [file for file in left if foreign[0] in file or foreign[1] in file]


def test_a_full_disk_does_not_take_the_list_of_what_is_to_be_removed(tmp_path):
    private = tmp_path / "private"
    private.mkdir()
    ours = SharedMemory(str(private))
    first, second = (Path(f"/dev/shm/gpuserve-{os.getpid()}-{number}") for number in range(2))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with first.open("w"):
            ours.observe([os.getpid()])
        with second.open("w"):
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
            ours.observe([os.getpid()])
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert remove_remains(str(private))
        assert not first.exists()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        first.unlink(missing_ok=True)
        second.unlink(missing_ok=True)


def test_what_no_process_of_ours_used_is_only_listed(tmp_path):
    ours = SharedMemory(str(tmp_path))
    block = shared_memory.SharedMemory(create=True, size=4096)
    path = f"/dev/shm/{block.name}"
    ours.observe([])
    block.close()
    try:
        removed, left = ours.clean([])
        assert path in left
        assert path not in removed
        assert Path(path).exists()
    finally:
        block.unlink()
        assert multiprocessing.active_children() == []
