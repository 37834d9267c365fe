"""What this machine has for the archs that are asked for; or the simulated one in its place."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpuserve.errors import MachineError, UsageError
from pytest_gpuserve.gpu import open_probe
from pytest_gpuserve.gpu.sim import create
from pytest_gpuserve.gpu.visible import bound
from pytest_gpuserve.model.arch import CPU, is_arch
from pytest_gpuserve.model.words import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pytest_gpuserve.matrix.types import Matrix
    from pytest_gpuserve.model.gpu import Gpu
    from pytest_gpuserve.model.settings import Settings

__all__ = ["Machine", "archs_of", "look", "machine_of", "require", "simulate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """GPUs this run may use, how to read them by arch, driver versions, and why there are none if so."""

    gpus: tuple[Gpu, ...] = ()
    probes: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    driver: Mapping[str, str] = field(default_factory=dict)
    without: str = ""

    @property
    def archs(self) -> tuple[str, ...]:
        """The archs of the GPUs here, `cpu` left out: every machine has one of those."""
        return tuple(dict.fromkeys(gpu.arch for gpu in self.gpus if gpu.arch != CPU))

    def describe(self) -> str:
        """`8 x sm120 (NVIDIA RTX PRO 6000)`, or why there is nothing."""
        return counted(f"{gpu.arch} ({gpu.name})" for gpu in self.gpus if gpu.arch != CPU) or self.without


def simulate(machine: str, folder: Path) -> Machine:
    """The simulated machine of `--gpu-sim` in that folder, made if it is not there."""
    probe = create(folder, machine)
    gpus = probe.gpus()
    return Machine(gpus=gpus, probes=dict.fromkeys((gpu.arch for gpu in gpus), probe.spec()), driver=probe.driver())


def machine_of(settings: Settings) -> Machine:
    """This machine, or what `--gpu-sim` would simulate; nothing is left behind."""
    if settings.sim is None:
        return look()
    with tempfile.TemporaryDirectory(prefix="gpuserve-sim-") as folder:
        return simulate(settings.sim, Path(folder))


def look(environ: Mapping[str, str] = os.environ) -> Machine:
    """The GPUs of this machine within CUDA_VISIBLE_DEVICES, and its CPUs.

    A machine without a driver is no error here: the arch may be `cpu`, or only a plan be asked for.
    """
    cpu = open_probe({"kind": "cpu"})
    probes = {CPU: cpu.spec()}
    try:
        nvml = open_probe({"kind": "nvml"})
        there = nvml.gpus()
        driver = nvml.driver()
    except MachineError as error:
        return Machine(gpus=cpu.gpus(), probes=probes, without=str(error))
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    gpus = bound(visible, there)
    probes |= dict.fromkeys((gpu.arch for gpu in gpus), nvml.spec())
    without = f"CUDA_VISIBLE_DEVICES={visible} hides every GPU ({len(there)})" if there and not gpus else "no GPU"
    return Machine(gpus=(*gpus, *cpu.gpus()), probes=probes, driver=driver, without=without)


def archs_of(matrix: Matrix, machine: Machine, settings: Settings) -> tuple[str, ...]:
    """The archs to expand the matrix for: those it names that are here; all it names where no GPU is needed."""
    if settings.sim is None and not settings.launches:
        return tuple(arch for arch in matrix.archs if is_arch(arch)) or tuple(filter(matrix.covers, machine.archs))
    here = (*machine.archs, *((CPU,) if settings.sim is None else ()))
    return tuple(arch for arch in here if matrix.covers(arch))


def require(matrix: Matrix, archs: Sequence[str], machine: Machine, settings: Settings) -> None:
    """UsageError if none of the matrix' archs is here: an empty run must never look green."""
    if archs:
        return
    wanted = ", ".join(matrix.archs)
    if settings.sim is not None:
        raise UsageError(
            f"the matrix {matrix.name} is for {wanted}, and --gpu-sim {settings.sim} simulates "
            f"{_listed(machine.archs)}: simulate {_suggestion(matrix.archs)}, or name another matrix"
        )
    here = machine.describe().rstrip(".")
    # The probe's own message may say all this already.
    hint = (
        f" Without such a GPU: --gpu-plan shows the cells, --gpu-preflight asks SGLang's own arguments, "
        f"--gpu-sim {_suggestion(matrix.archs)} simulates the machine."
    )
    raise UsageError(f"the matrix {matrix.name} is for {wanted}; here: {here}.{'' if '--gpu-plan' in here else hint}")


def _listed(archs: Iterable[str]) -> str:
    return ", ".join(archs) or "nothing"


def _suggestion(archs: Sequence[str]) -> str:
    return f"8x{next((arch for arch in archs if is_arch(arch)), 'sm120')}"
