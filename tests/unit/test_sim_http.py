"""The simulated server's HTTP parser, whatever way the bytes are cut."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from pytest_gpuserve.sim.http import Connection
from pytest_gpuserve.sim.logs import Log


class Wire(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.closed = False

    def write(self, data) -> None:
        self.sent += bytes(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


def talk(parts: list[bytes]) -> tuple[list, Wire]:
    """What the handler saw of `parts`, and what it answered."""
    seen: list = []

    def handle(exchange) -> None:
        seen.append((exchange.method, exchange.path, exchange.query, exchange.body))
        exchange.json({"n": len(seen)})

    async def run() -> Wire:
        wire = Wire()
        connection = Connection(handle, Log("silent"))
        connection.connection_made(wire)
        for part in parts:
            connection.data_received(part)
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        return wire

    return seen, asyncio.run(run())


@given(
    bodies=st.lists(st.binary(max_size=40), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 400), max_size=12),
)
def test_requests_are_read_in_order_however_the_bytes_are_cut(bodies, cuts):
    data = b"".join(
        b"POST /a%%20b?x=%d HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (number, len(body), body)
        for number, body in enumerate(bodies)
    )
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    seen, wire = talk([data[a:b] for a, b in pairwise(edges)])
    assert seen == [("POST", "/a b", {"x": str(number)}, body) for number, body in enumerate(bodies)]
    answers = wire.sent.split(b"\r\n\r\n")[1:]
    assert [json.loads(answer.split(b"HTTP/")[0])["n"] for answer in answers] == list(range(1, len(bodies) + 1))


@given(st.binary(max_size=200))
def test_anything_is_refused_or_waited_for_and_never_raises(data):
    seen, wire = talk([data + b"\r\n\r\n"])
    assert wire.sent.startswith(b"HTTP/1.1 ")
    assert wire.closed or seen


def test_expect_continue_is_answered_once_before_the_body():
    head = b"POST / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n"
    seen, wire = talk([head, b"ab", b"cd"])
    assert wire.sent.count(b"100 Continue") == 1
    assert seen[0][3] == b"abcd"
