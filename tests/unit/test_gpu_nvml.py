"""NvmlProbe against a stand-in for the module pynvml that fails as drivers do."""

# ruff: noqa: N802, N815 - the stand-in has the names of pynvml

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from pytest_gpuserve.errors import MachineError, UsageError
from pytest_gpuserve.gpu import nvml
from pytest_gpuserve.gpu.nvml import NvmlProbe, checked
from pytest_gpuserve.model.gpu import GpuProcess

GIB = 1 << 30
Processes = tuple[tuple[int, int | None], ...]


@dataclass
class Device:
    """One device as the driver has it; None for what it does not support."""

    uuid: str
    bus: str
    name: str = "NVIDIA H200"
    capability: tuple[int, int] = (9, 0)
    memory: tuple[int, int, int] | None = (141 * GIB, 615 << 20, 600 << 20)  # total, used, reserved
    version_two: bool = True
    compute: Processes | None = ()
    graphics: Processes | None = ()
    nodes: int = 0b1
    nvlinked: tuple[str, ...] = ()
    mig: list[Device] | None = None
    whole: bool = True  # False: a MIG instance, without power, clocks and utilization
    power: tuple[int, int] = (76_500, 700_000)
    events: int = 0x1
    broken: int | None = None  # the error every call on it raises


class FakeNvml:
    """The functions of pynvml that the probe uses, on `Device`s. Constants and errors are the real module's."""

    def __init__(self, *devices: Device, init: int | None = None, heals_at: int | None = None) -> None:
        self.devices = list(devices)
        self.init_error = init
        self.heals_at = heals_at
        self.started = 0

    def __getattr__(self, name: str) -> Any:
        # Constants and the exception class: whatever the real module calls so. Its functions are never reached.
        value = getattr(pynvml, name)
        if callable(value) and name.startswith("nvmlDevice"):
            raise AttributeError(name)
        return value

    def __dir__(self) -> list[str]:
        return dir(pynvml)

    def nvmlInit(self) -> None:
        if self.init_error is not None:
            raise pynvml.NVMLError(self.init_error)
        self.started += 1
        if self.started == self.heals_at:
            for device in self.devices:
                device.broken = None

    def nvmlShutdown(self) -> None:
        pass

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.159.04"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 13010

    def nvmlSystemGetNVMLVersion(self) -> str:
        return "13.580.159.04"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Device:
        return self._working(self.devices[index])

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Device:
        for device in self.devices:
            for one in (device, *(device.mig or ())):
                if one.uuid == uuid:
                    return self._working(one)
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetPciInfo(self, device: Device) -> Any:
        return SimpleNamespace(busId=device.bus)

    def nvmlDeviceGetUUID(self, device: Device) -> str:
        return device.uuid

    def nvmlDeviceGetName(self, device: Device) -> str:
        return device.name

    def nvmlDeviceGetCudaComputeCapability(self, device: Device) -> list[int]:
        return list(device.capability)

    def nvmlDeviceGetMemoryInfo(self, device: Device, version: int | None = None) -> Any:
        self._working(device)
        if device.memory is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        total, used, reserved = device.memory
        if version is None:
            return SimpleNamespace(total=total, used=used + reserved, free=total - used - reserved)
        if not device.version_two:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
        return SimpleNamespace(total=total, used=used, reserved=reserved, free=total - used - reserved)

    def nvmlDeviceGetComputeRunningProcesses_v3(self, device: Device) -> list[Any]:
        return self._listed(device.compute)

    def nvmlDeviceGetGraphicsRunningProcesses_v3(self, device: Device) -> list[Any]:
        return self._listed(device.graphics)

    def nvmlDeviceGetUtilizationRates(self, device: Device) -> Any:
        return SimpleNamespace(gpu=self._whole(device, 97), memory=3)

    def nvmlDeviceGetPowerUsage(self, device: Device) -> int:
        return self._whole(device, device.power[0])

    def nvmlDeviceGetEnforcedPowerLimit(self, device: Device) -> int:
        return self._whole(device, device.power[1])

    def nvmlDeviceGetClockInfo(self, device: Device, kind: int) -> int:
        assert kind == pynvml.NVML_CLOCK_SM
        return self._whole(device, 1980)

    nvmlDeviceGetMaxClockInfo = nvmlDeviceGetClockInfo

    def nvmlDeviceGetTemperature(self, device: Device, sensor: int) -> int:
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return self._whole(device, 41)

    def nvmlDeviceGetCurrentClocksEventReasons(self, device: Device) -> int:
        return self._whole(device, device.events)

    def nvmlDeviceGetMemoryAffinity(self, device: Device, words: int, scope: int) -> list[int]:
        assert scope == pynvml.NVML_AFFINITY_SCOPE_NODE
        return [device.nodes] + [0] * (words - 1)

    def nvmlDeviceGetP2PStatus(self, one: Device, other: Device, kind: int) -> int:
        assert kind == pynvml.NVML_P2P_CAPS_INDEX_NVLINK
        return pynvml.NVML_P2P_STATUS_OK if other.uuid in one.nvlinked else 1

    def nvmlDeviceGetMigMode(self, device: Device) -> list[int]:
        if device.capability >= (12, 0):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [int(device.mig is not None)] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, device: Device) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: Device, slot: int) -> Device:
        # Slots are sparse: instances are destroyed in any order.
        if device.mig is None or slot % 2 or slot // 2 >= len(device.mig):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return device.mig[slot // 2]

    @staticmethod
    def _listed(processes: Processes | None) -> list[Any]:
        if processes is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [SimpleNamespace(pid=pid, usedGpuMemory=memory) for pid, memory in processes]

    @staticmethod
    def _working(device: Device) -> Device:
        if device.broken is not None:
            raise pynvml.NVMLError(device.broken)
        return device

    def _whole(self, device: Device, figure: int) -> int:
        self._working(device)
        if not device.whole:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return figure


