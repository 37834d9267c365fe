"""From settings to a plan: matrices, machine, versions, cells, known-bad entries, order. Starts nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pytest_gpuserve import schedule
from pytest_gpuserve.errors import FileProblems, GpuserveError, UsageError
from pytest_gpuserve.gpu import lockdir
from pytest_gpuserve.manager import builds
from pytest_gpuserve.manager import machine as machines
from pytest_gpuserve.manager.plan import Plan, Shard
from pytest_gpuserve.manager.weights import missing_model
from pytest_gpuserve.matrix.expand import expand_all
from pytest_gpuserve.matrix.find import available, find_matrices, known_bad_paths
from pytest_gpuserve.matrix.known_bad import in_range, load_known_bad, matching
from pytest_gpuserve.matrix.scenario import load_scenario, scenario_from_known_bad
from pytest_gpuserve.matrix.schema import load_matrix, vocabulary_of
from pytest_gpuserve.matrix.settings import variable_refusal
from pytest_gpuserve.model.versions import counted
from pytest_gpuserve.model.words import number
from pytest_gpuserve.preflight.run import PRETENDED
from pytest_gpuserve.report.store import read_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pytest_gpuserve.errors import Problem
    from pytest_gpuserve.manager.machine import Machine
    from pytest_gpuserve.matrix.expand import LeftOut
    from pytest_gpuserve.matrix.scenario import Scenario
    from pytest_gpuserve.matrix.types import Matrix
    from pytest_gpuserve.model.cell import Cell
    from pytest_gpuserve.model.knownbad import KnownBad
    from pytest_gpuserve.model.settings import Settings

_Source = TypeVar("_Source")
_Content = TypeVar("_Content")

__all__ = ["SIMULATED_VERSIONS", "elsewhere", "prepare", "require_locks", "server_variables", "settle"]

# What a simulated server claims to be where no SGLang is installed. Reports show it beside the word SIMULATED.
SIMULATED_VERSIONS = {
    "sglang": "0.5.23",
    "sglang-kernel": "0.4.2",
    "flashinfer": "0.6.17",
    "torch": "2.13.0",
    "triton": "3.8.0",
    "transformers": "5.8.0",
    "nccl": "2.29.7",
    "cuda": "13.0",
}


def server_variables(settings: Settings, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What `--gpu-server-env` sets or lets through.

    UsageError for a NAME that the caller does not have, or that is set for each start anyway.
    """
    found = {}
    for item in settings.server_env:
        name, equals, value = item.partition("=")
        if (reason := variable_refusal(name)) is not None:
            raise UsageError(f"--gpu-server-env {name}: the variable {reason}")
        if not equals:
            if name not in environ:
                raise UsageError(f"--gpu-server-env {name}: not set in this environment; write {name}=VALUE")
            value = environ[name]
        found[name] = value
    return found


def prepare(settings: Settings, *, pretended: Mapping[str, str] = PRETENDED) -> Plan:
    """The plan of a run. UsageError says what is wrong with what was asked; FileProblems all that is in the files.

    `pretended` are the driver's versions for a preflight, which asks nothing of this machine. Writes nothing: `settle`
    gives the plan its folder.
    """
    machine = machines.machine_of(settings)
    matrices, known_bad, scenario = _read(settings, machine)
    archs = {name: machines.archs_of(matrix, machine, settings) for name, matrix in matrices.items()}
    for name, matrix in matrices.items():
        machines.require(matrix, archs[name], machine, settings)
    versions = _versions(settings)
    taken_for, unused = builds.taken_for(settings, versions, matrices.values(), known_bad, server_variables(settings))
    all_versions = {**(pretended if settings.preflight else machine.driver), **counted(versions, taken_for)}
    if settings.sim and scenario is None:
        scenario = scenario_from_known_bad([entry for entry in known_bad if in_range(entry, all_versions)])
    cells: list[Cell] = []
    left_out: list[LeftOut] = []
    for name, matrix in matrices.items():
        for arch in archs[name]:
            expansion = expand_all(matrix, arch, strategy=settings.strategy, versions=all_versions)
            cells += expansion.cells
            left_out += expansion.left_out
    _refuse_twins(cells)
    cells, shard = _share(settings, cells)
    plan = Plan(
        settings=settings,
        run_id=secrets.token_hex(6),
        started=datetime.now(UTC).isoformat(),
        began=time.monotonic(),
        cells=tuple(cells),
        matrices=matrices,
        left_out=tuple(left_out),
        entries={cell.id: found for cell in cells if (found := matching(known_bad, cell, all_versions))},
        versions=versions,
        taken_for=taken_for,
        driver=dict(machine.driver),
        gpus=machine.gpus,
        probes=dict(machine.probes),
        lock_dir=_lock_dir(settings, _shared_machine()),
        scenario=scenario,
        owners=(os.getpid(),),
        shard=shard,
    )
    fitted = tuple(_fitted(cell, plan) for cell in plan.cells)
    remarks = (*builds.remarks_of(fitted, versions, taken_for), *unused)
    return dataclasses.replace(plan, cells=fitted, remarks=remarks).ordered()


def elsewhere(rootdir: Path) -> list[Matrix]:
    """All matrices that could be named here: a test's mark may be meant for another one than runs now."""
    found = []
    for path in available(rootdir).values():
        with contextlib.suppress(FileProblems):
            found.append(load_matrix(path))
    return found


