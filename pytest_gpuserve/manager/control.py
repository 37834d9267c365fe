"""The control run: was it the flags, or was it the machine?

The field's rule is to retreat to the known-good baseline before blaming a flag. So after an unexpected hang, crash or
oom the model's baseline is started once on the very same GPUs, before the failure is reported.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

from pytest_gpuserve import verdict
from pytest_gpuserve.manager.state import record_of
from pytest_gpuserve.model.failure import Failure, Kind
from pytest_gpuserve.model.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from pytest_gpuserve.manager.live import Live
    from pytest_gpuserve.manager.plan import Plan
    from pytest_gpuserve.manager.run import Run
    from pytest_gpuserve.manager.state import CellState
    from pytest_gpuserve.model.cell import Cell
    from pytest_gpuserve.model.gpu import Gpu

__all__ = ["Control", "extended", "infra", "named", "passing"]


def named(gpus: Iterable[Gpu]) -> str:
    """`GPU 0 (GPU-5f…), GPU 1 (…)`, `the CPU`."""
    return ", ".join(f"GPU {gpu.index} ({gpu.uuid})" if gpu.arch != "cpu" else "the CPU" for gpu in gpus)


def extended(failure: Failure, sentence: str) -> Failure:
    """The same failure, with a sentence added to what a person reads."""
    return dataclasses.replace(failure, message=f"{failure.message}\n{sentence}")


def infra(failure: Failure, message: str) -> Failure:
    """The failure as the machine's fault; its text stays for the record."""
    return dataclasses.replace(failure, kind=Kind.INFRA, message=f"{message}\nWhat it looked like: {failure.message}")


def passing(failure: Failure | None) -> bool:
    """True for what may be gone at the next try: others used the GPUs, or took the port."""
    return failure is not None and failure.kind is Kind.INFRA and failure.retryable


class Control:
    """Runs the baseline after a failure, once per failure and set of GPUs."""

    def __init__(self, plan: Plan, run: Run) -> None:
        self._plan = plan
        self._run = run
        self._seen: dict[tuple[str, frozenset[str]], dict[str, Any]] = {}

    def wanted(self, state: CellState, failure: Failure) -> bool:
        """True for an unexpected hang, crash or oom, unless `--gpu-no-control`."""
        return not self._plan.settings.no_control and verdict.needs_control(failure, state.entries)

    def judge(self, state: CellState, failure: Failure, live: Live, folder: Path) -> Failure:
        """The delta's failure, after its baseline was started under the same lease: confirmed, or `infra`."""
        baseline = self._plan.baseline_of(state.cell)
        if baseline is None:
            return extended(failure, "The machine is unverified: this matrix has no baseline to check it with.")
        key = (failure.signature, live.uuids)
        if key not in self._seen:
            state.record.server_starts += 1
            self._seen[key] = self._start(baseline, live, folder)
        result = state.record.control = self._seen[key]
        if result["outcome"] == str(Outcome.PASSED):
            return extended(
                failure,
                f"The machine was checked: {baseline.id} started and answered on the same GPUs after it "
                f"({result['seconds']:.0f} s).",
            )
        control = Failure.from_json(result["failure"])
        if passing(control):
            del self._seen[key]
            return infra(
                failure, f"not judged: the control run of {baseline.id} was disturbed itself: {control.message}"
            )
        if result["outcome"] == str(Outcome.XFAILED):
            return extended(failure, f"The machine is unverified: {baseline.id} is itself known to fail.")
        self._run.quarantine(live.uuids, f"{baseline.id} failed there: {control.kind} in {control.phase}")
        return infra(
            failure,
            f"the machine is suspect, not the flags: {baseline.id} fails on {named(live.gpus)} too "
            f"({control.kind} in {control.phase}). These GPUs are quarantined for this run.",
        )

    def _start(self, baseline: Cell, live: Live, folder: Path) -> dict[str, Any]:
        began = time.monotonic()
        record = record_of(baseline, self._plan)
        started = live.launch(baseline, record, folder, "control.log")
        teardown, leak = live.stop(record)
        result: dict[str, Any] = {
            "cell": baseline.id,
            "outcome": str(Outcome.PASSED),
            "gpus": sorted(live.uuids),
            "seconds": round(time.monotonic() - began, 3),
            "failure": None,
            "teardown": teardown,
        }
        # Others on the GPUs after it do not unsay that it started and answered.
        failure = started if isinstance(started, Failure) else None if passing(leak) else leak
        if failure is not None:
            entries = self._plan.entries.get(baseline.id, ())
            result["outcome"] = str(verdict.of_failure(failure, entries).outcome)
            result["failure"] = failure.to_json()
        return result
