"""One HTTP request to the server on the loopback, without blocking the supervisor's loop.

Requests say `Connection: close`; answers with a length, in chunks or up to the end of the stream are understood.
"""

from __future__ import annotations

import errno
import json
import socket
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpuserve.serve.loop import Loop, Timer

__all__ = ["Answer", "Exchange", "whole_answer"]

_MOST = 8 << 20


@dataclass(frozen=True, slots=True)
class Answer:
    """`status` 0 means there was none, and `error` says why. `seconds` from the request to the end of the answer."""

    status: int
    body: bytes = b""
    error: str = ""
    seconds: float = 0.0

    @property
    def refused(self) -> bool:
        """Nobody listens at the port."""
        return self.error == "refused"

    def json(self) -> Any:
        """The body as JSON, None when it is not."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None


class Exchange:
    """A request under way; `then` is called once, with the answer, unless it is cancelled before."""

    def __init__(
        self,
        loop: Loop,
        port: int,
        path: str,
        then: Callable[[Answer], object],
        *,
        key: str,
        body: object = None,
        timeout: float | None = None,
    ) -> None:
        self._loop = loop
        self._then = then
        self._began = monotonic()
        self._received = bytearray()
        self._timer: Timer | None = loop.every(timeout, lambda: self._end(error="timeout")) if timeout else None
        payload = b"" if body is None else json.dumps(body).encode()
        method = "GET" if body is None else "POST"
        kind = f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n" if payload else ""
        self._unsent = (
            f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {key}\r\n"
            f"{kind}Accept: */*\r\nConnection: close\r\n\r\n"
        ).encode() + payload
        self._socket: socket.socket | None = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        code = self._socket.connect_ex(("127.0.0.1", port))
        if code in (0, errno.EINPROGRESS):
            loop.watch(self._socket.fileno(), self._send, write=True)
        else:
            # Not from within the constructor: the caller does not have this object yet.
            loop.soon(lambda error: self._end(error=error), _reason(code))

    def cancel(self) -> None:
        """Closes the connection; `then` will not be called."""
        if self._timer:
            self._timer.cancel()
        if self._socket:
            self._loop.unwatch(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def _send(self) -> None:
        assert self._socket
        code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._end(error=_reason(code))
            return
        try:
            self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            return
        except OSError as error:
            self._end(error=str(error))
            return
        if not self._unsent:
            self._loop.watch(self._socket.fileno(), self._receive)

    def _receive(self) -> None:
        assert self._socket
        try:
            data = self._socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(error=str(error))
            return
        self._received += data
        answer = whole_answer(bytes(self._received), ended=not data)
        if answer is not None:
            self._end(status=answer[0], body=answer[1])
        elif not data or len(self._received) > _MOST:
            self._end(error="the connection was closed in the middle of an answer")

    def _end(self, *, status: int = 0, body: bytes = b"", error: str = "") -> None:
        if self._socket is not None:
            self.cancel()
            self._then(Answer(status, body, error, monotonic() - self._began))


def _reason(code: int) -> str:
    return "refused" if code == errno.ECONNREFUSED else errno.errorcode.get(code, str(code))


def whole_answer(received: bytes, *, ended: bool) -> tuple[int, bytes] | None:
    """Status and body of the HTTP answer in `received`, None while it is not whole (or is no HTTP answer at all)."""
    head, separator, rest = received.partition(b"\r\n\r\n")
    words = head.split(None, 2)
    if not separator or not head.startswith(b"HTTP/1.") or len(words) < 2 or not words[1].isdigit():
        return None
    status = int(words[1])
    headers = {}
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        headers[name.strip().lower()] = value.strip()
    if b"chunked" in headers.get(b"transfer-encoding", b"").lower():
        body = _unchunk(rest)
        return None if body is None else (status, body)
    length = headers.get(b"content-length", b"")
    if length.isdigit():
        return (status, rest[: int(length)]) if len(rest) >= int(length) else None
    return (status, rest) if ended else None


def _unchunk(rest: bytes) -> bytes | None:
    body = bytearray()
    while True:
        size, separator, rest = rest.partition(b"\r\n")
        if not separator:
            return None
        try:
            count = int(size.partition(b";")[0], 16)
        except ValueError:
            return None
        if count == 0:
            return bytes(body)
        if len(rest) < count + 2:
            return None
        body += rest[:count]
        rest = rest[count + 2 :]
