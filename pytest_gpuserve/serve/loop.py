"""The supervisor's loop: file descriptors, timers and a few calls that may block, all answered in one thread.

A blocking call (NVML in a wedged driver, py-spy) runs in a daemon thread and is answered here; nothing else does,
because the parent-death signal of the server belongs to the thread that spawned it.
"""

from __future__ import annotations

import os
import selectors
import threading
from time import monotonic
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Loop", "Timer"]


class Timer:
    """Calls `action` every `period` seconds until cancelled; late calls are not made up for."""

    def __init__(self, period: float, action: Callable[[], object], *, first: float | None = None) -> None:
        self.period = period
        self.due = monotonic() + (period if first is None else first)
        self._action = action
        self.cancelled = False

    def cancel(self) -> None:
        """No further call."""
        self.cancelled = True

    def run(self, now: float) -> None:
        """Calls the action and sets the next time."""
        self.due = now + self.period
        self._action()


class Loop:
    """`turn` handles what is ready once; `wait` turns until a condition holds. Handlers may call `wait` themselves."""

    def __init__(self) -> None:
        self._selector = selectors.PollSelector()  # epoll refuses /dev/null as stdin
        self._timers: list[Timer] = []
        self._answers: list[tuple[Callable[[Any], object], Any]] = []
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.watch(self._bell, self._ring)

    def watch(self, fd: int, action: Callable[[], object], *, write: bool = False) -> None:
        """Calls `action` whenever `fd` is readable (or writable); replaces an earlier watch of the same one."""
        events = selectors.EVENT_WRITE if write else selectors.EVENT_READ
        if fd in self._selector.get_map():
            self._selector.modify(fd, events, action)
        else:
            self._selector.register(fd, events, action)

    def unwatch(self, fd: int) -> None:
        """Forgets `fd`; to be called before it is closed."""
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    def every(self, period: float, action: Callable[[], object], *, first: float | None = None) -> Timer:
        """A timer, first due after `first` seconds (default: one period)."""
        timer = Timer(period, action, first=first)
        self._timers.append(timer)
        return timer

    def background(self, call: Callable[[], Any], then: Callable[[Any], object]) -> None:
        """Runs `call`, which may block and must not raise, in a daemon thread; `then` gets its result in this one."""

        def work() -> None:
            self.soon(then, call())

        threading.Thread(target=work, daemon=True).start()

    def soon(self, action: Callable[[Any], object], argument: Any) -> None:
        """Calls `action(argument)` in the next turn; may be called from any thread."""
        self._answers.append((action, argument))
        os.eventfd_write(self._bell, 1)

    def _ring(self) -> None:
        os.eventfd_read(self._bell)
        while self._answers:
            then, result = self._answers.pop(0)
            then(result)

    def turn(self, timeout: float) -> None:
        """Waits at most `timeout` seconds for the first thing to do, and does what is due."""
        self._timers = [timer for timer in self._timers if not timer.cancelled]
        now = monotonic()
        next_due = min((timer.due for timer in self._timers), default=now + timeout)
        for key, _ in self._selector.select(max(0.0, min(timeout, next_due - now))):
            # An earlier handler of this turn may have closed it.
            if key.fd in self._selector.get_map() and self._selector.get_key(key.fd).data is key.data:
                key.data()
        now = monotonic()
        for timer in list(self._timers):
            if timer.due <= now and not timer.cancelled:
                timer.run(now)

    def wait(self, until: Callable[[], bool], timeout: float, *, poll: float = 0.05) -> bool:
        """Turns until `until()` holds or `timeout` seconds are over; `until` is asked at least every `poll` seconds."""
        deadline = monotonic() + timeout
        while not until():
            left = deadline - monotonic()
            if left <= 0:
                return False
            self.turn(min(left, poll))
        return True
