"""Models, levels and cells: what is launched."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpuserve.errors import Where

__all__ = ["Cell", "FlagSetting", "FlagValue", "ModelSpec", "facts_of"]

FlagValue = str | int | float | bool | list[str]
# What a model or a level says of a flag: a value, or None, which takes away what came before it.
FlagSetting = FlagValue | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One entry of a matrix's `models`: a shipped shape or a local path.

    `gpus` is the number of GPUs a server of it takes; `min_memory_gib` the memory each of them must have.
    `properties` are what predicates see as `model.NAME` (attention, quantization, …), strings. `requires` maps
    distributions to PEP 440 ranges, as a level's does. A flag or variable that is None takes away the default's.
    `places` says where each is written, by its fact (`flag.NAME`, `env.NAME`).
    """

    name: str
    shape: str | None = None
    path: str | None = None
    layers: int | None = None
    gpus: int = 1
    min_memory_gib: float = 0.0
    optional: bool = False
    flags: Mapping[str, FlagSetting] = field(default_factory=dict)
    env: Mapping[str, str | None] = field(default_factory=dict)
    properties: Mapping[str, str] = field(default_factory=dict)
    requires: Mapping[str, str] = field(default_factory=dict)
    where: Where | None = None
    places: Mapping[str, Where] = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One launch: arch + model + a level for every axis.

    `axes` names the level of every axis (also the baseline's); `deltas` the axes that differ from the baseline.
    `flags` and `env` are merged: matrix defaults, the model's, the baseline levels', the deltas' (`matrix.merge`).
    `not_applicable` says why this cell cannot run with the versions or the model at hand (outcome: skipped).
    `notes` are shown by the plan, such as "--num-continuous-decode-steps is read by no code".
    """

    id: str
    arch: str
    model: ModelSpec
    axes: Mapping[str, str]
    deltas: tuple[str, ...] = ()
    flags: Mapping[str, FlagValue] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    not_applicable: str | None = None
    notes: tuple[str, ...] = ()
    matrix: str = ""
    limits: Mapping[str, Any] = field(default_factory=dict)
    where: Where | None = None

    @property
    def is_baseline(self) -> bool:
        """True if every axis is at the baseline's level."""
        return not self.deltas

    @property
    def gpus(self) -> int:
        """How many GPUs the server takes."""
        return self.model.gpus

    @property
    def identity(self) -> tuple[str, str, tuple[tuple[str, str], ...]]:
        """What comparisons pair by: arch, model, axes. Never the id's text."""
        return self.arch, self.model.name, tuple(sorted(self.axes.items()))


def facts_of(cell: Cell) -> dict[str, object]:
    """What a `when` predicate can name, with its value in this cell.

    Axes by name, `model`, `model.*`, `arch`, `gpus`, `flag.NAME` (without dashes in front), `env.NAME`.
    """
    facts: dict[str, object] = dict(cell.axes)
    facts |= {"arch": cell.arch, "gpus": cell.gpus, "model": cell.model.name}
    facts |= {f"model.{name}": value for name, value in cell.model.properties.items()}
    facts |= {f"flag.{name}": value for name, value in cell.flags.items()}
    facts |= {f"env.{name}": value for name, value in cell.env.items()}
    return facts
