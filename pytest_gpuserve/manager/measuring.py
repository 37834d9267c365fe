"""Loads against the cell's server, with its GPUs watched, and what they mean for the cell's floors."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import psutil

from pytest_gpuserve.gpu import open_probe
from pytest_gpuserve.measure.floors import Past, Verdict, bound_of, measurements, verdict_of
from pytest_gpuserve.measure.history import past_of, runs_before
from pytest_gpuserve.measure.load import LoadFailed, run_load
from pytest_gpuserve.measure.profile import changed, profile_named, refuse_too_long
from pytest_gpuserve.measure.stats import STARTS_NEEDED
from pytest_gpuserve.measure.target import target_of
from pytest_gpuserve.measure.telemetry import Sampler, Telemetry, summarise
from pytest_gpuserve.model.failure import Failure, Kind
from pytest_gpuserve.model.phase import Phase

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pytest_gpuserve.manager import Manager
    from pytest_gpuserve.manager.handle import ServerHandle
    from pytest_gpuserve.manager.plan import Plan
    from pytest_gpuserve.manager.run import Run
    from pytest_gpuserve.matrix.types import Floor
    from pytest_gpuserve.measure.load import LoadResult
    from pytest_gpuserve.measure.profile import LoadProfile
    from pytest_gpuserve.model.cell import Cell
    from pytest_gpuserve.model.record import CellRecord, Measurement

__all__ = ["Finding", "Measured", "Measuring", "load_once", "loads_of", "throughput"]

# Above this share of one core the client is what was measured.
_CLIENT_BUSY = 0.9
_RECORDED = "single-stream"
_VERDICT_WAIT = 3.0


@dataclass(slots=True, kw_only=True)
class Measured:
    """One load on one cell: `starts` has one result a server start; `verdicts` one a floor, `rows` one a metric."""

    profile: LoadProfile
    starts: list[LoadResult] = field(default_factory=list)
    invalid: str | None = None
    telemetry: dict[str, Any] = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)
    rows: dict[str, Measurement] = field(default_factory=dict)

    def __getitem__(self, metric: str) -> Measurement:
        """A metric by `sglang.bench_serving`'s name; KeyError where the load has none of it."""
        return self.rows[metric]

    @property
    def undecided(self) -> bool:
        """True if another start of the server can decide what is inconclusive."""
        left = STARTS_NEEDED - len(self.starts)
        samples = left * self.profile.windows
        return self.invalid is None and any(
            one.verdict == "inconclusive"
            and one.decision is not None
            and left > 0
            and (one.decision.more_starts > 0 or 0 < one.decision.more_samples <= samples)
            for one in self.verdicts
        )


class Measuring:
    """Everything about speed that needs more than one part: plan, records of the run, GPUs, client."""

    def __init__(self, plan: Plan, run: Run) -> None:
        self._plan = plan
        self._run = run

    def profile(self, cell: Cell, name: str, /, **changes: Any) -> LoadProfile:
        """The load of that name in the cell's matrix, perhaps changed. UsageError for what a load cannot be."""
        matrix = self._plan.matrices.get(cell.matrix)
        return changed(profile_named(name, matrix.loads if matrix else {}), changes)

    def start(self, handle: ServerHandle, measured: Measured) -> None:
        """Run the load once more, on a server that was started anew since the last time. LoadFailed as `run_load`."""
        result, telemetry = self._loaded(handle, measured.profile)
        measured.starts.append(result)
        measured.telemetry = telemetry.by_gpu
        busy = result.client_cpu >= _CLIENT_BUSY
        measured.invalid = (
            measured.invalid
            or telemetry.invalid
            or (f"the client used {result.client_cpu:.0%} of a core: it was the bottleneck" if busy else None)
        )

    def _loaded(self, handle: ServerHandle, profile: LoadProfile) -> tuple[LoadResult, Telemetry]:
        refuse_too_long(profile, target_of(handle.info).longest)
        uuids = [gpu.uuid for gpu in handle.gpus]
        probe = open_probe(self._plan.probes[handle.cell.arch])
        with Sampler(probe, uuids) as sampler:
            result = run_load(
                handle.url,
                profile,
                api_key=handle.api_key,
                vocabulary=target_of(handle.info).vocabulary,
                alive=handle.end,
            )
        return result, summarise(sampler.readings(result.begin, result.end), _Owner(handle.pid).owns)

    def judge(self, cell: Cell, measured: Measured, floors: Iterable[Floor], record: CellRecord) -> None:
        """Set the verdicts and rows of what was measured so far, and put them into the cell's record."""
        profile = measured.profile
        measured.verdicts = []
        if self._plan.settings.floors == "check":
            for floor in floors:
                if floor.load == profile.name:
                    starts = [start.samples(floor.metric.name) for start in measured.starts]
                    bound = bound_of(floor, **self._compared(cell, floor, profile, record))
                    measured.verdicts.append(verdict_of(bound, starts, measured.invalid))
        windows = [start.windows for start in measured.starts]
        rows = measurements(profile, windows, measured.verdicts, measured.invalid)
        measured.rows = {row.metric: row for row in rows}
        record.measurements = [one for one in record.measurements if one["load"] != profile.name]
        record.measurements += [row.to_json() for row in rows]
        record.telemetry[profile.name] = {
            "gpus": measured.telemetry,
            "client_cpu": round(max(start.client_cpu for start in measured.starts), 3),
            "starts": len(measured.starts),
        }

    def _compared(self, cell: Cell, floor: Floor, profile: LoadProfile, record: CellRecord) -> dict[str, Any]:
        """The measured things a floor may be relative to."""
        matrix = self._plan.matrices[cell.matrix]
        axes = floor.reference(cell.axes, matrix.baseline)
        other = self._plan.cell_with(cell, axes) if axes is not None else None
        past = Past()
        if floor.history_ratio is not None and self._plan.folder is not None:
            past = past_of(
                runs_before(self._plan.settings.report, self._plan.folder),
                cell,
                load=profile.name,
                metric=floor.metric.name,
                method=profile.method,
                gpus=[str(gpu["name"]) for gpu in record.gpus],
                simulated=self._plan.simulated,
                last=floor.history_last,
            )
        return {
            "reference": self._run.result_of(other.id) if other is not None else None,
            "past": past,
            "reference_name": other.id if other is not None else _named(axes),
            "gpus": [str(gpu["uuid"]) for gpu in record.gpus],
            "method": profile.method,
        }


