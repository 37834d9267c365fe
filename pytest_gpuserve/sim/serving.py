"""Main once the schedulers are up: port, warm-up, serving, draining, and the watch over its children."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import time
from typing import TYPE_CHECKING

from pytest_gpuserve.model.phase import Phase
from pytest_gpuserve.sim.clock import TokenClock
from pytest_gpuserve.sim.frontend import Frontend
from pytest_gpuserve.sim.http import Connection
from pytest_gpuserve.sim.processes import kill_tree
from pytest_gpuserve.sim.requests import Engine
from pytest_gpuserve.sim.ring import Ring
from pytest_gpuserve.sim.scheduler import CRASH, PING, QUIT, WARMUP, WORK
from pytest_gpuserve.sim.text import Model, Noise
from pytest_gpuserve.sim.tree import give_up

if TYPE_CHECKING:
    from pytest_gpuserve.sim.behaviour import Behaviour
    from pytest_gpuserve.sim.tree import Tree

__all__ = ["serve"]

_PULSE = 0.25  # seconds between looks at the ring while requests run
_SILENCE = 1.0  # seconds without an answer after which tokens stop: a rank is stopped, or compiles
_BUSY = 95  # percent of GPU use while requests run
_DRAIN_LOOK = 0.05  # SGLang looks every five seconds; nobody wants to wait for a simulation
_DRAIN_REPORT = 5.0
_SCHEDULER_EXIT = 5.0


def serve(tree: Tree, behaviour: Behaviour, begun: float, *, port_taken: bool) -> None:
    """Serves until a signal or a child's death ends the process; does not return."""
    asyncio.run(_Main(tree, behaviour, begun).run(port_taken=port_taken))


