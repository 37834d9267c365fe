"""The worker's side of a supervisor: start it, ask it, listen to it, and end its server if it dies itself.

No thread reads the events (a test that forks in a threaded process gets a warning, and warnings may be errors): they
are read while a call here waits, and the supervisor never waits for its reader. Every wait is bounded by silence: a
supervisor that works reports every second, so one that says nothing for a minute is wedged, and is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections import deque
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import pytest_gpuserve
from pytest_gpuserve.model.failure import Failure, Kind
from pytest_gpuserve.model.phase import Phase
from pytest_gpuserve.serve import procs
from pytest_gpuserve.serve.reap import end_by_force

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pytest_gpuserve.model.launch import LaunchSpec, LeaseRequest

__all__ = ["Supervisor"]

_SILENCE = 60.0
_HELLO = 30.0
_CLOSE = 180.0
_KILLED = 10.0
# Would reach the supervisor and do harm there: GitHub's runner kills what carries its mark as soon as the step ends,
# and coverage starts itself in every interpreter that finds these.
_NOT_FOR_IT = ("RUNNER_TRACKING_ID", "COV_CORE_SOURCE", "COV_CORE_CONFIG", "COV_CORE_DATAFILE")

Event = dict[str, Any]


class Supervisor:
    """One supervisor process, started at once. `owners` are pids whose end ends everything; this process is one.

    The calls return the event that answers them: `leased`, `ready` or `failed`, `stopped`, `released`. Instead of it
    comes an `error` whose `failure` is `infra` when it cannot be had or the supervisor is gone. In the last case every
    process of the server has been ended from here. `on_event` gets every event as it is read.
    """

    def __init__(
        self,
        run_id: str,
        *,
        owners: Sequence[int] = (),
        python: str = sys.executable,
        on_event: Callable[[Event], object] | None = None,
    ) -> None:
        self.on_event = on_event
        self._heard = b""
        self._events: deque[Event] = deque()
        self._server: Event | None = None
        self._failed: Event | None = None
        self._lease_id = ""
        self._dead: Event | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `close`)
        root = str(Path(pytest_gpuserve.__file__).parents[1])
        env = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_IT}
        env |= {"GPUSERVE_RUN_ID": run_id, "PYTHONPATH": os.pathsep.join(filter(None, [root, env.get("PYTHONPATH")]))}
        owned = [word for pid in {os.getpid(), *owners} for word in ("--owner", str(pid))]
        self._process = subprocess.Popen(
            [python, "-m", "pytest_gpuserve.serve.supervisor", *owned],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=env,
            cwd="/",
            start_new_session=True,
        )
        assert self._process.stdin
        assert self._process.stdout
        self._commands, self._output = self._process.stdin, self._process.stdout
        self._pid = os.getpid()
        atexit.register(self.close)

    # -- asking --------------------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """The supervisor's."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it can still be asked."""
        return self._dead is None and self._process.poll() is None

    def fileno(self) -> int:
        """Readable when there are events: for those who wait for other things too."""
        return self._output.fileno()

    def lease(self, request: LeaseRequest) -> Event:
        """Waits for the GPUs. The event is `leased`, or `error` naming who holds them."""
        return self._ask({"cmd": "lease", "request": request.to_json()}, "leased", "error")

    def launch(self, spec: LaunchSpec, on_event: Callable[[Event], object] | None = None) -> Event:
        """Starts a server and waits until it is `ready` or `failed`; `error` if it could not even be started."""
        before, self.on_event = self.on_event, on_event or self.on_event
        try:
            return self._ask({"cmd": "launch", "spec": spec.to_json()}, "ready", "failed", "error")
        finally:
            self.on_event = before

    def watch(self, on: bool, *, certain: bool = False) -> None:  # noqa: FBT001 (on or off)
        """Judges the serving phase while a check runs. `certain`: the caller knows that requests are under way."""
        self._send({"cmd": "watch", "on": on, "certain": certain})

    def verdict(self, timeout: float = 0.0) -> Event | None:
        """The `failed` event of the present server, if it has come or comes within `timeout` seconds; `error` if the
        supervisor is gone.
        """
        deadline = monotonic() + timeout
        while self._failed is None and self._dead is None:
            left = deadline - monotonic()
            for _ in self.events(max(0.0, left)):
                pass
            if left <= 0:
                break
        return self._failed or self._dead

    def stop(self) -> Event:
        """Ends the server, if there is one, and waits for the proof. The event is `stopped`."""
        return self._ask({"cmd": "stop"}, "stopped")

    def release(self) -> Event:
        """Gives the GPUs up, after ending the server if there is one. The event is `released`."""
        return self._ask({"cmd": "release"}, "released")

    def close(self) -> None:
        """Ends everything and the supervisor with it; returns when both are gone. May be called again."""
        atexit.unregister(self.close)
        if os.getpid() != self._pid or self._errors.closed:
            return  # in a forked child there is nothing to end
        # Said, too: a forked child that outlives its test keeps the pipe open.
        self._send({"cmd": "quit"})
        with contextlib.suppress(OSError):
            self._commands.close()
        deadline = monotonic() + _CLOSE
        while self._dead is None and monotonic() < deadline:
            for _ in self.events(1.0):
                pass
        if self._dead is None:
            self._give_up("it did not end when it was told to")
        self._output.close()
        self._errors.close()

    # -- listening -----------------------------------------------------------------------------------------------------

    def events(self, timeout: float = 0.0) -> Iterator[Event]:
        """The events that are there, or come within `timeout` seconds: ends with the first pause after one."""
        if not self._events:
            self._listen(timeout)
        while self._events:
            yield self._events.popleft()
            if not self._events:
                self._listen(0.0)

    def _ask(self, command: dict[str, Any], *answers: str) -> Event:
        self._send(command)
        heard = monotonic()
        while self._dead is None:
            for event in self.events(1.0):
                heard = monotonic()
                if event["event"] in answers:
                    return event
            if self._dead is None and monotonic() - heard > _SILENCE:
                self._give_up(f"it has said nothing for {_SILENCE:.0f} s")
        return self._dead

    def _send(self, command: dict[str, Any]) -> None:
        if self._dead is None:
            # A dead reader is noticed where its answer is missed.
            with contextlib.suppress(OSError):
                self._commands.write(json.dumps(command).encode() + b"\n")
                self._commands.flush()

    def _listen(self, timeout: float) -> None:
        if self._dead is not None:
            return
        if not select.select([self._output], [], [], timeout)[0]:
            return
        data = os.read(self._output.fileno(), 1 << 16)
        *lines, self._heard = (self._heard + data).split(b"\n")
        events = [json.loads(line) for line in lines]
        for event in events:
            self._take(event)
        if self.on_event:
            # Last, since it may be interrupted: what was read has been taken in by then.
            for event in events:
                self.on_event(event)
        if not data:
            self._give_up("it ended" if self._commands.closed else "it died")

    def _take(self, event: Event) -> None:
        if event["event"] == "leased":
            self._lease_id = event["lease"]
        elif event["event"] == "spawned":
            self._server, self._failed = event, None
        elif event["event"] == "failed":
            self._failed = event
        elif event["event"] == "stopped":
            self._server = self._failed = None
        self._events.append(event)

    def _give_up(self, why: str) -> None:
        """The supervisor is gone or wedged: makes sure of that, then of the end of its server."""
        if self._process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(2.0 if self._commands.closed else 0.2)
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
        try:
            text = f"the supervisor (pid {self.pid}, exit {self._process.wait(_KILLED)}) is gone: {why}"
        except subprocess.TimeoutExpired:
            # In a driver that does not answer, not even a signal ends a process.
            text = f"the supervisor (pid {self.pid}) is gone: {why}, and not even SIGKILL ends it (D in `ps`?)"
        if self._server or self._lease_id:
            family = procs.Family(f"GPUSERVE_LEASE={self._lease_id}")
            tmpdir = self._server["tmpdir"] if self._server else ""
            survivors = end_by_force(family, tmpdir=tmpdir)
            if survivors:
                text += f"; not killable: {', '.join(map(procs.describe, survivors))}"
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip()
        failure = Failure.of(Kind.INFRA, Phase.SPAWN, f"{text}. It said: {said[-500:]}" if said else text, text=said)
        self._dead = {"event": "error", "failure": failure.to_json()}
        if not self._commands.closed:
            self._events.append(self._dead)
            with contextlib.suppress(OSError):
                self._commands.close()
