"""The hooks around each test, in the process that runs it: an xdist worker, or the one process without xdist."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpuserve import verdict
from pytest_gpuserve.failing import ServerFailed
from pytest_gpuserve.fixtures import LOADS, MANAGER
from pytest_gpuserve.manager import Gate, Manager
from pytest_gpuserve.model.outcome import Outcome
from pytest_gpuserve.plugin import timeouts
from pytest_gpuserve.plugin.check import Check
from pytest_gpuserve.plugin.work import cell_of, stage_of, stops_server, work_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from contextlib import AbstractContextManager

    from pytest_gpuserve.manager.plan import Plan
    from pytest_gpuserve.model.record import CellRecord

__all__ = ["REPORT", "Runner"]

# The name of the attribute on a TestReport that carries what the controller keeps, as JSON text.
REPORT = "gpuserve"


class Runner:
    """At most one check is between its first and its last hook."""

    def __init__(self, config: pytest.Config, plan: Plan) -> None:
        self._config = config
        self._plan = plan
        self._manager: Manager | None = None
        self._check: Check | None = None
        # The test whose time is limited, and pytest-timeout's settings for it.
        self._limited: tuple[pytest.Item, Any] | None = None
        self.show: Callable[[str, dict[str, Any]], None] | None = None
        self.on_lost: Callable[[CellRecord], None] | None = None

    @property
    def manager(self) -> Manager:
        """There from when the collection is known."""
        assert self._manager is not None
        return self._manager

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """The manager needs to know which cells this session has."""
        if self._plan.folder is not None:
            selected = list(dict.fromkeys(cell.id for cell in map(cell_of, session.items) if cell is not None))
            # What marks of the tests ask for is known only now.
            collection = self._config.pluginmanager.get_plugin("gpuserve-collection")
            assert collection is not None
            self._manager = Manager(collection.plan, selected, self.show, self._untimed)
            self._config.stash[MANAGER] = self._manager

    # Outermost: pytest-timeout arms its timer in this hook too, and a server's start must not count as the test's time.
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        """Bring up what the check needs, before any timer and any fixture."""
        work = work_of(item)
        if work is None:
            return (yield)
        following = cell_of(nextitem) if nextitem is not None else None
        self._check = Check(
            work=work,
            nodeid=item.nodeid,
            location=item.location,
            last=following is None or following.id != work.cell.id,
            gate=Gate(),
            entries=self._plan.entries.get(work.cell.id, ()),
        )
        try:
            self._check.gate = self.manager.begin(work.cell, work.need)
            return (yield)
        finally:
            self._check = self._limited = None

    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> bool | None:
        """A test of ours that takes too long says where it was."""
        check = self._check
        if check is None:
            return None
        self._limited = item, settings
        manager, cell = self.manager, check.work.cell
        return timeouts.arm(item, settings, lambda: manager.where(cell), lambda text: manager.last_words(cell, text))

    def _untimed(self) -> AbstractContextManager[None]:
        """A server is started anew in the middle of a check: none of the test's time, as its first start was none."""
        return timeouts.suspended(*self._limited) if self._limited is not None else contextlib.nullcontext()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """Report what `begin` found before any fixture runs."""
        check = self._check
        if check is None or check.gate.opened:
            return
        if check.gate.failure is not None:
            raise ServerFailed(check.gate.failure)
        pytest.skip(check.gate.reason)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        """If the server ended during the check, that is the check's failure, whatever the test made of it."""
        check = self._check
        if check is None or not check.work.need.has_server:
            yield
            return
        if stops_server(item):
            timeouts.disarm(item)
        self.manager.watch(armed=True)
        error: BaseException | None = None
        try:
            yield
            loads = item.stash.get(LOADS, None)
            if loads is not None:
                loads.conclude()
        except (KeyboardInterrupt, pytest.exit.Exception):
            raise
        except BaseException as raised:  # noqa: BLE001 - raised again below, unless the server's end explains it
            error = raised
        self.manager.watch(armed=False)
        failure = self.manager.inspect(check.work.cell, seconds=_suspicion(error))
        if failure is not None:
            # What follows is bounded by itself and is none of the test's time.
            timeouts.disarm(item)
            failure = replace(failure, message=f"while {check.work.name} ran, {failure.message}")
            raise ServerFailed(self.manager.lost(check.work.cell, failure)) from error
        if error is not None:
            raise error

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
        """After the test's own fixtures: stop the server if nobody wants it next, so that its leak is blamed here."""
        check = self._check
        try:
            yield
        finally:
            if check is not None and not _same_server(item, nextitem):
                check.last = check.last or nextitem is None
                timeouts.disarm(item)
                leak = self.manager.end(check.work.cell)
                if leak is not None:
                    raise ServerFailed(leak)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Decide the outcome; works for setup, call and teardown, with and without xdist."""
        check = self._check
        if check is not None and call.excinfo is not None:
            timeouts.name(call.excinfo.value, self.manager.where(check.work.cell))
        report = yield
        if check is None:
            return report
        check.hear(report, call)
        if report.when == "call" and check.last:
            self._retire(check, report)
        if report.when == "teardown":
            self._close(check, report)
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_report_to_serializable(self) -> Generator[None, Any, Any]:
        """Half a character, as a broken model may answer with one, cannot be sent by execnet, and ends the worker."""
        return _sendable((yield))

    def _retire(self, check: Check, report: pytest.TestReport) -> None:
        """The cell's last check passed, as did all before it: are entries proved wrong?"""
        state = self.manager.state(check.work.cell)
        if check.verdict.outcome is not Outcome.PASSED or not state.clean:
            return
        plan, cell = self._plan, check.work.cell
        judged = plan.judges and bool(plan.needs_of(cell).floors)
        shows = verdict.shown_by(preflight=plan.settings.preflight, judged=judged)
        found = verdict.of_passing({*state.passed(), check.work.name}, check.entries, shows)
        if found is not None:
            check.fixed(found, report)

    def _close(self, check: Check, report: pytest.TestReport) -> None:
        record = check.record()
        self.manager.state(check.work.cell).add(record, check.verdict.entry)
        report.user_properties.extend(check.user_properties())
        payload: dict[str, Any] = {"check": record.to_json()}
        if check.last:
            payload["cell"] = self.manager.finish(check.work.cell).to_json()
        setattr(report, REPORT, json.dumps(payload, default=str))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """Ctrl-C inside a test skips the teardown hook: whatever still runs is stopped here."""
        if self._manager is not None:
            record = self._manager.close()
            if record is not None and self.on_lost is not None:
                self.on_lost(record)


def _same_server(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """True if the next test runs in the same cell and the same stage of it."""
    if nextitem is None:
        return False
    mine, other = cell_of(item), cell_of(nextitem)
    return mine is not None and other is not None and (mine.id, stage_of(item)[0]) == (other.id, stage_of(nextitem)[0])


def _sendable(value: Any) -> Any:
    """The same with lone surrogates spelt out."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_sendable(name): _sendable(item) for name, item in value.items()}
    return type(value)(map(_sendable, value)) if isinstance(value, (list, tuple)) else value


def _suspicion(error: BaseException | None) -> float:
    """How long to wait for the supervisor to say that the server's end is behind this error, in seconds.

    It looks twice a second and hears exits at once; a connection that broke is a strong sign.
    """
    if error is None or isinstance(error, (pytest.skip.Exception, ServerFailed)):
        return 0.0
    return 3.0 if isinstance(error, OSError) else 1.0
