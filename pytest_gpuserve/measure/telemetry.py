"""What the GPUs did during a load: power against its limit, clocks, utilization, temperature, slowdowns, strangers.

"330 W of 600 W" is how the field found its communication bottleneck; a hardware slowdown makes a figure invalid, and
the software power cap does not: it is normal at full load.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from statistics import median
from typing import TYPE_CHECKING, Any, Self

from pytest_gpuserve.errors import MachineError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from pytest_gpuserve.model.gpu import Probe, Reading

__all__ = ["SLOWDOWNS", "Sampler", "Telemetry", "summarise"]

EVERY = 0.5
# Seconds for the last reading: a call into a wedged driver may not return for minutes, and the test is over.
LATE = 5.0
# NVML's clocks-event reasons that say the hardware, or its temperature, held the GPU back.
SLOWDOWNS = frozenset({"HwSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown", "SwThermalSlowdown"})
_SHARE = 0.1  # of the samples: one blip in a long run is no reason to throw it away
_FIGURES = ("power", "utilization", "sm_clock", "temperature")
_BYTES = 1 << 20


class Telemetry:
    """Readings of one load. `by_gpu` is what the record keeps, `invalid` why the load's figures cannot be used."""

    def __init__(self, by_gpu: dict[str, dict[str, Any]], invalid: str | None) -> None:
        self.by_gpu = by_gpu
        self.invalid = invalid


class Sampler:
    """Reads the GPUs twice a second in a thread of its own, from entering to leaving its `with` block."""

    def __init__(self, probe: Probe, uuids: Sequence[str]) -> None:
        self._probe = probe
        self._uuids = tuple(uuids)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpuserve-telemetry", daemon=True)
        self._samples: list[tuple[float, Reading]] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(LATE)

    def _run(self) -> None:
        while True:
            for uuid in self._uuids:
                # A GPU that cannot be read is the supervisor's to report; here a sample is missing.
                with suppress(MachineError):
                    self._samples.append((time.perf_counter(), self._probe.read(uuid)))
            if self._stop.wait(EVERY):
                return

    def readings(self, begin: float, end: float) -> list[Reading]:
        """Those of (begin, end], `perf_counter` times; the last one before if the load was shorter than a period."""
        inside = [reading for at, reading in self._samples if begin < at <= end]
        return inside or [reading for at, reading in self._samples if at <= end][-len(self._uuids) :]


def summarise(readings: Sequence[Reading], owned: Callable[[int], bool | None]) -> Telemetry:
    """Medians and maxima by UUID, and what makes the load invalid.

    `owned(pid)` is True for the server's processes, False for others', None for a pid that is not there (any more).
    """
    by_gpu: dict[str, dict[str, Any]] = {}
    reasons: list[str] = []
    for uuid in dict.fromkeys(reading.uuid for reading in readings):
        mine = [reading for reading in readings if reading.uuid == uuid]
        by_gpu[uuid] = _figures(mine)
        reasons += _slowdowns(uuid, by_gpu[uuid]["throttle"])
        reasons += _strangers(uuid, mine, owned)
    return Telemetry(by_gpu, "; ".join(reasons) or None)


def _figures(readings: Sequence[Reading]) -> dict[str, Any]:
    found: dict[str, Any] = {"samples": len(readings)}
    for name in _FIGURES:
        values = [value for reading in readings if (value := getattr(reading, name)) is not None]
        if values:
            found[name] = {"median": median(values), "max": max(values)}
    limit = next((reading.power_limit for reading in readings if reading.power_limit is not None), None)
    if limit is not None:
        found["power_limit"] = limit
        if "power" in found:
            found["text"] = f"{found['power']['median']:.0f} W of {limit:.0f} W"
    fastest = next((reading.sm_clock_max for reading in readings if reading.sm_clock_max is not None), None)
    if fastest is not None:
        found["sm_clock_max"] = fastest
    names = sorted({name for reading in readings for name in reading.throttle})
    found["throttle"] = {
        name: round(sum(name in reading.throttle for reading in readings) / len(readings), 3) for name in names
    }
    return found


def _slowdowns(uuid: str, shares: dict[str, float]) -> list[str]:
    return [
        f"GPU {uuid} was held back by {name} in {share:.0%} of the samples"
        for name, share in shares.items()
        if name in SLOWDOWNS and share >= _SHARE
    ]


def _strangers(uuid: str, readings: Sequence[Reading], owned: Callable[[int], bool | None]) -> list[str]:
    pids: dict[int, int | None] = {}
    for reading in readings:
        pids |= {process.pid: process.memory for process in reading.processes or ()}
    whose = {pid: owned(pid) for pid in pids}
    # In a container NVML may list the host's pids, of which none can be found here: then they say nothing.
    here = True in whose.values()
    return [
        f"process {pid}, which is none of this server's, used GPU {uuid}"
        + (f" ({memory / _BYTES:.0f} MiB)" if memory else "")
        for pid, memory in pids.items()
        if whose[pid] is False or (here and whose[pid] is None)
    ]
