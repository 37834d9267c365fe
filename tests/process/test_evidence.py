"""Evidence of real process trees: found, named, in time, and never fatal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpuserve.model.gpu import GpuProcess, Reading
from pytest_gpuserve.model.launch import Limits
from pytest_gpuserve.model.phase import Phase
from pytest_gpuserve.serve.evidence import gather
from pytest_gpuserve.serve.kernel import messages, oom_kills
from pytest_gpuserve.serve.procs import Proc, all_pids, in_detail, read_stat
from pytest_gpuserve.serve.sockets import sockets_of
from pytest_gpuserve.serve.stacks import find_py_spy, frames_of
from pytest_gpuserve.serve.watch import Look, Stall, Status, Watch

if TYPE_CHECKING:
    from collections.abc import Iterator

MAIN = Path(__file__).with_name("hanging_server.py")


class Tree:
    """A server's two processes in a session of their own."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, str(MAIN), "--model-path", "m", "--api-key", "hush-hush", *arguments]
        self.main = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert self.main.stdout
        # One line of each process, in any order.
        said = [self.main.stdout.readline().strip() for _ in range(1 + ("--listen" in arguments))]
        assert "up" in said
        self.port = sum(int(line) for line in said if line.isdigit())

    def look(self) -> list[Proc]:
        stats = [stat for pid in all_pids() if (stat := read_stat(pid)) and stat.sid == self.main.pid]
        return [in_detail(stat) for stat in stats]

    def scheduler(self) -> int:
        return next(proc.pid for proc in self.look() if proc.comm == "sglang::schedul")

    def close(self) -> None:
        os.killpg(self.main.pid, signal.SIGKILL)
        self.main.wait()
        assert self.main.stdout
        self.main.stdout.close()


@pytest.fixture
def trees() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def tree_of(stack: ExitStack, *arguments: str) -> Tree:
    tree = Tree(*arguments)
    stack.callback(tree.close)
    return tree


class Probe:
    """A machine with one idle GPU."""

    simulated = True

    def read(self, uuid: str) -> Reading:
        return Reading(uuid=uuid, memory_used=1 << 30, processes=(GpuProcess(pid=1, memory=5),), utilization=0)

    gpus = driver = spec = None


def watched(tree: Tree, phase: Phase, *, quiet: float) -> Stall:
    """The watch's verdict over the real processes."""
    watch = Watch({phase: Limits(stall=quiet)}, now=time.monotonic(), phase=phase)
    status: Status | None = None
    while status is None or status.stall is None:
        status = watch.look(Look(now=time.monotonic(), procs=tree.look(), gpu_utilization={"GPU-a": 0}))
        time.sleep(0.2)
    return status.stall


def collect(server: Tree, folder: Path, stall: Stall | None, **more: Any) -> Any:
    log = folder / "server.log"
    folder.mkdir(exist_ok=True)
    log.write_text("Load weight end.\rCapturing batches: 0/4\n")
    given = {
        "tree": server.look,
        "probe": Probe(),
        "uuids": ["GPU-a"],
        "log": log,
        "stall": stall,
        "port": 9,
        "python": sys.executable,
        "phase": stall.phase if stall else Phase.WEIGHTS,
    }
    return gather(folder, **{**given, **more})


def test_a_hang_in_graph_capture_is_told_in_the_words_of_a_person(trees: ExitStack, tmp_path: Path) -> None:
    tree = tree_of(trees)
    stall = watched(tree, Phase.GRAPH_CAPTURE, quiet=3.0)
    began = time.monotonic()
    evidence = collect(tree, tmp_path, stall)
    assert time.monotonic() - began < 30.0  # each part has its time, 15 s in all, and a busy machine its own
    assert evidence.sentence.startswith("weights are loaded, the port never opened, the scheduler has written ")
    assert "a second" in evidence.sentence
    assert "with an idle GPU: stuck in CUDA graph capture" in evidence.sentence
    assert set(evidence.files) == {
        "evidence.json",
        "gpus.txt",
        "kernel.txt",
        "log-end.txt",
        "processes.txt",
        "sockets.txt",
        "stacks.txt",
    }
    processes = (tmp_path / "processes.txt").read_text()
    assert f"{tree.scheduler()}" in processes
    assert processes.startswith("over the 3 s without progress")
    assert "--api-key <secret>" in processes
    assert all("hush-hush" not in (tmp_path / name).read_text() for name in evidence.files)
    assert "memory in use  1 GiB\n" in (tmp_path / "gpus.txt").read_text()
    assert "Capturing batches: 0/4" in (tmp_path / "log-end.txt").read_text().splitlines()
    summary = json.loads((tmp_path / "evidence.json").read_text())
    assert summary["sentence"] == evidence.sentence
    assert summary["stall"]["phase"] == "graph-capture"


@pytest.mark.skipif(find_py_spy(sys.executable) is None, reason="py-spy is not installed")
def test_stacks_or_the_reason_why_not(trees: ExitStack, tmp_path: Path) -> None:
    tree = tree_of(trees)
    evidence = collect(tree, tmp_path, watched(tree, Phase.GRAPH_CAPTURE, quiet=1.0))
    stacks = (tmp_path / "stacks.txt").read_text()
    permitted = "capture_one_batch_size" in stacks
    assert permitted or "py-spy: " in stacks
    assert ("capture_one_batch_size (" in evidence.sentence) is permitted
    assert all(proc.state != "T" for proc in tree.look())


