"""The machine's CPUs as one device of arch `cpu`: one lease for the machine, so that two servers never share it."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from pytest_gpuserve.errors import MachineError
from pytest_gpuserve.model.arch import CPU
from pytest_gpuserve.model.gpu import Gpu, Reading

__all__ = ["CpuProbe"]


class CpuProbe:
    """A probe with one device. It reports no memory and no processes: those of the host are no sign of a server."""

    simulated = False

    def gpus(self) -> tuple[Gpu, ...]:
        """The one device; `memory_total` is the machine's memory in bytes."""
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return (Gpu(index=0, uuid="CPU", name=_model(), arch=CPU, memory_total=total),)

    def read(self, uuid: str) -> Reading:
        """An empty reading. MachineError for any other device."""
        if uuid != "CPU":
            message = f"there is no device {uuid} here: the CPU engine has one, CPU"
            raise MachineError(message)
        return Reading(uuid=uuid)

    def driver(self) -> dict[str, str]:
        """No driver is involved."""
        return {}

    def spec(self) -> dict[str, Any]:
        """For `gpu.open_probe`."""
        return {"kind": "cpu"}


def _model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{name or platform.machine()}, {os.cpu_count()} CPUs"
