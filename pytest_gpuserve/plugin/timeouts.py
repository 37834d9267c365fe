"""pytest-timeout beside servers: what it says names the cell and the server's phase, and our own waits are not timed.

Its two methods: `signal` fails the test with a message, `thread` prints all stacks and ends the process at once.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["arm", "disarm", "name", "suspended"]

# How pytest-timeout's own failure begins.
_MESSAGE = "Timeout ("


def name(error: BaseException | None, where: str) -> None:
    """Adds `where` to the failure of the `signal` method; leaves every other exception alone."""
    if where and isinstance(error, pytest.fail.Exception) and error.msg and error.msg.startswith(_MESSAGE):
        error.msg = f"{error.msg.rstrip('.')} in {where}"


def arm(item: pytest.Item, settings: Any, where: Callable[[], str], leave: Callable[[str], None]) -> bool | None:
    """For `pytest_timeout_set_timer`: the `thread` method's timer, with a line that names `where`.

    An xdist worker's terminal is nobody's: `leave` keeps the line for the controller. None, so that pytest-timeout sets
    its own timer, for the other method.
    """
    if settings.method != "thread":
        return None
    import pytest_timeout  # type: ignore[import-untyped]

    def over() -> None:
        place = where()
        if place and (settings.disable_debugger_detection or not pytest_timeout.is_debugging()):
            text = f"Timeout (>{settings.timeout:g}s) from pytest-timeout in {place}"
            leave(text)
            sys.stderr.write(f"{text}\n")
        pytest_timeout.timeout_timer(item, settings)

    timer = threading.Timer(settings.timeout, over)
    timer.name = f"gpuserve timeout {item.nodeid}"
    timer.daemon = True

    def cancel() -> None:
        timer.cancel()
        timer.join()

    item.cancel_timeout = cancel  # type: ignore[attr-defined]
    timer.start()
    return True


@contextlib.contextmanager
def suspended(item: pytest.Item, settings: Any) -> Iterator[None]:
    """No timer in the middle of the test, while the manager does something that is bounded by itself; then anew."""
    disarm(item)
    yield
    item.config.hook.pytest_timeout_set_timer(item=item, settings=settings)


def disarm(item: pytest.Item) -> None:
    """Ends pytest-timeout's timer for this test, if it has one: the manager's own waits are bounded."""
    hook = getattr(item.config.hook, "pytest_timeout_cancel_timer", None)
    if hook is not None:
        hook(item=item)
