"""One scheduler process: SGLang's start, phase by phase, and the faults that belong to it."""

from __future__ import annotations

import os
import re
import signal
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from pytest_gpuserve.model.phase import Phase
from pytest_gpuserve.sim.devices import OutOfMemory
from pytest_gpuserve.sim.logs import FLOOD_BYTES
from pytest_gpuserve.sim.processes import die_with_parent, run_compiler, set_title

if TYPE_CHECKING:
    import socket

    from pytest_gpuserve.sim.behaviour import Behaviour
    from pytest_gpuserve.sim.config import Config
    from pytest_gpuserve.sim.devices import Devices
    from pytest_gpuserve.sim.logs import Log

__all__ = ["CRASH", "PING", "QUIT", "SPAWNED", "WARMUP", "WORK", "Scheduler"]

# Messages of the ring main → schedulers → detokenizer → main, one byte each. A process that is stopped or dead breaks
# the ring, and main's clock stands still until the message comes round: as a collective that one rank does not join.
PING, WARMUP, WORK, CRASH, QUIT = b"p", b"w", b"x", b"c", b"q"

SPAWNED = "python -c from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=6) --multiprocessing-fork"

_GIB = 1 << 30
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Failure|OutOfMemory)\b")
_WHERE = (
    '  File ".../sglang/srt/managers/scheduler.py", line 6362, in run_scheduler_process\n'
    "    scheduler = Scheduler(server_args, port_args)\n"
    "                ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^\n"
)
_CAPTURE_HINTS = """
Possible solutions:
1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)
2. set --cuda-graph-max-bs-decode to a smaller value (e.g., 16)
3. disable torch compile by not using --enable-torch-compile
4. disable CUDA graph by --disable-cuda-graph. (Not recommended. Huge performance loss)
Open an issue on GitHub https://github.com/sgl-project/sglang/issues/new/choose """


class Crashed(Exception):
    """A scripted exception; its text is written as it stands."""


