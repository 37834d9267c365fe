"""Where a fault happens: a project, a simulated machine and its locks, strangers beside it; and the four counts."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import signal
import sys
import tempfile
import textwrap
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest_gpuserve
from pytest_gpuserve.errors import GpuserveError
from pytest_gpuserve.gpu import sim
from pytest_gpuserve.gpu.lease import acquire, quarantined
from pytest_gpuserve.model.launch import LeaseRequest

from . import proc
from .run import Run, until
from .stranger import Stranger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["ONE", "ROOT", "Counts", "Scene", "cells"]

ROOT = Path(pytest_gpuserve.__file__).parents[1]
MIB = 1 << 20
# Within this time after the fault nothing of a run may be left, however it ended.
GRACE = 30.0
_OURS = ("GPUSERVE_", "GITHUB_", "PYTEST_", "RUNNER_", "COV_")

MATRIX = """
schema: 1
arch: [sm120]
models:
  m: {{shape: llama-3, gpus: {gpus}}}
axes:
  attention:
    triton: {{flags: {{attention-backend: triton}}}}
    flashinfer: {{flags: {{attention-backend: flashinfer}}}}
  graphs:
    on: {{}}
    off: {{flags: {{disable-cuda-graph: true}}}}
baseline: {{attention: triton, graphs: on}}
"""
FAST = "schema: 1\ndefaults: {phase-seconds: 0.01, tokens-per-second: 5000, memory-gib: 1}\n"
_SAY = """
import os, pathlib, time
def say(name, text=""):
    place = pathlib.Path({folder!r}, name)
    draft = place.with_suffix(f".{{os.getpid()}}")
    draft.write_text(str(text or os.getpid()))
    draft.replace(place)
