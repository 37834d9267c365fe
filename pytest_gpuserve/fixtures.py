"""The fixtures: function-scoped views of what the manager owns.

A server is not a yield fixture: one that is torn down in the set-up of the next test blames that test for its leak
(pytest#9287). Ordering is the plugin's, so wider fixtures may not depend on these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_gpuserve.markers import throughput_floors

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpuserve.manager import Manager
    from pytest_gpuserve.manager.handle import ServerHandle
    from pytest_gpuserve.manager.measuring import Measured
    from pytest_gpuserve.model.cell import Cell
    from pytest_gpuserve.model.gpu import Gpu

__all__ = ["LOADS", "MANAGER", "gpu_cell", "gpus", "gpuserve_manager", "load", "sglang_server"]

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


class Loads:
    """The fixture `load`: runs loads for one test, and keeps what nobody could decide until the test is through."""

    def __init__(self, node: pytest.Item, manager: Manager, cell: Cell) -> None:
        self._node = node
        self._manager = manager
        self._cell = cell
        self._floors = throughput_floors(node)
        self._names: set[str] = set()
        self._open: dict[str, None] = {}

    def __call__(self, name: str = "single-stream", /, **changes: float | None) -> Measured:
        """Measure, record and judge. A missed floor fails the test at once, and disturbed figures skip it at once."""
        from pytest_gpuserve.errors import UsageError
        from pytest_gpuserve.failing import ServerFailed
        from pytest_gpuserve.manager import marked, measuring
        from pytest_gpuserve.schedule import without_cell

        __tracebackhide__ = True
        manager, cell = self._manager, self._cell
        try:
            profile = manager.measuring.profile(cell, name, **changes)
        except UsageError as error:
            # From None: pytest would show the message a second time, as what this one was raised from.
            raise pytest.fail.Exception(str(error), pytrace=False) from None
        self._names.add(name)
        floors = [floor for floor in self._floors if floor.load in ("", name)]
        if floors and manager.plan.made_up and manager.plan.settings.floors == "check":
            self._open[marked.MADE_UP] = None
            floors = []
        test = without_cell(self._node.nodeid, cell.id)
        measured, finding = measuring.load_once(manager, cell, profile, floors, test=test)
        if finding.failure is not None:
            raise ServerFailed(finding.failure)
        if finding.skipped:
            steps = marked.next_steps(manager, cell, measured, floors)
            self._open["; ".join((finding.skipped, *steps))] = None
        if measured.invalid is not None:
            # Whatever the test asserts next would be about figures that mean nothing.
            pytest.skip("\n".join(self._open))
        return measured

    def conclude(self) -> None:
        """Asked once the test itself has passed: it is green only if each of its marks has decided something."""
        if self._floors and not self._names:
            pytest.fail(
                "the test has a throughput_floor mark and ran no load(): nothing was held against it", pytrace=False
            )
        # A mark of a class or a module is for those of its tests that run the load.
        for floor in throughput_floors(self._node, inherited=False):
            if floor.load and floor.load not in self._names:
                pytest.fail(
                    f"the throughput_floor of {floor.where.file}:{floor.where.line} is about load {floor.load!r}, and "
                    f"the test ran {', '.join(sorted(self._names))}: nothing was held against it; where a parameter "
                    "names the load, the mark belongs to the parameter: pytest.param(…, marks=…)",
                    pytrace=False,
                )
        if self._open:
            raise pytest.skip.Exception("\n".join(self._open), _use_item_location=True)


LOADS: pytest.StashKey[Loads] = pytest.StashKey()


@pytest.fixture
def load(request: pytest.FixtureRequest, sglang_server: ServerHandle) -> Callable[..., Measured]:
    """Runs a load profile against the cell's server: `load("chat")["output_throughput"].median`.

    A profile of the matrix or a built-in one, perhaps with changes: `load("batch", windows=3)`. What it measures goes
    into the record. The test's `throughput_floor` marks are judged at once: below a floor the test fails as `slow`.
    What cannot be decided skips the test at its end, unless that fails.
    """
    loads = Loads(request.node, _manager(request), sglang_server.cell)
    request.node.stash[LOADS] = loads
    return loads