@dataclass(slots=True)
class Scheduler:
    """Rank `index` of the server, on GPU `ordinal`. `ready` is its pipe to main, `left` and `right` the ring."""

    config: Config
    behaviour: Behaviour
    devices: Devices
    log: Log
    index: int
    ordinal: int
    parent: int
    ready: int
    left: int
    right: int
    store: socket.socket | None = None

    def run(self) -> None:
        """The process from its first instruction to its end."""
        try:
            self._start()
            os.write(self.ready, b"ready")
            self._serve()
        except Exception as error:  # noqa: BLE001 - as SGLang: any exception ends the server
            self._hit(error)

    def _start(self) -> None:
        self._import()
        self._dist_init()
        self._weights()
        self._kv_cache()
        if self.config.graphs:
            self._graph_capture()
        elif self._first:
            self.log.line(
                "Disable prefill CUDA graph because cuda_graph_config resolved prefill.backend='disabled' (e.g. via "
                "--cuda-graph-backend-prefill=disabled or auto-disable rules)."
            )
        if self._first:
            args = self.config.args
            self.log.line(
                f"max_total_num_tokens={self.config.capacity}, chunked_prefill_size={args['chunked_prefill_size']}, "
                f"max_prefill_tokens={args['max_prefill_tokens']}, max_running_requests="
                f"{args['max_running_requests'] or 2048}, context_len={self.config.context}, "
                f"available_gpu_mem={self._free():.2f} GB"
            )
            self.log.line("Tree cache initialized: source=default impl=UnifiedRadixCache hicache_attached=False")

    @property
    def _first(self) -> bool:
        return self.index == 0

    def _free(self) -> float:
        return self.devices.free(self.ordinal)

    def _import(self) -> None:
        set_title(SPAWNED)
        self._work(Phase.IMPORT)
        name = self.log.rank.replace(" ", "_")
        set_title(f"sglang::scheduler{name}")
        # Only now, as SGLang does: a main that dies while this process imports leaves an orphan that goes on.
        die_with_parent()

    def _dist_init(self) -> None:
        self.log.line("Init parallel begin.")
        begun = time.monotonic()
        self.devices.require(self.ordinal)
        self.devices.busy(self.ordinal, 0)
        self._rendezvous()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        if visible.startswith(("GPU-", "MIG-")) and len(self.config.ranks) > 1:
            entry = visible.split(",")[0]
            self.log.line(
                f"Setup Custom allreduce failed with invalid literal for int() with base 10: '{entry}'. To silence "
                "this warning, specify --disable-custom-all-reduce explicitly."
            )
        self._work(Phase.DIST_INIT)
        self.devices.take(self.ordinal, min(_GIB // 2, self.behaviour.memory))
        self.log.line(f"Init parallel ends. elapsed={time.monotonic() - begun:.2f} s")

    def _rendezvous(self) -> None:
        """The first rank listens on --nccl-port, and keeps it, as the process group's store does."""
        port = self.config.args["nccl_port"]
        if port is None or not self._first:
            return
        import socket

        self.store = store = socket.socket()
        store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            store.bind(("127.0.0.1", port))
            store.listen()
        except OSError as error:
            raise Crashed(
                "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network "
                f"address. port: {port}, useIpv6: false, code: -{error.errno}, name: EADDRINUSE, message: address "
                "already in use"
            ) from error

    def _weights(self) -> None:
        if self.config.asked is not None and self._first:
            self.log.line(
                f"The {self.config.asked} attention backend is not supported here. "
                f"Setting attention backend to {self.behaviour.fallback}."
            )
        self.log.line(f"Load weight begin. avail mem={self._free():.2f} GB")
        begun = time.monotonic()
        self._work(Phase.WEIGHTS)
        self.devices.take(self.ordinal, self.behaviour.memory * 6 // 10)
        self.log.line(
            f"Load weight end. elapsed={time.monotonic() - begun:.2f} s, type={self.config.architecture}, "
            f"avail mem={self._free():.2f} GB, mem usage={self.behaviour.memory * 0.6 / _GIB:.2f} GB."
        )

    def _kv_cache(self) -> None:
        self._work(Phase.KV_CACHE)
        self.devices.take(self.ordinal, self.behaviour.memory)
        size = self.behaviour.memory * 0.2 / _GIB
        dtype = {"auto": "torch.bfloat16"}.get(str(self.config.args["kv_cache_dtype"]), "torch.float8_e4m3fn")
        self.log.line(
            f"KV Cache is allocated. dtype: {dtype}, #tokens: {self.config.capacity}, K size: {size:.2f} GB, "
            f"V size: {size:.2f} GB"
        )
        self.log.line(f"Memory pool end. avail mem={self._free():.2f} GB")

    def _graph_capture(self) -> None:
        graphs = self.config.args["cuda_graph_config"]
        if (backend := graphs["prefill"]["backend"]) != "disabled":
            self.log.line(
                f"Capture target prefill CUDA graph begin. backend={backend}, num_tokens=[4, 8, 16, 32, 64], "
                f"avail mem={self._free():.2f} GB"
            )
            self.log.line(f"Capture target prefill CUDA graph end. elapsed=0.00 s, avail mem={self._free():.2f} GB.")
        backend = graphs["decode"]["backend"]
        if backend == "disabled":
            self._work(Phase.GRAPH_CAPTURE)
            return
        begun = time.monotonic()
        self.log.line(
            f"Capture target decode CUDA graph begin. backend={backend}, num_tokens_per_req=1, "
            f"avail mem={self._free():.2f} GB"
        )
        if self._first:
            self.log.progress("Capturing batches (bs=32 avail_mem=3.21 GB):   0%|          | 0/4 [00:00<?, ?it/s]")
        self._work(Phase.GRAPH_CAPTURE)
        if self._first:
            self.log.progress("Capturing batches (bs=1 avail_mem=3.01 GB): 100%|██████████| 4/4 [00:00<00:00]\n")
        self.log.line(
            f"Capture target decode CUDA graph end. bs=[1, 2, 4, 8, 16, 32], elapsed={time.monotonic() - begun:.2f} s, "
            f"mem usage=0.20 GB, avail mem={self._free():.2f} GB."
        )

    def _serve(self) -> None:
        """Passes the ring's messages on until the last one."""
        while True:
            message = os.read(self.left, 1)
            if not message:
                signal.pause()
            if message in (WARMUP, WORK):
                self._work(Phase.WARMUP if message == WARMUP else self._trigger)
            elif message == CRASH:
                self._crash()
            os.write(self.right, message)
            if message == QUIT:
                return

    @property
    def _trigger(self) -> Phase:
        """The phase of a scripted fault that a request sets off."""
        fault = self.behaviour.crash or self.behaviour.compile
        return fault.phase if fault else Phase.SERVING

    def _work(self, phase: Phase) -> None:
        """What takes this phase's time: a compile, the phase's own seconds, a hang or a crash. In the ring phases the
        first rank works for all.
        """
        behaviour = self.behaviour
        ring = phase.rank >= Phase.WARMUP.rank
        if behaviour.hang is phase and not (ring and phase is not Phase.WARMUP):
            self._hang(phase)
        if behaviour.compile is not None and behaviour.compile.phase is phase and self._first:
            run_compiler(behaviour.compile.seconds)
        if not ring or (phase is Phase.WARMUP and self._first):
            time.sleep(behaviour.phase_seconds)
            self.log.flood(FLOOD_BYTES // 6 // len(self.config.ranks))
        if behaviour.crash is not None and behaviour.crash.phase is phase:
            self._crash()

    def _hang(self, phase: Phase) -> NoReturn:
        """For ever. In graph capture as seen in the field: one byte a second, an idle GPU, main polling. In the warm-up
        as a collective that never ends: the GPU is at 100 %.
        """
        if phase is Phase.WARMUP:
            self.devices.busy(self.ordinal, 100)
        spinning = os.open("/dev/null", os.O_WRONLY) if phase is Phase.GRAPH_CAPTURE else None
        while True:
            if spinning is not None:
                os.write(spinning, b"\0")
            self.log.repeat()
            time.sleep(1.0 if self.behaviour.log != "flood" else 0.1)

    def _crash(self) -> None:
        """While starting, the second rank (if there is one) has the cause, and the others follow it with an echo."""
        crash = self.behaviour.crash
        if crash is None:
            return
        started = crash.phase.rank >= Phase.WARMUP.rank  # the ring reaches the first rank first
        culprit = 0 if started else min(1, len(self.config.ranks) - 1)
        if self.index != culprit:
            time.sleep(0.02)
            raise Crashed(
                "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3699, remote process exited "
                "or there was a network error, NCCL version 2.28.9"
            )
        text = crash.text
        if not _EXCEPTION.match(text):  # a library's own words on stderr, before Python's
            self.log.raw(f"{text}\n")
            text = f"RuntimeError: {text}"
        if crash.phase is Phase.GRAPH_CAPTURE:
            text += (
                "\n\nDuring handling of the above exception, another exception occurred:\n\n"
                f"Traceback (most recent call last):\n{_WHERE}"
                f"Exception: Capture cuda graph failed: {crash.text}{_CAPTURE_HINTS}"
            )
        raise Crashed(text)

    def _hit(self, error: Exception) -> None:
        """SGLang's last words of a scheduler, and the signal that ends the server."""
        if isinstance(error, Crashed):
            where, last = _WHERE, str(error)
        else:
            where = "".join(traceback.format_tb(error.__traceback__))
            name = "torch.OutOfMemoryError" if isinstance(error, OutOfMemory) else type(error).__name__
            last = f"{name}: {error}"
        self.log.line(f"Scheduler hit an exception: Traceback (most recent call last):\n{where}{last}\n")
        if len(self.config.ranks) > 1:
            time.sleep(0.1)  # the other ranks' echoes come before main's kill
        with suppress(ProcessLookupError):
            if os.getppid() == self.parent:
                os.kill(self.parent, signal.SIGQUIT)
        # Main kills us; without a main (an orphan whose pipe broke) this is the end.
        for _ in range(50):
            if os.getppid() != self.parent:
                break
            time.sleep(0.02)
