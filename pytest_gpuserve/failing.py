"""How a check fails with a failure of the server's, instead of an assertion about text."""

from __future__ import annotations

import pytest

from pytest_gpuserve.model.failure import Failure, Kind
from pytest_gpuserve.model.phase import Phase

__all__ = ["ServerFailed", "check"]


class ServerFailed(pytest.fail.Exception):  # type: ignore[name-defined,misc]
    """Carries a Failure through pytest; shown as its message alone, since the traceback would be this plugin's own."""

    # As pytest does for its own `Failed`: the short name stands in reports.
    __module__ = "builtins"

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.kind} in {failure.phase}: {failure.message}", pytrace=False)
        self.failure = failure


def check(holds: bool, kind: Kind, message: str, phase: Phase = Phase.SERVING) -> None:  # noqa: FBT001
    """Fail the test with this kind of failure unless `holds`."""
    __tracebackhide__ = True
    if not holds:
        raise ServerFailed(Failure.of(kind, phase, message))