class _Main:
    def __init__(self, tree: Tree, behaviour: Behaviour, begun: float) -> None:
        self.tree = tree
        self.config = tree.config
        self.behaviour = behaviour
        self.log = tree.log
        self.begun = begun
        self.stopping = False
        self.used = 0
        self.terminated = asyncio.Event()

    async def run(self, *, port_taken: bool) -> None:
        loop = asyncio.get_running_loop()
        self.ring = Ring(loop, self.tree.ring_out, self.tree.ring_back)
        self.clock = TokenClock(loop, self.behaviour.stream_rate, self.behaviour.saturation)
        args = self.config.args
        noise = Noise.of(str(args["attention_backend"]), str(args["kv_cache_dtype"]))
        model = Model(self.config.vocabulary, self.config.context, noise, self.behaviour.output)
        self.engine = Engine(self.config, self.behaviour, model, self.clock, self.ring, self.log)
        self.frontend = Frontend(self.config, self.engine, self.log)
        loop.add_signal_handler(signal.SIGCHLD, self._child_died)
        self._child_died()  # one may have died before
        seconds = time.monotonic() - self.begun
        self.log.line(f"Engine startup timings (s): scheduler_e2e={seconds:.2f}, tokenizer_e2e={seconds:.2f}")
        self.log.uvicorn(f"Started server process [{os.getpid()}]")
        self.log.uvicorn("Waiting for application startup.")
        self.log.uvicorn("Application startup complete.")
        if not await self._listen(port_taken=port_taken):
            await self._deaf()
        self._serving_signals(loop)
        await self._warm_up()
        self.frontend.startup_seconds = time.monotonic() - self.begun
        pulse = loop.create_task(self._pulse())
        await self.terminated.wait()
        await self._drain()
        pulse.cancel()
        await self._stop()

    async def _listen(self, *, port_taken: bool) -> bool:
        """True once the port is open. Found taken, the server says so and hangs on, as SGLang does."""
        host, port = str(self.config.args["host"]), int(self.config.args["port"] or 30000)
        taken = OSError(
            errno.EADDRINUSE, f"error while attempting to bind on address ('{host}', {port}): address already in use"
        )
        try:
            if port_taken:
                raise taken
            await asyncio.get_running_loop().create_server(
                lambda: Connection(self.frontend.handle, self.log), host, port, backlog=2048
            )
        except OSError as error:
            shown = taken if error.errno == errno.EADDRINUSE else error
            self.log.uvicorn(str(shown), "ERROR")
            self.log.uvicorn("Waiting for application shutdown.")
            return False
        self.log.uvicorn(f"Uvicorn running on http://{host}:{port} (Press CTRL+C to quit)")
        return True

    async def _deaf(self) -> None:
        """SIGTERM and SIGINT are ignored from here on; only a child's death or SIGKILL ends it."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        await asyncio.Event().wait()

    def _serving_signals(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.add_signal_handler(signal.SIGQUIT, self._sigquit)
        loop.add_signal_handler(signal.SIGINT, self.terminated.set)
        if not self.behaviour.ignore_sigterm:
            loop.add_signal_handler(signal.SIGTERM, self._sigterm)

    async def _warm_up(self) -> None:
        """SGLang's own first request. It compiles what is not compiled yet, without a log line; `/health` is 503."""
        if not self.config.args["skip_server_warmup"]:
            self.log.uvicorn('127.0.0.1:40000 - "GET /model_info HTTP/1.1" 200 OK')
            self.log.line(
                "Prefill batch, #new-seq: 1, #new-token: 6, #cached-token: 0, token usage: 0.00, #running-req: 0, "
                f"#queue-req: 0, #pending-token: 0, cuda graph: {self.config.graphs}, input throughput (token/s): 0.00"
            )
            await self.ring.send(WARMUP)
            self.log.uvicorn('127.0.0.1:40001 - "POST /generate HTTP/1.1" 200 OK')
        self.frontend.status = "Up"
        self.log.line("The server is fired up and ready to roll!")

    async def _pulse(self) -> None:
        """While requests run: no token without a ring that turns; a line about the batch once a second; busy GPUs."""
        beat = 0
        while True:
            await asyncio.sleep(_PULSE)
            self._use_gpus(_BUSY if self.clock.running else 0)
            if not self.clock.running:
                continue
            beat += 1
            if beat % 4 == 0:
                self.engine.report()
            answer = self.ring.send(PING)
            if not (await asyncio.wait([answer], timeout=_SILENCE))[0]:
                self.clock.pause()
                await answer
                self.clock.resume()

    def _use_gpus(self, percent: int) -> None:
        if percent != self.used:
            self.used = percent
            for ordinal in self.tree.ordinals:
                self.tree.devices.busy(ordinal, percent)

    def _sigterm(self) -> None:
        self.log.line("SIGTERM received. signum=None frame=None. Draining requests and shutting down...")
        self.frontend.draining = True
        self.terminated.set()

    async def _drain(self) -> None:
        """Waits for running requests, without a deadline (sglang#1838)."""
        self.frontend.draining = True
        for fault, message in ((self.behaviour.crash, CRASH), (self.behaviour.compile, WORK)):
            if fault is not None and fault.phase is Phase.DRAINING:
                await self.ring.send(message)
        reported = float("-inf")
        while True:
            await asyncio.sleep(_DRAIN_LOOK)
            busy = [one.want.rid for one in self.engine.busy]
            if self.frontend.status == "UnHealthy":
                self.log.line("Signal SIGTERM received while health check failed. Force exiting.")
                return
            if os.environ.get("SGL_FORCE_SHUTDOWN", "").lower() in ("1", "true"):
                self.log.line("Signal SIGTERM received while force shutdown flag set. Force exiting.")
                return
            if time.monotonic() - reported >= _DRAIN_REPORT or not busy:
                reported = time.monotonic()
                self.log.line(
                    f"Gracefully exiting... Remaining number of requests {len(busy)}. Remaining requests "
                    f"remaining_rids={busy}."
                )
            if self.behaviour.hang is Phase.DRAINING:
                await asyncio.Event().wait()
            if not busy:
                return

    async def _stop(self) -> None:
        """Schedulers release their memory and go, then the rest of the tree, then main: exit 0."""
        self.stopping = True
        self._use_gpus(0)
        self.ring.send(QUIT)
        deadline = time.monotonic() + _SCHEDULER_EXIT
        while not all(child.reap() for child in self.tree.watched) and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
        self.log.uvicorn("Shutting down")
        self.log.uvicorn("Waiting for application shutdown.")
        self.log.uvicorn("Application shutdown complete.")
        self.log.uvicorn(f"Finished server process [{os.getpid()}]")
        self.log.line(f"kill_process_tree called: parent_pid={os.getpid()}, include_parent=False, pid={os.getpid()}")
        kill_tree()
        os._exit(0)

    def _child_died(self) -> None:
        for child in self.tree.watched:
            if child.reap() and child.exit_code and not self.stopping:
                self.log.line(
                    f"Subprocess {child.name} (pid={child.pid}) crashed with exit code {child.exit_code}. "
                    "Triggering SIGQUIT for cleanup..."
                )
                self.stopping = True
                os.kill(os.getpid(), signal.SIGQUIT)

    def _sigquit(self) -> None:
        self.log.line("SIGQUIT received. signum=None, frame=None. It usually means one child failed.")
        give_up(self.behaviour, self.log)
