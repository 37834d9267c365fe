"""What a matrix file says, as values: levels, loads, floors, the matrix itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytest_gpuserve.model.arch import matches_arch
from pytest_gpuserve.model.predicate import ALWAYS, Predicate

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pytest_gpuserve.errors import Where
    from pytest_gpuserve.model.cell import FlagSetting, FlagValue, ModelSpec

__all__ = [
    "BUILTIN_LOADS",
    "METRICS",
    "STRATEGIES",
    "Exclude",
    "Floor",
    "Include",
    "Level",
    "Load",
    "Matrix",
    "Metric",
]

STRATEGIES = ("one-at-a-time", "listed", "full")
BUILTIN_LOADS = ("single-stream", "batch", "saturate")


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric by `sglang.bench_serving`'s name, its unit and whether more is better."""

    name: str
    unit: str
    higher: bool

    @property
    def bound(self) -> str:
        """`at-least` for throughput, `at-most` for latency: the word a floor is written with."""
        return "at-least" if self.higher else "at-most"


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("output_throughput", "tok/s", higher=True),
        Metric("total_throughput", "tok/s", higher=True),
        Metric("request_throughput", "req/s", higher=True),
        *(
            Metric(f"{statistic}_{of}_ms", "ms", higher=False)
            for of in ("ttft", "tpot", "itl", "e2e_latency")
            for statistic in ("mean", "median", "p99")
        ),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of an axis. `requires` maps distributions to PEP 440 ranges; `note` is shown by the plan.

    A flag or variable that is None takes away what the defaults, the model or the baseline's levels set. `places` says
    where each is written, by its fact (`flag.NAME`, `env.NAME`).
    """

    axis: str
    name: str
    flags: Mapping[str, FlagSetting] = field(default_factory=dict)
    env: Mapping[str, str | None] = field(default_factory=dict)
    when: Predicate = ALWAYS
    requires: Mapping[str, str] = field(default_factory=dict)
    note: str | None = None
    where: Where
    places: Mapping[str, Where] = field(default_factory=dict, repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.axis}.{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A load profile: `concurrency` requests at once, each of `input` and `output` tokens.

    `rate` is how many arrive a second (None: the next one when one ends), `windows` how many samples are taken (None:
    the measurement's own choice), `prefix` how many of the input tokens all requests share.
    """

    name: str
    concurrency: int
    input: int
    output: int
    rate: float | None = None
    windows: int | None = None
    prefix: int = 0
    where: Where | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """What one metric of one load must reach in the cells that `when` matches, in exactly one of three forms.

    `limit` in `metric.unit`; `ratio` to another cell of the same session; `history_ratio` to the median of the last
    `history_last` runs. Each is a lower bound where more is better, else an upper bound (`metric.bound`).
    """

    when: Predicate
    load: str
    metric: Metric
    limit: float | None = None
    ratio: float | None = None
    of: Mapping[str, str] | None = None
    history_ratio: float | None = None
    history_last: int = 0
    where: Where

    def reference(self, axes: Mapping[str, str], baseline: Mapping[str, str]) -> dict[str, str] | None:
        """The axes of the cell that a `ratio` compares with: the baseline, or this cell with `of`'s levels."""
        if self.ratio is None:
            return None
        return dict(baseline) if self.of is None else {**axes, **self.of}


@dataclass(frozen=True, slots=True, kw_only=True)
class Include:
    """Extra cells: `axes` (others at the baseline) on each of `models`; `named` if the file itself names the models."""

    models: tuple[str, ...]
    axes: Mapping[str, str]
    named: bool
    where: Where


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclude:
    """Cells that are not made, and why."""

    when: Predicate
    reason: str
    where: Where


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """One matrix file. `axes` keep the file's order; `baseline` names a level of every axis. `places` says where each
    of its default flags and variables is written.

    `limits` maps phases to `{stall, total}` in seconds, as `model.launch.limits_from` takes them.
    """

    name: str
    path: Path
    archs: tuple[str, ...]
    title: str = ""
    flags: Mapping[str, FlagValue] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    models: Mapping[str, ModelSpec]
    axes: Mapping[str, Mapping[str, Level]] = field(default_factory=dict)
    baseline: Mapping[str, str] = field(default_factory=dict)
    strategy: str = STRATEGIES[0]
    include: tuple[Include, ...] = ()
    exclude: tuple[Exclude, ...] = ()
    loads: Mapping[str, Load] = field(default_factory=dict)
    limits: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    floors: tuple[Floor, ...] = ()
    places: Mapping[str, Where] = field(default_factory=dict, repr=False, compare=False)

    def covers(self, arch: str) -> bool:
        """True if the file is for `arch` (by name or family)."""
        return any(matches_arch(wanted, arch) for wanted in self.archs)
