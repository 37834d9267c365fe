"""The load client: streams from SGLang's `/generate` over many connections and accounts for every request.

A short or empty answer, an error or a stall is a failure of the load, never a faster run. The windows are taken in the
steady state: the load goes on before the first and after the last of them, so that no window sees it ramp up or down.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytest_gpuserve.errors import GpuserveError
from pytest_gpuserve.measure.window import Trace, metrics_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import aiohttp

    from pytest_gpuserve.measure.profile import LoadProfile

__all__ = ["LoadFailed", "LoadResult", "run_load"]

# SGLang's stream says in every event how many tokens there are so far; parsing the whole JSON (with the whole text so
# far in it) would cost a hundred times as much as finding this number, and the client would be what is measured.
_COMPLETED = re.compile(rb'"completion_tokens": ?(\d+)')
_MARK = b'"completion_tokens":'


class LoadFailed(GpuserveError):
    """Some requests did not give what was asked. `failures` are their errors, one text a request."""

    def __init__(self, profile: LoadProfile, failures: list[str], sent: int) -> None:
        self.failures = failures
        distinct = sorted(set(failures))
        super().__init__(
            f"load {profile.name}: {len(failures)} of {sent} requests failed: {'; '.join(distinct[:3])}"
            f"{f' and {len(distinct) - 3} other errors' if len(distinct) > 3 else ''}. "
            "Its figures are not used: answers that are missing or short are not throughput."
        )


@dataclass(slots=True, kw_only=True)
class LoadResult:
    """What a load measured. `windows` has one {metric: value} a window, in `metrics.METRICS`' units.

    `sent` = `completed` + `cancelled` (the load going on past the last window). `client_cpu` is the share of one core
    this process used while measuring: near 1, the client and not the server was measured.
    """

    profile: LoadProfile
    windows: list[dict[str, float]] = field(default_factory=list)
    sent: int = 0
    completed: int = 0
    cancelled: int = 0
    client_cpu: float = 0.0
    seconds: float = 0.0


class _Load:
    def __init__(self, url: str, api_key: str | None, profile: LoadProfile, vocabulary: int, seed: int) -> None:
        self.url = f"{url}/generate"
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.profile = profile
        self.random = random.Random(seed)
        self.vocabulary = vocabulary
        self.prefix = self._tokens(profile.prefix)
        self.traces: list[Trace] = []
        self.failures: list[str] = []
        self.ended = 0
        self.boundaries: list[float] = []
        self.finished = asyncio.Event()
        self.cpu = [0.0, 0.0]

    def _tokens(self, count: int) -> list[int]:
        # Ids below 259 are control and byte tokens in most vocabularies: some servers treat them specially.
        low = min(259, self.vocabulary // 2)
        return [self.random.randrange(low, self.vocabulary) for _ in range(count)]

    def _body(self) -> bytes:
        tokens = self.prefix + self._tokens(max(self.profile.input - self.profile.prefix, 1))
        return json.dumps(
            {
                "input_ids": tokens,
                "stream": True,
                "sampling_params": {"max_new_tokens": self.profile.output, "ignore_eos": True, "temperature": 0.0},
            }
        ).encode()

    async def request(self, session: aiohttp.ClientSession) -> None:
        """Send one request and follow it to its end."""
        body = self._body()
        trace = Trace(sent=time.perf_counter(), prompt_tokens=self.profile.input)
        self.traces.append(trace)
        try:
            trace.error = await self._follow(session, body, trace)
        except TimeoutError:
            trace.error = f"no token for {self.profile.timeout:.0f} s after {trace.tokens[-1] if trace.tokens else 0}"
        except OSError as error:
            trace.error = f"connection: {error}"
        except Exception as error:
            import aiohttp

            if not isinstance(error, aiohttp.ClientError):
                raise
            trace.error = f"connection: {type(error).__name__}: {error}"
        trace.ended = time.perf_counter()
        self._account(trace)

    async def _follow(self, session: aiohttp.ClientSession, body: bytes, trace: Trace) -> str | None:
        times, tokens, tail = trace.times, trace.tokens, b""
        async with session.post(self.url, data=body, headers=self.headers) as response:
            if response.status != 200:
                text = (await response.text(errors="replace")).strip()[:200]
                return f"HTTP {response.status}: {text}"
            async for piece in response.content.iter_any():
                now = time.perf_counter()
                data = tail + piece if tail else piece
                end = data.rfind(b"\n")
                at = data.rfind(_MARK, 0, end)
                if at >= 0:
                    found = _COMPLETED.match(data, at)
                    count = int(found.group(1)) if found else 0
                    if count and (not tokens or count > tokens[-1]):
                        times.append(now)
                        tokens.append(count)
                # Only an unfinished last event is kept: a stream with the whole text in every event grows fast.
                cut = data.rfind(b"\n\n", max(0, end - 1))
                tail = b"" if cut == len(data) - 2 else data[cut + 2 if cut >= 0 else 0 :]
                last = data
        received = tokens[-1] if tokens else 0
        if received != self.profile.output:
            problem = re.search(rb'"error": ?\{?.{0,200}', last) if received == 0 else None
            detail = f" ({problem.group().decode(errors='replace')})" if problem else ""
            return f"{received} of {self.profile.output} tokens{detail}"
        return None

    def _account(self, trace: Trace) -> None:
        self.ended += 1
        if trace.error is not None:
            self.failures.append(trace.error)
            # More failures than one window holds: the load will not come right, so do not wait for its end.
            if len(self.failures) >= max(3, self.profile.window_requests // 4):
                self.finished.set()
            return
        done = self.ended - self.profile.warmup_requests
        if done >= 0 and done % self.profile.window_requests == 0 and not self.finished.is_set():
            if not self.boundaries:
                self.cpu[0] = time.process_time()
            self.boundaries.append(trace.ended or time.perf_counter())
            if len(self.boundaries) > self.profile.windows:
                self.cpu[1] = time.process_time()
                self.finished.set()

    async def _closed(self, session: aiohttp.ClientSession) -> None:
        while True:
            await self.request(session)

    async def _open(self, session: aiohttp.ClientSession, tasks: set[asyncio.Task[None]]) -> None:
        slots = asyncio.Semaphore(self.profile.concurrency) if self.profile.concurrency else None
        due = time.perf_counter()
        while True:
            due += self.random.expovariate(self.profile.rate or 1.0)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            if slots:
                await slots.acquire()
            task = asyncio.create_task(self.request(session))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            if slots:
                task.add_done_callback(lambda _: slots.release())

    async def run(self, alive: Callable[[], str | None]) -> None:
        """Load until the last window closed, too many requests failed, or `alive` says what died."""
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_read=self.profile.timeout, sock_connect=30)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as session:
            tasks: set[asyncio.Task[None]] = set()
            if self.profile.rate is None:
                for _ in range(self.profile.concurrency):
                    tasks.add(asyncio.create_task(self._closed(session)))
            else:
                tasks.add(asyncio.create_task(self._open(session, tasks)))
            waiter = asyncio.create_task(self.finished.wait())
            try:
                while not waiter.done():
                    done, _ = await asyncio.wait({waiter, *tasks}, timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
                    for task in done - {waiter}:
                        task.result()
                    death = alive()
                    if death:
                        self.failures.append(death)
                        return
            finally:
                for task in (*tasks, waiter):
                    task.cancel()
                await asyncio.gather(*tasks, waiter, return_exceptions=True)


def run_load(
    url: str,
    profile: LoadProfile,
    *,
    api_key: str | None = None,
    vocabulary: int = 32_000,
    seed: int = 0,
    alive: Callable[[], str | None] = lambda: None,
) -> LoadResult:
    """Run `profile` against the server at `url` and return its windows.

    `alive` is asked twice a second and returns what died, or None. Raises LoadFailed if any request failed.
    """
    load = _Load(url, api_key, profile, vocabulary, seed)
    begun = time.perf_counter()
    asyncio.run(load.run(alive))
    if load.failures:
        raise LoadFailed(profile, load.failures, len(load.traces))
    bounds = load.boundaries
    completed = sum(trace.ended is not None for trace in load.traces)
    return LoadResult(
        profile=profile,
        windows=[metrics_of(load.traces, begin, end) for begin, end in itertools.pairwise(bounds)],
        sent=len(load.traces),
        completed=completed,
        cancelled=len(load.traces) - completed,
        client_cpu=(load.cpu[1] - load.cpu[0]) / (bounds[-1] - bounds[0]),
        seconds=time.perf_counter() - begun,
    )
