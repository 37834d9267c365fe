"""The process in the environment under test that asks SGLang: its life, its lines, its limits."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

from pytest_gpuserve.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["Child"]

_INSIDE = Path(__file__).with_name("_inside.py")


class Child:
    """One process of the environment under test, in a session of its own, which is ended with it."""

    def __init__(self, python: str, env: Mapping[str, str]) -> None:
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the child
        try:
            self._process = subprocess.Popen(
                [python, str(_INSIDE)],
                env=dict(env),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                start_new_session=True,
            )
        except OSError as error:
            self._stderr.close()
            raise UsageError(
                f"cannot run {python}: {error.strerror or error}. Name the interpreter of the environment under test "
                "with --gpu-server-python."
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # A fork that hangs in the session would outlive its parent; the session is ours, and ends here.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def ask(self, request: Mapping[str, Any], first: float, each: float) -> Iterator[dict[str, Any]]:
        """The child's lines until `done` or `unavailable`; silence or an early end is made into `unavailable`.

        `first` seconds are allowed until the first line (imports, once a model), `each` between lines.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request).encode())
            self._process.stdin.close()
        allowed = first
        assert self._process.stdout is not None
        lines = _Lines(self._process.stdout)
        while True:
            lines.timeout = allowed
            text = next(lines, None)
            if text is None:
                yield {"kind": "unavailable", "reason": self._silence(allowed, late=lines.late)}
                return
            line: dict[str, Any] = json.loads(text)
            yield line
            if line["kind"] in ("done", "unavailable"):
                return
            allowed = each

    def _silence(self, allowed: float, *, late: bool) -> str:
        what = f"no answer in {allowed:g} s" if late else f"its process ended with {self._process.wait()}"
        return f"{what}; last words: {self._tail() or '(none)'}"

    def _tail(self) -> str:
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - 4096))
        lines = [line for line in self._stderr.read().decode(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip()[:400] if lines else ""


class _Lines:
    """Lines of a pipe, each within `timeout` seconds; then, and at the end of the pipe, it stops."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._fd = pipe.fileno()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._fd, selectors.EVENT_READ)
        self._rest = b""
        self._ready: deque[bytes] = deque()
        self.timeout = 0.0
        self.late = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> bytes:
        deadline = time.monotonic() + self.timeout
        while not self._ready:
            if not self._selector.select(max(0.0, deadline - time.monotonic())):
                self.late = True
                raise StopIteration
            chunk = os.read(self._fd, 1 << 20)
            if not chunk:
                raise StopIteration
            *whole, self._rest = (self._rest + chunk).split(b"\n")
            self._ready.extend(whole)
        return self._ready.popleft()
