"""Is the server ready? Its own readiness endpoint says so *and* a real generation came back.

Neither alone is enough: `/health` of some servers answered 200 minutes before the warm-up ended (sglang#33719), a
model that is listed may still be loading (gpustack#6203), and an answer at the port may come from another process.
"""

from __future__ import annotations

import json
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

from pytest_gpuserve.serve.http import Answer, Exchange
from pytest_gpuserve.serve.spawn import is_secret

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpuserve.engine import Endpoints
    from pytest_gpuserve.serve.loop import Loop

__all__ = ["Readiness", "without_secrets"]

_FIRST = {
    "text": "The capital of France is",
    "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True},
}
_ATTEMPTS = 3
_BETWEEN_ATTEMPTS = 0.5
# `/health` generates and may take 20 s on a busy server before it answers 503 (sglang#8444).
_HEALTH_TIMEOUT = 25.0
_INFO_TIMEOUT = 5.0


class Readiness:
    """`poke` it every 0.1 s or so; it asks only when no question is open. No time limit: that is the watch's task.

    `listening` and `healthy` are what is known so far, `last` the newest word of the health endpoint. `ours` tells
    whether the listener at the port is a process of this server. `on_ready` gets what the server reports of itself,
    its model information and its first answer; `on_refusal` the answer of a server that is healthy and cannot
    generate.
    """

    def __init__(
        self,
        loop: Loop,
        port: int,
        key: str,
        endpoints: Endpoints,
        *,
        ours: Callable[[], bool],
        on_healthy: Callable[[], object],
        on_ready: Callable[[Any, Any, dict[str, Any]], object],
        on_refusal: Callable[[Answer], object],
    ) -> None:
        self.listening = False
        self.healthy = False
        self.last = "nobody listens at the port"
        self._loop, self._port, self._key, self._endpoints = loop, port, key, endpoints
        self._ours, self._on_healthy, self._on_ready, self._on_refusal = ours, on_healthy, on_ready, on_refusal
        self._path = endpoints.ready or endpoints.health
        self._open: dict[str, Exchange] = {}
        self._asked = float("-inf")
        self._told = False
        self._attempts = 0
        self._not_before = 0.0
        self._first: dict[str, Any] | None = None
        self._info: dict[str, Any] = {}

    def told(self) -> None:
        """The log says that it is ready: ask at once. A `/health` that generates need not come first."""
        self._told = True
        self._asked = float("-inf")
        self.poke()

    def poke(self) -> None:
        """Asks what is to be asked now."""
        now = monotonic()
        # A listening server logs every question: not more than five a second.
        pause = 0.2 if self.listening else 0.0
        if not self.healthy and "health" not in self._open and now - self._asked >= pause:
            self._asked = now
            self._ask("health", self._path, self._hear_health, timeout=_HEALTH_TIMEOUT)
        may_generate = self.healthy or (self._told and self.listening and self._endpoints.ready is None)
        if may_generate and self._first is None and now >= self._not_before:
            self._generate()

    def close(self) -> None:
        """Drops the open questions."""
        for exchange in self._open.values():
            exchange.cancel()
        self._open.clear()

    def _ask(self, what: str, path: str, hear: Callable[[Answer], None], **options: Any) -> None:
        def then(answer: Answer) -> None:
            self._open.pop(what, None)
            hear(answer)

        self._open[what] = Exchange(self._loop, self._port, path, then, key=self._key, **options)

    def _hear_health(self, answer: Answer) -> None:
        if answer.status == 0:
            self.listening = self.listening and not answer.refused
            self.last = "nobody listens at the port" if answer.refused else f"{self._path}: {answer.error}"
            return
        self.listening = True
        self.last = f"{self._path} answers {answer.status}"
        if answer.status == 404 and self._path == self._endpoints.ready:
            self._path = self._endpoints.health
        elif answer.status == 200:
            if self._ours():
                self.healthy = True
                self._on_healthy()
                self.poke()
                # Where there is no /ready, the generation was asked for at the log's word and may be back already.
                self._finish()
            else:
                self.last = f"port {self._port} is served by a process that is not of this server"

    def _generate(self) -> None:
        if "generate" not in self._open:
            self._ask("generate", self._endpoints.generate, self._hear_generation, body=_FIRST)
        for what in ("server_info", "model_info"):
            if what not in self._open and what not in self._info:
                path = getattr(self._endpoints, what)
                self._ask(what, path, partial(self._hear_info, what), timeout=_INFO_TIMEOUT)

    def _hear_generation(self, answer: Answer) -> None:
        data = answer.json()
        if answer.status == 200 and isinstance(data, dict):
            self._first = {
                "text": data.get("text"),
                "output_ids": data.get("output_ids"),
                "seconds": round(answer.seconds, 4),
            }
            self._finish()
            return
        self._attempts += 1
        self._not_before = monotonic() + _BETWEEN_ATTEMPTS
        # No answer at all means that the server is dying, which is seen by its process.
        if answer.status and self._attempts >= _ATTEMPTS:
            self._on_refusal(answer)

    def _hear_info(self, what: str, answer: Answer) -> None:
        text = answer.body.replace(self._key.encode(), b"<api-key>")
        data = Answer(answer.status, text).json() if answer.status == 200 else None
        self._info[what] = without_secrets(data) if isinstance(data, dict) else {}
        self._finish()

    def _finish(self) -> None:
        if self.healthy and self._first is not None and len(self._info) == 2:
            self._on_ready(self._info["server_info"], self._info["model_info"], self._first)


def without_secrets(data: Any) -> Any:
    """JSON data with the values of secret keys left out, at any depth."""
    if isinstance(data, dict):
        return {key: without_secrets(value) for key, value in data.items() if not (is_secret(str(key)) and value)}
    if isinstance(data, list):
        return [without_secrets(value) for value in data]
    return data


def excerpt(answer: Answer) -> str:
    """`HTTP 500: {"error": …` for messages, at most 300 characters of the body."""
    body = answer.body[:2000].decode(errors="replace")
    parsed = answer.json()
    if isinstance(parsed, dict) and isinstance(parsed.get("error"), dict):
        body = json.dumps(parsed["error"])
    return f"HTTP {answer.status}: {body[:300]}"
