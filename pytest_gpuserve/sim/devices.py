"""The simulated GPUs of one server: which it sees, and the memory its schedulers take."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_gpuserve.model.gpu import Gpu

__all__ = ["Devices", "OutOfMemory"]

_GIB = 1 << 30


class OutOfMemory(RuntimeError):
    """The GPU has less memory than the server wants; the text is PyTorch's."""


class Devices:
    """GPUs of `GPUSERVE_SIM_DIR` that `CUDA_VISIBLE_DEVICES` names; none without a simulated machine.

    `hold` is for how many seconds memory stays taken after the end of the process that took it, however it ends.
    """

    def __init__(self, folder: Path | None, gpus: tuple[Gpu, ...], hold: float) -> None:
        self._folder = folder
        self._gpus = gpus
        self._hold = hold
        self._held: dict[int, int] = {}

    @classmethod
    def of_environment(cls, hold: float) -> Devices:
        """As the environment says. UsageError or MachineError of the probe if the machine cannot be read."""
        name = os.environ.get("GPUSERVE_SIM_DIR")
        if not name:
            return cls(None, (), hold)
        from pytest_gpuserve.gpu.sim import SimProbe
        from pytest_gpuserve.gpu.visible import bound

        folder = Path(name)
        return cls(folder, bound(os.environ.get("CUDA_VISIBLE_DEVICES"), SimProbe(folder).gpus()), hold)

    @property
    def arch(self) -> str:
        """Of the first GPU; `cpu` without one."""
        return self._gpus[0].arch if self._gpus else "cpu"

    def require(self, ordinal: int) -> None:
        """RuntimeError in CUDA's words if there is a machine, and no such GPU in it."""
        if self._folder is not None and ordinal >= len(self._gpus):
            raise RuntimeError(
                "CUDA error: invalid device ordinal\n"
                "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below "
                "might be incorrect."
            )

    def free(self, ordinal: int) -> float:
        """GiB that nobody uses; 0 where there is no simulated machine."""
        if self._folder is None or ordinal >= len(self._gpus):
            return 0.0
        gpu = self._gpus[ordinal]
        return max(0, (gpu.memory_total or 0) - self._used(ordinal)) / _GIB

    def take(self, ordinal: int, amount: int) -> None:
        """This process now uses `amount` bytes in all of GPU `ordinal`. OutOfMemory if others left it less."""
        if self._folder is None:
            return
        from pytest_gpuserve.gpu.sim import charge

        gpu = self._gpus[ordinal]
        mine = self._held.get(ordinal, 0)
        room = (gpu.memory_total or amount) - (self._used(ordinal) - mine)
        if amount > room:
            raise OutOfMemory(
                f"CUDA out of memory. Tried to allocate {(amount - mine) / _GIB:.2f} GiB. GPU {ordinal} has a total "
                f"capacity of {(gpu.memory_total or 0) / _GIB:.2f} GiB of which {max(0, room - mine) / _GIB:.2f} GiB "
                "is free."
            )
        self._held[ordinal] = amount
        charge(self._folder, gpu.uuid, os.getpid(), amount, linger=self._hold)

    def busy(self, ordinal: int, percent: int) -> None:
        """What readings report of GPU `ordinal`'s use from now on, until somebody says otherwise."""
        if self._folder is not None and ordinal < len(self._gpus):
            from pytest_gpuserve.gpu.sim import set_utilization

            set_utilization(self._folder, self._gpus[ordinal].uuid, percent)

    def _used(self, ordinal: int) -> int:
        from pytest_gpuserve.gpu.sim import SimProbe

        assert self._folder is not None
        return SimProbe(self._folder).read(self._gpus[ordinal].uuid).memory_used or 0
