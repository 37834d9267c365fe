"""Main's end of the ring: messages out to the first scheduler, back from the detokenizer."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from pytest_gpuserve.sim.scheduler import PING, WORK

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Ring"]


class Ring:
    """A message that came back was passed on by every process, in order: all of them live and run."""

    def __init__(self, loop: asyncio.AbstractEventLoop, out: int, back: int) -> None:
        self._loop = loop
        self._out = out
        self._back = back
        self._sent: deque[asyncio.Future[None]] = deque()
        os.set_blocking(out, False)
        os.set_blocking(back, False)
        loop.add_reader(back, self._read)

    def send(self, message: bytes) -> asyncio.Future[None]:
        """A future that is done once the message came round."""
        future: asyncio.Future[None] = self._loop.create_future()
        self._sent.append(future)
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(self._out, message)
        return future

    def work(self, then: Callable[[], None]) -> None:
        """Lets the schedulers do a scripted fault's work, then calls `then`."""
        self.send(WORK).add_done_callback(lambda _: then())

    async def ping(self, timeout: float) -> bool:
        """True if a message came round in time."""
        done, _ = await asyncio.wait([self.send(PING)], timeout=timeout)
        return bool(done)

    def _read(self) -> None:
        try:
            data = os.read(self._back, 4096)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(self._back)
        for _ in data:
            if self._sent:
                future = self._sent.popleft()
                if not future.done():
                    future.set_result(None)
