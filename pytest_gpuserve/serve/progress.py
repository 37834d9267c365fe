"""What counts as progress. Progress is news: a state that this phase of this start has not shown before.

- compilers: CPU time of nvcc, cicc, ptxas, ninja, gcc, … in our tree, or of children that are already reaped;
- log: a line that is new apart from its numbers, or a progress bar further on (`news`);
- GPU memory at a value not seen before, by 2 MiB;
- disk reads, by 256 KiB; and while importing or loading, 64 KiB/s read from any file, since a warm page cache and
  some network file systems read nothing from a disk;
- resident memory of the tree at a new height, by 1 MiB: a cold import prints nothing for a minute on a slow machine,
  yet every module it loads stays in memory;
- a set of processes, by name and number, not seen before.

CPU time of the server itself is none of these: a spin burns it too. Nor is GPU utilisation: some hangs spin at 100 %.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytest_gpuserve.model.phase import Phase

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_gpuserve.engine import ServerLoad
    from pytest_gpuserve.serve.procs import Proc

__all__ = ["Look", "Signals", "is_compiler", "name_of"]

_CUDA = ("nvcc", "cicc", "ptxas", "cudafe++", "fatbinary", "nvlink", "tileiras", "hipcc")
_HOST = ("cc", "c++", "gcc", "g++", "cc1", "cc1plus", "clang", "clang++", "lto1", "rustc")
_LINK = ("as", "ld", "ld.bfd", "ld.gold", "ld.lld", "lld", "collect2")
_BUILD = ("ninja", "make", "cmake", "cargo")
_COMPILERS = frozenset((*_CUDA, *_HOST, *_LINK, *_BUILD))
_GPU_STEP = 2 << 20
_MEMORY_STEP = 1 << 20
_DISK_STEP = 256 << 10
_READ_RATE = 64 << 10
_READERS = frozenset({Phase.SPAWN, Phase.IMPORT, Phase.WEIGHTS})
_REAPED = 0.02


def is_compiler(proc: Proc) -> bool:
    """By its name, versions included: `gcc-13`, `x86_64-linux-gnu-g++`."""
    name = proc.comm.rpartition("linux-gnu-")[2]
    return name in _COMPILERS or name.rstrip("0123456789.").rstrip("-") in _COMPILERS


def name_of(proc: Proc) -> str:
    """What a person calls the process: `scheduler TP1`, `detokenizer`, `main`, or the command's name."""
    if proc.cmdline.startswith("sglang::"):
        return proc.cmdline.split(" ", 1)[0].removeprefix("sglang::").replace("_", " ")
    if proc.comm.startswith("sglang::schedul"):  # the kernel cuts names at 15 characters
        return "scheduler"
    if "resource_tracker" in proc.cmdline:
        return "resource tracker"
    if "--multiprocessing-fork" in proc.cmdline:
        return "worker"
    return "main" if "--model-path" in proc.cmdline else proc.comm


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One look at the machine. `procs` is the server's tree (zombies may be among them), `gpu_memory` bytes in use and
    `gpu_utilization` percent by UUID. `load` is what `/metrics` said last, None when it did not answer; only needed
    while requests are expected.
    """

    now: float
    procs: Sequence[Proc] = ()
    gpu_memory: Mapping[str, int | None] = field(default_factory=dict)
    gpu_utilization: Mapping[str, int | None] = field(default_factory=dict)
    load: ServerLoad | None = None


class Signals:
    """Remembers what one phase has shown. `news` and `compilers` are to be called once for every look."""

    def __init__(self, phase: Phase, previous: Look | None) -> None:
        self._phase = phase
        self._previous = previous
        self._gpu_seen: dict[str, set[int]] = {}
        self._trees: set[frozenset[tuple[str, int]]] = set()
        self._resident_most: int | None = None
        self._disk = 0

    def compilers(self, look: Look) -> tuple[str | None, bool]:
        """What compiled since the last look, if anything, and whether a compiler was seen doing it."""
        before = self._before()
        reaped = None
        for proc in look.procs:
            old = before.get((proc.pid, proc.started))
            if is_compiler(proc):
                if proc.cpu + proc.children_cpu > (old.cpu + old.children_cpu if old else 0.0):
                    return f"{proc.comm} is compiling", True
            elif old and proc.children_cpu - old.children_cpu > _REAPED:
                # The ptxas of a Triton kernel lives for less than a second: seen only in what its parent inherits.
                reaped = f"children of {name_of(proc)} worked"
        return reaped, False

    def news(self, look: Look) -> str | None:
        """What else is new since the last look. Every signal is read each time: each has its own memory."""
        found = [self._gpu_memory(look), self._reads(look), self._resident(look), self._process_set(look)]
        self._previous = look
        return next((what for what in found if what), None)

    def _before(self) -> dict[tuple[int, float], Proc]:
        return {(proc.pid, proc.started): proc for proc in self._previous.procs} if self._previous else {}

    def _gpu_memory(self, look: Look) -> str | None:
        new = False
        for uuid, used in look.gpu_memory.items():
            if used is None:
                continue
            seen = self._gpu_seen.setdefault(uuid, set())
            new |= bool(seen) and used // _GPU_STEP not in seen
            seen.add(used // _GPU_STEP)
        return "GPU memory" if new else None

    def _reads(self, look: Look) -> str | None:
        if self._previous is None:
            return None
        before = self._before()
        anything = 0
        for proc in look.procs:
            old = before.get((proc.pid, proc.started))
            self._disk += proc.read_bytes - (old.read_bytes if old else 0)
            anything += proc.rchar - (old.rchar if old else 0)
        if self._disk >= _DISK_STEP:
            self._disk = 0
            return "disk reads"
        rate = anything / max(look.now - self._previous.now, 0.5)
        return "reads of files" if self._phase in _READERS and rate >= _READ_RATE else None

    def _resident(self, look: Look) -> str | None:
        resident = sum(proc.rss for proc in look.procs)
        most = self._resident_most
        if most is not None and resident < most + _MEMORY_STEP:
            return None
        self._resident_most = resident
        return None if most is None else "memory of the processes"

    def _process_set(self, look: Look) -> str | None:
        tree = frozenset(Counter(proc.comm for proc in look.procs if proc.state not in "ZX").items())
        known = not self._trees or tree in self._trees
        self._trees.add(tree)
        return None if known else "processes came or went"
