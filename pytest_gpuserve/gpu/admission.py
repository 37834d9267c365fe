"""Is a GPU free? By its memory against its idle reading, and by the compute processes on it.

An idle GPU is not at zero (an idle H200 shows 615 MiB), so the first lease of a boot records what idle means there.
Where NVML lists no processes (containers, WSL) memory alone decides; where it has no memory figures (GB10) processes
alone; what could not be checked is said.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pytest_gpuserve.errors import MachineError
from pytest_gpuserve.gpu import process
from pytest_gpuserve.gpu.lockdir import stem
from pytest_gpuserve.gpu.notes import boot_id, read_json, write_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from pytest_gpuserve.gpu.notes import Note
    from pytest_gpuserve.model.gpu import Gpu, GpuProcess, Probe, Reading

__all__ = ["LEASE_MARK", "Gate", "State", "believable_idle", "judge", "name_of", "occupant", "remains"]

LEASE_MARK = "GPUSERVE_LEASE"
GIB = 1 << 30
# The driver's own share of memory moves by some MiB; the smallest CUDA context takes more than this.
TOLERANCE = 256 << 20
# What a process takes of a GPU beside the figure that NVML gives for it, generously.
_BESIDE = 1 << 30


@dataclass(frozen=True, slots=True)
class State:
    """A look at one GPU: its `occupants` (empty: free), the `idle` reading to go by, what was `unchecked`.

    Of an `unreadable` GPU the one occupant is the reason why it cannot be read. `foreign` are those processes that the
    caller said are not its own; they are no occupants. `unidentified` tells that a process among the occupants is
    known by its number alone.
    """

    occupants: tuple[str, ...]
    idle: int | None = None
    unchecked: tuple[str, ...] = ()
    unreadable: bool = False
    foreign: tuple[str, ...] = ()
    unidentified: bool = False


def name_of(gpu: Gpu) -> str:
    """`GPU 3`, `GPU 3 (MIG-…)`, `the CPUs`."""
    if gpu.arch == "cpu":
        return "the CPUs"
    return f"GPU {gpu.index} ({gpu.uuid})" if gpu.parent else f"GPU {gpu.index}"


def believable_idle(total: int | None) -> int:
    """The most memory, in bytes, that an idle GPU of `total` bytes is believed to show: 5 %, within 1.5 and 4 GiB."""
    return min(max(GIB * 3 // 2, (total or 0) // 20), 4 * GIB)


def judge(gpu: Gpu, reading: Reading, idle: int | None) -> State:
    """Who or what occupies `gpu`. `idle` is its recorded idle reading in bytes, if there is a believable one. Pure
    but for the names of processes.
    """
    name = name_of(gpu)
    occupants = [occupant(gpu, item) for item in reading.processes or ()]
    unidentified = any(item.start is None for item in reading.processes or ())
    unchecked = []
    if reading.processes is None:
        unchecked.append(f"processes of {name} (the driver lists none)")
    used = reading.memory_used
    if used is None:
        unchecked.append(f"memory of {name} (the driver has no figure)")
        return State(tuple(occupants), None, tuple(unchecked), unidentified=unidentified)
    limit = believable_idle(gpu.memory_total) if idle is None else idle + TOLERANCE
    if used > limit and not occupants:
        listed = "no process is listed" if reading.processes is None else "no process has it"
        known = f"at most {limit / GIB:.1f} GiB is believed idle" if idle is None else f"idle is {idle / GIB:.1f} GiB"
        occupants.append(f"{used / GIB:.1f} GiB in use on {name}, {known}, {listed}")
    if idle is None and not occupants:
        idle = used
    return State(tuple(occupants), idle, tuple(unchecked), unidentified=unidentified)


def occupant(gpu: Gpu, item: GpuProcess) -> str:
    """`pid 4242 (python, alice) 76.1 GiB on GPU 3`."""
    return f"{process.describe(item.pid, identified=item.start is not None)} {_gib(item.memory)}on {name_of(gpu)}"


def _without(reading: Reading, foreign: Iterable[GpuProcess]) -> Reading:
    """The reading as it would be if these processes were not there; what cannot be told apart then is None."""
    strangers = tuple(foreign)
    if not strangers:
        return reading
    used = reading.memory_used
    if used is not None and all(item.memory is not None for item in strangers):
        used = max(0, used - sum((item.memory or 0) + _BESIDE for item in strangers))
    else:
        used = None
    left = tuple(item for item in reading.processes or () if item not in strangers)
    return replace(reading, memory_used=used, processes=left)


def _gib(memory: int | None) -> str:
    return "" if memory is None else f"{memory / GIB:.1f} GiB "


class Gate:
    """Looks at GPUs through `probe` and keeps their idle readings in `lock_dir`, one file a GPU, valid for one boot."""

    def __init__(self, probe: Probe, lock_dir: Path) -> None:
        self._probe = probe
        self._lock_dir = lock_dir

    def look(self, gpu: Gpu, foreign: Callable[[GpuProcess], bool] = lambda _: False) -> State:
        """The GPU now. One that cannot be read is not free. What is `foreign`, and its memory, is kept apart."""
        try:
            reading = self._probe.read(gpu.uuid)
        except MachineError as error:
            return State((f"{name_of(gpu)} cannot be read: {error}",), unreadable=True)
        strangers = [item for item in reading.processes or () if foreign(item)]
        state = judge(gpu, _without(reading, strangers), self._recorded(gpu))
        return replace(state, foreign=tuple(occupant(gpu, item) for item in strangers))

    def record(self, gpu: Gpu, idle: int | None) -> None:
        """Keep `idle` as this GPU's reading if there is none of this boot. Only under its lock."""
        if idle is not None and self._recorded(gpu) is None:
            write_json(self.path(gpu), {"memory": idle, "boot": boot_id()})

    def path(self, gpu: Gpu) -> Path:
        """The file of the idle reading."""
        return self._lock_dir / f"{stem(gpu.uuid)}.idle.json"

    def _recorded(self, gpu: Gpu) -> int | None:
        data = read_json(self.path(gpu)) or {}
        memory = data.get("memory")
        if data.get("boot") != boot_id() or not isinstance(memory, int):
            return None
        return memory if 0 <= memory <= believable_idle(gpu.memory_total) else None


def remains(dead: Iterable[Note]) -> list[str]:
    """Live server processes of leases whose holder is gone, by the mark in their environment and by the holder's note.

    They need not be on the GPU yet: SGLang's scheduler, orphaned while it imports, takes it 30 s later. Processes of
    other users are known only by the note.
    """
    notes = list(dead)
    leases = {lease for note in notes for lease in (note.lease, *note.orphans)}
    pids = process.marked(LEASE_MARK, leases) if leases else []
    for note in notes:
        if note.namespace == process.pid_namespace():
            pids += [pid for pid, start in note.pids if process.is_alive(pid, start)]
    return [f"{process.describe(pid)}, left by an earlier lease" for pid in dict.fromkeys(pids)]
