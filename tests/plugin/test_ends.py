"""How runs end before their time: -x, budget, timeouts, Ctrl-C, a dying worker. Nothing is left behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import psutil
import pytest

from pytest_gpuserve.gpu.lease import holders


def marked(project) -> list[psutil.Process]:
    """Living processes that carry the mark of this project's runs."""
    folder = str(project.path)
    found = []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
        except (psutil.Error, OSError):
            continue
        if "GPUSERVE_RUN_ID" in environment and folder in "\0".join(environment.values()):
            found.append(process)
    return found


def wait_for(what, seconds: float = 30.0):
    deadline = time.monotonic() + seconds
    while not (value := what()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)
    return value


def clean(project) -> None:
    """Within a while no marked process is left and every lock is free."""
    wait_for(lambda: not marked(project))
    latest = (project.path / ".gpuserve/runs/latest").resolve()
    wait_for(lambda: not [one for one in holders(latest / "sim" / "locks") if not one.stale])


def start(project, *args: str, rules: str = "") -> subprocess.Popen[bytes]:
    """Pytest in the background, in the project."""
    scenario = project.scenario(rules)
    simulation = ["--gpu-sim", "4xsm120", "--gpu-sim-scenario", str(scenario)]
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--gpu-matrix", "tiny", *simulation, *args],
        cwd=project.path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


SLOW = """
import pathlib, time
def test_slow(sglang_server):
    pathlib.Path("running").write_text("yes")
    time.sleep(60)
"""


@pytest.mark.parametrize("args", [("-x",), ("--maxfail=1", "-n", "2")], ids=["-x", "--maxfail with xdist"])
def test_what_is_not_reached_is_not_run(project, args) -> None:
    result = project.run(*args, "--gpu-no-control", rules="- {when: {graphs: 'on'}, then: {reject: 'no such flag'}}")
    assert result.code in (1, 2)
    assert result.outcomes["baseline"] == "failed"
    assert result.outcomes["graphs.off"] == "not-run"
    assert result.checks["graphs.off", "ready"] == "not-run"
    clean(project)


def test_the_budget_starts_no_new_cell(project) -> None:
    project.file("test_mine.py", "import time\ndef test_slow(sglang_server): time.sleep(1.5)\n")
    result = project.run("test_mine.py", "--gpu-budget", "0.02")
    assert result.code == 0
    assert result.outcomes == {"baseline": "passed", "attention.flashinfer": "not-run", "graphs.off": "not-run"}
    assert "the budget of 0.02 minutes was used up" in result.cells["graphs.off"]["reason"]


def test_a_timeout_by_signal_fails_the_test_and_the_run_goes_on(project) -> None:
    project.file("test_mine.py", SLOW)
    result = project.run("test_mine.py", "--timeout=1.5", "--timeout-method=signal", "-k", "baseline or graphs")
    assert result.outcomes == {"baseline": "failed", "graphs.off": "failed"}
    assert "Timeout" in result.cells["baseline"]["failure"]["message"]
    clean(project)


def test_the_start_does_not_count_against_the_tests_own_limit(project) -> None:
    """Three seconds of phases under a limit of two; the limit still holds for the test itself."""
    slow_start = "- {then: {phase-seconds: 0.5}}"
    result = project.run("--timeout=2", "-k", "baseline and (ready or answers)", rules=slow_start)
    assert result.outcomes == {"baseline": "passed"}
    assert result.cells["baseline"]["timings"]["ready"] > 2


def test_a_timeout_by_thread_kills_pytest_and_the_server_goes_too(project) -> None:
    project.file("test_mine.py", SLOW)
    result = project.run("test_mine.py", "--timeout=1.5", "--timeout-method=thread", "-k", "baseline")
    assert result.code == 1
    assert "Timeout" in result.text + result.errors
    clean(project)


def test_a_timeout_in_a_worker_is_the_tests_own_failure_without_a_server_too(project) -> None:
    project.file("test_mine.py", "import time\ndef test_slow(gpu_cell): time.sleep(60)")
    result = project.run("test_mine.py", "-n", "1", "--timeout=1", "--timeout-method=thread", "-k", "baseline")
    assert result.outcomes == {"baseline": "failed"}
    assert "Timeout (>1s) from pytest-timeout in sm120-m-baseline" in result.cells["baseline"]["reason"]


