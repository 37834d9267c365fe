"""One server, from its spawn to the moment its teardown begins: what it logs, where it stands, what it died of.

Everything here happens in the supervisor's loop. `Server` owns the process, the log, the ports, the private files and
the watch; it reports phases, readiness and at most one failure through `emit`. `teardown.tear_down` ends it.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from pytest_gpuserve import engine
from pytest_gpuserve.model.failure import Failure, Kind
from pytest_gpuserve.model.phase import Phase
from pytest_gpuserve.serve import judge, procs, spawn
from pytest_gpuserve.serve.compile_lock import CompileLocks
from pytest_gpuserve.serve.deaths import Deaths, Handover
from pytest_gpuserve.serve.judge import Circumstances, Judge
from pytest_gpuserve.serve.kernel import oom_kills
from pytest_gpuserve.serve.litter import SharedMemory, remove_folder
from pytest_gpuserve.serve.phases import PhaseTracker
from pytest_gpuserve.serve.ports import acquire_block
from pytest_gpuserve.serve.readiness import Readiness, excerpt
from pytest_gpuserve.serve.readings import GpuReadings
from pytest_gpuserve.serve.reap import end_by_force
from pytest_gpuserve.serve.serving import LoadMeter
from pytest_gpuserve.serve.strangers import Stranger, Strangers
from pytest_gpuserve.serve.tail import CappedFile, LogPump
from pytest_gpuserve.serve.watch import Look, Status, Watch

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpuserve.gpu.lease import Lease
    from pytest_gpuserve.model.gpu import Probe
    from pytest_gpuserve.model.launch import LaunchSpec
    from pytest_gpuserve.serve.http import Answer
    from pytest_gpuserve.serve.loop import Loop, Timer

__all__ = ["Server"]

_LOOK = 0.5
_LOOK_CLOSE = 0.1
_POKE = 0.1
_TICK = 1.0
_LITTER = 0.2


class Server:
    """A started server. `emit(event, **fields)` sends one event of `model.launch` to the worker.

    Public state for the teardown: `pid` (main's, and its session's), `family`, `deaths`, `ready`, `failed`, `phase`,
    `status` (the newest look), `port`, `api_key`, `shm`, `tmpdir`, `strangers`. It sets `stopping`, and
    `dispose`s in the end.
    """

    def __init__(
        self,
        loop: Loop,
        spec: LaunchSpec,
        *,
        lease: Lease,
        probe: Probe,
        run_id: str,
        lock_dir: Path,
        emit: Callable[..., None],
    ) -> None:
        now = monotonic()
        self.loop, self.spec, self.lease = loop, spec, lease
        self.ready = self.failed = self.stopping = False
        self.status: Status | None = None
        self.api_key = os.urandom(16).hex()
        self.family = procs.Family(f"GPUSERVE_LEASE={lease.id}", adopter=os.getpid())
        self.log_path = Path(spec.folder, spec.log_name)
        self._emit = emit
        self._patterns = engine.patterns(spec.sglang_version)
        self.endpoints = engine.endpoints(spec.sglang_version)
        self._tracker = PhaseTracker(self._patterns, now=now)
        self._began = now
        self._oom_kills = oom_kills()
        self._judge = Judge(loop, probe, self._facts, lambda: self.deaths.ended_at, self._fail)
        self._readings = GpuReadings(loop, probe, lease.gpus)
        self.strangers = Strangers(lease.gpus, self.family.started, self._announce)
        self._noted: frozenset[int] = frozenset()
        self._timers: list[Timer] = []
        with ExitStack() as undo:
            self._block = acquire_block(lock_dir)
            undo.callback(self._block.release)
            self.port = spec.port or self._block.port
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            self._log = CappedFile(str(self.log_path), spec.log_cap)
            undo.callback(self._log.close)
            self.tmpdir = spawn.make_tmpdir(lease.id)
            undo.callback(remove_folder, self.tmpdir)
            self.shm = SharedMemory(self.tmpdir)
            self._start(run_id, undo)
            undo.pop_all()

    def _start(self, run_id: str, undo: ExitStack) -> None:
        command = spawn.command(
            self.spec,
            os.environ,
            gpus=self.lease.gpus,
            tmpdir=self.tmpdir,
            marks=spawn.marks(run_id, self.lease.id),
            ports=(self.port, self._block.nccl_port),
            api_key=self.api_key,
        )
        self.url = str(command.shown["url"])
        self.limits = self.spec.limit_table
        self._watch = Watch(
            self.limits,
            now=self._began,
            start_timeout=self.spec.start_timeout,
            compile_lock=CompileLocks(command.env, lambda: [stat.pid for stat in self.family.members()]),
        )
        spawned = spawn.spawn(command.argv, command.env, self.tmpdir)
        undo.callback(end_by_force, self.family)
        self._process = spawned.process
        self.pid = self.family.session = spawned.process.pid
        self._pump = LogPump(spawned.output, self._log, self.api_key)
        self.deaths = Deaths(self.loop, self.pid, on_main=self._main_ended, on_other=self._other_ended)
        self.loop.watch(spawned.output, self._drain)
        self._handover = Handover(
            self.loop,
            spawned.started,
            on_success=lambda: self._enter(Phase.IMPORT, ""),
            on_failure=lambda reason: self._blame(Kind.INFRA, f"the server cannot be started: {reason}"),
        )
        self._readiness = Readiness(
            self.loop,
            self.port,
            self.api_key,
            self.endpoints,
            ours=self._port_is_ours,
            on_healthy=lambda: self._enter(Phase.READY, ""),
            on_ready=self._is_ready,
            on_refusal=self._refuses,
        )
        self._meter = LoadMeter(self.loop, self.port, self.api_key, self.endpoints)
        self._looks = self.loop.every(_LOOK, self._look, first=0.0)
        self._timers = [
            self._looks,
            self.loop.every(_POKE, self._poke),
            self.loop.every(_TICK, self._tick),
            self.loop.every(_LITTER, lambda: self.observe_litter(thorough=False)),
        ]
        self._emit(
            "spawned",
            pid=self.pid,
            lease=self.lease.id,
            **command.shown,
            api_key=self.api_key,
            log=str(self.log_path),
            tmpdir=self.tmpdir,
        )
        self._note(phase=str(self.phase), cell=self.spec.cell, pids=[self.pid])

    @property
    def phase(self) -> Phase:
        """Where the server is."""
        return self._tracker.phase

    @property
    def exit(self) -> int | None:
        """Main's exit status as `Popen.returncode`, None while it lives."""
        return self.deaths.exit

    @property
    def answers(self) -> bool:
        """Whether the server has ever answered at its port and may do so still."""
        return self._readiness.listening and self.exit is None

    def timings(self) -> dict[str, float]:
        """Seconds spent in each phase so far."""
        return {str(phase): round(seconds, 3) for phase, seconds in self._tracker.timings(monotonic()).items()}

    def _drain(self) -> None:
        lines = self._pump.read()
        if self._pump.ended:
            self.loop.unwatch(self._pump.fd)
        self._hear(lines)

    def _hear(self, lines: list[str]) -> None:
        now = monotonic()
        for line in lines:
            phase = self._tracker.feed(line, now)
            if phase:
                self._entered(phase, line)
            self._watch.line(line)
            self._meter.line(line)
            if phase is Phase.READY:
                self._readiness.told()
            if not self.ready and self._patterns.fatal(line):
                self._judge.condemn(judge.AFTER_FATAL)
        if self._log.error and not self.ready:
            self._blame(Kind.INFRA, f"the log {self.log_path} cannot be written: {self._log.error}")

    def _enter(self, phase: Phase, line: str) -> None:
        if self._tracker.enter(phase, monotonic()):
            self._entered(phase, line)

    def _entered(self, phase: Phase, line: str) -> None:
        self._watch.enter(phase, monotonic())
        self._emit("phase", phase=str(phase), line=line[:500])
        self._note(phase=str(phase))

    def _note(self, **facts: Any) -> None:
        try:
            self.lease.note(**facts)
        except OSError:
            return  # the note only tells others; the lock decides

    def _poke(self) -> None:
        if not self.ready and not self.failed and self.exit is None:
            self._readiness.poke()
        self._meter.poke()

    def _look(self) -> None:
        now = monotonic()
        tree = self._tree()
        self.deaths.follow(tree)
        self._readings.refresh()
        if not self.stopping:
            self.strangers.see(self._readings.latest.values(), now - self._began, self.phase)
        pids = frozenset(proc.pid for proc in tree)
        if pids != self._noted:
            self._noted = pids
            self._note(pids=sorted(pids))
        look = Look(
            now=now,
            procs=tree,
            gpu_memory=self._readings.memory,
            gpu_utilization=self._readings.utilization,
            load=self._meter.load,
        )
        self.status = self._watch.look(look)
        # A verdict may be due before the next look.
        left = self.limits[self.phase].stall - self.status.quiet if self.phase in self.limits else _LOOK
        self._looks.period = _LOOK_CLOSE if 0 < left < _LOOK else _LOOK
        if self.status.stall and not self.stopping:
            self._judge.condemn(0.0)

    def _announce(self, stranger: Stranger) -> None:
        """From whichever thread saw it."""
        self.loop.soon(lambda text: self._emit("stranger", text=text), str(stranger))

    def _tree(self) -> list[procs.Proc]:
        return [procs.in_detail(stat) for stat in self.family.members()]

    def _tick(self) -> None:
        status = self.status
        if status and (self.stopping or not (self.ready or self.failed)):
            self._emit(
                "tick",
                phase=str(status.phase),
                seconds=round(status.seconds, 1),
                quiet=round(status.quiet, 1),
                compiling=status.compiling,
            )

    def observe_litter(self, *, thorough: bool = True) -> None:
        """Notes which shared memory the living processes use."""
        self.shm.observe((stat.pid for stat in self.family.members()), thorough=thorough)

    def _port_is_ours(self) -> bool:
        return procs.listens(self.port, [stat.pid for stat in self.family.members()])

    def _is_ready(self, info: Any, model_info: Any, first_answer: dict[str, Any]) -> None:
        if self._judge.at_work or self.ready:
            return
        self.ready = True
        self._enter(Phase.SERVING, "")
        self.observe_litter()
        self._emit(
            "ready",
            url=self.url,
            seconds=round(monotonic() - self._began, 3),
            phases=self.timings(),
            info=info,
            model_info=model_info,
            first_answer=first_answer,
        )

    def _refuses(self, answer: Answer) -> None:
        self._blame(Kind.CRASH, f"the server says it is ready but does not generate: {excerpt(answer)}")

    def _blame(self, kind: Kind, text: str) -> None:
        self._judge.condemn(0.0, failure=Failure.of(kind, self.phase, text))

    def arm(self, on: bool, *, certain: bool) -> None:  # noqa: FBT001 (one bit of the protocol)
        """Judges the serving phase from now on, or no more. `certain`: requests are known to be under way."""
        if on:
            self._watch.arm(monotonic(), certain=certain)
        else:
            self._watch.disarm()
        self._meter.armed = on

    def _main_ended(self) -> None:
        self._handover.settle()  # if it never ran, that is the reason
        if not self.stopping:
            self._judge.condemn(judge.AFTER_EXIT)

    def _other_ended(self) -> None:
        if not self.stopping:
            self._judge.condemn(judge.AFTER_DEATH_SERVING if self.ready else judge.AFTER_DEATH)

    def _facts(self) -> Circumstances:
        self._hear(self._pump.flush())
        return Circumstances(
            spec=self.spec,
            phase=self.phase,
            lines=tuple(self._pump.recent),
            stall=self.status.stall if self.status else None,
            deaths=self.deaths,
            port=self.port,
            health=self._readiness.last,
            uuids=tuple(gpu.uuid for gpu in self.lease.gpus),
            tree=lambda: [proc for proc in self._tree() if proc.state not in "ZX"],
            log=self.log_path,
            began=time.time() - (monotonic() - self._began),
            oom_kills=self._oom_kills,
            draft=self._tracker.draft,
            strangers=self.strangers,
        )

    def _fail(self, failure: Failure) -> None:
        if self.stopping:
            return
        self.failed = True
        self._emit("failed", failure=failure.to_json(), phases=self.timings())
        if self.ready and failure.kind is Kind.HANG:
            # The test is blocked in a request to this server and cannot ask for its end: closed connections free it.
            for stat in self.family.members():
                procs.send_signal(stat, signal.SIGKILL)

    def begin_stop(self) -> None:
        """No verdicts and no questions from now on; the log is still drained and the processes still looked at."""
        self.stopping = True
        self._readiness.close()
        self._meter.close()
        self._enter(Phase.DRAINING, "")

    def dispose(self) -> str:
        """Closes everything of a server that is no more. Returns what went wrong with its log, empty if nothing."""
        for timer in self._timers:
            timer.cancel()
        self._readiness.close()
        self._meter.close()
        while not self._pump.ended and (lines := self._pump.read()):
            self._hear(lines)
        self._enter(Phase.STOPPED, "")
        self.loop.unwatch(self._pump.fd)
        self._pump.close()
        self.deaths.close()
        self._process.returncode = self.exit if self.exit is not None else -signal.SIGKILL
        self._block.release()
        return self._log.error
