"""Starts the plugin's work: what is registered in the controller, in the one process without xdist, in a worker."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
from typing import TYPE_CHECKING

import pytest

from pytest_gpuserve import options
from pytest_gpuserve.errors import GpuserveError
from pytest_gpuserve.manager.machine import machine_of
from pytest_gpuserve.model.arch import CPU
from pytest_gpuserve.plugin.collect import Collection
from pytest_gpuserve.plugin.controller import Controller
from pytest_gpuserve.plugin.live_line import StatusFile
from pytest_gpuserve.plugin.runner import Runner

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_gpuserve.manager.plan import Plan

__all__ = ["begin", "collect_and_run", "join", "user_errors", "worker_count"]


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """A mistake of the user's, or a machine that cannot do it: pytest exits 4 with the message and no traceback."""
    try:
        yield
    except GpuserveError as error:
        raise pytest.UsageError(str(error)) from None


def begin(config: pytest.Config) -> None:
    """In the controller, or in the one process there is. The plan is made when the session starts."""
    with user_errors():
        settings = options.resolve(config)
    if config.option.help or config.option.version:
        return
    config.pluginmanager.register(Controller(config, settings), "gpuserve-controller")


def worker_count(config: pytest.Config) -> int:
    """For `-n auto`: a worker more than there are GPUs could only wait for one."""
    with user_errors():
        machine = machine_of(options.resolve(config))
    return max(1, min(len([gpu for gpu in machine.gpus if gpu.arch != CPU]), os.cpu_count() or 1))


def join(config: pytest.Config, plan: bytes) -> None:
    """In an xdist worker: the controller's plan, of which nothing is computed again."""
    made: Plan = pickle.loads(plan)  # noqa: S301 - our own controller made it
    runner = collect_and_run(config, made)
    if made.folder is not None:
        runner.show = StatusFile(made.folder, config.workerinput["workerid"]).event  # type: ignore[attr-defined]


def collect_and_run(config: pytest.Config, plan: Plan) -> Runner:
    """In the process that collects and runs tests."""
    # The plan stays until the end: without this the garbage collector walks all its cells again and again while
    # pytest makes its items (a fifth of the time of collecting 20,000).
    gc.freeze()
    runner = Runner(config, plan)
    config.pluginmanager.register(Collection(config, plan), "gpuserve-collection")
    config.pluginmanager.register(runner, "gpuserve-runner")
    return runner
