"""Runs that end before their time by pytest's own means: -x, --maxfail, a fixture that raises, pytest-timeout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .deaths import BASELINE, BUSY
from .scene import ONE
from .table import fault

if TYPE_CHECKING:
    from .scene import Scene

__all__: list[str] = []

FAILS = """
def test_fails(sglang_server): assert sglang_server.cell.is_baseline is None
def test_never(sglang_server): say("reached")
"""


@fault("-x", slow=True)
def exit_first(scene: Scene) -> None:
    scene.tests(FAILS)
    run = scene.run("test_mine.py", "-x")
    assert run.code == 1
    assert run.outcomes() == {"baseline": "failed", "attention.flashinfer": "not-run", "graphs.off": "not-run"}
    assert not scene.heard("reached")
    assert run.record["server_starts"] == 1


@fault("--maxfail with xdist", slow=True)
def maxfail(scene: Scene) -> None:
    scene.tests(FAILS)
    run = scene.run("test_mine.py", "--maxfail=1", "-n", "2")
    assert run.code in (1, 2)
    outcomes = run.outcomes()
    assert outcomes["baseline"] == "failed"
    assert "not-run" in outcomes.values()


@fault("a fixture that raises after the server is up", slow=True)
def fixture_raises(scene: Scene) -> None:
    scene.tests(
        """
        import pytest
        @pytest.fixture
        def mine(sglang_server): raise ValueError("my own")
        def test_mine(mine): pass
        """
    )
    run = scene.run(*BASELINE)
    assert run.code == 1
    failure = run.cells["baseline"]["failure"]
    assert (failure["kind"], failure["message"]) == ("assertion", "ValueError: my own (setup)")


@fault("pytest-timeout by signal", slow=True)
def timeout_by_signal(scene: Scene) -> None:
    scene.tests(BUSY)
    run = scene.run(*BASELINE, "--timeout=1.5", "--timeout-method=signal")
    assert run.code == 1
    assert "Timeout" in run.message()
    assert "sm120-m-baseline, in phase serving" in run.message(), run.message()
    assert run.checked("test_quick")["outcome"] == "passed"
    assert run.record["complete"] is True


@fault("pytest-timeout by thread")
def timeout_by_thread(scene: Scene) -> None:
    scene.tests(BUSY)
    run = scene.run(*BASELINE, "--timeout=1.5", "--timeout-method=thread")
    assert run.code == 1
    assert "Timeout" in run.text
    assert "sm120-m-baseline, in phase serving" in run.text
    assert run.checked("test_quick")["outcome"] == "passed"
    assert run.record["complete"] is False


@fault("pytest-timeout by thread in an xdist worker", slow=True)
def timeout_in_worker(scene: Scene) -> None:
    scene.tests(BUSY)
    run = scene.run("test_mine.py", "-n2", "-k", "baseline or graphs", "--timeout=3", "--timeout-method=thread")
    assert run.code == 1
    assert run.outcomes() == {"baseline": "failed", "graphs.off": "passed"}
    assert "Timeout (>3s) from pytest-timeout in sm120-m-baseline, in phase serving" in run.message()
    assert run.record["complete"] is True


@fault("a server's start is longer than the test's own limit", slow=True)
def start_beyond_timeout(scene: Scene) -> None:
    run = scene.run(*ONE, "--timeout=1.5", rules="- {then: {phase-seconds: 0.4}}")
    assert run.code == 0
    assert run.outcomes() == {"baseline": "passed"}
    assert run.cells["baseline"]["timings"]["ready"] > 1.6