def h200(number: int, **facts: Any) -> Device:
    return Device(uuid=f"GPU-{number}", bus=f"00000000:{number:02X}:00.0", **facts)


def test_gpus_are_numbered_by_pci_bus() -> None:
    probe = NvmlProbe(FakeNvml(h200(0x3B), h200(0x1A), h200(0xCA)))
    assert [(gpu.index, gpu.uuid) for gpu in probe.gpus()] == [(0, "GPU-26"), (1, "GPU-59"), (2, "GPU-202")]
    assert {gpu.arch for gpu in probe.gpus()} == {"sm90"}
    assert probe.gpus()[0].memory_total == 141 * GIB


def test_topology_is_nvlink_peers_and_the_single_near_numa_node() -> None:
    pair = [h200(1, nvlinked=("GPU-2",), nodes=0b10), h200(2, nvlinked=("GPU-1",), nodes=0b11), h200(3, nodes=0)]
    first, second, third = NvmlProbe(FakeNvml(*pair)).gpus()
    assert (first.links, second.links, third.links) == (("GPU-2",), ("GPU-1",), ())
    assert (first.numa, second.numa, third.numa) == (1, None, None)


def test_gpu_that_this_container_may_not_use_is_left_out_and_the_rest_keeps_its_order() -> None:
    devices = [h200(1, broken=pynvml.NVML_ERROR_NO_PERMISSION), h200(2), h200(3)]
    assert [(gpu.index, gpu.uuid) for gpu in NvmlProbe(FakeNvml(*devices)).gpus()] == [(0, "GPU-2"), (1, "GPU-3")]


