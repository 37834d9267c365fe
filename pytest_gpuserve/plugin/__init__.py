"""The entry point: options, markers, fixtures, and nothing else until `--gpu-matrix` is seen.

Every pytest run of every project with the plugin installed imports this module, so the rest is imported only when
there is work for it: no YAML, no HTTP client, no NVML here (benchmarks/ measures it).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_gpuserve import markers, options
from pytest_gpuserve.fixtures import gpu_cell, gpus, gpuserve_manager, load, sglang_server

if TYPE_CHECKING:
    from pytest_gpuserve.xdist import CellScheduling

__all__ = ["gpu_cell", "gpus", "gpuserve_manager", "load", "sglang_server"]

_WORKER = "gpuserve_plan"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option group `gpuserve`."""
    options.add(parser)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Registers what does the work: in the controller if a matrix is asked for, in a worker if it got a plan."""
    markers.register(config)
    workerinput = getattr(config, "workerinput", None)
    if workerinput is not None:
        if _WORKER in workerinput:
            from pytest_gpuserve.plugin import active

            active.join(config, workerinput[_WORKER])
    elif options.given(config):
        from pytest_gpuserve.plugin import active

        active.begin(config)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: object) -> None:
    """What an xdist worker needs to know; it decides nothing by itself (pytest-xdist#432)."""
    config: pytest.Config = node.config  # type: ignore[attr-defined]
    controller = config.pluginmanager.get_plugin("gpuserve-controller")
    if controller is not None:
        node.workerinput[_WORKER] = controller.for_worker()  # type: ignore[attr-defined]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """`-n auto`: as many workers as there are GPUs, or CPUs if they are fewer; None in runs without a matrix."""
    if not options.given(config):
        return None
    from pytest_gpuserve.plugin import active

    return active.worker_count(config)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config) -> CellScheduling | None:
    """One cell, one worker; None (xdist's own) in runs without a matrix."""
    controller = config.pluginmanager.get_plugin("gpuserve-controller")
    if controller is None:
        return None
    from pytest_gpuserve import xdist

    return xdist.make(config, controller.cell_ids)
