"""The main job on a real SGLang, real processes. `tox -e real-cpu` runs this on the CPU engine, with a tiny model.

On a machine with GPUs, GPUSERVE_TEST_MATRIX names a matrix of one baseline to use instead.
Every run is a pytest of its own, so that it can be killed, with its own TMPDIR, lock directory and reports.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest

SERVER_PYTHON = os.environ.get("GPUSERVE_TEST_SERVER_PYTHON", "")
ROOT = Path(__file__).parents[2]
SHIM = ROOT / "tests" / "envs" / "sglang-cpu-shim"
CPU_BASELINE = """
schema: 1
arch: [cpu]
defaults:
  flags: {disable-cuda-graph: true, max-total-tokens: 4096, mem-fraction-static: 0.3}
  env: {SGLANG_USE_CPU_ENGINE: "1"}
models: {tiny-llama: {shape: tiny-llama}}
axes: {attention: {torch_native: {flags: {attention-backend: torch_native}}}}
baseline: {attention: torch_native}
"""

# Loaded by its entry point where the project is installed, by name from a plain checkout.
INSTALLED = any(point.name == "gpuserve" for point in importlib.metadata.entry_points(group="pytest11"))
PLUGIN = () if INSTALLED else ("-p", "pytest_gpuserve.plugin")
ON_CPU = "GPUSERVE_TEST_MATRIX" not in os.environ
BASELINE = CPU_BASELINE if ON_CPU else Path(os.environ["GPUSERVE_TEST_MATRIX"]).read_text()
# Two cores that others use too may need minutes for the imports of SGLang.
STARTED = 400
# What the lease of a dead run must allow again, without the cost of a server.
LEASE = "def test_lease(gpus):\n    assert gpus\n"

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not SERVER_PYTHON, reason="GPUSERVE_TEST_SERVER_PYTHON names no environment with SGLang"),
]


class Project:
    """A folder with a matrix and perhaps tests, in which pytest runs against the real server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Short: in a longer one, ZeroMQ's sockets would not fit and the server's own would be under /tmp.
        self.tmp = Path(tempfile.mkdtemp(prefix="gs-"))
        self.runs: set[str] = set()
        (folder / "pytest.ini").write_text("[pytest]\naddopts = -p no:cacheprovider\n")
        (folder / "baseline.yaml").write_text(BASELINE)
        (folder / "test_lease.py").write_text(LEASE)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [
            *(sys.executable, "-m", "pytest", *PLUGIN, f"--gpu-server-python={SERVER_PYTHON}"),
            *(("--gpu-server-env", f"PYTHONPATH={SHIM}") if ON_CPU else ()),
            *(f"--gpu-lock-dir={self.folder / 'locks'}", *arguments),
        ]
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env={**os.environ, "TMPDIR": str(self.tmp), "GPUSERVE_TEST_MARK": str(self.folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, *arguments: str, limit: float = 600) -> tuple[int, str]:
        process = self.start(*arguments)
        try:
            output, _ = process.communicate(timeout=limit)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        return process.returncode, output

    def record(self) -> dict:
        return json.loads((self.folder / ".gpuserve" / "runs" / "latest" / "run.json").read_text())

    def ours(self) -> list[psutil.Process]:
        """Living processes that carry the mark of one of this project's runs; a run's own processes name its folder."""
        marked: list[tuple[str, bool, psutil.Process]] = []
        for process in psutil.process_iter():
            try:
                environment = process.environ()
                if process.status() != psutil.STATUS_ZOMBIE and "GPUSERVE_RUN_ID" in environment:
                    here = environment.get("GPUSERVE_TEST_MARK") == str(self.folder)
                    marked.append((environment["GPUSERVE_RUN_ID"], here, process))
            except psutil.Error:
                continue
        self.runs |= {run for run, here, _ in marked if here}
        return [process for run, _, process in marked if run in self.runs]

    def assert_nothing_left(self, shared_memory: set[str]) -> None:
        wait_for(lambda: not self.ours(), 30, lambda: f"left: {[(p.pid, p.cmdline()) for p in self.ours()]}")
        # What a living process maps belongs to a server of somebody else on this machine.
        assert shared_memory_now() - shared_memory - mapped() == set()
        assert list(self.tmp.iterdir()) == []


def wait_for(condition, seconds, message=lambda: "it did not come true"):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, message()
        time.sleep(0.05)


def shared_memory_now() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith(("sglang", "sem.", "psm_", "gpuserve"))}


