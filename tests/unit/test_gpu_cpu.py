"""The CPUs as one device."""

from __future__ import annotations

import pytest

from pytest_gpuserve.errors import MachineError, UsageError
from pytest_gpuserve.gpu import open_probe
from pytest_gpuserve.gpu.cpu import CpuProbe


def test_machine_has_one_cpu_device_with_its_memory_and_nothing_to_gate_on() -> None:
    probe = open_probe(CpuProbe().spec())
    (cpu,) = probe.gpus()
    assert (cpu.index, cpu.arch, probe.simulated) == (0, "cpu", False)
    assert "CPUs" in cpu.name
    assert (cpu.memory_total or 0) > 1 << 28
    reading = probe.read(cpu.uuid)
    assert (reading.memory_used, reading.processes) == (None, None)
    with pytest.raises(MachineError, match="no device GPU-1"):
        probe.read("GPU-1")


def test_unknown_probe_is_refused() -> None:
    with pytest.raises(UsageError, match="nvml, sim"):
        open_probe({"kind": "rocm"})
