"""Loads against the cell's server, with its GPUs watched, and what they mean for the cell's floors."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import psutil

from pytest_gpuserve import engine
from pytest_gpuserve.errors import UsageError
from pytest_gpuserve.gpu import open_probe
from pytest_gpuserve.measure.floors import Beside, Past, Verdict, bound_of, measurements, verdict_of
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
    from pathlib import Path

    from pytest_gpuserve.engine import Fallback
    from pytest_gpuserve.manager import Manager
    from pytest_gpuserve.manager.handle import ServerHandle
    from pytest_gpuserve.manager.plan import Plan
    from pytest_gpuserve.manager.run import Run
    from pytest_gpuserve.matrix.types import Floor
    from pytest_gpuserve.measure.floors import Bound
    from pytest_gpuserve.measure.load import LoadResult
    from pytest_gpuserve.measure.profile import LoadProfile
    from pytest_gpuserve.measure.stats import Decision
    from pytest_gpuserve.model.cell import Cell
    from pytest_gpuserve.model.record import CellRecord, Measurement

__all__ = ["Finding", "Measured", "Measuring", "fallbacks_of", "load_once", "loads_of", "throughput"]

# Above this share of one core the client is what was measured.
_CLIENT_BUSY = 0.9
_RECORDED = "single-stream"
_VERDICT_WAIT = 3.0
_LOG_BYTES = 8 << 20


@dataclass(slots=True, kw_only=True)
class Measured:
    """One load on one cell: `starts` has one result a server start; `verdicts` one a floor, `rows` one a metric.

    `test` is the node id, without the cell, of the user's test that asked; empty for the built-in check. `beside` has,
    by cell id, the results of the cells it is compared with that were started on its own GPUs, and `stuck` why one of
    them cannot be.
    """

    profile: LoadProfile
    test: str = ""
    starts: list[LoadResult] = field(default_factory=list)
    beside: dict[str, list[LoadResult]] = field(default_factory=dict)
    stuck: dict[str, str] = field(default_factory=dict)
    invalid: str | None = None
    telemetry: dict[str, Any] = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)
    rows: dict[str, Measurement] = field(default_factory=dict)

    def __getitem__(self, metric: str) -> Measurement:
        """A metric by `sglang.bench_serving`'s name; KeyError where the load has none of it."""
        return self.rows[metric]

    @property
    def undecided(self) -> bool:
        """True if another start of the server, or of one it is compared with, can decide what is inconclusive."""
        left = STARTS_NEEDED - len(self.starts)
        return bool(self.references_wanted) or any(
            left > 0 and (open_.more_starts > 0 or 0 < open_.more_samples <= left * self.profile.windows)
            for _, open_ in self._open()
        )

    @property
    def references_wanted(self) -> tuple[str, ...]:
        """The ids of the cells of which another start on the same GPUs can decide what is inconclusive."""
        wanted = (bound.compared for bound, open_ in self._open() if open_.more_references and bound.compared)
        return tuple(one for one in dict.fromkeys(wanted) if len(self.beside.get(one, ())) < STARTS_NEEDED)

    def _open(self) -> list[tuple[Bound, Decision]]:
        """What is inconclusive and may be decided: not what waits for a cell that cannot be started here."""
        if self.invalid is not None:
            return []
        return [
            (one.bound, one.decision)
            for one in self.verdicts
            if one.verdict == "inconclusive"
            and one.decision is not None
            and not (one.decision.more_references and one.bound.compared in self.stuck)
        ]


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
        result, telemetry = self._loaded(handle, measured)
        measured.starts.append(result)
        measured.telemetry = telemetry.by_gpu

    def start_beside(self, handle: ServerHandle, measured: Measured) -> None:
        """The same load on a server of the cell that is compared with, on the same GPUs. LoadFailed as `run_load`."""
        result, _ = self._loaded(handle, measured)
        measured.beside.setdefault(handle.cell.id, []).append(result)

    def _loaded(self, handle: ServerHandle, measured: Measured) -> tuple[LoadResult, Telemetry]:
        refuse_too_long(measured.profile, target_of(handle.info).longest)
        uuids = [gpu.uuid for gpu in handle.gpus]
        probe = open_probe(self._plan.probes[handle.cell.arch])
        with Sampler(probe, uuids) as sampler:
            result = run_load(
                handle.url,
                measured.profile,
                api_key=handle.api_key,
                vocabulary=target_of(handle.info).vocabulary,
                alive=handle.end,
            )
        telemetry = summarise(sampler.readings(result.begin, result.end), _Owner(handle.pid).owns)
        busy = result.client_cpu >= _CLIENT_BUSY
        measured.invalid = (
            measured.invalid
            or result.invalid
            or telemetry.invalid
            or (f"the client used {result.client_cpu:.0%} of a core: it was the bottleneck" if busy else None)
        )
        return result, telemetry

    def judge(self, cell: Cell, measured: Measured, floors: Iterable[Floor], record: CellRecord) -> None:
        """Set the verdicts and rows of what was measured so far, and put them into the cell's record."""
        profile = measured.profile
        measured.verdicts = []
        if self._plan.judges:
            for floor in floors:
                if floor.load == profile.name:
                    starts = [start.samples(floor.metric.name) for start in measured.starts]
                    beside = self._beside(cell, floor, measured, record)
                    bound = bound_of(floor, beside, self._past(cell, floor, profile, record), method=profile.method)
                    measured.verdicts.append(verdict_of(bound, starts, measured.invalid))
        windows = [start.windows for start in measured.starts]
        rows = measurements(profile, windows, measured.verdicts, measured.invalid, measured.test)
        measured.rows = {row.metric: row for row in rows}
        # A user's test may run the check's load too, without its floors: it must not hide what the check found.
        mine = (profile.name, measured.test)
        record.measurements = [one for one in record.measurements if (one["load"], one["test"]) != mine]
        record.measurements += [row.to_json() for row in rows]
        name = f"{profile.name} ({measured.test})" if measured.test else profile.name
        record.telemetry[name] = {
            "gpus": measured.telemetry,
            "client_cpu": round(max(start.client_cpu for start in measured.starts), 3),
            "starts": len(measured.starts),
            "beside": {cell_id: len(results) for cell_id, results in measured.beside.items()},
            "requests": {
                what: sum(getattr(start, what) for start in measured.starts)
                for what in ("sent", "completed", "cancelled")
            },
        }

    def _beside(self, cell: Cell, floor: Floor, measured: Measured, record: CellRecord) -> Beside:
        """The cell that a ratio compares with."""
        axes = floor.reference(cell.axes, self._plan.matrices[cell.matrix].baseline)
        other = self._plan.cell_with(cell, axes) if axes is not None else None
        if other is None:
            return Beside(name=_named(axes))
        metric = floor.metric.name
        return Beside(
            name=other.id,
            record=self._run.result_of(other.id),
            starts=[result.samples(metric) for result in measured.beside.get(other.id, ())],
            problem=measured.stuck.get(other.id, ""),
            gpus=[str(gpu["uuid"]) for gpu in record.gpus],
        )

    def _past(self, cell: Cell, floor: Floor, profile: LoadProfile, record: CellRecord) -> Past:
        """The earlier runs that a floor relative to history looks at."""
        if floor.history_ratio is None or self._plan.folder is None:
            return Past()
        return past_of(
            runs_before(self._plan.settings.report, self._plan.folder),
            cell,
            load=profile.name,
            metric=floor.metric.name,
            method=profile.method,
            gpus=[str(gpu["name"]) for gpu in record.gpus],
            simulated=self._plan.simulated,
            last=floor.history_last,
        )


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
    asked = plan.needs_of(cell).loads
    if plan.settings.floors == "record":
        return tuple(dict.fromkeys((_RECORDED, *asked)))
    return asked if plan.judges else ()