def mapped() -> set[str]:
    names = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text(errors="replace").splitlines()
        except OSError:
            continue
        names |= {line.rpartition("/dev/shm/")[2] for line in lines if "/dev/shm/" in line}
    return names


@pytest.fixture
def project(tmp_path):
    made = Project(tmp_path)
    yield made
    for process in made.ours():
        process.kill()
    shutil.rmtree(made.tmp)


@pytest.fixture
def shared_memory():
    return shared_memory_now()


def cells_of(record: dict) -> dict[str, dict]:
    return {cell["id"]: cell for cell in record["cells"]}


@pytest.mark.skipif(not ON_CPU, reason="the CPU engine's own matrix")
def test_the_shipped_cpu_matrix(project, shared_memory):
    code, output = project.run("--gpu-matrix", "cpu")
    assert code == 0, output
    record = project.record()
    cells = cells_of(record)
    assert not record["simulated"]
    assert record["complete"]
    assert record["versions"]["sglang"] == "0.5.23"
    assert cells["cpu-tiny-llama-baseline"]["outcome"] == "passed"
    assert cells["cpu-tiny-llama-radix.off"]["outcome"] == "passed"
    assert cells["cpu-tiny-llama-radix.off"]["resolved"]["disable_radix_cache"] is True
    refused = cells["cpu-tiny-llama-dsa.nsa-flags"]
    assert (refused["outcome"], refused["failure"]["kind"]) == ("xfailed", "rejected")
    assert "--nsa-decode-backend" in refused["failure"]["message"]
    absent = cells["cpu-tiny-llama-attention.fa3"]
    assert (absent["outcome"], absent["failure"]["kind"]) == ("xfailed", "crash")
    assert "FlashAttention v3 Backend requires SM>=80 and SM<=90" in absent["failure"]["message"]
    assert list(cells["cpu-tiny-llama-baseline"]["timings"]["phases"])[:2] == ["spawn", "import"]
    project.assert_nothing_left(shared_memory)


@pytest.mark.parametrize("moment", ["importing", "serving"])
def test_kill_9_of_pytest_leaves_nothing(project, shared_memory, moment):
    (project.folder / "test_wait.py").write_text(
        "import time, pathlib\n"
        "def test_wait(sglang_server):\n    pathlib.Path('serving').touch()\n    time.sleep(600)\n"
    )
    process = project.start("--gpu-matrix", "baseline.yaml", "test_wait.py")
    try:
        # The scheduler exists and imports torch: the moment at which it outlives a killed main (sglang#31645).
        come = {
            "importing": lambda: any("spawn_main" in " ".join(words) for words in commands(project)),
            "serving": (project.folder / "serving").exists,
        }[moment]
        wait_for(lambda: come() or process.poll() is not None, STARTED)
        assert process.poll() is None, process.communicate()[0]
        process.kill()
        project.assert_nothing_left(shared_memory)
    finally:
        process.kill()
        process.communicate()
    code, output = project.run("--gpu-matrix", "baseline.yaml", "--gpu-lock-timeout", "5", "test_lease.py")
    assert code == 0, output


