"""The server's output: drained from its pipe at once, kept in a file of limited size, cut into lines.

The server writes into a pipe, not into the file itself: a full disk or a flood of a gigabyte is then this tool's
problem and never the server's, a new line wakes the loop instead of being polled for, and the API key can be kept out
of the file (SGLang logs all its arguments). The pipe is always drained: while it waits for anything, the supervisor
turns its loop.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections import deque
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["CappedFile", "LogPump", "Splitter"]

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[@-_]|[\x00-\x08\x0b-\x1f\x7f]")
_LONGEST = 16 << 10
_RECENT = 1 << 20
_PIPE = 1 << 20
# A flood of millions of lines must not cost the supervisor its deadlines. A burst is looked at in full, and a steady
# stream up to that many lines a second; of more, some at both ends of each piece.
_BURST = 20_000
_PER_SECOND = 2_000
_EDGE = 50


class CappedFile:
    """A file of at most about `cap` bytes: the first half as it came, then the newest, and between them a line that
    says how much is gone.

    The first write error (disk full) is kept in `error`; what comes later is dropped.
    """

    def __init__(self, path: str, cap: int) -> None:
        self.error = ""
        self.dropped = 0
        self._cap = max(cap, 4096)
        self._head = self._cap // 2
        self._tail_at = self._head
        self._size = 0
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)

    def write(self, data: bytes) -> None:
        """Appends `data`, moving the newest part of the file down when there is no room."""
        if self.error:
            self.dropped += len(data)
            return
        try:
            if self._size + len(data) <= self._cap:
                self._append(data)
            else:
                self._make_room(data)
        except OSError as error:
            self.error = f"{error.strerror} (errno {error.errno})"
            self.dropped += len(data)

    def _append(self, data: bytes) -> None:
        while data:
            count = os.pwrite(self._fd, data, self._size)
            self._size += count
            data = data[count:]

    def _make_room(self, data: bytes) -> None:
        if self._size < self._head:
            space = self._head - self._size
            self._append(data[:space])
            data = data[space:]
        keep = (self._cap - self._head) // 2
        begin = max(self._tail_at, self._size - keep)
        kept = (os.pread(self._fd, max(0, self._size - begin), begin) + data)[-keep:]
        self.dropped += max(0, self._size - self._tail_at) + len(data) - len(kept)
        os.ftruncate(self._fd, self._head)
        self._size = self._head
        self._append(f"\n[gpuserve: {self.dropped} bytes of the log are left out here]\n".encode())
        self._tail_at = self._size
        self._append(kept)

    def close(self) -> None:
        """Closes the file; what was written stays."""
        os.close(self._fd)


class Splitter:
    """Bytes to lines: a carriage return ends a line too (progress bars), escapes and control characters are dropped.

    Of a flood only some lines are given; `skipped` counts the others.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self.skipped = 0
        self._rest = b""
        self._clock = clock
        self._allowance = float(_BURST)
        self._filled = clock()

    def feed(self, data: bytes) -> list[str]:
        """The lines `data` completes, without empty ones."""
        *whole, rest = (self._rest + data).replace(b"\r", b"\n").split(b"\n")
        if len(rest) > _LONGEST:
            whole.append(rest)
            rest = b""
        self._rest = rest
        now = self._clock()
        self._allowance = min(_BURST, self._allowance + _PER_SECOND * (now - self._filled))
        self._filled = now
        if len(whole) > max(self._allowance, 2 * _EDGE):
            self.skipped += len(whole) - 2 * _EDGE
            whole = whole[:_EDGE] + whole[-_EDGE:]
        self._allowance = max(0.0, self._allowance - len(whole))
        return list(_texts(whole))

    def flush(self) -> list[str]:
        """What has come of a line that has not ended."""
        rest, self._rest = self._rest, b""
        return list(_texts([rest]))


def _texts(lines: Iterable[bytes]) -> Iterable[str]:
    for line in lines:
        text = _ESCAPES.sub("", line[:_LONGEST].decode(errors="replace")).rstrip()
        if text:
            yield text


class LogPump:
    """Moves the server's output from `fd` (made non-blocking) to `file`. `recent` holds about the last MiB of lines."""

    def __init__(self, fd: int, file: CappedFile, secret: str) -> None:
        self.fd = fd
        self.file = file
        self.ended = False
        self.recent: deque[str] = deque()
        self.splitter = Splitter()
        self._secret = secret.encode()
        self._held = b""
        self._recent_size = 0
        os.set_blocking(fd, False)
        with contextlib.suppress(OSError):  # the user's pipe quota
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _PIPE)

    def read(self) -> list[str]:
        """The lines that have come since the last call; never blocks."""
        try:
            data = os.read(self.fd, _PIPE)
        except BlockingIOError:
            return []
        self.ended = not data
        return self._remember(self.splitter.feed(self._publish(data)))

    def flush(self) -> list[str]:
        """A line that was begun and not ended: for when nothing more has come for a while."""
        return self._remember(self.splitter.flush())

    def _publish(self, data: bytes) -> bytes:
        """Writes `data` without the secret; the last bytes wait if they may be its beginning."""
        data = (self._held + data).replace(self._secret, b"<api-key>")
        self._held = b"" if self.ended else _beginning_of(self._secret, data)
        data = data[: len(data) - len(self._held)]
        self.file.write(data)
        return data

    def _remember(self, lines: list[str]) -> list[str]:
        self.recent.extend(lines)
        self._recent_size += sum(map(len, lines))
        while self._recent_size > _RECENT:
            self._recent_size -= len(self.recent.popleft())
        return lines

    def close(self) -> None:
        """Ends the log file and closes the pipe: a writer that still lives gets a broken pipe."""
        if self._held:
            self.file.write(self._held)
        os.close(self.fd)
        self.file.close()


def _beginning_of(secret: bytes, data: bytes) -> bytes:
    """The longest end of `data` that is a proper beginning of `secret`."""
    for length in range(min(len(secret) - 1, len(data)), 0, -1):
        if data.endswith(secret[:length]):
            return secret[:length]
    return b""
