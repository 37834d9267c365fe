"""GPUs through NVML, by the module `pynvml` of the distribution nvidia-ml-py. The only place that imports it.

A figure the driver does not have is None, never an error: GB10 has no memory figures (nvitop#208), containers list no
processes, MIG instances have no power. An error is what ends the reading itself: the driver gone, a GPU off the bus.
"""

from __future__ import annotations

import re
import threading
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpuserve.errors import MachineError, UsageError
from pytest_gpuserve.gpu import process
from pytest_gpuserve.gpu.admission import believable_idle
from pytest_gpuserve.model.arch import arch_of_capability
from pytest_gpuserve.model.gpu import Gpu, GpuProcess, Reading

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["NvmlProbe", "checked", "import_pynvml"]

_WITHOUT = "Without a GPU: --gpu-plan, --gpu-preflight, --gpu-sim 8xsm120, or --gpu-matrix cpu"
_KERNEL_MODULE = Path("/proc/driver/nvidia/version")
_EVENT_REASON = "nvmlClocksEventReason"
# Of these the rest of a reading cannot be trusted. All other errors only say that one figure is not to be had.
_LOST = (
    "NVML_ERROR_UNINITIALIZED",
    "NVML_ERROR_DRIVER_NOT_LOADED",
    "NVML_ERROR_TIMEOUT",
    "NVML_ERROR_GPU_IS_LOST",
    "NVML_ERROR_RESET_REQUIRED",
    "NVML_ERROR_LIB_RM_VERSION_MISMATCH",
    "NVML_ERROR_UNKNOWN",
)


def import_pynvml() -> Any:
    """The module, or a UsageError if it is missing or is another distribution's."""
    try:
        import pynvml
    except ModuleNotFoundError:
        raise UsageError("the module pynvml is missing: pip install nvidia-ml-py") from None
    return checked(pynvml)


def checked(module: Any) -> Any:
    """`module`, or a UsageError if it is not nvidia-ml-py's, or too old a one.

    The distribution `pynvml` up to 11 ships a package of the same name that shadows it (vllm#12847).
    """
    if hasattr(module, "nvmlDeviceGetCurrentClocksEventReasons") and hasattr(module, "nvmlMemory_v2"):
        return module
    found = []
    for name in ("pynvml", "nvidia-ml-py"):
        with suppress(metadata.PackageNotFoundError):
            found.append(f"{name} {metadata.version(name)}")
    where = getattr(module, "__file__", None)
    raise UsageError(
        f"the module pynvml at {where} is not that of nvidia-ml-py 12.560 or newer (installed: "
        f"{', '.join(found) or 'neither'}): an old `pynvml` shadows it, or it is too old itself. "
        "Do: pip uninstall -y pynvml && pip install --force-reinstall 'nvidia-ml-py>=12.560'"
    )


