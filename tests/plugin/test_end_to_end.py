"""`pytest --gpu-matrix … --gpu-sim …` from the command line to the record, with real processes."""

from __future__ import annotations

import pytest

CELLS = ["baseline", "attention.flashinfer", "graphs.off"]


@pytest.mark.parametrize("args", [(), ("-n", "2")], ids=["one process", "xdist"])
def test_every_cell_is_started_once_checked_and_recorded(project, args) -> None:
    result = project.run(*args)
    assert result.code == 0, result.text
    assert result.outcomes == dict.fromkeys(CELLS, "passed")
    # Whatever checks the suite has: none fails, and these are always there.
    assert set(result.checks.values()) <= {"passed", "skipped"}
    for cell in CELLS:
        assert {result.checks[cell, check] for check in ("ready", "answers", "clean-shutdown")} == {"passed"}
    record = result.record
    assert record["server_starts"] == 3
    assert record["complete"] is True
    assert record["simulated"] is True
    assert record["outcomes"] == {"passed": 3}
    assert "SIMULATED" in result.text
    assert "; sglang 0.5.23 (SIMULATED)" in result.text
    assert "SIMULATED" in (result.folder / "summary.md").read_text()
    for cell in record["cells"]:
        assert cell["server_starts"] == 1
        assert cell["gpus"][0]["arch"] == "sm120"
        assert cell["timings"]["phases"]
        # Files of other programs in /dev/shm may be listed as leftovers; processes of the server may not be there.
        assert cell["teardown"]["rungs"][-1]["alive"] == 0
        assert (result.folder / cell["folder"] / "cell.json").exists()
        assert (result.folder / cell["folder"] / "server.log").exists()
    kinds = [event["event"] for event in result.events]
    assert kinds[0] == "run"
    assert kinds[-1] == "end"
    assert kinds.count("check") == len(record["checks"]) == len(result.checks)
    assert kinds.count("cell") == 3


@pytest.mark.parametrize("args", [(), ("-n", "2")], ids=["one process", "xdist"])
def test_a_failing_baseline_blocks_its_deltas_and_nothing_deadlocks(project, monkeypatch, args) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    result = project.run(
        *args,
        "--gpu-no-control",
        rules="- {when: {attention: triton, graphs: 'on'}, then: {crash: {phase: weights, text: 'bad weights'}}}",
    )
    assert result.code == 1
    assert result.outcomes == {"baseline": "failed", "attention.flashinfer": "blocked", "graphs.off": "blocked"}
    assert result.record["server_starts"] == 1
    baseline = result.cells["baseline"]
    assert (baseline["failure"]["kind"], baseline["failure"]["phase"]) == ("crash", "weights")
    assert "bad weights" in baseline["failure"]["message"]
    result.run.stdout.fnmatch_lines(["ERROR gpuserve/suite.py::test_ready[[]*] - crash in weights: *"])
    assert result.cells["graphs.off"]["reason"] == "the baseline sm120-m-baseline is failed (crash in weights)"
    assert result.checks["baseline", "answers"] == "blocked"


@pytest.mark.parametrize("args", [(), ("-n", "1")], ids=["one process", "xdist"])
def test_half_a_character_in_a_failure_costs_no_result(project, args) -> None:
    project.file("test_mine.py", "def test_it(sglang_server): print('\\ud83d'); raise ValueError('said \\ud83d')\n")
    result = project.run("test_mine.py", "-k", "baseline", *args)
    assert result.code == 1, result.text
    assert result.outcomes == {"baseline": "failed"}
    assert "INTERNALERROR" not in result.text


def test_a_worker_that_breaks_is_never_green(project) -> None:
    """xdist tells of it, and then exits with 0."""
    project.file(
        "conftest.py",
        """
        import os
        def pytest_runtest_makereport():
            assert "PYTEST_XDIST_WORKER" not in os.environ, "broken"
        """,
    )
    project.file("test_mine.py", "def test_it(gpu_cell): pass\n")
    result = project.run("test_mine.py", "-n", "1")
    assert result.code == 3
    assert result.record["complete"] is False