def test_without_py_spy_the_file_says_so(trees: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = tree_of(trees)
    stall = watched(tree, Phase.GRAPH_CAPTURE, quiet=1.0)
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    monkeypatch.setenv("PATH", "/nowhere")
    collect(tree, tmp_path, stall, python="/nowhere/python")
    assert "py-spy is not installed" in (tmp_path / "stacks.txt").read_text()


def test_a_stopped_scheduler_is_named(trees: ExitStack, tmp_path: Path) -> None:
    tree = tree_of(trees)
    os.kill(tree.scheduler(), signal.SIGSTOP)
    evidence = collect(tree, tmp_path, watched(tree, Phase.WARMUP, quiet=1.0))
    assert "the scheduler is stopped (SIGSTOP or a debugger)" in evidence.sentence


def test_ports_are_seen_with_their_owner(trees: ExitStack, tmp_path: Path) -> None:
    tree = tree_of(trees, "--listen", "0")
    port = tree.port
    evidence = collect(tree, tmp_path, watched(tree, Phase.WARMUP, quiet=1.0), port=port)
    assert evidence.facts.port_open is True
    assert "the port is open" in evidence.sentence
    assert f"127.0.0.1:{port}" in (tmp_path / "sockets.txt").read_text()
    assert "GET /health: " in (tmp_path / "health.txt").read_text()
    (listening,) = [one for one in sockets_of([tree.main.pid]) if one.state == "listen"]
    assert (listening.pid, listening.host, listening.port) == (tree.main.pid, "127.0.0.1", port)


def test_a_server_that_is_gone_leaves_evidence_too(tmp_path: Path) -> None:
    tree = Tree()
    tree.close()
    began = time.monotonic()
    evidence = collect(tree, tmp_path, None)
    assert time.monotonic() - began < 10.0  # nothing is waited for
    assert evidence.sentence == ""
    assert "no process of the server is left alive" in (tmp_path / "processes.txt").read_text()
    assert "stacks.txt" not in evidence.files


def test_a_probe_that_blocks_and_a_tree_that_fails_cost_their_own_file_only(trees: ExitStack, tmp_path: Path) -> None:
    class Wedged(Probe):
        def read(self, uuid: str) -> Reading:
            threading.Event().wait(60)
            raise AssertionError

    def tree() -> list[Proc]:
        raise OSError("no /proc here")

    began = time.monotonic()
    evidence = collect(tree_of(trees), tmp_path, None, probe=Wedged(), tree=tree, budget=2.0)
    assert time.monotonic() - began < 20.0  # the probe blocks for a minute
    assert "did not come within the time" in (tmp_path / "gpus.txt").read_text()
    assert "OSError: no /proc here" in (tmp_path / "processes.txt").read_text()
    assert "log-end.txt" in evidence.files


def test_a_folder_that_cannot_be_written_costs_the_files_not_the_verdict(trees: ExitStack, tmp_path: Path) -> None:
    tree = tree_of(trees)
    stall = watched(tree, Phase.GRAPH_CAPTURE, quiet=3.0)
    blocker = tmp_path / "file"
    blocker.write_text("")
    log = tmp_path / "server.log"
    evidence = gather(
        blocker,
        tree=tree.look,
        probe=None,
        uuids=(),
        log=log,
        stall=stall,
        port=None,
        python=sys.executable,
        phase=stall.phase,
    )
    assert evidence.files == ()
    assert "stuck in CUDA graph capture" in evidence.sentence


def test_kernel_messages_of_interest_since_the_start(tmp_path: Path) -> None:
    """A file stands in for the device: the records are as the kernel writes them."""
    now = time.monotonic()
    device = tmp_path / "kmsg"
    old, new = int((now - 500) * 1e6), int((now - 1) * 1e6)
    # One record a read, as the device gives them.
    device.write_text(f"4,100,{new},-;NVRM: Xid (PCI:0000:41:00): 79, GPU has fallen off the bus.\n")
    found, reason = messages(time.time() - 60, device=str(device))
    assert reason == ""
    assert len(found) == 1
    assert found[0].endswith("NVRM: Xid (PCI:0000:41:00): 79, GPU has fallen off the bus.")
    device.write_text(f"4,100,{old},-;NVRM: Xid (PCI:0000:41:00): 79, an old one\n")
    assert messages(time.time() - 60, device=str(device))[0] == []
    device.write_text(f"6,100,{new},-;usb 1-1: new device\n")
    assert messages(time.time() - 60, device=str(device))[0] == []
    assert messages(0.0, device=str(tmp_path / "none")) == ([], f"{tmp_path / 'none'}: No such file or directory")


def test_out_of_memory_kills_are_a_count() -> None:
    assert oom_kills() >= 0


DUMP = """\
Process 4242: sglang::scheduler_TP0
Python v3.12.3 (/usr/bin/python3.12)

Thread 4242 (active): "MainThread"
    ncclAllReduce (sglang/srt/distributed/device_communicators/pynccl_wrapper.py:373)
    <listcomp> (a (odd) name.py:1)
    run_scheduler_process (sglang/srt/managers/scheduler.py:2353)
Thread 4300 (idle): "Thread-1 (watchdog)"
    watchdog_thread (scheduler.py:1419)
"""


def test_frames_of_the_main_thread() -> None:
    assert frames_of(DUMP, 4242) == (
        "ncclAllReduce (pynccl_wrapper.py:373)",
        "<listcomp> (a (odd) name.py:1)",
        "run_scheduler_process (scheduler.py:2353)",
    )
    unnamed = DUMP.replace(': "MainThread"', "")
    assert frames_of(unnamed, 4242) == frames_of(DUMP, 4242)
    assert frames_of("py-spy: Permission denied", 4242) == ()