class NvmlProbe:
    """Reads this machine's GPUs. `library` is the module pynvml, or what stands in for it in a test.

    UsageError for a wrong module; MachineError, with the next step, if there is no driver to talk to. May be used from
    several threads; not across a fork.
    """

    simulated = False

    def __init__(self, library: Any = None) -> None:
        self._nvml = import_pynvml() if library is None else checked(library)
        self._fatal = {getattr(self._nvml, name) for name in _LOST}
        self._lock = threading.RLock()
        self._handles: dict[str, Any] = {}
        self._lost: set[str] = set()
        self._gpus: tuple[Gpu, ...] | None = None
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            raise MachineError(self._explain(error)) from error

    def gpus(self) -> tuple[Gpu, ...]:
        """Every GPU of the machine in PCI bus order, a GPU in MIG mode as its instances. Read once.

        `visible.bound` applies CUDA_VISIBLE_DEVICES. GPUs that this container has no right to are not listed.
        """
        with self._lock:
            if self._gpus is None:
                try:
                    self._gpus = tuple(self._list())
                except self._nvml.NVMLError as error:
                    raise MachineError(self._explain(error)) from error
            return self._gpus

    def read(self, uuid: str) -> Reading:
        """The GPU's state now. NVML is started again once if it fails; MachineError if that does not help."""
        with self._lock:
            try:
                reading = self._read(uuid)
            except self._nvml.NVMLError as error:
                if uuid in self._lost:
                    raise MachineError(self._gone(uuid, error)) from error
                self._lost.add(uuid)
                try:
                    self._restart()
                    reading = self._read(uuid)
                except self._nvml.NVMLError as again:
                    raise MachineError(self._gone(uuid, again)) from again
            self._lost.discard(uuid)
            return reading

    def driver(self) -> dict[str, str]:
        """The versions of the driver, of the CUDA it brings, and of NVML."""
        nvml = self._nvml
        cuda = self._figure(nvml.nvmlSystemGetCudaDriverVersion)
        versions = {
            "driver": self._figure(nvml.nvmlSystemGetDriverVersion),
            "cuda": None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
            "nvml": self._figure(nvml.nvmlSystemGetNVMLVersion),
        }
        return {name: str(version) for name, version in versions.items() if version is not None}

    def spec(self) -> dict[str, Any]:
        """For `gpu.open_probe`."""
        return {"kind": "nvml"}

    def _figure(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """The call's result; None where this driver or device does not have it."""
        try:
            return call(*arguments)
        except self._nvml.NVMLError as error:
            if error.value in self._fatal:
                raise
            return None

    def _list(self) -> Iterator[Gpu]:
        nvml = self._nvml
        handles = []
        for position in range(nvml.nvmlDeviceGetCount()):
            # A container sees GPUs it has no right to; one that fell off the bus is still counted. CUDA skips both.
            with suppress(nvml.NVMLError):
                handle = nvml.nvmlDeviceGetHandleByIndex(position)
                handles.append((nvml.nvmlDeviceGetPciInfo(handle).busId, nvml.nvmlDeviceGetUUID(handle), handle))
        handles.sort(key=lambda entry: entry[:2])
        for index, (_, uuid, handle) in enumerate(handles):
            common = {
                "index": index,
                "arch": arch_of_capability(*nvml.nvmlDeviceGetCudaComputeCapability(handle)),
                "numa": self._numa(handle),
            }
            mig = self._figure(nvml.nvmlDeviceGetMigMode, handle)
            if mig is not None and mig[0] == nvml.NVML_DEVICE_MIG_ENABLE:
                for instance in self._instances(handle):
                    yield self._gpu(instance, nvml.nvmlDeviceGetUUID(instance), parent=uuid, **common)
            else:
                peers = tuple(name for _, name, peer in handles if peer is not handle and self._joined(handle, peer))
                yield self._gpu(handle, uuid, links=peers, **common)

    def _gpu(self, handle: Any, uuid: str, **facts: Any) -> Gpu:
        memory = self._memory(handle)
        name = self._nvml.nvmlDeviceGetName(handle)
        return Gpu(uuid=uuid, name=name, memory_total=None if memory is None else memory.total, **facts)

    def _instances(self, handle: Any) -> Iterator[Any]:
        for slot in range(self._figure(self._nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
            instance = self._figure(self._nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, slot)
            if instance is not None:
                yield instance

    def _joined(self, one: Any, other: Any) -> bool:
        """By NVLink, directly or through NVSwitch: the links' own remote addresses name only the switch."""
        nvml = self._nvml
        status = self._figure(nvml.nvmlDeviceGetP2PStatus, one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
        return bool(status == nvml.NVML_P2P_STATUS_OK)

    def _numa(self, handle: Any) -> int | None:
        """The one NUMA node the GPU is near to; None if NVML names none or several."""
        scope = self._nvml.NVML_AFFINITY_SCOPE_NODE
        words = self._figure(self._nvml.nvmlDeviceGetMemoryAffinity, handle, 4, scope)
        nodes = [64 * at + bit for at, word in enumerate(words or ()) for bit in range(64) if word >> bit & 1]
        return nodes[0] if len(nodes) == 1 else None

    def _memory(self, handle: Any) -> Any:
        """Version 2 leaves the driver's reserved part out of `used`; older drivers and MIG have only version 1."""
        call = self._nvml.nvmlDeviceGetMemoryInfo
        newer = self._figure(call, handle, self._nvml.nvmlMemory_v2)
        return self._figure(call, handle) if newer is None else newer

    def _read(self, uuid: str) -> Reading:
        nvml = self._nvml
        handle = self._handle(uuid)
        gpu = next((gpu for gpu in self.gpus() if gpu.uuid == uuid), None)
        whole = self._handle(gpu.parent) if gpu and gpu.parent else handle
        memory = self._memory(handle)
        compute = self._processes(nvml.nvmlDeviceGetComputeRunningProcesses_v3, handle)
        used = None
        if memory is not None:
            graphics = self._processes(nvml.nvmlDeviceGetGraphicsRunningProcesses_v3, handle)
            used = memory.used - _drawing(graphics, compute)
            if not compute and used > believable_idle(memory.total):
                compute = None  # a container's or WSL's empty list: it is not believed while so much is in use
        utilization = self._figure(nvml.nvmlDeviceGetUtilizationRates, handle)
        power = self._figure(nvml.nvmlDeviceGetPowerUsage, whole)
        limit = self._figure(nvml.nvmlDeviceGetEnforcedPowerLimit, whole)
        return Reading(
            uuid=uuid,
            memory_used=used,
            processes=compute,
            utilization=None if utilization is None else int(utilization.gpu),
            power=None if power is None else power / 1000,
            power_limit=None if limit is None else limit / 1000,
            sm_clock=self._figure(nvml.nvmlDeviceGetClockInfo, whole, nvml.NVML_CLOCK_SM),
            sm_clock_max=self._figure(nvml.nvmlDeviceGetMaxClockInfo, whole, nvml.NVML_CLOCK_SM),
            temperature=self._figure(nvml.nvmlDeviceGetTemperature, whole, nvml.NVML_TEMPERATURE_GPU),
            throttle=self._reasons(self._figure(nvml.nvmlDeviceGetCurrentClocksEventReasons, whole)),
        )

    def _handle(self, uuid: str) -> Any:
        if uuid not in self._handles:
            self._handles[uuid] = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
        return self._handles[uuid]

    def _processes(self, call: Callable[..., Any], handle: Any) -> tuple[GpuProcess, ...] | None:
        listed = self._figure(call, handle)
        if listed is None:
            return None
        return tuple(
            GpuProcess(pid=int(entry.pid), memory=entry.usedGpuMemory, start=process.gpu_user(int(entry.pid)))
            for entry in listed
        )

    def _reasons(self, mask: int | None) -> tuple[str, ...]:
        """The active reasons by NVML's names, without their prefix: `SwPowerCap`, `HwThermalSlowdown`."""
        if not mask:
            return ()
        named: dict[int, str] = {}
        for name in sorted(dir(self._nvml)):
            bit = getattr(self._nvml, name) if name.startswith(_EVENT_REASON) else 0
            if isinstance(bit, int) and bit.bit_count() == 1 and bit & mask:
                named.setdefault(bit, name.removeprefix(_EVENT_REASON))
        return tuple(named[bit] for bit in sorted(named))

    def _restart(self) -> None:
        with suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()
        self._handles.clear()
        self._nvml.nvmlInit()

    def _gone(self, uuid: str, error: Any) -> str:
        index = next((f"GPU {gpu.index} " for gpu in self._gpus or () if gpu.uuid == uuid), "GPU ")
        return (
            f"{index}({uuid}) can no longer be read: NVML says '{error}' ({error.value}), also after NVML was started "
            "again. Look for Xid lines in `dmesg`; the GPU needs a reset (nvidia-smi --gpu-reset) or the machine a boot"
        )

    def _explain(self, error: Any) -> str:
        nvml = self._nvml
        if error.value == nvml.NVML_ERROR_LIBRARY_NOT_FOUND:
            return (
                "there is no NVIDIA driver here: libnvidia-ml.so.1 is not found. Install the driver; in a container, "
                f"start it with the NVIDIA runtime (docker run --gpus all). {_WITHOUT}"
            )
        if error.value == nvml.NVML_ERROR_DRIVER_NOT_LOADED:
            return (
                "the NVIDIA driver is installed but not loaded, or no GPU device is passed into this container "
                f"(/dev/nvidia*). Try `nvidia-smi`, then `modprobe nvidia`. {_WITHOUT}"
            )
        if error.value == nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
            return (
                f"the NVIDIA driver was updated under the running system: the loaded kernel module is "
                f"{_kernel_module() or 'of one version'}, the library libnvidia-ml {_loaded_library() or 'of another'}."
                " Reboot, or unload and load the nvidia modules; in a container, restart it"
            )
        return f"NVML does not start: '{error}' ({error.value}). Try `nvidia-smi`, and look for NVRM lines in `dmesg`"


def _drawing(graphics: tuple[GpuProcess, ...] | None, compute: tuple[GpuProcess, ...] | None) -> int:
    """Bytes of processes that only draw: a display server is no reason to wait, and its share changes all day."""
    computing = {item.pid for item in compute or ()}
    return sum(item.memory or 0 for item in graphics or () if item.pid not in computing)


def _kernel_module() -> str | None:
    try:
        found = re.search(r"Kernel Module.*?\s(\d+\.\d[\d.]*)", _KERNEL_MODULE.read_text(encoding="ascii"))
    except OSError:
        return None
    return found[1] if found else None


def _loaded_library() -> str | None:
    """The version in the name of the library file that this process has mapped."""
    found = re.search(r"libnvidia-ml\.so\.(\d+\.[\d.]+)", Path("/proc/self/maps").read_text(encoding="utf-8"))
    return found[1] if found else None