def _named(axes: Mapping[str, str] | None) -> str:
    return "+".join(f"{axis}.{level}" for axis, level in (axes or {}).items())


class _Owner:
    """Which processes are a server's: those of its session, and its descendants wherever they went."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def owns(self, pid: int) -> bool | None:
        """None if there is no such process."""
        try:
            if pid == self._pid or os.getsid(pid) == self._pid:
                return True
            return self._pid in [parent.pid for parent in psutil.Process(pid).parents()]
        except (ProcessLookupError, psutil.NoSuchProcess):
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a check found: a `failure`, or why nothing can be said (`skipped`), or neither: all is well."""

    failure: Failure | None = None
    skipped: str = ""


def loads_of(plan: Plan, cell: Cell) -> tuple[str, ...]:
    """The loads of the cell's throughput check: those that floors need; a single stream too where they are recorded.

    A simulation without a scenario has one made-up speed for all cells: floors ask nothing of it.
    """
    floors = plan.settings.floors
    if floors == "off" or (floors == "check" and plan.simulated and plan.settings.sim_scenario is None):
        return ()
    asked = plan.needs_of(cell).loads
    return tuple(dict.fromkeys((_RECORDED, *asked))) if floors == "record" else asked


def _load_failure(error: LoadFailed) -> Failure:
    """A load that did not come through: answers that never end are a hang, missing ones wrong output."""
    stalled = bool(error.failures) and all(text.startswith("stalled") for text in error.failures)
    return Failure.of(Kind.HANG if stalled else Kind.WRONG_OUTPUT, Phase.SERVING, str(error))


def throughput(manager: Manager, cell: Cell) -> Finding:
    """Run the cell's loads and hold them against its floors; where noise hides the answer, on further starts too."""
    measuring, record = manager.measuring, manager.state(cell).record
    floors = manager.plan.needs_of(cell).floors
    loads = [Measured(profile=measuring.profile(cell, name)) for name in loads_of(manager.plan, cell)]
    grey, handle = loads, manager.server(cell)
    while grey:
        for measured in grey:
            failure = _started(manager, handle, measured)
            if failure is not None:
                return Finding(failure=failure)
            measuring.judge(cell, measured, floors, record)
        grey = [measured for measured in loads if measured.undecided]
        if grey:
            started = manager.restart(cell)
            if isinstance(started, Failure):
                return Finding(failure=started)
            handle = started
    return _conclusion([verdict for measured in loads for verdict in measured.verdicts])


def load_once(manager: Manager, cell: Cell, profile: LoadProfile, floors: Sequence[Floor]) -> tuple[Measured, Finding]:
    """One load for a user's test, on the server as it is: what is inconclusive stays so."""
    measured = Measured(profile=profile)
    failure = _started(manager, manager.server(cell), measured)
    if failure is not None:
        return measured, Finding(failure=failure)
    named = [replace(floor, load=profile.name) for floor in floors if not _is_own(manager.plan, cell, floor)]
    manager.measuring.judge(cell, measured, named, manager.state(cell).record)
    return measured, _conclusion(measured.verdicts)


def _is_own(plan: Plan, cell: Cell, floor: Floor) -> bool:
    """A ratio to the cell itself: the baseline's, to the baseline."""
    matrix = plan.matrices.get(cell.matrix)
    return matrix is not None and floor.reference(cell.axes, matrix.baseline) == dict(cell.axes)


def _started(manager: Manager, handle: ServerHandle, measured: Measured) -> Failure | None:
    try:
        manager.measuring.start(handle, measured)
    except LoadFailed as error:
        # If the server ended, its supervisor is about to say so, and that is then the check's failure.
        manager.inspect(handle.cell, seconds=_VERDICT_WAIT if error.died or _broken(error) else 0.0)
        return _load_failure(error)
    return None


def _broken(error: LoadFailed) -> bool:
    return any(text.startswith("connection") for text in error.failures)


def _conclusion(verdicts: Sequence[Verdict]) -> Finding:
    """Below a floor: `slow`. Else what could not be judged is said, never passed over."""
    missed = [one.text for one in verdicts if one.verdict == "below-floor"]
    if missed:
        return Finding(failure=Failure.of(Kind.SLOW, Phase.SERVING, "\n".join(missed)))
    open_ = [f"{one.verdict}: {one.text}" for one in verdicts if one.verdict in ("invalid", "inconclusive")]
    return Finding(skipped="; ".join(open_))