def test_a_check_that_the_machine_stopped_is_no_failure_of_the_cells(project) -> None:
    """A disk that is full under what a check writes, say. The line of the summary begins with what happened."""
    project.file(
        "test_mine.py",
        """
        from pytest_gpuserve.errors import MachineError
        def test_writes(sglang_server): raise MachineError("cannot write answers: No space left on device")
        """,
    )
    result = project.run("test_mine.py", "-k", "baseline")
    assert result.code == 1
    assert result.outcomes == {"baseline": "infra"}
    assert result.cells["baseline"]["failure"]["message"] == "cannot write answers: No space left on device"
    result.run.stdout.fnmatch_lines(["INFRA test_mine.py::test_writes*"])


def test_a_deselected_baseline_blocks_nothing(project) -> None:
    result = project.run("-k", "not baseline", rules="- {when: {graphs: 'on', attention: triton}, then: {reject: no}}")
    assert result.code == 0, result.text
    assert result.outcomes == {"attention.flashinfer": "passed", "graphs.off": "passed"}


def test_a_crash_during_a_check_is_that_checks_failure(project) -> None:
    project.file(
        "test_mine.py",
        """
        import os, signal
        def test_kills_it(sglang_server):
            os.kill(sglang_server.pid, signal.SIGKILL)
            sglang_server.generate("hello")
        """,
    )
    result = project.run("test_mine.py", "--gpu-no-control", "-k", "baseline")
    assert result.code == 1
    failure = result.cells["baseline"]["failure"]
    assert failure["kind"] == "crash"
    assert failure["message"].startswith("while test_kills_it ran, ")
    assert result.checks == {("baseline", "test_kills_it"): "failed"}
    assert "crash in " in result.text


def test_a_users_assertion_fails_only_its_own_check(project) -> None:
    project.file(
        "test_mine.py",
        """
        import pytest
        def test_bad(sglang_server): assert sglang_server.info is None, "a finding"
        @pytest.mark.parametrize("tokens", [1, 3])
        def test_good(sglang_server, tokens):
            assert sglang_server.generate("hi", max_new_tokens=tokens, ignore_eos=True).completion_tokens == tokens
        def test_unrelated(): raise RuntimeError
        """,
    )
    result = project.run("test_mine.py", "-k", "baseline or unrelated")
    assert result.code == 1
    assert result.checks == {
        ("baseline", "test_bad"): "failed",
        ("baseline", "test_good[1]"): "passed",
        ("baseline", "test_good[3]"): "passed",
    }
    assert result.cells["baseline"]["failure"]["kind"] == "assertion"
    assert "a finding" in result.cells["baseline"]["failure"]["message"]
    result.run.assert_outcomes(passed=2, failed=1, deselected=7)


def test_gpus_without_a_server(project) -> None:
    project.file(
        "test_mine.py",
        """
        import pytest
        @pytest.mark.gpus(3)
        def test_lease(gpus): assert len(gpus) == 3 and len({gpu.uuid for gpu in gpus}) == 3
        def test_both(gpus, sglang_server): assert gpus == sglang_server.gpus
        def test_cell(gpu_cell): assert gpu_cell.is_baseline
        """,
    )
    result = project.run("test_mine.py", "-k", "baseline")
    assert result.code == 0, result.text
    assert result.record["server_starts"] == 1


def test_a_killed_run_can_be_read_up_to_the_cell_in_flight(project) -> None:
    project.file(
        "test_mine.py",
        """
        import os
        def test_dies(sglang_server):
            if sglang_server.cell.axes["graphs"] == "off":
                os._exit(9)
        """,
    )
    project.run("test_mine.py")
    from pytest_gpuserve.report.store import read_run

    run = read_run(project.path / ".gpuserve")
    outcomes = {cell["id"]: cell["outcome"] for cell in run["cells"]}
    assert run["complete"] is False
    assert outcomes["sm120-m-baseline"] == outcomes["sm120-m-attention.flashinfer"] == "passed"
    assert outcomes["sm120-m-graphs.off"] == "not-run"
