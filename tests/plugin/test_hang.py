"""A server that stops answering in the middle of a check."""

from __future__ import annotations


def test_a_check_does_not_wait_for_a_server_that_hangs(project) -> None:
    """The client would wait five minutes for the answer; the supervisor knows after the stall limit."""
    project.stall("serving", 3)
    result = project.run("--gpu-no-control", "-k", "baseline", rules="- {then: {hang: serving}}")
    cell = result.cells["baseline"]
    assert cell["outcome"] == "failed"
    assert (cell["failure"]["kind"], cell["failure"]["phase"]) == ("hang", "serving")
    assert result.checks["baseline", "answers"] == "failed"
    assert result.checks["baseline", "clean-shutdown"] == "blocked"
    assert cell["timings"]["checks"]["answers"] < 60