def _load_failure(error: LoadFailed) -> Failure:
    """A load that did not come through: answers that never end are a hang, missing ones wrong output."""
    stalled = bool(error.failures) and all(text.startswith("stalled") for text in error.failures)
    return Failure.of(Kind.HANG if stalled else Kind.WRONG_OUTPUT, Phase.SERVING, str(error))


def throughput(manager: Manager, cell: Cell) -> Finding:
    """Run the cell's loads and hold them against its floors.

    Where noise hides the answer, on further starts too; where the noise is that of a cell it is compared with, or that
    one ran on other GPUs, this one is started in between, on the same GPUs.
    """
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
            for reference in dict.fromkeys(one for measured in grey for one in measured.references_wanted):
                _start_beside(manager, cell, reference, grey)
            started = manager.restart(cell)
            if isinstance(started, Failure):
                return Finding(failure=started)
            handle = started
    return _conclusion(loads, handle)


def _start_beside(manager: Manager, cell: Cell, reference: str, grey: Sequence[Measured]) -> None:
    """Measure what the cell is compared with on its GPUs; where that cannot be done, the verdict will say why."""
    wanting = [measured for measured in grey if reference in measured.references_wanted]
    started = manager.beside(cell, manager.plan.by_id[reference])
    for measured in wanting:
        if isinstance(started, Failure):
            measured.stuck[reference] = (
                f"{reference} could not be started on these GPUs: {started.message.splitlines()[0]}"
            )
            continue
        try:
            manager.measuring.start_beside(started, measured)
        except (LoadFailed, UsageError) as error:
            measured.stuck[reference] = f"{reference} did not come through on these GPUs: {error}"


