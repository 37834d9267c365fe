"""GPUs: what this machine has, and the right to use them.

A probe (`open_probe`) reads them; `visible.bound` applies an outer CUDA_VISIBLE_DEVICES; `lease.acquire` takes some.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpuserve.errors import UsageError

if TYPE_CHECKING:
    from pytest_gpuserve.model.gpu import Probe

__all__ = ["open_probe"]


def open_probe(spec: dict[str, Any]) -> Probe:
    """The probe that `Probe.spec()` describes: `{"kind": "nvml"}`, `{"kind": "sim", "dir": …}`, `{"kind": "cpu"}`.

    Imports only what that kind needs. MachineError when the driver or the simulated machine cannot be opened.
    """
    match spec:
        case {"kind": "nvml"}:
            from pytest_gpuserve.gpu.nvml import NvmlProbe

            return NvmlProbe()
        case {"kind": "sim", "dir": str(folder)}:
            from pytest_gpuserve.gpu.sim import SimProbe

            return SimProbe(Path(folder))
        case {"kind": "cpu"}:
            from pytest_gpuserve.gpu.cpu import CpuProbe

            return CpuProbe()
    message = f"no probe is described by {spec!r}: the kinds are nvml, sim (with dir) and cpu"
    raise UsageError(message)