"""


def cells(*words: str) -> tuple[str, str]:
    """Selects cells by words of their ids; of the built-in checks only the first and the last."""
    return "-k", f"({' or '.join(words)}) and (ready or clean_shutdown)"


ONE = cells("baseline")


@dataclass(slots=True)
class Counts:
    """After one fault: what is left, unusable, lost, hit; each as one line a case. All empty is as it should be."""

    left: list[str] = field(default_factory=list)
    unusable: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    hit: list[str] = field(default_factory=list)

    def numbers(self) -> tuple[int, int, int, int]:
        """The four counts."""
        return len(self.left), len(self.unusable), len(self.lost), len(self.hit)

    def __str__(self) -> str:
        names = ("left", "unusable", "lost", "signalled")
        return "; ".join(
            f"{name}: {', '.join(cases)}"
            for name, cases in zip(names, (self.left, self.unusable, self.lost, self.hit), strict=True)
            if cases
        )


class Scene:
    """`gpus` GPUs for the runs, and one more on which a stranger computes. `close` gives the counts."""

    def __init__(self, *, gpus: int = 2, processes: bool = True) -> None:
        # Private files of servers lie below it, and a path of more than 40 letters is too long for their sockets.
        self.folder = Path(tempfile.mkdtemp(prefix="gf-", dir="/tmp"))
        self.folder.chmod(0o755)
        self.token = f"FAULT_SCENE={secrets.token_hex(6)}"
        self.project = self.folder / "project"
        self.tmp = self.folder / "tmp"
        for made in (self.project / "matrices", self.tmp):
            made.mkdir(parents=True)
        self.tmp.chmod(0o1777)
        self.machine = self.folder / "sim"
        self.locks = self.folder / "locks"
        self.said = self.folder / "said"
        self.arch = f"{gpus + 1}xsm120"
        self.probe = sim.create(self.machine, self.arch, processes=processes)
        *mine, foreign = (gpu.uuid for gpu in self.probe.gpus())
        self.gpus = tuple(mine)
        # GPUs that rightly cannot be used at the end, and processes that are left on purpose.
        self.excused: set[str] = set()
        self.spared: set[int] = set()
        self.runs: list[Run] = []
        self.matrix()
        self.file("pytest.ini", "[pytest]\n")
        self.strangers = [
            Stranger(
                self.folder, "sglang::scheduler_TP0", {"GPUSERVE_RUN_ID": "another", "GPUSERVE_LEASE": "another-run"}
            ),
            Stranger(
                self.folder,
                "python -m pytest_gpuserve.sim.server --port 30000",
                {"GPUSERVE_SIM_DIR": str(self.machine)},
            ),
        ]
        sim.charge(self.machine, foreign, self.strangers[1].pid, 8 << 30)

    # -- setting it up -------------------------------------------------------------------------------------------------

    def file(self, name: str, text: str) -> Path:
        """Writes a file of the project."""
        path = self.project / name
        path.write_text(textwrap.dedent(text))
        return path

    def matrix(self, more: str = "", *, gpus: int = 1) -> None:
        """Three cells of `gpus` GPUs each; `more` is added to the file."""
        self.file("matrices/tiny.yaml", f"{MATRIX.format(gpus=gpus)}{more}\n")

    def tests(self, text: str) -> None:
        """The project's own tests beside the built-in checks. With `say(name)` a test tells that it has come so far."""
        self.said.mkdir(exist_ok=True)
        self.said.chmod(0o777)
        self.file("test_mine.py", _SAY.format(folder=str(self.said)) + textwrap.dedent(text))

    def heard(self, name: str) -> str:
        """What a test said under that name (the pid of its process, if nothing else); empty while it did not."""
        with suppress(FileNotFoundError):
            return (self.said / name).read_text()
        return ""

    def start(
        self,
        *args: str,
        rules: str = "",
        env: Mapping[str, str] | None = None,
        via: Sequence[str] = (),
        place: Callable[[Path], Path] = lambda path: path,
        locks: Path | None = None,
    ) -> Run:
        """Starts a run. `rules` are a scenario's, as a YAML list; `via` is a command that starts pytest's."""
        number = len(self.runs)
        body = f"rules:\n{textwrap.indent(textwrap.dedent(rules), '  ')}" if rules else ""
        scenario = self.file(f"scenario-{number}.yaml", FAST + body)
        report = self.project / f"report-{number}"
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        name, _, value = self.token.partition("=")
        environment |= {
            name: value,
            "GPUSERVE_SIM_DIR": str(self.machine),
            # Not as an option: pytest asks whether every word it does not know yet is a file, and one fault's lock
            # directory never answers.
            "GPUSERVE_LOCK_DIR": str(locks or self.locks),
            "PYTHONPATH": str(ROOT),
            "XDG_CACHE_HOME": str(self.tmp),
            "TMPDIR": str(self.tmp),
            "COLUMNS": "200",
            # A simulation's own limit is 4 s, which a start on a busy machine may be without a sign of life.
            "GPUSERVE_STALL": "60",
            **(env or {}),
        }
        options = {
            "--gpu-matrix": "tiny",
            "--gpu-sim": self.arch,
            "--gpu-sim-scenario": scenario,
            "--gpu-report": report,
        }
        given = [str(word) for option in options.items() for word in option]
        # Signals that whoever runs the suite ignores (nohup, a shell's background job) stay ignored in what is started.
        plain = ("env", "--default-signal")
        run = Run(
            [*plain, *via, sys.executable, "-m", "pytest", *_plugin(), "-v", "-p", "no:cacheprovider", *given, *args],
            cwd=self.project,
            env=environment,
            output=self.folder / f"output-{number}",
            report=report,
            place=place,
        )
        self.runs.append(run)
        return run

    def run(self, *args: str, **options: Any) -> Run:
        """A run from start to end."""
        run = self.start(*args, **options)
        run.remember()
        run.wait()
        return run

    # -- looking -------------------------------------------------------------------------------------------------------

    def processes(self, role: str | None = None) -> list[proc.Process]:
        """What lives of this scene's runs, pytest itself included."""
        return [one for one in proc.carrying(self.token) if role in (None, one.role)]

    def one(self, role: str) -> proc.Process:
        """A process of that role, as soon as there is one."""
        return until(lambda: self.processes(role), f"a {role}")[0]

    def kill(self, role: str) -> proc.Process:
        """kill -9 to one process of that role. What is reported by then may not be lost."""
        victim = self.one(role)
        for run in self.runs:
            run.remember()
        os.kill(victim.pid, signal.SIGKILL)
        return victim

    # -- counting ------------------------------------------------------------------------------------------------------

    def close(self) -> Counts:
        """Counts what is left, then removes it."""
        try:
            counts = Counts(left=self._left())
            counts.unusable = self._unusable()
            counts.lost = [case for run in self.runs for case in run.lost()]
            counts.hit = [hit for stranger in self.strangers for hit in stranger.hits()]
        finally:
            for run in self.runs:
                run.end()
            for process in self.processes():
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            for stranger in self.strangers:
                stranger.end()
            shutil.rmtree(self.folder, ignore_errors=True)
        return counts

    def gone(self) -> bool:
        """Whether nothing with the tool's mark is left, and no pytest that waits for it."""
        return not [one for one in self.processes() if one.pid not in self.spared]

    def _left(self) -> list[str]:
        """Processes with the mark (and pytest's own) after the grace, and private folders of servers."""
        with suppress(AssertionError):
            until(self.gone, "nothing left", GRACE)
        left = [str(one) for one in self.processes() if one.pid not in self.spared]
        return left + [str(path) for path in self.tmp.glob("gpuserve-*")]

    def _unusable(self) -> list[str]:
        """GPUs whose lock is held, that a new lease does not get, or that stay quarantined although they are free."""
        usable = [uuid for uuid in self.gpus if uuid not in self.excused]
        with suppress(AssertionError):  # a dying process loses its environment, by which it is found, before its locks
            until(lambda: not any(_locked(self.locks / f"{uuid}.lock") for uuid in usable), "free locks", GRACE)
        unusable = {uuid: f"{uuid}: its lock is held" for uuid in usable if _locked(self.locks / f"{uuid}.lock")}
        if not unusable and usable:
            unusable = self._refused(usable)
        noted = quarantined(self.locks).keys() if self.locks.is_dir() else ()
        return [*unusable.values(), *(f"{uuid}: still quarantined" for uuid in noted if uuid in usable)]

    def _refused(self, usable: list[str]) -> dict[str, str]:
        """All of them together; if that fails, which of them it is."""
        try:
            self.lease(usable, len(usable))
        except GpuserveError as error:
            refused = {}
            for uuid in usable:
                try:
                    self.lease([uuid], 1)
                except GpuserveError as reason:
                    refused[uuid] = f"{uuid}: {reason}"
            return refused or {"all": str(error)}
        return {}

    def lease(self, allowed: Sequence[str], count: int, *, wait: float = 3.0) -> tuple[str, ...]:
        """Takes a lease and gives it up: the UUIDs it got. GpuserveError if it is refused."""
        request = LeaseRequest(
            count=count,
            allowed=tuple(allowed),
            probe=self.probe.spec(),
            lock_dir=str(self.locks),
            lock_timeout=wait,
            admission_timeout=wait,
            owners=(),
            run_id="proof",
            holder="the fault suite's proof",
        )
        with acquire(request, self.probe, lambda *_: None) as lease:
            return tuple(gpu.uuid for gpu in lease.gpus)

    def refusal(self, allowed: Sequence[str], *, wait: float = 0.2) -> str:
        """Why a lease of one of those GPUs is refused; empty if it is not."""
        try:
            self.lease(allowed, 1, wait=wait)
        except GpuserveError as error:
            return str(error)
        return ""


def _plugin() -> tuple[str, ...]:
    import importlib.metadata

    known = any(point.name == "gpuserve" for point in importlib.metadata.entry_points(group="pytest11"))
    return () if known else ("-p", "pytest_gpuserve.plugin")


def _locked(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
