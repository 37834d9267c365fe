"""The processes of one server and the pipes between them."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from pytest_gpuserve.sim.processes import Child, die_with_parent, end_as, fork, kill_tree, set_title
from pytest_gpuserve.sim.scheduler import QUIT, SPAWNED, Scheduler

if TYPE_CHECKING:
    from pytest_gpuserve.sim.behaviour import Behaviour
    from pytest_gpuserve.sim.config import Config
    from pytest_gpuserve.sim.devices import Devices
    from pytest_gpuserve.sim.logs import Log

__all__ = ["Tree", "give_up"]


class Tree:
    """The server's processes, and the pipes between them."""

    def __init__(self, config: Config, behaviour: Behaviour, devices: Devices, log: Log) -> None:
        self.config = config
        self.devices = devices
        self.log = log
        self.schedulers: list[Child] = []
        self._ready: list[int] = []
        count = len(config.ranks)
        ring = [os.pipe() for _ in range(count + 2)]
        self.ring_out, self.ring_back = ring[0][1], ring[-1][0]
        tracker_read, tracker_write = os.pipe()
        self.tracker = fork("resource_tracker", lambda: _track(tracker_read), close=(tracker_write,))
        os.close(tracker_read)
        base, step = int(config.args["base_gpu_id"]), int(config.args["gpu_id_step"])
        self.ordinals = [base + index * step for index in range(count)]
        for index, rank in enumerate(config.ranks):
            reader, writer = os.pipe()
            scheduler = Scheduler(
                config=config,
                behaviour=behaviour,
                devices=devices,
                log=log.of_rank(rank),
                index=index,
                ordinal=self.ordinals[index],
                parent=os.getpid(),
                ready=writer,
                left=ring[index][0],
                right=ring[index + 1][1],
            )
            # Without main's ends of the pipes: an orphan notices by a broken pipe, at the end of its start.
            self.schedulers.append(fork(f"scheduler_{index}", scheduler.run, close=(*self._ready, reader)))
            os.close(writer)
            self._ready.append(reader)
        left, right, seconds = ring[count][0], ring[count + 1][1], behaviour.phase_seconds
        body = partial(_detokenize, os.getpid(), left, right, seconds)
        self.detokenizer = fork("detokenizer_0", body, close=tuple(self._ready))

    @property
    def watched(self) -> list[Child]:
        """Those whose end is the server's end."""
        return [*self.schedulers, self.detokenizer]

    def wait_ready(self) -> None:
        """Returns once every scheduler said so; ends the server if one died without a word."""
        for index, reader in enumerate(self._ready):
            if os.read(reader, 16):
                continue
            child = self.schedulers[index]
            child.reap(block=True)
            self.log.raw(
                "Traceback (most recent call last):\n"
                '  File ".../sglang/srt/entrypoints/engine.py", line 2029, in _wait_for_scheduler_ready\n'
                f"RuntimeError: Rank {index} scheduler died during initialization (exit code: {child.exit_code}). "
                "If exit code is -9 (SIGKILL), a common cause is the OS OOM killer. "
                "Run `dmesg -T | grep -i oom` to check.\n"
            )
            kill_tree()
            os._exit(1)


def _track(pipe: int) -> None:
    """The resource tracker of multiprocessing: deaf to signals, gone when the last process that holds the pipe is."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    set_title("python -B -c from multiprocessing.resource_tracker import main;main(6)")
    while os.read(pipe, 1):
        pass


def _detokenize(parent: int, left: int, right: int, seconds: float) -> None:
    set_title(SPAWNED)
    time.sleep(seconds)
    die_with_parent()
    if os.getppid() != parent:
        return
    set_title("sglang::detokenizer")
    message = b""
    while message != QUIT:
        message = os.read(left, 1)
        if not message:
            signal.pause()
        os.write(right, message)


def give_up(behaviour: Behaviour, log: Log) -> NoReturn:
    """Kills the tree and itself: exit -9, which is no out-of-memory; or as the scripted crash says."""
    log.line(f"kill_process_tree called: parent_pid={os.getpid()}, include_parent=True, pid={os.getpid()}")
    kill_tree()
    crash = behaviour.crash
    end_as(-9 if crash is None or crash.exit is None else crash.exit)
