"""Does a server that is ready get anywhere with the requests of a check? Its counters, asked for only while armed.

`/health` and `/metrics` of a wedged engine went on answering 200 (vllm#41834), so what counts is that the token
counter moves. A server without `--enable-metrics` has no counter: then its log of batches counts, and when that is
quiet a generation of one token is tried. So a test may keep an idle server for as long as it likes, and a benchmark is
not disturbed.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from pytest_gpuserve import engine
from pytest_gpuserve.serve.http import Answer, Exchange

if TYPE_CHECKING:
    from pytest_gpuserve.engine import Endpoints, ServerLoad
    from pytest_gpuserve.serve.loop import Loop

__all__ = ["LoadMeter"]

_EVERY = 1.0
_TIMEOUT = 5.0
_TRY_AFTER = 5.0
_BATCH = ("Prefill batch", "Decode batch")
_ONE_TOKEN = {"text": "1", "sampling_params": {"max_new_tokens": 1, "temperature": 0}}


class LoadMeter:
    """`poke` it often; `load` is the newest answer, None when the server does not answer (or is not armed)."""

    def __init__(self, loop: Loop, port: int, key: str, endpoints: Endpoints) -> None:
        self.armed = False
        self._loop, self._port, self._key, self._endpoints = loop, port, key, endpoints
        self._load: ServerLoad | None = None
        self._asked = float("-inf")
        self._open: Exchange | None = None
        self._trial: Exchange | None = None
        self._counted = 0
        self._has_metrics = True

    @property
    def load(self) -> ServerLoad | None:
        """The server's counters; where it has none, ours of batches in the log and of trial generations."""
        if not self.armed:
            return None
        if self._has_metrics:
            return self._load
        return engine.ServerLoad(tokens=self._counted, running=1 if self._trial else 0)

    def line(self, line: str) -> None:
        """One line of the log."""
        if not self._has_metrics and any(text in line for text in _BATCH):
            self._counted += 1
            self._asked = monotonic()

    def poke(self) -> None:
        """Asks for the counters when it is time."""
        if not self.armed:
            return
        now = monotonic()
        if self._has_metrics:
            if self._open is None and now - self._asked >= _EVERY:
                self._asked = now
                self._open = Exchange(
                    self._loop, self._port, self._endpoints.metrics, self._hear, key=self._key, timeout=_TIMEOUT
                )
        elif self._trial is None and now - self._asked >= _TRY_AFTER:
            self._asked = now
            self._trial = Exchange(
                self._loop, self._port, self._endpoints.generate, self._answered, key=self._key, body=_ONE_TOKEN
            )

    def close(self) -> None:
        """Drops the open questions."""
        self.armed = False
        for exchange in (self._open, self._trial):
            if exchange:
                exchange.cancel()
        self._open = self._trial = None

    def _hear(self, answer: Answer) -> None:
        self._open = None
        self._load = engine.load_of(answer.body.decode(errors="replace")) if answer.status == 200 else None
        if answer.status == 404 or (self._load and self._load.tokens is None):
            self._has_metrics = False
            self._asked = monotonic()

    def _answered(self, answer: Answer) -> None:
        self._trial = None
        if answer.status:
            self._counted += 1