def require_locks(plan: Plan) -> None:
    """UsageError or MachineError if the locks of this run cannot be where it wants them: once, not in every cell.

    Asked before a run has a folder; the directory is made if it is missing. A run that leases nothing needs none.
    """
    if plan.settings.launches and plan.lock_dir is not None:
        shared = _shared_machine() if plan.simulated else None
        if shared is not None:
            with contextlib.suppress(OSError):  # the locks are in it: `prepare` says what is wrong
                lockdir.make_shared(shared)
        lockdir.prepare(plan.lock_dir)


def settle(plan: Plan, folder: Path) -> Plan:
    """The plan with its run's folder; the simulated machine is made there, or in $GPUSERVE_SIM_DIR to be shared."""
    if plan.settings.sim is None:
        return dataclasses.replace(plan, folder=folder)
    place = _shared_machine() or folder / "sim"
    machine = machines.simulate(plan.settings.sim, place)
    return dataclasses.replace(
        plan,
        folder=folder,
        gpus=machine.gpus,
        probes=dict(machine.probes),
        lock_dir=_lock_dir(plan.settings, place),
    )


def _read(settings: Settings, machine: Machine) -> tuple[dict[str, Matrix], tuple[KnownBad, ...], Scenario | None]:
    """What is in the files of a run. FileProblems with the problems of all of them, of whatever kind they are."""
    problems: list[Problem] = []
    matrices: dict[str, Matrix] = {}
    for path in find_matrices(settings.matrix, settings.rootdir, machine.archs, machine.without):
        matrix = _kept(problems, load_matrix, path)
        if matrix is None:
            continue
        if matrix.name in matrices:
            raise UsageError(
                f"two matrices are called {matrix.name}: {matrices[matrix.name].path} and {path}; rename one"
            )
        matrices[matrix.name] = matrix
    # Beside a matrix that cannot be read, nobody knows what a rule may name: then it may name anything.
    vocabularies = [] if problems else [vocabulary_of(matrix) for matrix in matrices.values()]
    known_bad = _kept(problems, load_known_bad, known_bad_paths(settings.rootdir, settings.known_bad))
    scenario = None
    if settings.sim_scenario:
        scenario = _kept(problems, lambda path: load_scenario(path, vocabularies=vocabularies), settings.sim_scenario)
    if problems:
        raise FileProblems(problems)
    return matrices, known_bad or (), scenario


def _kept(problems: list[Problem], load: Callable[[_Source], _Content], source: _Source) -> _Content | None:
    """What `load` makes of `source`; None, and one more of the `problems`, where it refuses."""
    try:
        return load(source)
    except FileProblems as error:
        problems += error.problems
        return None


def _shared_machine() -> Path | None:
    shared = os.environ.get("GPUSERVE_SIM_DIR")
    return Path(shared) if shared else None


def _lock_dir(settings: Settings, simulated: Path | None) -> Path | None:
    """Those of a simulated machine are in its own place; None while it has none."""
    if settings.lock_dir is not None or settings.sim is None:
        return settings.lock_dir or lockdir.default_lock_dir()
    return simulated / "locks" if simulated else None


def _versions(settings: Settings) -> dict[str, str]:
    from pytest_gpuserve.serve.environment import read_versions

    try:
        return read_versions(settings.python, server_variables(settings))
    except UsageError as error:
        # A simulation needs no SGLang; but an environment that was named must be one.
        if settings.server_python is not None:
            raise
        if settings.sim is not None:
            return dict(SIMULATED_VERSIONS)
        if settings.plan:
            raise UsageError(f"{error}; a plan for the versions of the simulation: add --gpu-sim 8xsm120") from None
        raise


def _share(settings: Settings, cells: list[Cell]) -> tuple[list[Cell], Shard | None]:
    """This machine's cells, and what the record says of the share; all cells where no share is asked for."""
    if settings.shard is None:
        return cells, None
    index, count = settings.shard
    history = _times(settings)
    mine = {cell.id for cell in schedule.shares(cells, count, history)[index - 1]}
    return [cell for cell in cells if cell.id in mine], Shard(index, count, tuple(cell.id for cell in cells))


def _times(settings: Settings) -> dict[str, float]:
    """Seconds of each cell in the record of `--gpu-history`; a simulation's say nothing of real servers."""
    if settings.history is None:
        return {}
    try:
        record = read_run(settings.history)
    except GpuserveError as error:
        raise UsageError(f"--gpu-history: {error}") from error
    if record["simulated"] and settings.sim is None:
        raise UsageError(f"--gpu-history: {settings.history} is of a simulation: its times are invented")
    return {cell["id"]: float(total) for cell in record["cells"] if (total := (cell.get("timings") or {}).get("total"))}


def _refuse_twins(cells: Iterable[Cell]) -> None:
    seen: dict[str, Cell] = {}
    for cell in cells:
        twin = seen.setdefault(cell.id, cell)
        if twin is not cell:
            raise UsageError(
                f"the matrices {twin.matrix} and {cell.matrix} both have a cell {cell.id}: run them one by one"
            )


def _fitted(cell: Cell, plan: Plan) -> Cell:
    """The cell, marked not applicable if this machine cannot hold it or its model is not here."""
    # A plan may be made where none of these GPUs are: there it says what a machine that has them would do.
    if cell.not_applicable or (plan.settings.plan and cell.arch not in {gpu.arch for gpu in plan.gpus}):
        return cell
    reason = None
    fitting = plan.gpus_for(cell)
    if not plan.settings.preflight and len(fitting) < cell.gpus:
        least = f" of at least {cell.model.min_memory_gib:g} GiB" if cell.model.min_memory_gib else ""
        reason = f"needs {number(cell.gpus, f'{cell.arch} GPU')}{least}, {len(fitting)} here"
    elif not plan.simulated and cell.model.optional:
        reason = missing_model(cell)
    return dataclasses.replace(cell, not_applicable=reason) if reason else cell
