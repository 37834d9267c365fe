"""When each token is due, by the server's own clock: the rate is exact, whatever the machine is busy with.

One stream gets `rate` tokens a second, whatever the others do, until `n * rate` is above `saturation`: from there on
all streams share `saturation` equally. Token i (from 1) of a stream is due when its share of time reaches i / rate;
there is no sum of sleeps, so nothing drifts. A late wake-up emits all that is due at once.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio

__all__ = ["Stream", "TokenClock"]

_SLACK = 1e-9


class Stream(Protocol):
    """Something that emits `total` tokens. `step` is how many must be due together before it is woken."""

    total: int
    step: int

    def emit(self, count: int) -> int:
        """Makes up to `count` tokens now; returns how many it made (fewer: its reader is slow)."""
        ...


class _Entry:
    __slots__ = ("begun", "emitted", "stream")

    def __init__(self, stream: Stream, begun: float) -> None:
        self.stream = stream
        self.begun = begun
        self.emitted = 0


class TokenClock:
    """Wakes streams as their tokens fall due. Virtual seconds are seconds of an unsaturated server."""

    def __init__(self, loop: asyncio.AbstractEventLoop, rate: float, saturation: float) -> None:
        self.rate = rate
        self.saturation = saturation
        self._loop = loop
        self._virtual = 0.0
        self._at = loop.time()
        self._paused = False
        self._entries: dict[Stream, _Entry] = {}
        self._heap: list[tuple[float, int, _Entry]] = []
        self._order = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def running(self) -> int:
        """Streams that have tokens to come."""
        return len(self._entries)

    @property
    def throughput(self) -> float:
        """Tokens a second that all streams get now."""
        return self.running * self.rate * self._speed()

    def progress(self, stream: Stream) -> int:
        """Tokens of a running stream that were due so far; 0 for one that is not running."""
        self._advance()
        entry = self._entries.get(stream)
        return self._due(entry) if entry is not None else 0

    def start(self, stream: Stream) -> None:
        """Begins `stream` now."""
        self._advance()
        entry = _Entry(stream, self._virtual)
        self._entries[stream] = entry
        self._push(entry)
        self._arm()

    def stop(self, stream: Stream) -> None:
        """Ends `stream`, finished or not."""
        self._advance()
        self._entries.pop(stream, None)
        self._arm()

    def pause(self) -> None:
        """No token is due while paused; the schedule moves by as long as the pause takes."""
        self._advance()
        self._paused = True
        self._arm()

    def resume(self) -> None:
        """Goes on where `pause` stopped."""
        self._advance()
        self._paused = False
        self._arm()

    def _speed(self) -> float:
        if self._paused:
            return 0.0
        wanted = len(self._entries) * self.rate
        return 1.0 if wanted <= self.saturation else self.saturation / wanted

    def _advance(self) -> None:
        now = self._loop.time()
        self._virtual += (now - self._at) * self._speed()
        self._at = now

    def _due(self, entry: _Entry) -> int:
        return min(entry.stream.total, int((self._virtual - entry.begun) * self.rate + _SLACK * self.rate))

    def _push(self, entry: _Entry) -> None:
        self._order += 1
        following = min(entry.stream.total, entry.emitted + entry.stream.step)
        heapq.heappush(self._heap, (entry.begun + following / self.rate, self._order, entry))

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._heap and self._heap[0][2].stream not in self._entries:
            heapq.heappop(self._heap)
        speed = self._speed()
        if self._heap and speed > 0:
            delay = max(0.0, self._heap[0][0] - self._virtual) / speed
            self._timer = self._loop.call_at(self._at + delay, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._advance()
        while self._heap and self._heap[0][0] <= self._virtual + _SLACK:
            entry = heapq.heappop(self._heap)[2]
            stream = entry.stream
            if stream not in self._entries:
                continue
            made = stream.emit(self._due(entry) - entry.emitted)
            entry.emitted += made
            if entry.emitted >= stream.total:
                self._entries.pop(stream, None)
            elif made:
                self._push(entry)
            else:  # the reader is slow: looked at again a token later
                self._order += 1
                heapq.heappush(self._heap, (self._virtual + 1 / self.rate, self._order, entry))
        self._arm()
