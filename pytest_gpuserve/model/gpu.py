"""GPUs as every part sees them, whatever reads them (NVML, the simulation, the CPU as one device)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["Gpu", "GpuProcess", "Probe", "Reading"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU (or MIG instance, or the CPU). `index` is NVML's, in PCI bus order; `uuid` is what locks are named by.

    `memory_total` in bytes, None where NVML has no figure (GB10). `numa` and `links` are for the choice of groups:
    `links` holds the UUIDs of GPUs joined by NVLink.
    """

    index: int
    uuid: str
    name: str
    arch: str
    memory_total: int | None
    numa: int | None = None
    links: tuple[str, ...] = ()
    parent: str | None = None

    def to_json(self) -> dict[str, Any]:
        """As `run.json` lists it."""
        return {
            "index": self.index,
            "uuid": self.uuid,
            "name": self.name,
            "arch": self.arch,
            "memory_total": self.memory_total,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """A compute process NVML reports on a GPU. `memory` in bytes or None.

    `start` is the start time (`gpu.process.start_of`) of the process of this PID namespace that `pid` is known to mean.
    None: nothing of that kind is known. In a container NVML may report the host's pids, and then the same number names
    another process here.
    """

    pid: int
    memory: int | None = None
    start: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One reading of one GPU, None for what could not be read. Memory in bytes, power in watts, clocks in MHz, percent.

    `memory_used` leaves out the driver's reserved part, and what processes hold that only draw (display servers).
    `processes` None means: this driver or container lists no processes (then memory alone is the evidence).
    `throttle` holds the names of NVML's clocks-event reasons that are active.
    """

    uuid: str
    memory_used: int | None = None
    processes: tuple[GpuProcess, ...] | None = None
    utilization: int | None = None
    power: float | None = None
    power_limit: float | None = None
    sm_clock: int | None = None
    sm_clock_max: int | None = None
    temperature: int | None = None
    throttle: tuple[str, ...] = ()


class Probe(Protocol):
    """Reads the GPUs of a machine. Implementations: `gpu.nvml`, `gpu.sim`, `gpu.cpu`."""

    simulated: bool

    def gpus(self) -> tuple[Gpu, ...]:
        """Every GPU of the machine, in index order; `gpu.visible.bound` applies an outer CUDA_VISIBLE_DEVICES.

        MachineError with a clear text when there is no driver.
        """
        ...

    def read(self, uuid: str) -> Reading:
        """The GPU's state now; never raises for a figure the driver does not have. MachineError if NVML fails."""
        ...

    def driver(self) -> dict[str, str]:
        """`driver`, `cuda` (driver API version) and `nvml` versions, as far as they are known."""
        ...

    def spec(self) -> dict[str, Any]:
        """How another process opens the same probe: `gpu.open_probe(spec)`."""
        ...
