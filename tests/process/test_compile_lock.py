"""Waiting for somebody else's compile: found by the lock its process holds and by the compiler's CPU time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from pytest_gpuserve.gpu import process
from pytest_gpuserve.serve.compile_lock import CompileLocks, cache_folders
from pytest_gpuserve.serve.procs import read_stat

from .supervised import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OTHER = """
import fcntl, os, sys
folder, how, name = sys.argv[1:]
os.makedirs(folder, exist_ok=True)
lock = open(os.path.join(folder, "lock" if how == "baton" else "kernel.lock"), "w")
if how == "flock":
    fcntl.flock(lock, fcntl.LOCK_EX)
if os.fork() == 0:
    os.chdir(folder)
    open("/proc/self/comm", "w").write(name)
    print(os.getpid(), flush=True)
    while True:
        pass
os.wait()
"""


@pytest.fixture
def others() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for other in started:
        if other.poll() is None:
            os.killpg(other.pid, signal.SIGKILL)
            other.wait()
        assert other.stdout
        other.stdout.close()


def compile_elsewhere(started: list[subprocess.Popen[str]], folder: Path, how: str, name: str) -> int:
    """The compiler's pid; the last of `started` is its parent, and its process group both."""
    command = [sys.executable, "-c", OTHER, str(folder), how, name]
    other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    started.append(other)
    assert other.stdout
    return int(other.stdout.readline())


def cpu(pid: int) -> float:
    stat = read_stat(pid)
    assert stat is not None
    return stat.cpu


def state(pid: int) -> str:
    stat = read_stat(pid)
    return stat.state if stat else ""


def locks(cache: Path) -> CompileLocks:
    return CompileLocks({"HOME": "/nowhere", "FLASHINFER_WORKSPACE_DIR": str(cache)}, lambda: [os.getpid()])


@pytest.mark.parametrize("how", ["flock", "baton"])
def test_a_compile_under_a_lock_of_our_cache(how: str, others: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    compiler = compile_elsewhere(others, tmp_path / "jit", how, "cicc")
    ask = locks(tmp_path)
    first = ask()
    assert first is not None
    assert first.startswith("cicc (pid ")
    assert str(tmp_path / "jit") in first
    # It counts in hundredths of a second, and a busy machine may give the compiler none for longer than that.
    used = cpu(compiler)
    eventually(lambda: cpu(compiler) > used)
    assert ask() is not None


def test_a_compiler_that_stands_still_is_not_waited_for(others: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    compiler = compile_elsewhere(others, tmp_path / "jit", "flock", "cicc")
    os.killpg(others[0].pid, signal.SIGSTOP)
    eventually(lambda: state(compiler) == "T")
    ask = locks(tmp_path)
    ask()
    assert ask() is None


def test_it_ends_with_the_compile(others: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    compiler = compile_elsewhere(others, tmp_path / "jit", "flock", "ptxas")
    ask = locks(tmp_path)
    assert ask() is not None
    os.killpg(others[0].pid, signal.SIGKILL)
    others[0].wait()
    # The compiler, which has the lock too, is not the child that was waited for.
    eventually(lambda: not process.is_alive(compiler))
    assert ask() is None


@pytest.mark.parametrize(("how", "name"), [("flock", "python"), ("none", "cicc")])
def test_a_lock_without_a_compiler_and_a_compiler_without_a_lock(
    how: str, name: str, others: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    compile_elsewhere(others, tmp_path / "jit", how, name)
    assert locks(tmp_path)() is None


def test_a_compile_in_another_cache_is_nobodys_wait(others: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    compile_elsewhere(others, tmp_path / "jit", "flock", "cicc")
    assert locks(tmp_path / "other")() is None


def test_our_own_compile_is_seen_by_its_cpu_time_not_here(others: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    compile_elsewhere(others, tmp_path / "jit", "flock", "cicc")
    ours = CompileLocks({"TORCH_EXTENSIONS_DIR": str(tmp_path)}, lambda: _session(others[0].pid))
    assert ours() is None


def _session(sid: int) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.getsid(int(name)) == sid:
                    found.append(int(name))
            except ProcessLookupError:
                continue
    return found


def test_where_a_server_keeps_what_it_compiles() -> None:
    folders = cache_folders(
        {"HOME": "/home/a", "TRITON_CACHE_DIR": "/x/triton/", "XDG_CACHE_HOME": "/y", "PATH": "/bin"}
    )
    assert folders == ("/home/a/.cache/", "/home/a/.triton/", "/x/triton/", "/y/")
