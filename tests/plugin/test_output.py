"""What the canary may compare with, in whole simulated runs: wrong answers are no reference, and none is no match."""

from __future__ import annotations

import pytest

WRONG_BASELINE = """
schema: 1
entries:
  - id: KB-1
    when: {attention: triton, graphs: on}
    expect: {kind: wrong-output}
    mode: xfail
    confidence: confirmed
    source: test
    grade: S
    issue: https://github.com/sgl-project/sglang/issues/1
    reason: the baseline talks garbage
    added: 2026-11-01
    review-by: 2036-11-01
"""
UNLIKE = """
from pytest_gpuserve.manager import quality

real = quality._sender

def sender(handle):
    send = real(handle)
    return (lambda body: changed(handle.cell.id, body, send)) if {cells} else send

quality._sender = sender
"""
NO_LOGPROBS = (
    UNLIKE
    + """
def changed(cell, body, send):
    answer = send(body)
    for name in ("input_token_logprobs", "output_token_logprobs", "output_top_logprobs"):
        answer["meta_info"].pop(name, None)
    return answer
"""
)
FEW_LOGPROBS = (
    UNLIKE
    + """
def changed(cell, body, send):
    answer = send(body)
    answer["meta_info"]["input_token_logprobs"] = answer["meta_info"].get("input_token_logprobs", [])[:3]
    return answer
"""
)
REFUSES_LOGPROBS = (
    UNLIKE
    + """
def changed(cell, body, send):
    if body.get("return_logprob"):
        raise OSError("/generate: HTTP 400 Bad Request: no logprobs with this algorithm")
    return send(body)
"""
)


@pytest.mark.parametrize("output", ["nan", "garbage", "repeat"])
def test_a_baseline_whose_output_is_wrong_is_no_reference(project, output) -> None:
    project.file("matrices/known_bad.yaml", WRONG_BASELINE)
    rules = (
        f"- {{when: {{attention: triton, graphs: on}}, then: {{output: {output}}}}}\n"
        "- {when: {attention: flashinfer}, then: {output: garbage}}"
    )
    result = project.run("-rs", "--gpu-no-control", rules=rules)
    assert result.outcomes == {"baseline": "xfailed", "graphs.off": "passed", "attention.flashinfer": "failed"}, (
        result.text
    )
    assert result.checks["baseline", "output"] == "xfailed"
    assert result.checks["graphs.off", "output"] == "skipped"
    told = "output not checked: compared with itself only, since the baseline sm120-m-baseline is no reference"
    result.run.stdout.fnmatch_lines([f"SKIPPED*{told}*"])
    assert result.cells["graphs.off"]["reason"].startswith(told)
    assert result.cells["graphs.off"]["output"]["compared_with"] == "itself"
    # What needs no reference is asked all the same: garbage is not even what it was a moment before.
    assert result.checks["attention.flashinfer", "output"] == "failed"


def test_a_baseline_that_another_check_finds_wrong_is_no_reference(project) -> None:
    project.file("matrices/known_bad.yaml", WRONG_BASELINE)
    project.file(
        "conftest.py",
        """
        from pytest_gpuserve.manager import quality

        real = quality.concurrency

        def concurrency(manager, cell):
            return quality._wrong("among 64, they leak") if cell.is_baseline else real(manager, cell)

        quality.concurrency = concurrency
        """,
    )
    result = project.run("-k", "baseline or graphs")
    assert result.checks["baseline", "output"] == "passed", result.text
    assert result.checks["graphs.off", "output"] == "skipped"
    assert "sm120-m-baseline is no reference: among 64, they leak" in result.cells["graphs.off"]["reason"]


def test_without_the_baseline_the_output_is_not_checked(project) -> None:
    result = project.run("-k", "flashinfer", "-rs")
    assert result.code == 0, result.text
    assert result.checks["attention.flashinfer", "output"] == "skipped"
    result.run.stdout.fnmatch_lines(["SKIPPED*output not checked*sm120-m-baseline is deselected: run it*"])


@pytest.mark.parametrize(
    ("fault", "told"),
    [(NO_LOGPROBS, "0 of 47 logprobs of its prompt"), (FEW_LOGPROBS, "2 of 47 logprobs of its prompt")],
    ids=["none", "few"],
)
def test_logprobs_that_do_not_come_are_wrong_output_of_that_server(project, fault, told) -> None:
    project.file("conftest.py", fault.replace("{cells}", "'flashinfer' in handle.cell.id"))
    result = project.run("-k", "baseline or flashinfer")
    assert result.checks["baseline", "output"] == "passed", result.text
    assert result.checks["attention.flashinfer", "output"] == "failed"
    failure = next(one["failure"] for one in result.record["checks"] if one["failure"] and "flashinfer" in one["cell"])
    assert failure["kind"] == "wrong-output"
    assert told in failure["message"]


def test_a_server_that_refuses_logprobs_is_not_checked_and_no_reference(project) -> None:
    project.file("conftest.py", REFUSES_LOGPROBS.replace("{cells}", "handle.cell.is_baseline"))
    result = project.run("-k", "baseline or graphs", "-rs")
    assert result.code == 0, result.text
    assert result.checks["baseline", "output"] == result.checks["graphs.off", "output"] == "skipped"
    assert result.checks["baseline", "concurrency"] == "passed"
    result.run.stdout.fnmatch_lines_random(
        [
            "SKIPPED*output not checked: the server refuses to give logprobs*HTTP 400*",
            "SKIPPED*sm120-m-baseline is no reference: output not checked: the server refuses*",
        ]
    )
    assert any("were not compared" in note for note in result.cells["baseline"]["notes"])


def test_a_server_that_refuses_logprobs_may_not_repeat_itself_either(project) -> None:
    project.file("conftest.py", REFUSES_LOGPROBS.replace("{cells}", "True"))
    result = project.run("-k", "baseline", rules="- {when: {}, then: {output: repeat}}")
    assert result.checks["baseline", "output"] == "failed", result.text
    assert "token 0 over and over" in result.cells["baseline"]["failure"]["message"]