def test_reading_has_every_figure_in_its_unit() -> None:
    device = h200(1, compute=((77, 100 * GIB),), memory=(141 * GIB, 101 * GIB, GIB // 2), events=0x4 | 0x40)
    reading = NvmlProbe(FakeNvml(device)).read("GPU-1")
    assert reading.memory_used == 101 * GIB  # version 2: without the reserved half GiB
    assert reading.processes == (GpuProcess(pid=77, memory=100 * GIB),)
    assert (reading.utilization, reading.temperature) == (97, 41)
    assert (reading.power, reading.power_limit) == (76.5, 700.0)
    assert (reading.sm_clock, reading.sm_clock_max) == (1980, 1980)
    assert reading.throttle == ("SwPowerCap", "HwThermalSlowdown")


def test_application_clocks_have_nvmls_name_and_not_that_of_its_deprecated_twin() -> None:
    assert NvmlProbe(FakeNvml(h200(1, events=0x3))).read("GPU-1").throttle == ("GpuIdle", "ApplicationsClocksSetting")


def test_driver_without_version_two_gives_version_one() -> None:
    reading = NvmlProbe(FakeNvml(h200(1, version_two=False))).read("GPU-1")
    assert reading.memory_used == (615 + 600) << 20


def test_gb10_has_processes_but_no_memory_figures() -> None:
    spark = Device(
        uuid="GPU-S", bus="0000000F:01:00.0", name="NVIDIA GB10", capability=(12, 1), memory=None, compute=((9, None),)
    )
    probe = NvmlProbe(FakeNvml(spark))
    assert (probe.gpus()[0].arch, probe.gpus()[0].memory_total) == ("sm121", None)
    reading = probe.read("GPU-S")
    assert reading.memory_used is None
    assert reading.processes == (GpuProcess(pid=9, memory=None),)


@pytest.mark.parametrize(("used", "processes"), [(615 << 20, ()), (77 * GIB, None)])
def test_empty_process_list_is_believed_only_on_an_idle_gpu(used: int, processes: tuple[()] | None) -> None:
    reading = NvmlProbe(FakeNvml(h200(1, memory=(141 * GIB, used, 0)))).read("GPU-1")
    assert (reading.memory_used, reading.processes) == (used, processes)


def test_unsupported_process_list_is_none() -> None:
    assert NvmlProbe(FakeNvml(h200(1, compute=None, graphics=None))).read("GPU-1").processes is None


def test_display_server_counts_neither_as_process_nor_as_memory_but_a_computing_one_does() -> None:
    drawing = ((100, 700 << 20), (200, 300 << 20))
    idle = h200(1, memory=(32 * GIB, 1500 << 20, 0), graphics=drawing)
    both = replace(idle, compute=((200, 300 << 20),))
    reading = NvmlProbe(FakeNvml(idle)).read("GPU-1")
    assert (reading.memory_used, reading.processes) == (500 << 20, ())
    reading = NvmlProbe(FakeNvml(both)).read("GPU-1")
    assert (reading.memory_used, reading.processes) == (800 << 20, (GpuProcess(pid=200, memory=300 << 20),))


def test_mig_instances_stand_for_their_gpu_and_take_power_and_clocks_from_it() -> None:
    instances = [
        Device(uuid=f"MIG-{slot}", bus="", name="NVIDIA H200 MIG 3g.71gb", memory=(70 * GIB, 40 << 20, 0), whole=False)
        for slot in range(2)
    ]
    probe = NvmlProbe(FakeNvml(h200(1), h200(2, mig=instances), h200(3, mig=[])))
    found = [(gpu.index, gpu.uuid, gpu.parent) for gpu in probe.gpus()]
    assert found == [(0, "GPU-1", None), (1, "MIG-0", "GPU-2"), (1, "MIG-1", "GPU-2")]
    assert (probe.gpus()[1].memory_total, probe.gpus()[1].arch) == (70 * GIB, "sm90")
    reading = probe.read("MIG-1")
    assert (reading.memory_used, reading.power, reading.sm_clock, reading.utilization) == (40 << 20, 76.5, 1980, None)


def test_versions() -> None:
    driver = NvmlProbe(FakeNvml()).driver()
    assert driver == {"driver": "580.159.04", "cuda": "13.1", "nvml": "13.580.159.04"}


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_UNINITIALIZED])
def test_nvml_that_fails_in_a_run_is_started_again(code: int) -> None:
    fake = FakeNvml(h200(1), heals_at=2)
    probe = NvmlProbe(fake)
    probe.read("GPU-1")
    fake.devices[0].broken = code
    assert probe.read("GPU-1").memory_used == 615 << 20
    assert fake.started == 2


