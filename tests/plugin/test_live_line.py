"""The live line, on a terminal of its own."""

from __future__ import annotations

import os
import pty
import sys
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

from pytest_gpuserve.plugin import live_line
from pytest_gpuserve.plugin.live_line import LiveLine, describe

if TYPE_CHECKING:
    from pathlib import Path

HANG = "- {when: {attention: flashinfer}, then: {hang: weights}}"


def on_a_terminal(project, *args: str) -> str:
    """What a person would see: everything written to a pseudo-terminal, 100 columns wide."""
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--gpu-matrix", "tiny", "--gpu-sim", "4xsm120"]
    words += ["--gpu-sim-scenario", str(project.scenario(HANG)), "--gpu-no-control", "--gpu-stall", "3"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(project.path)
        os.environ |= {"COLUMNS": "100", "TERM": "xterm"}
        os.execv(words[0], [*words, *args])
    output = b""
    try:
        while data := os.read(terminal, 4096):
            output += data
    except OSError:  # Linux's way of end-of-file here
        pass
    os.waitpid(pid, 0)
    os.close(terminal)
    return output.decode()


def test_it_tells_cell_phase_and_silence_and_goes_away(project) -> None:
    seen = on_a_terminal(project, "-k", "flashinfer")
    assert "\rsm120-m-attention.flashinfer: weights" in seen
    assert " s without progress" in seen
    last = seen.splitlines()[-1]
    assert "1 error" in last


def test_workers_tell_theirs_through_the_runs_folder(project) -> None:
    seen = on_a_terminal(project, "-k", "flashinfer", "-n", "1")
    assert "\rgw0 sm120-m-attention.flashinfer: weights" in seen


def test_a_line_that_was_on_its_way_at_the_end_is_taken_away_too(tmp_path, monkeypatch) -> None:
    shown: list[str] = []
    reporter = SimpleNamespace(
        isatty=True,
        ensure_newline=lambda: None,
        rewrite=lambda text, erase: shown.append(text),
        _tw=SimpleNamespace(fullwidth=80),
    )
    plugins = SimpleNamespace(get_plugin=lambda name: reporter)
    line = LiveLine(SimpleNamespace(pluginmanager=plugins, option=SimpleNamespace(verbose=0)))
    read, ended = threading.Event(), threading.Event()

    def slowly(path: Path) -> str:
        read.set()
        assert ended.wait(60)
        return "gw0 weights"

    monkeypatch.setattr(live_line, "_read", slowly)
    (tmp_path / "status-gw0.json").touch()
    line.follow(tmp_path)
    assert read.wait(60)
    threading.Timer(0.2, ended.set).start()
    line.close()
    assert ended.wait(60)
    time.sleep(0.2)
    assert shown[-1:] == [""]


def test_the_words() -> None:
    tick = {"event": "tick", "phase": "warmup", "seconds": 80.4, "quiet": 12.3, "compiling": False}
    assert describe("c", tick) == "c: warmup 80 s, 12 s without progress"
    assert describe("c", tick | {"compiling": True}) == "c: warmup 80 s, compiling"
    assert describe("c", tick | {"quiet": 0.3}) == "c: warmup 80 s"
    waiting = {"event": "waiting", "seconds": 5.0, "holders": ["GPU 3: held by alice"]}
    assert describe("c", waiting) == "c: waiting for GPUs 5 s (GPU 3: held by alice)"
    assert describe("c", {"event": "spawned"}) is None
