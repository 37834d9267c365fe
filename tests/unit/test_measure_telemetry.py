"""Telemetry: what makes a load invalid, and what is normal at full load."""

from __future__ import annotations

import threading

import pytest

from pytest_gpuserve.errors import MachineError
from pytest_gpuserve.measure import telemetry
from pytest_gpuserve.measure.telemetry import Sampler, summarise
from pytest_gpuserve.model.gpu import GpuProcess, Reading


def reading(**given: object) -> Reading:
    return Reading(uuid="GPU-1", **given)


def test_power_against_its_limit_is_said_in_one_text() -> None:
    readings = [reading(power=watts, power_limit=600.0, utilization=99, sm_clock=2400) for watts in (320.0, 330, 580)]
    found = summarise(readings, lambda _pid: True)
    figures = found.by_gpu["GPU-1"]
    assert figures["text"] == "330 W of 600 W"
    assert figures["power"] == {"median": 330, "max": 580}
    assert figures["sm_clock"]["median"] == 2400
    assert found.invalid is None


@pytest.mark.parametrize(
    ("reasons", "invalid"),
    [
        ([("SwPowerCap",)] * 10, None),
        ([("GpuIdle",)] * 10, None),
        ([()] * 19 + [("HwThermalSlowdown",)], None),
        ([()] * 8 + [("HwThermalSlowdown", "SwPowerCap")] * 2, "HwThermalSlowdown in 20% of the samples"),
        ([("HwSlowdown",)], "HwSlowdown in 100%"),
        ([("HwPowerBrakeSlowdown",)] * 3, "HwPowerBrakeSlowdown"),
    ],
)
def test_slowdowns_of_the_hardware_are_invalid_and_the_power_cap_is_not(reasons, invalid) -> None:
    found = summarise([reading(throttle=names) for names in reasons], lambda _pid: True)
    assert invalid in found.invalid if invalid else found.invalid is None


@pytest.mark.parametrize(
    ("whose", "invalid"),
    [
        ({1: True, 2: True}, False),
        ({1: True, 2: False}, True),
        ({1: True, 2: None}, True),  # came and went
        ({1: None, 2: None}, False),  # another namespace's pids: nobody's, or the server's own
    ],
)
def test_a_strangers_process_is_invalid(whose, invalid) -> None:
    seen = [reading(processes=(GpuProcess(pid=1),)), reading(processes=tuple(GpuProcess(pid=pid) for pid in whose))]
    found = summarise(seen, whose.__getitem__)
    assert (found.invalid is not None) is invalid
    if invalid:
        assert "process 2" in found.invalid


def test_figures_that_a_driver_does_not_have_are_left_out() -> None:
    assert summarise([reading()], lambda _pid: True).by_gpu == {"GPU-1": {"samples": 1, "throttle": {}}}
    assert summarise([], lambda _pid: True).by_gpu == {}


class Probe:
    simulated = True

    def __init__(self) -> None:
        self.reads = 0
        self.enough = threading.Event()

    def read(self, uuid: str) -> Reading:
        self.reads += 1
        if self.reads >= 4:
            self.enough.set()
        if uuid == "GPU-sick":
            raise MachineError("fell off the bus")
        return Reading(uuid=uuid, utilization=self.reads)


def test_it_samples_in_the_background_and_survives_a_gpu_that_cannot_be_read() -> None:
    probe = Probe()
    with Sampler(probe, ["GPU-1", "GPU-sick"]) as sampler:
        assert probe.enough.wait(10)
    readings = sampler.readings(0.0, float("inf"))
    assert {one.uuid for one in readings} == {"GPU-1"}
    assert len(readings) >= 2


def test_a_driver_that_does_not_answer_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "LATE", 0.05)
    answered = threading.Event()

    class Wedged(Probe):
        def read(self, uuid: str) -> Reading:
            assert answered.wait(60)
            return super().read(uuid)

    with Sampler(Wedged(), ["GPU-1"]) as sampler:
        pass
    assert not answered.is_set()
    assert sampler.readings(0.0, float("inf")) == []
    answered.set()


def test_a_load_shorter_than_a_period_has_the_reading_before_it() -> None:
    probe = Probe()
    with Sampler(probe, ["GPU-1"]) as sampler:
        assert probe.enough.wait(10)
    last = sampler.readings(0.0, float("inf"))[-1]
    assert sampler.readings(1e12, 2e12) == [last]
