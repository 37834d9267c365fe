"""What a test sees of a running server."""

from __future__ import annotations

import http.client
import json
import select
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from pytest_gpuserve.model.cell import Cell
    from pytest_gpuserve.model.failure import Failure
    from pytest_gpuserve.model.gpu import Gpu

__all__ = ["Answer", "ServerHandle"]


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of `/generate`: the text, how many tokens were made, and all that the server said (`meta_info`, …)."""

    text: str
    completion_tokens: int
    raw: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerHandle:
    """A server that is ready. `info` is what it reports of itself, `log_path` its log while and after it runs."""

    cell: Cell
    url: str
    api_key: str
    gpus: tuple[Gpu, ...]
    log_path: Path
    pid: int
    info: Mapping[str, Any] = field(default_factory=dict)
    first_answer: str = ""
    simulated: bool = False
    failed: Callable[[], Failure | None] = field(repr=False)
    events: int = field(repr=False)

    @property
    def openai_base_url(self) -> str:
        """For OpenAI clients, with `api_key`."""
        return f"{self.url}/v1"

    def end(self) -> str | None:
        """What ended the server, in words; None while it runs as far as its supervisor knows."""
        failure = self.failed()
        return None if failure is None else f"{failure.kind} in {failure.phase}"

    def request(self, path: str, body: Mapping[str, Any] | None = None, *, timeout: float = 300.0) -> Any:
        """GET `path`, or POST `body` as JSON; the parsed answer, or its text where it is not JSON.

        Gives up after `timeout` seconds, or as soon as the supervisor says that the server hangs or is gone: OSError
        (ConnectionError, TimeoutError), as for any answer but a 200.
        """
        parts = urlsplit(self.url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)
        headers = {"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"}
        try:
            connection.request(
                "GET" if body is None else "POST", path, None if body is None else json.dumps(body), headers
            )
            self._wait(connection.sock, path, timeout)
            response = connection.getresponse()
            text = response.read().decode("utf-8", "replace")
        except http.client.HTTPException as error:
            raise ConnectionError(f"{path}: {type(error).__name__}: {error}") from error
        finally:
            connection.close()
        if response.status != http.client.OK:
            raise OSError(f"{path}: HTTP {response.status} {response.reason}: {text[:500]}")
        try:
            return json.loads(text)
        except ValueError:
            return text

    def _wait(self, answer: socket.socket, path: str, timeout: float) -> None:
        """Until the answer begins. A hung server never answers, but its supervisor tells."""
        deadline = time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"{path}: no answer within {timeout:g} s")
            ready, _, _ = select.select([answer.fileno(), self.events], [], [], left)
            if answer.fileno() in ready:
                return
            failure = self.failed()
            if failure is not None:
                raise ConnectionError(f"{path}: no answer will come: {failure.kind} in {failure.phase}")

    def generate(self, prompt: str, *, max_new_tokens: int = 64, timeout: float = 300.0, **sampling: Any) -> Answer:
        """One completion, greedy unless `sampling` (SGLang's `sampling_params`) says otherwise."""
        params = {"temperature": 0.0, "max_new_tokens": max_new_tokens} | sampling
        raw = self.request("/generate", {"text": prompt, "sampling_params": params}, timeout=timeout)
        meta = raw.get("meta_info") or {}
        return Answer(str(raw.get("text", "")), int(meta.get("completion_tokens") or 0), raw)
