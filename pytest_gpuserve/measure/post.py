"""Connections to a server, and requests of which only the answer counts, not its time."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import aiohttp

__all__ = ["LOOK", "connect", "headers_of", "post_all"]

LOOK = 0.5  # seconds between two questions whether the server lives


def headers_of(api_key: str | None) -> dict[str, str]:
    """Of a request with a JSON body."""
    return {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})


def connect(silence: float | None = None) -> aiohttp.ClientSession:
    """Any number of connections, each given up after `silence` seconds without a byte, if that is given."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=None, sock_read=silence, sock_connect=30)
    # SGLang closes an idle connection after 5 s: one that is used again just then would lose its request.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)


def post_all(
    url: str,
    bodies: Sequence[Mapping[str, Any]],
    *,
    api_key: str | None = None,
    timeout: float = 300.0,
    alive: Callable[[], str | None] = lambda: None,
) -> list[dict[str, Any] | str]:
    """Post all bodies to `url` at once; each one's parsed answer, or what went wrong with it.

    Ends early when `alive` says what died: what has no answer by then is told so. `timeout` bounds each answer, in s.
    """
    return asyncio.run(_post_all(url, bodies, headers_of(api_key), timeout, alive))


async def _post_all(
    url: str,
    bodies: Sequence[Mapping[str, Any]],
    headers: dict[str, str],
    timeout: float,
    alive: Callable[[], str | None],
) -> list[dict[str, Any] | str]:
    async with connect(timeout) as session:
        tasks = [asyncio.create_task(_post(session, url, body, headers)) for body in bodies]
        death: str | None = None
        while death is None and (await asyncio.wait(tasks, timeout=LOOK))[1]:
            death = alive()
        for task in tasks:
            task.cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
    return [
        f"no answer: {death or type(answer).__name__}" if isinstance(answer, BaseException) else answer
        for answer in answers
    ]


async def _post(
    session: aiohttp.ClientSession, url: str, body: Mapping[str, Any], headers: dict[str, str]
) -> dict[str, Any] | str:
    import aiohttp

    try:
        async with session.post(url, data=json.dumps(body).encode(), headers=headers) as response:
            raw = await response.read()
            text = raw.decode("utf-8")
            answer = json.loads(text)
            if response.status == 200 and isinstance(answer, dict):
                return answer
            return f"HTTP {response.status}: {text[:200]}"
    except UnicodeDecodeError:
        return "the answer is not valid UTF-8"
    except (OSError, ValueError, aiohttp.ClientError) as error:
        return f"{type(error).__name__}: {error}"