def test_a_second_ctrl_c_at_once_leaves_no_record_that_says_complete(project) -> None:
    """It finds pytest at the traceback of the first one: the session has no exit status of an interruption yet."""
    project.file("conftest.py", "def pytest_keyboard_interrupt(excinfo): raise KeyboardInterrupt")
    project.file("test_mine.py", SLOW)
    process = start(project, "test_mine.py", "-k", "baseline")
    wait_for((project.path / "running").exists)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    clean(project)
    record = json.loads((project.path / ".gpuserve/runs/latest/run.json").read_text())
    assert not record["complete"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_in_the_middle_of_a_test_leaves_nothing(project, number: signal.Signals) -> None:
    project.file("test_mine.py", SLOW)
    process = start(project, "test_mine.py", "-k", "baseline")
    wait_for((project.path / "running").exists)
    assert len(marked(project)) >= 3
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    clean(project)
    if number is signal.SIGINT:
        from pytest_gpuserve.report.store import read_run

        run = read_run(project.path / ".gpuserve")
        assert run["complete"] is False, output
        assert (run["cells"][0]["outcome"], run["cells"][0]["server_starts"]) == ("not-run", 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_while_a_server_starts_leaves_nothing(project, number: signal.Signals) -> None:
    process = start(project, "-k", "baseline", rules="- {then: {phase-seconds: 5}}")
    log = wait_for(lambda: list(project.path.glob(".gpuserve/runs/*/cells/*/server.log")))[0]
    wait_for(lambda: log.stat().st_size)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == (2 if number is signal.SIGINT else -number)
    clean(project)


def test_a_supervisor_that_is_gone_when_a_run_is_interrupted_is_not_the_cells_fault(project) -> None:
    """As in a worker that outlives its killed controller: the supervisor has ended before the worker asks it to."""
    project.file(
        "test_mine.py",
        """
        import psutil
        def test_it(sglang_server):
            psutil.Process(sglang_server.pid).parent().kill()
            raise KeyboardInterrupt
        """,
    )
    result = project.run("test_mine.py", "-k", "baseline")
    assert result.code == 2
    assert result.outcomes == {"baseline": "infra"}
    cell = result.cells["baseline"]
    assert cell["failure"]["kind"] == "infra"
    assert "the supervisor" in cell["reason"]
    clean(project)


def test_a_dead_worker_is_infra_and_its_cell_is_not_run_again(project) -> None:
    project.file(
        "test_mine.py",
        """
        import os, pathlib
        def test_a(sglang_server):
            if sglang_server.cell.axes["graphs"] == "off":
                with open("deaths", "a") as file: file.write("x")
                os._exit(7)
        def test_b(sglang_server): pass
        """,
    )
    result = project.run("test_mine.py", "-n", "2")
    assert result.code == 1
    assert result.outcomes == {"baseline": "passed", "attention.flashinfer": "passed", "graphs.off": "infra"}
    assert result.checks["graphs.off", "test_a"] == "infra"
    assert result.checks["graphs.off", "test_b"] == "not-run"
    assert (project.path / "deaths").read_text() == "x"
    clean(project)


def test_a_worker_that_dies_in_the_baseline_keeps_nobody_waiting(project) -> None:
    project.file(
        "test_mine.py",
        """
        import os, time
        def test_a(sglang_server):
            if sglang_server.cell.is_baseline:
                time.sleep(2)
                os._exit(7)
        """,
    )
    result = project.run("test_mine.py", "-n", "2", timeout=60)
    assert result.outcomes == {"baseline": "infra", "attention.flashinfer": "blocked", "graphs.off": "blocked"}


def test_a_fixture_that_raises_after_the_server_is_up(project) -> None:
    project.file(
        "test_mine.py",
        """
        import pytest
        @pytest.fixture
        def mine(sglang_server): raise ValueError("my own")
        def test_a(mine): pass
        """,
    )
    result = project.run("test_mine.py", "-k", "baseline")
    assert result.outcomes == {"baseline": "failed"}
    assert result.cells["baseline"]["failure"]["kind"] == "assertion"
    result.run.assert_outcomes(errors=1, deselected=2)
    clean(project)


def test_a_leak_is_blamed_on_the_cell_that_leaked(project) -> None:
    project.file("test_mine.py", "def test_a(sglang_server): pass\ndef test_b(sglang_server): pass\n")
    leak = "- {when: {attention: flashinfer}, then: {hold-memory: forever}}"
    result = project.run("test_mine.py", rules=leak)
    assert result.outcomes == {"baseline": "passed", "attention.flashinfer": "failed", "graphs.off": "passed"}
    cell = result.cells["attention.flashinfer"]
    assert cell["failure"]["kind"] == "leak"
    assert result.checks["attention.flashinfer", "test_a"] == "passed"
    assert result.checks["attention.flashinfer", "test_b"] == "failed"
    assert result.cells["graphs.off"]["gpus"] != cell["gpus"]
    result.run.assert_outcomes(passed=6, errors=1)


def test_a_cell_that_has_no_gpus_left_says_which_cell_leaked(project) -> None:
    leak = "- {when: {attention: flashinfer}, then: {hold-memory: forever}}"
    result = project.run("-k", "ready", sim="1xsm120", rules=leak)
    assert result.outcomes == {"baseline": "passed", "attention.flashinfer": "failed", "graphs.off": "infra"}
    assert result.cells["graphs.off"]["failure"]["message"] == (
        "sm120-m-graphs.off needs 1 GPU, this run has 0 left. "
        "Quarantined: left in use by the server of sm120-m-attention.flashinfer"
    )
