"""A small HTTP/1.1 server on asyncio protocols: aiohttp.web takes 0.16 s to import, longer than a simulated start."""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, unquote

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpuserve.sim.logs import Log

__all__ = ["Connection", "Exchange", "dumps"]

_MAX_HEAD = 64 << 10
_MAX_BODY = 256 << 20
_REASONS = {status.value: status.phrase for status in HTTPStatus}


def dumps(content: object) -> bytes:
    """Compact UTF-8 JSON, as SGLang's orjson writes it (which has null where a float is NaN: give None)."""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode(errors="replace")


class Exchange:
    """One request and its answer: `answer` once, or `begin`, `write`…, `finish` for a stream."""

    __slots__ = ("_connection", "body", "headers", "method", "on_gone", "path", "query", "started", "target")

    def __init__(self, connection: Connection, method: str, target: str, headers: dict[str, str], body: bytes) -> None:
        self._connection: Connection | None = connection
        self.method = method
        self.target = target
        path, _, query = target.partition("?")
        self.path = unquote(path)
        self.query = dict(parse_qsl(query))
        self.headers = headers
        self.body = body
        self.started = False
        self.on_gone: Callable[[], None] | None = None

    @property
    def writable(self) -> bool:
        """False while the client reads slower than the server writes."""
        return self._connection is not None and self._connection.writable

    def answer(self, status: int, body: bytes = b"", media: str | None = "application/json", **headers: str) -> None:
        """The whole answer; nothing happens if the client is gone."""
        if self._connection is None or self.started:
            return
        self.started = True
        head = self._head(status, headers) + f"content-length: {len(body)}\r\n"
        if body and media:
            head += f"content-type: {media}\r\n"
        self._connection.transport.write(f"{head}\r\n".encode() + (b"" if self.method == "HEAD" else body))
        self._end()

    def json(self, content: object, status: int = 200) -> None:
        """A JSON answer."""
        self.answer(status, dumps(content))

    def begin(self) -> None:
        """Begins a stream of server-sent events."""
        if self._connection is not None and not self.started:
            self.started = True
            head = self._head(200, {}) + "content-type: text/event-stream; charset=utf-8\r\n"
            self._connection.transport.write(f"{head}transfer-encoding: chunked\r\n\r\n".encode())

    def write(self, data: bytes) -> None:
        """Sends a part of the stream at once."""
        if self._connection is not None and data:
            self._connection.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def finish(self, data: bytes = b"") -> None:
        """Sends a last part and ends the stream."""
        if self._connection is None:
            return
        part = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
        self._connection.transport.write(part + b"0\r\n\r\n")
        self._end()

    def gone(self) -> None:
        """The client closed the connection."""
        self._connection = None
        if self.on_gone is not None:
            self.on_gone()

    def _head(self, status: int, headers: dict[str, str]) -> str:
        reason = _REASONS.get(status, "")
        assert self._connection is not None
        self._connection.log.uvicorn(
            f'{self._connection.peer} - "{self.method} {self.target} HTTP/1.1" {status} {reason}'
        )
        extra = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return f"HTTP/1.1 {status} {reason}\r\nserver: uvicorn\r\n{extra}"

    def _end(self) -> None:
        connection, self._connection, self.on_gone = self._connection, None, None
        if connection is not None:
            connection.done(close=self.headers.get("connection", "").lower() == "close")


class Connection(asyncio.Protocol):
    """One client: requests one after another, pipelined ones wait."""

    def __init__(self, handle: Callable[[Exchange], None], log: Log) -> None:
        self._handle = handle
        self.log = log
        self.writable = True
        self.peer = "-"
        self.transport: asyncio.Transport
        self._buffer = bytearray()
        self._exchange: Exchange | None = None
        self._continued = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Asyncio: a client is there."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        address = transport.get_extra_info("peername") or ("-", 0)
        self.peer = f"{address[0]}:{address[1]}"

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """Asyncio: the client is gone."""
        if self._exchange is not None:
            self._exchange.gone()

    def pause_writing(self) -> None:
        """Asyncio: the client reads too slowly."""
        self.writable = False

    def resume_writing(self) -> None:
        """Asyncio: the client has caught up."""
        self.writable = True

    def data_received(self, data: bytes) -> None:
        """Asyncio: bytes of one or more requests."""
        self._buffer += data
        if self._exchange is None:
            self._next()

    def done(self, *, close: bool) -> None:
        """The exchange is answered."""
        self._exchange = None
        if close:
            self.transport.close()
        elif self._buffer:
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        if self._exchange is not None or self.transport.is_closing():
            return
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > _MAX_HEAD:
                self._refuse(431)
            return
        lines = self._buffer[:end].decode("latin-1").split("\r\n")
        words = lines[0].split(" ")
        headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])
        }
        length = headers.get("content-length", "0")
        if len(words) != 3 or not words[2].startswith("HTTP/1.") or not length.isdigit():
            self._refuse(400)
        elif "transfer-encoding" in headers:
            self._refuse(411)
        elif int(length) > _MAX_BODY:
            self._refuse(413)
        elif len(self._buffer) < end + 4 + int(length):
            if headers.get("expect", "").lower() == "100-continue" and not self._continued:
                self._continued = True
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        else:
            self._continued = False
            body = bytes(self._buffer[end + 4 : end + 4 + int(length)])
            del self._buffer[: end + 4 + int(length)]
            self._exchange = Exchange(self, words[0], words[1], headers, body)
            self._handle(self._exchange)

    def _refuse(self, status: int) -> None:
        self.log.uvicorn("Invalid HTTP request received.", "WARNING")
        text = f"HTTP/1.1 {status} {_REASONS[status]}\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
        self.transport.write(text.encode())
        self.transport.close()
