"""How counts are written."""

from __future__ import annotations

from pytest_gpuserve.model.words import machine

CPU = ("Intel(R) Xeon(R) Processor, 32 CPUs", "cpu")
H200 = ("NVIDIA H200", "sm90")


def test_a_machine_is_what_the_cells_can_run_on() -> None:
    """Seen on an H200: `3 × Intel(R) Xeon(R) Processor, 32 CPUs, NVIDIA H200` for two GPUs and their host."""
    assert machine([H200, H200, CPU], {"sm90"}) == "2 x NVIDIA H200"
    assert machine([H200, CPU], {"cpu"}) == f"1 x {CPU[0]}"
    assert machine([H200, H200, ("NVIDIA B200", "sm100")], {"sm90", "sm100"}) == "2 x NVIDIA H200, 1 x NVIDIA B200"


def test_a_machine_without_a_fitting_gpu_is_told_whole_and_an_empty_one_is_empty() -> None:
    assert machine([H200, CPU], {"sm120"}) == f"1 x NVIDIA H200, 1 x {CPU[0]}"
    assert machine([], {"sm90"}) == ""
