"""At most one live server a worker: started before its cell's first check, ended after the last one.

The only part that joins GPUs, servers, models and records. It knows nothing of pytest, and raises nothing for what a
machine or a server does: that comes back as a `Gate` or a `Failure`.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from pytest_gpuserve import verdict
from pytest_gpuserve.manager.asking import Preflights
from pytest_gpuserve.manager.control import Control, extended, infra, named, passing
from pytest_gpuserve.manager.live import Live
from pytest_gpuserve.manager.measuring import Measuring
from pytest_gpuserve.manager.run import Run
from pytest_gpuserve.manager.state import CellState, Gate, known_bad_json, record_of
from pytest_gpuserve.model.failure import Failure, Kind
from pytest_gpuserve.model.outcome import Outcome
from pytest_gpuserve.model.phase import Phase
from pytest_gpuserve.model.words import number

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from pytest_gpuserve.manager.handle import ServerHandle
    from pytest_gpuserve.manager.need import Need
    from pytest_gpuserve.manager.plan import Plan
    from pytest_gpuserve.model.cell import Cell
    from pytest_gpuserve.model.gpu import Gpu
    from pytest_gpuserve.model.record import CellRecord

__all__ = ["Gate", "Manager"]


class Manager:
    """`begin` before each check, `inspect` after it, `end` when the next check wants something else, `finish` a cell.

    `selected` are the ids of the cells that run in this session: a baseline that is deselected blocks nothing.
    `show(cell, event)` gets every event of the supervisor, for a live line. `untimed()` is entered while a server is
    started anew in the middle of a check, whose time that is not.
    """

    def __init__(
        self,
        plan: Plan,
        selected: Sequence[str],
        show: Callable[[str, dict[str, Any]], None] | None = None,
        untimed: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.plan = plan
        self._selected = selected
        self._untimed = untimed
        self._run = Run(plan)
        self._control = Control(plan, self._run)
        self.measuring = Measuring(plan, self._run)
        self._live = Live(plan, show or (lambda _cell, _event: None))
        self._state: CellState | None = None
        self._done: dict[str, CellRecord] = {}
        self.preflights = Preflights(plan, selected)

    # -- before a check ------------------------------------------------------------------------------------------------

    def begin(self, cell: Cell, need: Need) -> Gate:
        """Bring up what the check needs. May take as long as a server's start; bounded by the limits of its phases."""
        state = self.state(cell)
        gate = self._refusal(state, need)
        if gate is not None:
            return gate
        if need.has_server:
            return Gate() if state.handle is not None else self._start(state)
        if need.gpus:
            return self._lease_alone(state, need.gpus)
        return Gate()

    def state(self, cell: Cell) -> CellState:
        """What is known of the cell in this process; opened on first use."""
        if self._state is None or self._state.cell.id != cell.id:
            self._state = CellState(
                cell=cell, entries=self.plan.entries.get(cell.id, ()), record=record_of(cell, self.plan)
            )
            self._state.record.folder = str(self._run.cell(cell.id).relative_to(self._run.folder))
        return self._state

    def _refusal(self, state: CellState, need: Need) -> Gate | None:
        cell = state.cell
        if cell.not_applicable:
            return Gate(Outcome.SKIPPED, cell.not_applicable)
        entry = verdict.skipped_by(state.entries)
        if entry is not None:
            state.record.known_bad = known_bad_json(entry)
            return Gate(Outcome.SKIPPED, f"{entry.id} {entry.issue}: {entry.reason}")
        if need.has_server and state.failure is not None:
            reason = f"{state.failure.kind} in {state.failure.phase}, reported by an earlier check of this cell"
            return Gate(Outcome.BLOCKED, reason)
        if state.handle is not None or not need.gpus:
            return None
        closed = self._run.closed()
        if closed is not None:
            return Gate(Outcome.NOT_RUN, closed)
        if not need.has_server:
            return None
        blocked = self._blocked(cell)
        if blocked is None:
            # Waited for before anything is leased: a cell that held GPUs could keep its own reference from running.
            for reference in self.plan.references_of(cell):
                self.result_of(reference)
        return blocked

    def _blocked(self, cell: Cell) -> Gate | None:
        """A delta waits, before it leases anything, for its baseline; what it waits for was sent out earlier."""
        baseline = self.plan.baseline_of(cell)
        if baseline is None or baseline.id not in self._selected:
            return None
        result = self.result_of(baseline.id)
        if result is None:
            closed = self._run.closed()
            if closed is not None:
                return Gate(Outcome.NOT_RUN, closed)
            seconds = self.plan.settings.lock_timeout
            none = f"none within {seconds:.0f} s, or it could not be written"
            return Gate(Outcome.BLOCKED, f"no result of the baseline {baseline.id}: {none}")
        if not verdict.blocks(result):
            return None
        what = f"{result.failure.kind} in {result.failure.phase}" if result.failure else result.reason
        return Gate(Outcome.BLOCKED, f"the baseline {baseline.id} is {result.outcome} ({what})")

    def _lease_alone(self, state: CellState, count: int) -> Gate:
        if len(self._live.gpus) == count and not self._live.serving:
            return Gate()
        self._release()
        failure = self._lease(state, count)
        return Gate() if failure is None else Gate(failure=failure)

    def _lease(self, state: CellState, count: int, without: frozenset[str] = frozenset()) -> Failure | None:
        state.begin()
        quarantined = self._run.quarantined()
        allowed = [
            gpu for gpu in self.plan.gpus_for(state.cell) if gpu.uuid not in quarantined and gpu.uuid not in without
        ]
        if len(allowed) < count:
            reasons = "; ".join(dict.fromkeys(quarantined.values()))
            left = f"this run has {len(allowed)} left. Quarantined: {reasons}"
            text = f"{state.cell.id} needs {number(count, 'GPU')}, {left}"
            return Failure.of(Kind.INFRA, Phase.SPAWN, text)
        # A ratio is only fair on the same GPUs: those its reference ran on come first.
        wanted = {
            str(gpu["uuid"])
            for reference in self.plan.references_of(state.cell)
            if (record := self._run.result_of(reference)) is not None
            for gpu in record.gpus
        }
        allowed.sort(key=lambda gpu: gpu.uuid not in wanted)
        return self._live.lease(state.cell, count, allowed, state.record)

    def _start(self, state: CellState) -> Gate:
        # A guest is still there if the check that compared with it was cut off.
        if state.guest is not None and (lost := self._make_room(state)) is not None:
            return Gate(failure=lost)
        self._release()
        folder = self._run.cell(state.cell.id)
        failure = self._lease(state, state.cell.gpus)
        if failure is None:
            started = self._live.launch(state.cell, state.record, folder, state.log_name)
            if isinstance(started, Failure) and passing(started):
                started = self._once_more(state, started, folder)
            if not isinstance(started, Failure):
                state.handle = started
                return Gate()
            failure = self._after(state, started)
        if state.handle is None:
            self._release()
            state.failure = failure
        return Gate(failure=failure)

    def _once_more(self, state: CellState, failure: Failure, folder: Path) -> ServerHandle | Failure:
        """A second start: a port was taken between the probe and the bind, or others used the GPUs.

        Who still uses them is waited for as before every start: by a new lease, within its limits.
        """
        first = failure.message.splitlines()[0]
        self._stop(state)
        if passing(state.leak):
            state.leak = None
            self._release()
            lost = self._lease(state, state.cell.gpus)
            if lost is not None:
                state.record.notes.append(f"not started again, its GPUs did not become free: {first}")
                return extended(failure, f"It was not started again: {lost.message}")
        if state.leak is not None:
            return failure
        state.record.notes.append(f"started twice: {first}")
        return self._live.launch(state.cell, state.record, folder, state.log_name)

    # -- after a failure -----------------------------------------------------------------------------------------------

    def _after(self, state: CellState, failure: Failure) -> Failure:
        """The server is of no use any more: end it, and find out whether the machine is to blame."""
        state.handle = None
        self._stop(state)
        if state.leak is not None and passing(state.leak):
            if failure.kind is not Kind.INFRA:
                return extended(failure, f"The machine is unverified: {state.leak.message}.")
            state.leak = None  # the failure says it
        if not self._control.wanted(state, failure):
            return failure
        if state.leak is not None:
            return extended(failure, "The machine is unverified: its GPUs did not become free for a control run.")
        if not state.cell.is_baseline:
            return self._control.judge(state, failure, self._live, self._run.cell(state.cell.id))
        return self._elsewhere(state, failure)

    def _elsewhere(self, state: CellState, failure: Failure) -> Failure:
        """A failing baseline has no control: it is started again on other GPUs, if there are any.

        If it serves there, the cell goes on with that server, and the first GPUs are `infra`.
        """
        first = self._live.gpus
        used = self._live.uuids
        others = [
            gpu for gpu in self.plan.gpus_for(state.cell) if gpu.uuid not in used | self._run.quarantined().keys()
        ]
        if failure.phase.rank >= Phase.SERVING.rank:
            return extended(failure, "The machine is unverified: a start elsewhere would not repeat what failed.")
        if len(others) < state.cell.gpus:
            return extended(failure, "The machine is unverified: this is the baseline, and there are no other GPUs.")
        self._release()
        problem = self._lease(state, state.cell.gpus, used)
        if problem is not None:
            return extended(failure, f"The machine is unverified: {problem.message}")
        second = named(self._live.gpus)
        folder = self._run.cell(state.cell.id)
        started = self._live.launch(state.cell, state.record, folder, "elsewhere.log")
        serves = not isinstance(started, Failure)
        state.record.control = {
            "cell": state.cell.id,
            "outcome": str(Outcome.PASSED if serves else Outcome.FAILED),
            "gpus": sorted(self._live.uuids),
            "instead_of": sorted(used),
            "failure": started.to_json() if isinstance(started, Failure) else None,
        }
        if isinstance(started, Failure):
            self._stop(state)
            if passing(started):
                return extended(failure, f"The machine is unverified: {started.message}.")
            return extended(failure, f"On {second} too ({started.kind} in {started.phase}): not one sick GPU.")
        state.handle = started
        text = f"{failure.kind} in {failure.phase} on {named(first)}, while the same baseline serves on {second}"
        self._run.quarantine(used, text)
        return infra(failure, f"the machine is suspect: {text}. {named(first)} is quarantined for this run.")

    # -- during and after a check --------------------------------------------------------------------------------------

    def server(self, cell: Cell) -> ServerHandle:
        """The running server of the cell whose check is running."""
        handle = self.state(cell).handle
        assert handle is not None, "a check that needs a server runs only after begin() opened its gate"
        return handle

    def leased(self, cell: Cell) -> tuple[Gpu, ...]:
        """The GPUs that are leased for the check that is running."""
        assert self.state(cell).cell is cell
        return self._live.gpus

    def where(self, cell: Cell) -> str:
        """Cell, phase and log, for the message of a test that was cut off: `sm120-m-baseline, in phase serving (…)`."""
        state = self.state(cell)
        log = state.handle.log_path if state.handle is not None else None
        what = cell.id
        if state.guest is not None:
            record, log = state.guest
            what = f"{cell.id}, which is being compared with {record.id}"
        return f"{what}, in phase {self._live.phase} (its server's log: {log})" if log is not None else what

    def result_of(self, cell_id: str) -> CellRecord | None:
        """The record of a cell that is through: of this process, or waited for, bounded, if another worker has it.

        None if it does not run in this session, or did not come. Only for cells that come earlier in the launch order.
        """
        if cell_id not in self._done:
            found = self._run.wait_for(cell_id, self.plan.settings.lock_timeout) if cell_id in self._selected else None
            if found is None:
                return None
            self._done[cell_id] = found
        return self._done[cell_id]

    def runs(self, cell_id: str) -> bool:
        """True if the cell has checks in this session."""
        return cell_id in self._selected

    def last_words(self, cell: Cell, text: str) -> None:
        """This process is about to end in the middle of a test: why, for a controller that only sees it vanish."""
        self._run.leave(cell.id, text)

    def watch(self, *, armed: bool) -> None:
        """A check is running against the server, or no more: its lack of progress is judged only then."""
        self._live.watch(armed=armed)

    def folder(self, cell: Cell) -> Path:
        """Where the cell's evidence goes, whoever runs the cell."""
        return self._run.cell(cell.id)

    def restart(self, cell: Cell) -> ServerHandle | Failure:
        """End the running server and start another on the same GPUs; `server` gives the new one from then on."""
        with self._untimed():
            return self._restart(cell)

    def _restart(self, cell: Cell) -> ServerHandle | Failure:
        state = self.state(cell)
        lost = self._make_room(state)
        if lost is not None:
            return lost
        started = self._live.launch(cell, state.record, self._run.cell(cell.id), state.log_name)
        if isinstance(started, Failure):
            return self.lost(cell, started)
        state.handle = started
        self._live.watch(armed=True)
        return started

    def _make_room(self, state: CellState) -> Failure | None:
        """End what runs on the cell's GPUs. What was left there, if anything: nothing can be started any more."""
        if state.failure is not None:
            return state.failure
        state.handle = None
        self._stop(state)
        if state.leak is None:
            return None
        # Reported by the check that asked for the start.
        state.failure, state.leak = state.leak, None
        self._release()
        return state.failure

    def beside(self, cell: Cell, reference: Cell) -> ServerHandle | Failure:
        """End the cell's server and start one of `reference` on its GPUs, to compare with; `restart` ends that again.

        What comes of it is none of the cell's record: its log and its evidence lie in a folder of their own.
        """
        state = self.state(cell)
        with self._untimed():
            lost = self._make_room(state)
            if lost is not None:
                return lost
            record = record_of(reference, self.plan)
            # Counted on: another start of the same thing, and a server that was started for this cell.
            record.server_starts = state.record.server_starts
            state.record.server_starts += 1
            folder = self._run.cell(cell.id) / f"{reference.id}-{state.record.server_starts}"
            state.guest = record, folder / "server.log"
            started = self._live.launch(reference, record, folder)
        if not isinstance(started, Failure):
            self._live.watch(armed=True)
        return started

    def inspect(self, cell: Cell, *, seconds: float) -> Failure | None:
        """What ended the server during the check, if something did and the supervisor says so within `seconds`."""
        state = self.state(cell)
        if state.handle is None:
            return None
        return self._live.failure(wait=seconds)

    def lost(self, cell: Cell, failure: Failure) -> Failure:
        """The server failed during a check: end it, check the machine. The failure as it is to be reported."""
        state = self.state(cell)
        state.failure = self._after(state, failure)
        if state.handle is None:
            self._release()
        return state.failure

    def stop_server(self, cell: Cell) -> tuple[dict[str, Any], Failure | None]:
        """For the clean-shutdown check: end the server now; how that went, and a leak."""
        state = self.state(cell)
        state.handle = None
        teardown, leak = self._live.stop(state.record)
        self._release()
        return teardown, leak

    def _stop(self, state: CellState) -> None:
        """End the server, the cell's or its guest's, and keep the leak, if there was one."""
        guest, state.guest = state.guest, None
        _, leak = self._live.stop(guest[0] if guest is not None else state.record)
        if leak is not None and guest is not None:
            leak = infra(leak, f"{guest[0].id} was started on these GPUs to compare with, and left something behind")
        state.leak = state.leak or leak

    def _release(self) -> None:
        """Give the GPUs up. Those that something is left on are kept out of the rest of the run."""
        left = self._live.release()
        if left:
            self._run.quarantine(left, f"left in use by the server of {self._live.cell}")

    def end(self, cell: Cell) -> Failure | None:
        """Nothing more of this cell (or of its server) is wanted: stop and release. The leak, if there was one."""
        state = self.state(cell)
        state.handle = None
        self._stop(state)
        self._release()
        leak, state.leak = state.leak, None
        return leak

    def finish(self, cell: Cell) -> CellRecord:
        """The cell is through: its record, written for whoever waits for it."""
        record = self.state(cell).close()
        self._done[cell.id] = record
        self._run.keep(record)
        self._state = None
        return record

    def close(self) -> CellRecord | None:
        """The session ends, perhaps in the middle of a cell: stop the server, and keep what is known of the cell."""
        state = self._state
        if state is None:
            self._release()
            return None
        leak = self.end(state.cell)
        if leak is not None:
            found = verdict.of_failure(leak, state.entries)
            state.record.failure, state.record.outcome, state.record.reason = leak, found.outcome, found.reason
        state.record.notes.append("the session ended before the cell did")
        return self.finish(state.cell)
