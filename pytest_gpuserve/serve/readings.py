"""GPU readings for the watch, taken beside the loop: a call into a wedged driver may not return for minutes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpuserve.model.gpu import Gpu, Probe, Reading
    from pytest_gpuserve.serve.loop import Loop

__all__ = ["GpuReadings"]


class GpuReadings:
    """`latest` by UUID; `refresh` asks for new ones unless the last question is still open."""

    def __init__(self, loop: Loop, probe: Probe, gpus: Sequence[Gpu]) -> None:
        self.latest: dict[str, Reading] = {}
        self._loop, self._probe, self._gpus = loop, probe, gpus
        self._open = False

    def refresh(self) -> None:
        """Takes readings in the background; returns at once."""
        if not self._open:
            self._open = True
            self._loop.background(self._read, self._take)

    @property
    def memory(self) -> dict[str, int | None]:
        """Bytes in use."""
        return {uuid: reading.memory_used for uuid, reading in self.latest.items()}

    @property
    def utilization(self) -> dict[str, int | None]:
        """Percent."""
        return {uuid: reading.utilization for uuid, reading in self.latest.items()}

    def _read(self) -> dict[str, Reading]:
        try:
            return {gpu.uuid: self._probe.read(gpu.uuid) for gpu in self._gpus}
        except Exception:  # noqa: BLE001 (NVML failed: then the server is judged by everything else)
            return {}

    def _take(self, readings: dict[str, Reading]) -> None:
        self.latest = readings
        self._open = False
