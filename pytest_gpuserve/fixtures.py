"""The fixtures: function-scoped views of what the manager owns.

A server is not a yield fixture: one that is torn down in the set-up of the next test blames that test for its leak
(pytest#9287). Ordering is the plugin's, so wider fixtures may not depend on these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_gpuserve.markers import throughput_floors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_gpuserve.manager import Manager
    from pytest_gpuserve.manager.handle import ServerHandle
    from pytest_gpuserve.manager.measuring import Measured
    from pytest_gpuserve.model.cell import Cell
    from pytest_gpuserve.model.gpu import Gpu

__all__ = ["MANAGER", "gpu_cell", "gpus", "gpuserve_manager", "load", "sglang_server"]

MANAGER: pytest.StashKey[Manager] = pytest.StashKey()


def _manager(request: pytest.FixtureRequest) -> Manager:
    manager = request.config.stash.get(MANAGER, None)
    if manager is None:
        pytest.skip("needs a GPU matrix: run pytest with --gpu-matrix NAME (or auto)")
    return manager


@pytest.fixture
def gpuserve_manager(request: pytest.FixtureRequest) -> Manager:
    """The owner of servers and leases; for the built-in checks."""
    return _manager(request)


@pytest.fixture
def gpu_cell(request: pytest.FixtureRequest) -> Cell:
    """The cell this test runs in: id, arch, model, axes, flags, env. The test runs once a cell of the matrix."""
    _manager(request)
    if not hasattr(request, "param"):
        pytest.fail(
            "gpu_cell, sglang_server and gpus must be arguments of the test or of its fixtures: "
            "getfixturevalue() comes too late to run the test once a cell",
            pytrace=False,
        )
    cell: Cell = request.param
    return cell


@pytest.fixture
def sglang_server(request: pytest.FixtureRequest, gpu_cell: Cell) -> ServerHandle:
    """The cell's running server: `url`, `api_key`, `openai_base_url`, `info`, `gpus`, `log_path`, `generate()`."""
    return _manager(request).server(gpu_cell)


@pytest.fixture
def gpus(request: pytest.FixtureRequest, gpu_cell: Cell) -> tuple[Gpu, ...]:
    """Exclusive GPUs: those of the cell's server if the test asks for one too, else a lease of their own.

    `@pytest.mark.gpus(n)` says how many; default: as many as the cell's server takes.
    """
    return _manager(request).leased(gpu_cell)


@pytest.fixture
def load(request: pytest.FixtureRequest, sglang_server: ServerHandle) -> Iterator[Callable[..., Measured]]:
    """Runs a load profile against the cell's server: `load("chat")["output_throughput"].median`.

    A profile of the matrix or a built-in one, perhaps with changes: `load("batch", windows=3)`. What it measures goes
    into the record. The test's `throughput_floor` marks are judged at once: below a floor the test fails as `slow`.
    """
    from pytest_gpuserve.failing import ServerFailed
    from pytest_gpuserve.manager import measuring

    manager, cell = _manager(request), sglang_server.cell
    names: list[str] = []

    def run(name: str = "single-stream", **changes: float) -> Measured:
        __tracebackhide__ = True
        profile = manager.measuring.profile(cell, name, **changes)
        names.append(profile.name)
        measured, finding = measuring.load_once(manager, cell, profile, throughput_floors(request.node, name))
        if finding.failure is not None:
            raise ServerFailed(finding.failure)
        if finding.skipped:
            pytest.skip(finding.skipped)
        return measured

    yield run
    if not names and request.node.get_closest_marker("throughput_floor") is not None:
        pytest.fail(
            "the test has a throughput_floor mark and ran no load(): nothing was held against it", pytrace=False
        )
