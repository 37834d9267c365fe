"""The token clock against a loop whose time is made up: exact rates, no drift, fair shares."""

from __future__ import annotations

import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpuserve.sim.clock import TokenClock


class Loop:
    """Time that moves from timer to timer, each `late` seconds late."""

    def __init__(self, late: float = 0.0) -> None:
        self.now = 1000.0
        self.late = late
        self.timers: list = []
        self.count = 0

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, call):
        self.count += 1
        handle = Handle(when, call)
        heapq.heappush(self.timers, (when, self.count, handle))
        return handle

    def run(self, until: float = float("inf")) -> None:
        while self.timers and self.timers[0][0] <= until:
            when, _, handle = heapq.heappop(self.timers)
            if not handle.cancelled:
                self.now = max(self.now, when + self.late)
                handle.call()
        if until < float("inf"):
            self.now = max(self.now, until)


class Handle:
    def __init__(self, when: float, call) -> None:
        self.call = call
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Tokens:
    def __init__(self, loop: Loop, total: int, step: int = 1) -> None:
        self.loop, self.total, self.step = loop, total, step
        self.times: list[float] = []
        self.blocked = False

    def emit(self, count: int) -> int:
        if self.blocked:
            return 0
        self.times += [self.loop.now] * count
        return count


@given(
    rate=st.floats(0.5, 5000),
    totals=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    late=st.floats(0, 0.01),
)
def test_unsaturated_streams_get_every_token_on_time_and_never_early(rate, totals, late):
    loop = Loop(late)
    clock = TokenClock(loop, rate, saturation=1e9)
    streams = [Tokens(loop, total) for total in totals]
    for stream in streams:
        clock.start(stream)
    loop.run()
    for stream in streams:
        assert len(stream.times) == stream.total
        for number, when in enumerate(stream.times, 1):
            lag = when - 1000 - number / rate
            assert -1e-6 <= lag <= late * (len(streams) + 1) + 1e-6


def test_no_drift_over_many_late_tokens():
    loop = Loop(late=0.0009)
    clock = TokenClock(loop, 333.0, saturation=1e9)
    stream = Tokens(loop, 100_000)
    clock.start(stream)
    loop.run()
    assert stream.times[-1] - 1000 == pytest.approx(100_000 / 333.0, abs=0.001)


@given(streams=st.integers(1, 40), saturation=st.floats(100, 1000))
def test_saturated_streams_share_the_whole(streams, saturation):
    loop = Loop()
    clock = TokenClock(loop, 100.0, saturation)
    made = [Tokens(loop, 50) for _ in range(streams)]
    for stream in made:
        clock.start(stream)
    wanted = min(streams * 100.0, saturation)
    assert clock.throughput == pytest.approx(wanted)
    loop.run()
    assert loop.now - 1000 == pytest.approx(streams * 50 / wanted, rel=1e-6)


def test_a_pause_moves_the_schedule_by_its_length():
    loop = Loop()
    clock = TokenClock(loop, 10.0, 1e9)
    stream = Tokens(loop, 10)
    clock.start(stream)
    loop.run(until=1000.45)
    clock.pause()
    loop.run(until=1003.45)
    assert len(stream.times) == 4
    clock.resume()
    loop.run()
    assert stream.times[-1] == pytest.approx(1004.0)


def test_a_slow_reader_gets_nothing_and_then_all():
    loop = Loop()
    clock = TokenClock(loop, 10.0, 1e9)
    stream = Tokens(loop, 10)
    stream.blocked = True
    clock.start(stream)
    loop.run(until=1000.75)
    assert (stream.times, clock.progress(stream), clock.running) == ([], 7, 1)
    stream.blocked = False
    loop.run(until=1000.85)
    assert len(stream.times) == 8
    loop.run()
    assert (len(stream.times), clock.running) == (10, 0)


def test_a_whole_answer_wakes_once_and_a_stopped_stream_never():
    loop = Loop()
    clock = TokenClock(loop, 10.0, 1e9)
    whole, stopped = Tokens(loop, 20, step=20), Tokens(loop, 20)
    clock.start(whole)
    clock.start(stopped)
    loop.run(until=1000.25)
    clock.stop(stopped)
    loop.run()
    assert whole.times == [pytest.approx(1002.0)] * 20
    assert len(stopped.times) == 2
