"""Simulated GPUs: a machine whose state is files in a directory, read and written by unrelated processes at once.

`machine.json` says what the machine is; `gpu/UUID/` holds one file for each process that has memory there. Memory of a
dead process is gone, as a driver frees it, unless it lingers or is held. Every file appears atomically, so that a
reader never sees half of one. Everything made here says SIMULATED.
"""

from __future__ import annotations

import difflib
import hashlib
import math
import re
import time
import uuid as uuids
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_gpuserve.errors import MachineError, UsageError
from pytest_gpuserve.gpu import process
from pytest_gpuserve.gpu.lockdir import make_shared
from pytest_gpuserve.gpu.notes import read_json, write_json
from pytest_gpuserve.model.gpu import Gpu, GpuProcess, Reading

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "MODELS",
    "SimProbe",
    "charge",
    "clear",
    "create",
    "fail",
    "hold",
    "mark_foreign",
    "parse_machine",
    "set_utilization",
]

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What a GPU of one arch is like: `memory` and `idle` in bytes (`memory` None: no figures), watts, MHz."""

    name: str
    memory: int | None
    idle: int
    power: float
    clock: int
    nvlink: bool = False


MODELS: dict[str, Model] = {
    "sm80": Model(name="NVIDIA A100-SXM4-80GB", memory=81920 * MIB, idle=450 * MIB, power=400, clock=1410, nvlink=True),
    "sm86": Model(name="NVIDIA A10", memory=23028 * MIB, idle=424 * MIB, power=150, clock=1695),
    "sm89": Model(name="NVIDIA L40S", memory=46068 * MIB, idle=424 * MIB, power=350, clock=2520),
    "sm90": Model(name="NVIDIA H200", memory=143771 * MIB, idle=615 * MIB, power=700, clock=1980, nvlink=True),
    "sm100": Model(name="NVIDIA B200", memory=183359 * MIB, idle=640 * MIB, power=1000, clock=1965, nvlink=True),
    "sm103": Model(
        name="NVIDIA B300 SXM6 AC", memory=275040 * MIB, idle=660 * MIB, power=1100, clock=2032, nvlink=True
    ),
    "sm120": Model(
        name="NVIDIA RTX PRO 6000 Blackwell Server Edition", memory=97887 * MIB, idle=510 * MIB, power=600, clock=2430
    ),
    "sm121": Model(name="NVIDIA GB10", memory=None, idle=0, power=140, clock=2418),
}


def parse_machine(machine: str) -> tuple[int, str]:
    """`8xsm120` → (8, "sm120"). UsageError, with the arch that was probably meant, for anything else."""
    match = re.fullmatch(r"(\d{1,3})\s*[xX]\s*(\w+)", machine.strip())
    if match and match[2] in MODELS and 1 <= int(match[1]) <= 64:
        return int(match[1]), match[2]
    known = f"a simulated machine is NxARCH, N from 1 to 64, ARCH one of {', '.join(MODELS)}; such as 8xsm120"
    near = difflib.get_close_matches(match[2] if match else machine, MODELS, 1)
    raise UsageError(f"{machine!r}: {known}{f'. Did you mean {near[0]}?' if near else ''}")


def create(folder: Path, machine: str, *, processes: bool = True) -> SimProbe:
    """Make the machine in `folder`, or open it if it is the same one; its UUIDs belong to the folder's path.

    `processes` False, when it is made: NVML lists none, as in many containers. UsageError for a bad name, or if
    `folder` holds another machine.
    """
    count, arch = parse_machine(machine)
    folder = folder.resolve()
    there = read_json(folder / "machine.json")
    if there is None:
        with suppress(FileNotFoundError, PermissionError):  # still to be made, or another user's
            folder.chmod(0o777)
        names = [_uuid(folder, index) for index in range(count)]
        for shared in (folder, folder / "gpu", *(folder / "gpu" / name for name in names)):
            make_shared(shared)
        write_json(folder / "machine.json", {"machine": f"{count}x{arch}", "processes": processes, "uuids": names})
    elif there.get("machine") != f"{count}x{arch}":
        message = f"{folder} holds another simulated machine ({there.get('machine')}): name a directory of its own"
        raise UsageError(message)
    return SimProbe(folder)


def _uuid(folder: Path, index: int) -> str:
    digest = hashlib.sha256(f"{folder}#{index}".encode()).digest()
    return f"GPU-SIM-{uuids.UUID(bytes=digest[:16])}"


def charge(folder: Path, uuid: str, pid: int, memory: int, *, linger: float = 0.0) -> None:
    """Let the live process `pid` have `memory` bytes on that GPU, 0 for none any more; replaces what it had.

    After its death the memory stays for `linger` seconds more (infinity: for ever), from when a reading first sees it
    dead. MachineError if the process is gone.
    """
    start = process.start_of(pid)
    if start is None:
        message = f"pid {pid} has no GPU memory: it is gone"
        raise MachineError(message)
    _put(folder, uuid, f"pid-{pid}-{start}", memory, {"pid": pid, "start": start, "linger": _finite(linger)})


def hold(folder: Path, uuid: str, memory: int, until: float | None) -> None:
    """Keep `memory` bytes taken though no process has them, as a driver does that has lost track of a dead one.

    `until` is a time on `time.monotonic`'s clock, which all processes share; None: for ever.
    """
    _put(folder, uuid, f"hold-{uuids.uuid4().hex}", memory, {"until": until})


def mark_foreign(folder: Path, uuid: str, pid: int, memory: int) -> None:
    """A compute process that is listed whether that pid exists here or not (another container's); 0 bytes: gone."""
    _put(folder, uuid, f"foreign-{pid}", memory, {"pid": pid})


def clear(folder: Path, uuid: str) -> None:
    """All memory of that GPU back, as after a reset."""
    for path in _folder(folder, uuid).glob("*.memory.json"):
        path.unlink(missing_ok=True)


def set_utilization(folder: Path, uuid: str, percent: int | None) -> None:
    """Script the utilization that readings report; None: 0 again."""
    write_json(_folder(folder, uuid) / "utilization.json", {"percent": percent or 0})


def fail(folder: Path, message: str | None, uuid: str | None = None) -> None:
    """Let every reading raise MachineError with `message`, of one GPU or of all; None: readings work again."""
    path = (_folder(folder, uuid) if uuid else folder) / "nvml-fails.json"
    if message is None:
        path.unlink(missing_ok=True)
    else:
        write_json(path, {"message": message})


def _folder(folder: Path, uuid: str) -> Path:
    return folder / "gpu" / uuid


def _put(folder: Path, uuid: str, name: str, memory: int, facts: dict[str, Any]) -> None:
    path = _folder(folder, uuid) / f"{name}.memory.json"
    if not path.parent.is_dir():
        message = f"there is no GPU {uuid} in the simulated machine {folder}"
        raise MachineError(message)
    if memory <= 0:
        path.unlink(missing_ok=True)
    else:
        write_json(path, {"memory": memory, **facts})


def _finite(seconds: float) -> float | None:
    return None if math.isinf(seconds) else seconds


class SimProbe:
    """Reads a simulated machine. MachineError if there is none in `folder`."""

    simulated = True

    def __init__(self, folder: Path) -> None:
        machine = read_json(folder / "machine.json")
        if machine is None:
            message = f"there is no simulated machine in {folder} (machine.json): --gpu-sim makes one"
            raise MachineError(message)
        self.folder = folder.resolve()
        count, self._arch = parse_machine(str(machine["machine"]))
        self._model = MODELS[self._arch]
        self._lists_processes = bool(machine["processes"])
        names = [str(name) for name in machine["uuids"]]
        self._gpus = tuple(
            Gpu(
                index=index,
                uuid=name,
                name=f"{self._model.name} (SIMULATED)",
                arch=self._arch,
                memory_total=self._model.memory,
                # Two sockets, as in the common eight-GPU machines.
                numa=0 if index < (count + 1) // 2 else 1,
                links=tuple(other for other in names if other != name) if self._model.nvlink else (),
            )
            for index, name in enumerate(names)
        )

    def gpus(self) -> tuple[Gpu, ...]:
        """Every GPU of the machine, in index order; `visible.bound` applies CUDA_VISIBLE_DEVICES."""
        return self._gpus

    def read(self, uuid: str) -> Reading:
        """The GPU's state now. MachineError while `fail` says so, or for an unknown UUID."""
        gpu = next((gpu for gpu in self._gpus if gpu.uuid == uuid), None)
        if gpu is None:
            message = f"there is no GPU {uuid} in the simulated machine {self.folder}"
            raise MachineError(message)
        mine = _folder(self.folder, uuid)
        for place in (self.folder, mine):
            if failing := read_json(place / "nvml-fails.json"):
                message = f"GPU {gpu.index} ({uuid}): {failing['message']} (SIMULATED)"
                raise MachineError(message)
        used = self._model.idle
        processes = []
        for path in sorted(mine.glob("*.memory.json")):
            entry = read_json(path)  # None: taken back meanwhile
            if entry and (owner := _counts(path, entry)) is not None:
                used += int(entry["memory"])
                listed = GpuProcess(pid=owner, memory=int(entry["memory"]), start=entry.get("start"))
                processes += [listed] if owner else []
        busy = int((read_json(mine / "utilization.json") or {}).get("percent", 0))
        return Reading(
            uuid=uuid,
            memory_used=None if self._model.memory is None else used,
            processes=tuple(processes) if self._lists_processes else None,
            utilization=busy,
            power=round(self._model.power * (0.12 + 0.0075 * busy), 1),
            power_limit=self._model.power,
            sm_clock=self._model.clock if busy or processes else self._model.clock // 6,
            sm_clock_max=self._model.clock,
            temperature=32 + busy // 3,
            throttle=() if busy or processes else ("GpuIdle",),
        )

    def driver(self) -> dict[str, str]:
        """No real versions: nothing simulated may pass for a driver."""
        return {"driver": "SIMULATED", "cuda": "SIMULATED", "nvml": "SIMULATED"}

    def spec(self) -> dict[str, Any]:
        """For `gpu.open_probe`."""
        return {"kind": "sim", "dir": str(self.folder)}


def _counts(path: Path, entry: dict[str, Any]) -> int | None:
    """The pid that has this memory, 0 if nobody has but it is taken, None if it is free by now."""
    if "until" in entry:
        return 0 if entry["until"] is None or time.monotonic() < entry["until"] else None
    pid = int(entry["pid"])
    if "start" not in entry or process.is_alive(pid, int(entry["start"])):
        return pid
    if entry["linger"] is None:
        return 0
    if entry["linger"] <= 0:
        return None
    died = path.with_name(path.name.replace(".memory.", ".died."))
    seen = read_json(died)
    if seen is None:
        seen = {"at": time.monotonic()}
        with suppress(OSError):
            write_json(died, seen)
    return 0 if time.monotonic() < seen["at"] + entry["linger"] else None