def test_two_runs_share_the_gpu_one_after_the_other(project, shared_memory):
    """Two unrelated pytest processes want the same GPU: one waits, both serve, at no time do both."""
    (project.folder / "test_alone.py").write_text(
        "import pathlib, time\n"
        "def test_alone(sglang_server):\n"
        "    flag = pathlib.Path('serving')\n    flag.touch(exist_ok=False)\n"
        "    assert sglang_server.generate('Once upon a time', max_new_tokens=64).completion_tokens\n"
        "    flag.unlink()\n"
    )
    runs = [project.start("--gpu-matrix", "baseline.yaml", "test_alone.py") for _ in range(2)]
    try:
        outputs = [run.communicate(timeout=2 * STARTED)[0] for run in runs]
    finally:
        for run in runs:
            run.kill()
    assert [run.returncode for run in runs] == [0, 0], outputs
    waits = sorted(
        json.loads(path.read_text())["cells"][0]["timings"]["lease_wait"]
        for path in (project.folder / ".gpuserve" / "runs").glob("2*/run.json")
    )
    assert waits[1] > waits[0] + 0.5
    project.assert_nothing_left(shared_memory)


def commands(project: Project) -> list[list[str]]:
    found = []
    for process in project.ours():
        with contextlib.suppress(psutil.Error):
            found.append(process.cmdline())
    return found


_SIGNAL_TEST = """
import os, psutil, signal
def test_it(sglang_server):
    tree = psutil.Process(sglang_server.pid).children(recursive=True)
    scheduler, = [child for child in tree if "scheduler" in " ".join(child.cmdline())]
    os.kill(scheduler.pid, signal.{signal})
    sglang_server.generate("Once upon a time", max_new_tokens=64)
"""


def test_a_stopped_scheduler_is_a_hang_with_evidence(project, shared_memory):
    (project.folder / "test_it.py").write_text(_SIGNAL_TEST.format(signal="SIGSTOP"))
    limits = "limits: {serving: {stall: 10}}\n"
    (project.folder / "baseline.yaml").write_text(BASELINE + limits)
    code, output = project.run("--gpu-matrix", "baseline.yaml", "--gpu-no-control", "test_it.py")
    assert code == 1, output
    (cell,) = project.record()["cells"]
    failure = cell["failure"]
    assert (cell["outcome"], failure["kind"], failure["phase"]) == ("failed", "hang", "serving")
    assert "stopped" in failure["message"]
    folder = project.folder / ".gpuserve" / "runs" / "latest" / cell["folder"]
    assert {"processes.txt", "sockets.txt"} <= set(failure["evidence"])
    assert "sglang::scheduler" in (folder / "processes.txt").read_text()
    project.assert_nothing_left(shared_memory)


def test_a_killed_scheduler_is_a_crash_that_names_it(project, shared_memory):
    (project.folder / "test_it.py").write_text(_SIGNAL_TEST.format(signal="SIGKILL"))
    code, output = project.run("--gpu-matrix", "baseline.yaml", "--gpu-no-control", "test_it.py")
    assert code == 1, output
    (cell,) = project.record()["cells"]
    failure = cell["failure"]
    assert (cell["outcome"], failure["kind"], failure["phase"]) == ("failed", "crash", "serving")
    assert "scheduler" in failure["message"]
    project.assert_nothing_left(shared_memory)


def test_a_taken_port_is_infra_and_the_next_block_serves(project, shared_memory):
    """SGLang finishes its whole start before it finds its port taken, then hangs, deaf to SIGTERM."""
    taken: list[socket.socket] = []
    over = threading.Event()

    def take() -> None:
        def main_with_port() -> int | None:
            for words in commands(project):
                if "--port" in words and "--model-path" in words:
                    return int(words[words.index("--port") + 1])
            return None

        while (port := main_with_port()) is None:
            if over.wait(0.05):
                return
        occupant = socket.socket()
        occupant.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        occupant.bind(("127.0.0.1", port))
        occupant.listen()
        taken.append(occupant)

    thread = threading.Thread(target=take)
    thread.start()
    try:
        code, output = project.run("--gpu-matrix", "baseline.yaml")
    finally:
        over.set()
        thread.join(60)
        for occupant in taken:
            occupant.close()
    assert taken, output
    assert code == 0, output
    (cell,) = project.record()["cells"]
    assert (cell["outcome"], cell["server_starts"]) == ("passed", 2)
    assert "[Errno 98]" in json.dumps(cell) or "port" in json.dumps(cell["notes"])
    project.assert_nothing_left(shared_memory)
