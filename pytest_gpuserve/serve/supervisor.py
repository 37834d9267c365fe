"""The supervisor process: `python -m pytest_gpuserve.serve.supervisor [--owner PID]...`.

It takes a lease, runs servers one after another under it, and gives the lease up: protocol in `model.launch`, JSON
lines on stdin and stdout. It ends everything when it is told to, when stdin ends, on SIGTERM or SIGHUP, and when one of
its owners is gone (a forked child of a test can hold the pipe open for as long as it likes, a pidfd cannot be held).
Whatever happens, the locks are given up only after the server's processes are gone and the GPUs are free, or known not
to be.

One thread, one loop. No pytest, no torch, no HTTP or YAML library: it has to start fast and to outlive all of them.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from collections import deque
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from pytest_gpuserve.errors import GpuserveError
from pytest_gpuserve.gpu import open_probe
from pytest_gpuserve.gpu.lease import acquire
from pytest_gpuserve.model.failure import Failure, Kind
from pytest_gpuserve.model.launch import LaunchSpec, LeaseRequest
from pytest_gpuserve.model.phase import Phase
from pytest_gpuserve.serve import procs
from pytest_gpuserve.serve.loop import Loop
from pytest_gpuserve.serve.reap import end_by_force
from pytest_gpuserve.serve.server import Server
from pytest_gpuserve.serve.teardown import tear_down

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpuserve.gpu.lease import Lease
    from pytest_gpuserve.model.gpu import Probe

__all__ = ["Supervisor", "main"]

_PR_SET_CHILD_SUBREAPER = 36
# Events that nobody reads pile up here; ticks are the first to go.
_BACKLOG = 256 << 10


class _Abandoned(Exception):
    """Nobody wants the lease any more that is being waited for."""


class Supervisor:
    """Commands in, events out. `quitting` says why everything is to end, empty while it is not."""

    def __init__(self, commands: int, events: int) -> None:
        self.quitting = ""
        self._loop = Loop()
        self._began = monotonic()
        self._commands_fd, self._events_fd = commands, events
        self._commands: deque[dict[str, Any]] = deque()
        self._received = b""
        self._unsent = bytearray()
        self._owners: dict[str, int] = {}
        self._probe: Probe | None = None
        self._request: LeaseRequest | None = None
        self._lease: Lease | None = None
        self._server: Server | None = None
        self._quarantined: list[str] = []
        os.set_blocking(commands, False)
        os.set_blocking(events, False)
        self._loop.watch(commands, self._receive)

    # -- talking -------------------------------------------------------------------------------------------------------

    def emit(self, event: str, **fields: Any) -> None:
        """Sends one event, without ever waiting for the reader."""
        if event in ("tick", "waiting") and len(self._unsent) > _BACKLOG // 4:
            return
        if len(self._unsent) > _BACKLOG and event == "phase":
            return
        line = json.dumps({"event": event, "t": round(monotonic() - self._began, 3), **fields}, default=str)
        self._unsent += line.encode() + b"\n"
        self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: os.write(self._events_fd, self._unsent)]
        except BlockingIOError:
            self._loop.watch(self._events_fd, self._flush, write=True)
            return
        except OSError:  # the reader is gone
            self._unsent.clear()
        self._loop.unwatch(self._events_fd)

    def _receive(self) -> None:
        try:
            data = os.read(self._commands_fd, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self._loop.unwatch(self._commands_fd)
            self.quit("stdin ended")
            return
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            try:
                command = json.loads(line)
                name = command["cmd"]
            except (ValueError, TypeError, KeyError):
                self._complain(f"a command that is none: {line[:200]!r}")
                continue
            if name == "quit":
                self.quit("told to")
            else:
                self._commands.append(command)

    def _complain(self, message: str, *, retryable: bool = False) -> None:
        failure = Failure.of(Kind.INFRA, Phase.SPAWN, message, retryable=retryable)
        self.emit("error", failure=failure.to_json())

    # -- ending --------------------------------------------------------------------------------------------------------

    def quit(self, reason: str) -> None:
        """Stop, release and exit as soon as what is under way allows it."""
        self.quitting = self.quitting or reason

    def watch_owner(self, pid: int) -> None:
        """Quits when that process is gone, or is gone already."""
        who = procs.identity(pid)
        if who in self._owners:
            return
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self.quit(f"owner {pid} is gone")
            return
        self._owners[who] = fd
        self._loop.watch(fd, lambda: self._owner_gone(pid, fd))

    def _owner_gone(self, pid: int, fd: int) -> None:
        self._loop.unwatch(fd)
        self.quit(f"owner {pid} is gone")

    def handle_signals(self) -> None:
        """SIGTERM and SIGHUP: stop and release. SIGINT is for the foreground, which this process is not part of.

        Handlers, not SIG_IGN: an ignored signal would stay ignored in the server.
        """
        signal.signal(signal.SIGINT, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, _: self.quit(signal.Signals(number).name))
        wake, wake_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake_end)
        self._loop.watch(wake, lambda: os.read(wake, 512))

    # -- working -------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Does what is asked until it is time to quit; then ends the server and gives the lease up."""
        try:
            while not self.quitting:
                self._loop.wait(lambda: bool(self._commands or self.quitting), 60.0, poll=60.0)
                if self._commands and not self.quitting:
                    self._obey(self._commands.popleft())
        finally:
            self._stop()
            self._release()
            self._loop.wait(lambda: not self._unsent, 1.0)

    def _obey(self, command: dict[str, Any]) -> None:
        name = command["cmd"]
        try:
            if name == "lease":
                self._take_lease(LeaseRequest.from_json(command["request"]))
            elif name == "launch":
                self._launch(LaunchSpec.from_json(command["spec"]))
            elif name == "watch" and self._server:
                self._server.arm(bool(command["on"]), certain=bool(command.get("certain")))
            elif name == "stop":
                self._stop(told=True)
            elif name == "release":
                self._stop()
                self._release(told=True)
            elif name != "watch":
                self._complain(f"an unknown command: {name}")
        except (GpuserveError, OSError) as error:
            self._complain(str(error))
        except (KeyError, TypeError, ValueError) as error:
            self._complain(f"the command {name} is not as it should be: {type(error).__name__}: {error}")

    def _take_lease(self, request: LeaseRequest) -> None:
        if self._lease:
            self._complain("a lease is held already: release it first")
            return
        for pid in request.owners:
            self.watch_owner(pid)
        self._probe = open_probe(request.probe)
        began = monotonic()

        def on_wait(seconds: float, holders: list[str]) -> None:
            self.emit("waiting", seconds=round(seconds, 1), holders=holders)
            self._loop.turn(0.0)
            if self.quitting or any(command["cmd"] in ("release", "stop") for command in self._commands):
                raise _Abandoned

        self._loop.turn(0.0)
        try:
            if self.quitting:
                return
            self._lease = acquire(request, self._probe, on_wait)
        except _Abandoned:
            return
        self._request = request
        self._quarantined = []
        self.emit(
            "leased",
            lease=self._lease.id,
            gpus=[gpu.to_json() for gpu in self._lease.gpus],
            seconds=round(monotonic() - began, 3),
            unchecked=self._lease.unchecked,
        )

    def _launch(self, spec: LaunchSpec) -> None:
        if not self._lease or not self._probe or not self._request:
            self._complain(f"{spec.cell} cannot be launched: no lease is held")
            return
        if self._server:
            self._complain(f"{spec.cell} cannot be launched: a server is there already, stop it first")
            return
        self._server = Server(
            self._loop,
            spec,
            lease=self._lease,
            probe=self._probe,
            run_id=self._request.run_id,
            lock_dir=Path(self._request.lock_dir),
            emit=self.emit,
        )

    def _stop(self, *, told: bool = False) -> None:
        if self._server and self._request:
            server, self._server = self._server, None
            try:
                report = tear_down(
                    server, abandoned=lambda: bool(self.quitting), release_timeout=self._request.release_timeout
                )
            except BaseException:
                # A bug of ours must not become somebody's leak: no proof any more, but nothing of it goes on running.
                end_by_force(server.family)
                raise
            self._quarantined += report.pop("quarantined")
            self.emit("stopped", **report)
        elif told:
            self.emit("stopped", teardown={"rungs": []}, failure=None)

    def _release(self, *, told: bool = False) -> None:
        if self._lease:
            lease, self._lease = self._lease, None
            lease.release()
        elif not told:
            return
        self.emit("released", quarantined=self._quarantined)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a supervisor over this process's stdin and stdout. Returns the exit status: 1 if it failed itself."""
    arguments = sys.argv[1:] if arguments is None else arguments
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # A stray print must not become part of the protocol.
    events = os.dup(1)
    os.dup2(2, 1)
    _restore_python_path()
    supervisor = Supervisor(0, events)
    supervisor.handle_signals()
    supervisor.emit("hello", pid=os.getpid())
    for flag, pid in zip(arguments[::2], arguments[1::2], strict=True):
        assert flag == "--owner", flag
        supervisor.watch_owner(int(pid))
    try:
        supervisor.run()
    except Exception:  # noqa: BLE001 (the last line of defence: `run` has released what it could)
        text = traceback.format_exc()
        failure = Failure.of(Kind.INFRA, Phase.SPAWN, f"the supervisor failed: {text.splitlines()[-1]}", text=text)
        supervisor.emit("error", failure=failure.to_json())
        sys.stderr.write(text)
        return 1
    return 0


def _restore_python_path() -> None:
    """The client puts this package's own root first on PYTHONPATH; the rest is the caller's."""
    root = str(Path(__file__).parents[2])
    first, _, rest = os.environ.get("PYTHONPATH", "").partition(os.pathsep)
    if first == root:
        os.environ["PYTHONPATH"] = rest
        if not rest:
            del os.environ["PYTHONPATH"]


if __name__ == "__main__":
    sys.exit(main())