def test_lost_gpu_is_an_error_with_the_next_step_and_nvml_is_restarted_once_not_at_every_reading() -> None:
    fake = FakeNvml(h200(1), h200(2))
    probe = NvmlProbe(fake)
    assert len(probe.gpus()) == 2
    fake.devices[1].broken = pynvml.NVML_ERROR_GPU_IS_LOST
    for _ in range(3):
        with pytest.raises(MachineError) as failure:
            probe.read("GPU-2")
    assert str(failure.value) == (
        "GPU 1 (GPU-2) can no longer be read: NVML says 'GPU is lost' (15), also after NVML was started again. "
        "Look for Xid lines in `dmesg`; the GPU needs a reset (nvidia-smi --gpu-reset) or the machine a boot"
    )
    assert fake.started == 2
    assert probe.read("GPU-1").memory_used == 615 << 20
    fake.devices[1].broken = None
    assert probe.read("GPU-2").memory_used == 615 << 20


def test_reading_an_unknown_gpu_is_an_error() -> None:
    with pytest.raises(MachineError, match="GPU-9"):
        NvmlProbe(FakeNvml(h200(1))).read("GPU-9")


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, r"no NVIDIA driver here.*docker run --gpus all.*--gpu-sim"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, r"not loaded.*/dev/nvidia.*modprobe nvidia.*--gpu-plan"),
        (pynvml.NVML_ERROR_UNKNOWN, r"'Unknown Error' \(999\).*nvidia-smi"),
        (pynvml.NVML_ERROR_NO_PERMISSION, r"'Insufficient Permissions' \(4\)"),
    ],
)
def test_driver_that_does_not_start_is_named_with_the_next_step(code: int, says: str) -> None:
    with pytest.raises(MachineError, match=says):
        NvmlProbe(FakeNvml(init=code))


@pytest.mark.parametrize(
    "line",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23 03:50:36 UTC 2025\n",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (dvs-builder)\n",
    ],
)
def test_driver_updated_under_the_running_system_names_both_versions(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "version"
    module.write_text(line)
    monkeypatch.setattr(nvml, "_KERNEL_MODULE", module)
    with pytest.raises(MachineError) as failure:
        NvmlProbe(FakeNvml(init=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH))
    assert "the loaded kernel module is 570.86.15, the library libnvidia-ml of another" in str(failure.value)


def test_old_pynvml_distribution_that_shadows_nvidia_ml_py_is_named() -> None:
    old = SimpleNamespace(__file__="/env/pynvml/__init__.py", nvmlInit=lambda: None)
    with pytest.raises(UsageError, match=r"/env/pynvml/__init__\.py.*pip uninstall -y pynvml && pip install"):
        checked(old)


def test_real_module_of_the_development_environment_is_accepted() -> None:
    assert checked(pynvml) is pynvml


def test_every_function_the_stand_in_offers_exists_in_the_real_module() -> None:
    ours = {name for name in vars(FakeNvml) if name.startswith("nvml")}
    assert {name for name in ours if not hasattr(pynvml, name)} == set()


@pytest.mark.real
@pytest.mark.skipif(not Path("/proc/driver/nvidia/version").exists(), reason="needs an NVIDIA driver")
def test_real_gpus_are_read() -> None:
    probe = NvmlProbe()
    assert probe.gpus()
    for gpu in probe.gpus():
        reading = probe.read(gpu.uuid)
        assert gpu.arch.startswith("sm")
        assert reading.memory_used is None or 0 <= reading.memory_used <= (gpu.memory_total or 0)
        assert reading.memory_used is not None or reading.processes is not None
    assert probe.driver()["driver"][0].isdigit()
