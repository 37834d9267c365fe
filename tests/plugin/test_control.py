"""The control run: the flags or the machine?"""

from __future__ import annotations

HANG = "- {when: {attention: flashinfer}, then: {hang: graph-capture}}"


def test_a_bad_flag_on_a_sound_gpu_fails_with_the_control_recorded(project) -> None:
    project.stall("graph-capture")
    result = project.run("-k", "baseline or flashinfer", rules=HANG)
    assert result.outcomes == {"baseline": "passed", "attention.flashinfer": "failed"}
    cell = result.cells["attention.flashinfer"]
    control = cell["control"]
    assert (control["cell"], control["outcome"]) == ("sm120-m-baseline", "passed")
    assert control["gpus"] == [cell["gpus"][0]["uuid"]]
    assert (
        "The machine was checked: sm120-m-baseline started and answered on the same GPUs" in cell["failure"]["message"]
    )
    assert (result.folder / cell["folder"] / "control.log").exists()
    assert (cell["server_starts"], result.record["server_starts"]) == (2, 3)
    assert result.code == 1


def test_a_sick_gpu_is_infra_named_and_not_used_again(project) -> None:
    """On GPU 0 everything hangs; the baseline goes on elsewhere and blocks nothing."""
    sick = "- {when: {gpu: 0}, then: {hang: weights}}"
    project.stall("weights")
    result = project.run(rules=sick)
    assert result.code == 1
    assert result.outcomes == {"baseline": "infra", "attention.flashinfer": "passed", "graphs.off": "passed"}
    assert result.checks["baseline", "answers"] == "passed"
    message = result.cells["baseline"]["failure"]["message"]
    assert "hang in weights on GPU 0 (GPU-SIM-" in message
    assert "quarantined for this run" in message
    first = result.cells["baseline"]["control"]["instead_of"]
    for name in ("attention.flashinfer", "graphs.off"):
        assert result.cells[name]["gpus"][0]["uuid"] not in first


def test_a_machine_on_which_the_baseline_fails_too_is_infra(project) -> None:
    """The delta is alone here, so its control run is the first to see that the GPU is sick."""
    sick = "- {when: {gpu: 0}, then: {hang: weights}}"
    project.stall("weights")
    result = project.run("-k", "flashinfer", rules=sick)
    assert result.outcomes == {"attention.flashinfer": "infra"}
    cell = result.cells["attention.flashinfer"]
    assert "the machine is suspect, not the flags: sm120-m-baseline fails on GPU 0" in cell["failure"]["message"]
    assert cell["control"]["outcome"] == "failed"
    assert "INFRA" in result.text


def test_a_failing_baseline_without_other_gpus_is_unverified(project, monkeypatch) -> None:
    """After the simulation's own limit, which nobody gave."""
    monkeypatch.delenv("GPUSERVE_STALL")
    result = project.run("-k", "baseline", sim="1xsm120", rules="- {then: {hang: weights}}")
    assert result.outcomes == {"baseline": "failed"}
    assert result.cells["baseline"]["failure"]["kind"] == "hang"
    assert (
        "unverified: this is the baseline, and there are no other GPUs"
        in result.cells["baseline"]["failure"]["message"]
    )


def test_a_baseline_that_fails_on_two_gpus_is_not_one_sick_gpu(project) -> None:
    rules = "- {then: {crash: {phase: weights, text: 'RuntimeError: broken'}}}"
    result = project.run("-k", "baseline", rules=rules)
    assert result.outcomes == {"baseline": "failed"}
    assert "too (crash in weights): not one sick GPU" in result.cells["baseline"]["failure"]["message"]


def test_without_control(project) -> None:
    project.stall("graph-capture")
    result = project.run("--gpu-no-control", "-k", "flashinfer", rules=HANG)
    cell = result.cells["attention.flashinfer"]
    assert (cell["outcome"], cell["control"], cell["server_starts"]) == ("failed", None, 1)
    assert result.record["server_starts"] == 1
