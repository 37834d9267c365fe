"""How a cell is launched: the command line, the environment, the limits; or the simulated server in its place."""

from __future__ import annotations

import sys
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest_gpuserve
from pytest_gpuserve import engine
from pytest_gpuserve.manager.prepare import server_variables
from pytest_gpuserve.manager.weights import draft_path, model_path
from pytest_gpuserve.model.arch import CPU
from pytest_gpuserve.model.cell import facts_of
from pytest_gpuserve.model.launch import LaunchSpec, limits_from
from pytest_gpuserve.report.store import write_json_atomic

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_gpuserve.manager.plan import Plan
    from pytest_gpuserve.model.cell import Cell
    from pytest_gpuserve.model.gpu import Gpu
    from pytest_gpuserve.model.phase import Phase

__all__ = ["SIMULATED_RELEASE", "SIMULATED_STALL", "spec_of"]

# A simulated phase takes a fraction of a second, and simulated memory comes back at once unless a scenario holds it:
# a hang or a leak need not be waited for as long as a real one.
SIMULATED_STALL = 4.0
SIMULATED_RELEASE = 5.0


def spec_of(cell: Cell, plan: Plan, *, folder: Path, log_name: str, gpus: Sequence[Gpu], start: int) -> LaunchSpec:
    """The launch of `cell`, writing into `folder`; `start` counts the starts of this cell in the run.

    UsageError or MachineError if its model cannot be had.
    """
    settings = plan.settings
    variables = server_variables(settings)
    version = plan.version("sglang")
    path = model_path(cell.model, python=settings.python, env={**variables, **cell.env}, simulated=plan.simulated)
    draft = draft_path(cell, simulated=plan.simulated)
    argv = engine.argv(cell, python=settings.python, version=version, model_path=path)
    env = dict(cell.env)
    if plan.simulated:
        launcher = engine.launcher(settings.python, version)
        argv = (sys.executable, "-m", "pytest_gpuserve.sim.server", *argv[len(launcher) :])
        variables |= _simulation(cell, plan, folder, log_name, gpus, start)
    stall = settings.stall or (SIMULATED_STALL if plan.simulated else None)
    limits = limits_from({str(phase): dict(given) for phase, given in cell.limits.items()}, stall)
    return LaunchSpec(
        cell=cell.id,
        argv=argv,
        env=env,
        folder=str(folder),
        sglang_version=version,
        model_path=path,
        draft_path=draft,
        blind=engine.hides_phases(cell.flags),
        pass_env=variables,
        log_name=log_name,
        limits={str(phase): _limits_json(limits, phase) for phase in limits},
        start_timeout=settings.start_timeout,
        gpus_visible=cell.arch != CPU,
        simulated=plan.simulated,
    )


def _limits_json(limits: Mapping[Phase, Any], phase: Phase) -> dict[str, float | None]:
    return {"stall": limits[phase].stall, "total": limits[phase].total}


def _simulation(cell: Cell, plan: Plan, folder: Path, log_name: str, gpus: Sequence[Gpu], start: int) -> dict[str, str]:
    """How the simulated server behaves, by the scenario, and where it finds that and its machine."""
    assert plan.scenario is not None
    facts = {**facts_of(cell), "gpu": [gpu.index for gpu in gpus]}
    # The same cell's n-th start behaves the same in every run: a flaky rule is drawn from this.
    seed = zlib.crc32(f"{cell.id}:{start}".encode())
    folder.mkdir(parents=True, exist_ok=True)
    behaviour = folder / f"behaviour-{Path(log_name).stem}.json"
    write_json_atomic(behaviour, plan.scenario.behaviour(facts, seed))
    return {
        "GPUSERVE_SIM_BEHAVIOUR": str(behaviour),
        "GPUSERVE_SIM_DIR": str(plan.probes[cell.arch]["dir"]),
        # The server runs outside the caller's PYTHONPATH; this package may only be there through it.
        "PYTHONPATH": str(Path(pytest_gpuserve.__file__).parent.parent),
    }