def load_once(
    manager: Manager, cell: Cell, profile: LoadProfile, floors: Sequence[Floor], *, test: str = ""
) -> tuple[Measured, Finding]:
    """One load for a user's test, on the server as it is: what is inconclusive stays so."""
    measured = Measured(profile=profile, test=test)
    failure = _started(manager, manager.server(cell), measured)
    if failure is not None:
        return measured, Finding(failure=failure)
    named = [replace(floor, load=profile.name) for floor in floors if not _is_own(manager.plan, cell, floor)]
    manager.measuring.judge(cell, measured, named, manager.state(cell).record)
    return measured, _conclusion([measured], manager.server(cell))


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
    except UsageError as error:
        # The load cannot be run here: the fault of who wrote it, and none of the server.
        return Failure.of(Kind.INFRA, Phase.SERVING, str(error))
    return None


def _broken(error: LoadFailed) -> bool:
    return any(text.startswith("connection") for text in error.failures)


def fallbacks_of(log: Path) -> tuple[Fallback, ...]:
    """What the start's part of a log admits: fallbacks are announced there."""
    with log.open("rb") as file:
        return engine.fallback_lines(file.read(_LOG_BYTES).decode("utf-8", "replace").splitlines())


def _perhaps_why(handle: ServerHandle) -> list[str]:
    """What the server's log says of itself that makes it slow: a place to look, and no proof."""
    reasons = [one.what for one in fallbacks_of(handle.log_path)]
    return [f"the server's log says, which may be why: {'; '.join(reasons)}"] if reasons else []


def _conclusion(loads: Sequence[Measured], handle: ServerHandle) -> Finding:
    """Below a floor: `slow`. Else what could not be judged is said, never passed over; disturbed figures too."""
    verdicts = [verdict for measured in loads for verdict in measured.verdicts]
    missed = [one for one in verdicts if one.verdict == "below-floor"]
    if missed:
        # What is slow, and not by how many floors, of which line, against which start: that differs from run to run.
        what = ", ".join(dict.fromkeys(f"{one.bound.load}: {one.bound.metric}" for one in missed))
        text = "\n".join((*(one.text for one in missed), *_perhaps_why(handle)))
        return Finding(failure=Failure.of(Kind.SLOW, Phase.SERVING, text, line=f"{what} below its floor", text=text))
    open_ = [f"{one.verdict}: {one.text}" for one in verdicts if one.verdict in ("invalid", "inconclusive")]
    open_ += [
        f"invalid: load {measured.profile.name}: {measured.invalid}"
        for measured in loads
        if measured.invalid is not None and not any(one.verdict == "invalid" for one in measured.verdicts)
    ]
    return Finding(skipped="; ".join(open_))
