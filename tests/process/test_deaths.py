"""Whose death counts: schedulers', not that of what they start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from pytest_gpuserve.serve import procs
from pytest_gpuserve.serve.deaths import Deaths
from pytest_gpuserve.serve.loop import Loop

if TYPE_CHECKING:
    from collections.abc import Iterator

# Main forks a scheduler; the scheduler forks something that has not executed yet, so it is called as the scheduler is.
TREE = """
import os, signal
main = os.getpid()
if os.fork() == 0:
    open("/proc/self/comm", "w").write("sglang::schedul")
    child = os.fork()
    if child:
        print(os.getpid(), child, flush=True)
    signal.pause()
signal.pause()
"""


@pytest.fixture
def tree() -> Iterator[tuple[int, int, int]]:
    """Pids of main, its scheduler, and the scheduler's fork."""
    with subprocess.Popen([sys.executable, "-c", TREE], stdout=subprocess.PIPE, text=True) as main:
        assert main.stdout
        scheduler, fork = map(int, main.stdout.readline().split())
        yield main.pid, scheduler, fork
        for pid in (fork, scheduler, main.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _followed(pids: tuple[int, ...], died: list[str]) -> tuple[Loop, Deaths]:
    loop = Loop()
    deaths = Deaths(loop, pids[0], on_main=lambda: died.append("main"), on_other=lambda: died.append("other"))
    stats = [stat for pid in pids if (stat := procs.read_stat(pid))]
    deaths.follow([procs.in_detail(stat) for stat in stats])
    return loop, deaths


def test_the_end_of_a_schedulers_fork_is_none_of_a_scheduler(tree: tuple[int, int, int]) -> None:
    died: list[str] = []
    loop, deaths = _followed(tree, died)
    os.kill(tree[2], signal.SIGKILL)
    loop.wait(lambda: False, 0.3)
    assert died == []
    assert deaths.first is None
    os.kill(tree[1], signal.SIGKILL)
    assert loop.wait(lambda: died == ["other"], 30)
    assert f"sglang::schedul (pid {tree[1]})" in str(deaths.first)
    deaths.close()
