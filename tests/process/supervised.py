"""What the supervisor's tests share: a supervised fake server, and the proof that nothing of it is left.

Loaded by `conftest.py` as a plugin of this directory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpuserve.gpu import sim
from pytest_gpuserve.gpu.lease import holders
from pytest_gpuserve.model.launch import LaunchSpec, LeaseRequest
from pytest_gpuserve.serve import procs
from pytest_gpuserve.serve.client import Supervisor
from pytest_gpuserve.serve.litter import folder_owner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FAKE = Path(__file__).with_name("fake_server.py")
QUICK = {"stall": 1.0}


def eventually(what: Callable[[], Any], timeout: float = 20.0) -> Any:
    """The first true value of `what()`."""
    deadline = time.monotonic() + timeout
    while not (value := what()):
        assert time.monotonic() < deadline, f"still false after {timeout} s"
        time.sleep(0.02)
    return value


class Bench:
    """One run: a simulated machine, a lock directory, a run id of its own, and supervisors of fake servers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_id = f"t{os.getpid()}x{time.monotonic_ns() % 10**9}"
        self.locks = folder / "locks"
        self.locks.mkdir()
        self.locks.chmod(0o777)
        self.machine = folder / "sim"
        self.probe = sim.create(self.machine, "2xsm120")
        self.uuids = tuple(gpu.uuid for gpu in self.probe.gpus())
        self.supervisors: list[Supervisor] = []
        self.workers: list[subprocess.Popen[str]] = []
        self.events: list[dict[str, Any]] = []

    def request(self, **changes: Any) -> LeaseRequest:
        facts = {
            "count": 1,
            "allowed": self.uuids,
            "probe": self.probe.spec(),
            "lock_dir": str(self.locks),
            "lock_timeout": 5.0,
            "admission_timeout": 5.0,
            "owners": (os.getpid(),),
            "run_id": self.run_id,
            "holder": "a-cell",
            "release_timeout": 5.0,
        }
        return LeaseRequest(**(facts | changes))

    def spec(self, *faults: str, **changes: Any) -> LaunchSpec:
        facts: dict[str, Any] = {
            "cell": "a-cell",
            "argv": (
                *(sys.executable, str(FAKE), "--port", "{port}", "--api-key", "{api_key}"),
                *(word for fault in faults for word in ("--fault", fault)),
            ),
            "env": {},
            "folder": str(self.folder / "cell"),
            "sglang_version": "0.5.23",
            "model_path": "/nowhere",
        }
        return LaunchSpec(**(facts | changes))

    def supervisor(self, **options: Any) -> Supervisor:
        supervisor = Supervisor(self.run_id, on_event=self.events.append, **options)
        self.supervisors.append(supervisor)
        return supervisor

    def leased(self, **changes: Any) -> Supervisor:
        supervisor = self.supervisor()
        event = supervisor.lease(self.request(**changes))
        assert event["event"] == "leased", event
        return supervisor

    def serving(self, *faults: str, **changes: Any) -> Supervisor:
        """A supervisor whose server is ready."""
        supervisor = self.leased(
            **{name: changes.pop(name) for name in ("count", "release_timeout") if name in changes}
        )
        event = supervisor.launch(self.spec(*faults, **changes))
        assert event["event"] == "ready", event
        return supervisor

    def of(self, kind: str) -> dict[str, Any]:
        """The newest event of that kind."""
        return next(event for event in reversed(self.events) if event["event"] == kind)

    def marked(self) -> list[str]:
        """Living processes that carry this run's mark, the supervisor's own included."""
        mark = f"GPUSERVE_RUN_ID={self.run_id}".encode()
        stats = [procs.read_stat(pid) for pid in procs.all_pids() if procs.carries(procs.environment_of(pid), mark)]
        return [procs.describe(stat) for stat in stats if stat and not stat.zombie]

    def folders(self) -> list[Path]:
        """Private TMPDIRs of this run's leases that still exist."""
        ours = {event["tmpdir"] for event in self.events if event["event"] == "spawned"}
        return [path for path in Path("/tmp").glob("gpuserve-*") if str(path) in ours and folder_owner(path)]

    def assert_clean(self, timeout: float = 30.0) -> None:
        """No process with the mark, no lock held, no folder: what every fault has to end in."""
        with suppress(AssertionError):
            eventually(lambda: not self.marked() and not self.held() and not self.folders(), timeout)
        assert self.marked() == []
        assert self.held() == []
        assert self.folders() == []

    def held(self) -> list[str]:
        return [str(holder) for holder in holders(self.locks) if holder.held]

    def worker(self, *faults: str, then: str = "time.sleep(600)", **spec: Any) -> subprocess.Popen[str]:
        """Another process that leases, launches and then runs `then`; prints its events."""
        code = f"""
import json, os, sys, time
from pytest_gpuserve.model.launch import LaunchSpec, LeaseRequest
from pytest_gpuserve.serve.client import Supervisor
show = lambda event: print(json.dumps(event), flush=True)
supervisor = Supervisor({self.run_id!r}, on_event=show)
request = LeaseRequest.from_json({{**{self.request().to_json()!r}, "owners": [os.getpid()]}})
supervisor.lease(request)
supervisor.launch(LaunchSpec.from_json({self.spec(*faults, **spec).to_json()!r}))
{then}
"""
        worker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        self.workers.append(worker)
        return worker

    def hear(self, worker: subprocess.Popen[str], kind: str) -> dict[str, Any]:
        """The worker's next event of that kind."""
        assert worker.stdout
        for line in worker.stdout:
            event = json.loads(line)
            self.events.append(event)
            if event["event"] == kind:
                return event
        pytest.fail(f"the worker ended without {kind}: {self.events[-3:]}")


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    for supervisor in bench.supervisors:
        supervisor.close()
    for worker in bench.workers:
        worker.kill()
        worker.communicate()
    bench.assert_clean()
