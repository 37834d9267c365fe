"""Who else uses the leased GPUs: compute processes that came after the lease was granted and are not our server's.

A lease is granted only while no compute process is on its GPUs, so each one that is seen later is the server's or
came meanwhile. It is a stranger if it is known to be no process of the server. That is not known where NVML lists no
processes, and where it lists pids of another PID namespace (a container): there not one of the server's own is found.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pytest_gpuserve.gpu import process
from pytest_gpuserve.gpu.admission import GIB, name_of
from pytest_gpuserve.model.failure import Failure, Kind
from pytest_gpuserve.model.phase import STARTUP, Phase
from pytest_gpuserve.serve.faults import memory_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pytest_gpuserve.model.gpu import Gpu, GpuProcess, Reading

__all__ = ["Stranger", "Strangers", "disturbed"]

# Once the server serves, a stranger that went earlier than this many seconds before the failure did not cause it.
_RECENT = 60.0
_STARTING = frozenset({*STARTUP, Phase.READY})
# Words for missing GPU memory beside those that `faults` knows: without a stranger they prove nothing.
_SHORT_OF_MEMORY = re.compile(
    r"[Nn]ot enough (?:GPU )?memory|leave no GPU memory|CUBLAS_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED)|"
    r"memory capacity is unbalanced|out of memory|No available memory for the cache|[Ff]ree memory on device|"
    r"mem[-_]fraction[-_]static"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stranger:
    """A process that is not the server's on one leased GPU. `memory` is the most it was seen with, in bytes, or None.

    `came` and `last` are when it was first and last seen, in seconds after the server's launch; `phase` is the
    server's when it came.
    """

    pid: int
    gpu: str
    who: str
    memory: int | None
    came: float
    last: float
    phase: Phase

    def __str__(self) -> str:
        """`pid 4242 (python, alice) with 84.0 GiB on GPU 0, there since 20 s after the launch (phase weights)`."""
        much = "memory it has no figure for" if self.memory is None else f"{self.memory / GIB:.1f} GiB"
        return f"{self.who} with {much} on {self.gpu}, there since {self.came:.0f} s after the launch ({self.phase})"


class Strangers:
    """Keeps who was seen. `started` gives the start time of a process that is or was the server's, else None.

    `announce` gets each stranger once. May be used from several threads.
    """

    def __init__(
        self, gpus: Sequence[Gpu], started: Callable[[int], int | None], announce: Callable[[Stranger], object]
    ) -> None:
        self._names = {gpu.uuid: name_of(gpu) for gpu in gpus}
        self._started = started
        self._announce = announce
        self._seen: dict[tuple[str, int], Stranger] = {}
        self._announced: set[tuple[str, int]] = set()
        self._doubtful: set[tuple[str, int]] = set()
        self._ours_listed = False
        self._unlisted: set[str] = set()
        self._lock = threading.RLock()

    def see(self, readings: Iterable[Reading], seconds: float, phase: Phase) -> None:
        """Takes in readings of the GPUs, taken `seconds` after the launch while the server was in `phase`."""
        with self._lock:
            for reading in readings:
                if reading.processes is None:
                    self._unlisted.add(reading.uuid)
                    continue
                for item in reading.processes:
                    if not self._is_ours(item):
                        self._note(reading.uuid, item, seconds, phase)
            for key in self._seen.keys() - self._announced:
                if self._sure(key):
                    self._announced.add(key)
                    self._announce(self._seen[key])

    def is_foreign(self, item: GpuProcess) -> bool:
        """True if this process is known to be none of the server's."""
        with self._lock:
            if self._is_ours(item):
                return False
            gone = any(pid == item.pid and (uuid, pid) not in self._doubtful for uuid, pid in self._seen)
            return item.start is not None or self._ours_listed or gone

    def found(self, seconds: float, phase: Phase) -> tuple[Stranger, ...]:
        """Those that may have to do with a failure in `phase`, `seconds` after the launch, in the order they came."""
        with self._lock:
            sure = [one for key, one in self._seen.items() if self._sure(key)]
        since = 0.0 if phase in _STARTING else seconds - _RECENT
        return tuple(sorted((one for one in sure if one.last >= since), key=lambda one: one.came))

    def unchecked(self) -> str:
        """Why it cannot be told who uses the GPUs; empty if it can."""
        with self._lock:
            if self._unlisted:
                names = ", ".join(sorted(self._names.get(uuid, uuid) for uuid in self._unlisted))
                return f"not checked who held memory of {names}: the driver lists no processes there"
            doubtful = sorted({pid for key in self._doubtful if not self._sure(key) for pid in key[1:]})
            if doubtful:
                pids = ", ".join(map(str, doubtful))
                return f"not checked who held the GPU's memory: its pids ({pids}) cannot be identified from here"
            return ""

    def _is_ours(self, item: GpuProcess) -> bool:
        start = self._started(item.pid)
        ours = start is not None and item.start in (None, start)
        self._ours_listed |= ours
        return ours

    def _sure(self, key: tuple[str, int]) -> bool:
        return self._ours_listed or key not in self._doubtful

    def _note(self, uuid: str, item: GpuProcess, seconds: float, phase: Phase) -> None:
        key = (uuid, item.pid)
        before = self._seen.get(key)
        if before is not None:
            memory = max((one for one in (before.memory, item.memory) if one is not None), default=None)
            self._seen[key] = replace(before, memory=memory, last=seconds)
            return
        identified = item.start is not None
        if not identified:
            self._doubtful.add(key)
        self._seen[key] = Stranger(
            pid=item.pid,
            gpu=self._names.get(uuid, uuid),
            who=process.describe(item.pid, identified=identified),
            memory=item.memory,
            came=seconds,
            last=seconds,
            phase=phase,
        )


def disturbed(failure: Failure, strangers: Sequence[Stranger], unchecked: str, cause: str) -> Failure:
    """The failure as it is to be told when `strangers` used the GPUs meanwhile. `cause` is what the log gives as cause.

    A lack of GPU memory and a hang are then no fault of the cell: `infra`, and the start may be tried again. Other
    failures stay what they are, and name the strangers.
    """
    short = _short_of_memory(failure, cause)
    if not strangers:
        if short and unchecked:
            return replace(failure, message=f"{failure.message}\n{unchecked[0].upper()}{unchecked[1:]}.")
        return failure
    they = "; ".join(map(str, strangers))
    if not short and failure.kind is not Kind.HANG:
        return replace(failure, message=f"{failure.message}\nNot alone on its GPUs: {they}.")
    what = "ran out of GPU memory" if short else "made no progress"
    # The engine's own advice (to raise --mem-fraction-static) would be wrong: it stays in the log.
    message = (
        f"another process used the server's GPU: {they}. The server then {what} in phase {failure.phase}, which says "
        "nothing about this cell. Whoever uses these GPUs without a lease must not, while tests run on them"
    )
    told = Failure.of(Kind.INFRA, failure.phase, message, line="a process that is not the server's used its GPU")
    return replace(told, text=failure.text, evidence=failure.evidence, retryable=True)


def _short_of_memory(failure: Failure, cause: str) -> bool:
    if failure.kind is Kind.OOM:
        return memory_of(cause) != "host" and not failure.message.startswith("host memory")
    if failure.kind not in (Kind.CRASH, Kind.REJECTED):
        return False
    return failure.phase is Phase.KV_CACHE or memory_of(cause) == "GPU" or bool(_SHORT_OF_MEMORY.search(cause))
