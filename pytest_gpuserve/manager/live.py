"""One supervisor, its lease, and the server that runs under it: requests down, events into the cell's record."""

from __future__ import annotations

import dataclasses
import os
import time
from typing import TYPE_CHECKING, Any

from pytest_gpuserve import engine
from pytest_gpuserve.errors import GpuserveError, UsageError
from pytest_gpuserve.manager.handle import ServerHandle
from pytest_gpuserve.manager.launch import SIMULATED_RELEASE, spec_of
from pytest_gpuserve.model.failure import Failure, Kind
from pytest_gpuserve.model.launch import LeaseRequest
from pytest_gpuserve.model.phase import Phase
from pytest_gpuserve.serve.client import Supervisor
from pytest_gpuserve.serve.spawn import left_out

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from pytest_gpuserve.manager.plan import Plan
    from pytest_gpuserve.model.cell import Cell
    from pytest_gpuserve.model.gpu import Gpu
    from pytest_gpuserve.model.record import CellRecord

__all__ = ["Live"]

Event = dict[str, Any]


class Live:
    """Holds GPUs from `lease` to `release`, and at most one server from `launch` to `stop`.

    Nothing here raises for what the machine or the server did: it comes back as a Failure. `phase` is the server's,
    empty without one; `cell` the id of the one that had the GPUs last.
    """

    def __init__(self, plan: Plan, show: Callable[[str, Event], None]) -> None:
        self._plan = plan
        self._show = show
        self._supervisor: Supervisor | None = None
        self.gpus: tuple[Gpu, ...] = ()
        self.serving = False
        self.phase = ""
        self.cell = ""
        self._spawned: Event = {}
        self._failure: Failure | None = None
        self._record: CellRecord | None = None

    @property
    def uuids(self) -> frozenset[str]:
        """The GPUs that are leased."""
        return frozenset(gpu.uuid for gpu in self.gpus)

    def lease(self, cell: Cell, count: int, allowed: Sequence[Gpu], record: CellRecord) -> Failure | None:
        """Exclusive use of `count` of the `allowed` GPUs; waits for them at most `--gpu-lock-timeout`."""
        self.cell = cell.id
        request = LeaseRequest(
            count=count,
            allowed=tuple(gpu.uuid for gpu in allowed),
            probe=self._plan.probes[cell.arch],
            lock_dir=str(self._plan.lock_dir),
            lock_timeout=self._plan.settings.lock_timeout,
            owners=tuple(dict.fromkeys((os.getpid(), *self._plan.owners))),
            run_id=self._plan.run_id,
            holder=f"pytest-gpuserve run {self._plan.run_id}, cell {cell.id}",
        )
        if self._plan.simulated:
            request = dataclasses.replace(request, release_timeout=SIMULATED_RELEASE)
        try:
            self._supervisor = Supervisor(self._plan.run_id, owners=self._plan.owners, on_event=self._on_event)
            event = self._supervisor.lease(request)
        except (GpuserveError, OSError) as error:
            return _infra(f"the supervisor of {cell.id} cannot be used: {error}")
        if event["event"] != "leased":
            return Failure.from_json(event["failure"])
        by_uuid = {gpu.uuid: gpu for gpu in self._plan.gpus}
        self.gpus = tuple(by_uuid[one["uuid"]] for one in event["gpus"])
        record.gpus = [gpu.to_json() for gpu in self.gpus]
        record.timings["lease_wait"] = round(float(event.get("seconds", 0.0)), 3)
        return None

    def launch(
        self, cell: Cell, record: CellRecord, folder: Path, log_name: str = "server.log"
    ) -> ServerHandle | Failure:
        """Start a server of `cell` on the leased GPUs and wait until it has answered a request, or has failed."""
        assert self._supervisor is not None
        self.cell = cell.id
        self._record = record
        record.server_starts += 1
        try:
            spec = spec_of(
                cell, self._plan, folder=folder, log_name=log_name, gpus=self.gpus, start=record.server_starts
            )
            self.serving, self._failure = True, None
            event = self._supervisor.launch(spec)
        except UsageError as error:
            return _infra(str(error))
        except (GpuserveError, OSError) as error:
            return _infra(f"{cell.id} cannot be launched: {error}")
        record.argv = list(self._spawned.get("argv", ()))
        record.env = {**cell.env, **self._spawned.get("env", {})}
        record.timings["phases"] = event.get("phases", {})
        if dropped := self._spawned.get("dropped_env"):
            note = left_out(dropped)
            if note not in record.notes:
                record.notes.append(note)
        if event["event"] != "ready":
            return Failure.from_json(event["failure"])
        record.timings["ready"] = event.get("seconds")
        info = event.get("info") or {}
        record.resolved = dict(engine.resolved_of(info, self._plan.versions.get("sglang", "")))
        return ServerHandle(
            failed=self.failure,
            events=self._supervisor.fileno(),
            cell=cell,
            url=event["url"],
            api_key=self._spawned.get("api_key", ""),
            gpus=self.gpus,
            log_path=folder / log_name,
            pid=int(self._spawned.get("pid", 0)),
            info=info,
            first_answer=_text_of(event.get("first_answer")),
            simulated=self._plan.simulated,
        )

    def watch(self, *, armed: bool) -> None:
        """Whether the lack of progress is judged now: only while a check keeps the server busy."""
        if self._supervisor is not None and self.serving:
            self._supervisor.watch(armed)

    def failure(self, wait: float = 0.0) -> Failure | None:
        """What ended the server, if something did; waits up to `wait` seconds for the supervisor to find out."""
        if self._supervisor is None or not self.serving:
            return None
        deadline = time.monotonic() + wait
        while self._failure is None:
            left = deadline - time.monotonic()
            event = self._supervisor.verdict(max(left, 0.0))
            if event is not None:
                self._failure = Failure.from_json(event["failure"])
            elif left <= 0:
                break
        return self._failure

    def stop(self, record: CellRecord) -> tuple[dict[str, Any], Failure | None]:
        """End the server and wait until its memory is back. The teardown, and a leak if there is one."""
        if self._supervisor is None or not self.serving:
            return {}, None
        self.serving = False
        event = self._supervisor.stop()
        teardown = dict(event.get("teardown") or {})
        record.teardown = teardown
        record.timings["teardown"] = round(sum(float(rung.get("seconds", 0)) for rung in teardown.get("rungs", ())), 3)
        if teardown.get("memory_release_seconds") is not None:
            record.timings["memory_release"] = teardown["memory_release_seconds"]
        given = event.get("failure")
        return teardown, Failure.from_json(given) if given else None

    def release(self) -> list[str]:
        """Give the GPUs up; the UUIDs of those that were not free again. A supervisor that is gone has none to give."""
        supervisor, self._supervisor = self._supervisor, None
        self.gpus, self.serving, self.phase, self._spawned = (), False, "", {}
        if supervisor is None:
            return []
        event = supervisor.release()
        supervisor.close()
        return list(event.get("quarantined", ()))

    def _on_event(self, event: Event) -> None:
        if event["event"] == "spawned":
            self._spawned = event
        elif event["event"] == "phase":
            self.phase = event["phase"]
        elif event["event"] == "stranger" and self._record is not None:
            self._record.notes.append(f"not alone on its GPUs: {event['text']}")
        self._show(self.cell, event)


def _text_of(answer: object) -> str:
    return str(answer.get("text", "")) if isinstance(answer, dict) else str(answer or "")


def _infra(message: str) -> Failure:
    return Failure.of(Kind.INFRA, Phase.SPAWN, message)
