"""The load client: streams from SGLang's `/generate` over many connections and accounts for every request.

A short or empty answer, an error or a stall is a failure of the load, never a faster run. The windows lie in the
steady state: the first begins when every warm-up request has ended, and the load goes on after the last.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_gpuserve.errors import GpuserveError
from pytest_gpuserve.measure.post import LOOK, connect, headers_of
from pytest_gpuserve.measure.stream import TokenStream
from pytest_gpuserve.measure.window import Trace, metrics_of
from pytest_gpuserve.model.words import number

if TYPE_CHECKING:
    from collections.abc import Callable

    import aiohttp

    from pytest_gpuserve.measure.profile import LoadProfile

__all__ = ["LoadFailed", "LoadResult", "run_load"]

# Seconds that requests under way have, once another failed: whether they fail too is worth knowing, not worth a wait.
_GRACE = 5.0
# Seconds: a stream that is quiet for less when the load ends is only between two tokens.
_QUIET = 1.0
# From this share of requests on that had to wait for a stream, an open loop's rate was not what is recorded.
_HELD = 0.1
# An open loop whose streams are all taken, and that is this many times slower than its rate, warms up no longer.
_TOO_SLOW = 4
_LEAST_WARMUP = 32
# Ids below are control and byte tokens in most vocabularies: some servers treat them specially.
_FIRST_WORD = 259


class LoadFailed(GpuserveError):
    """Some requests did not give what was asked. `failures` are their errors, one text a request.

    Of the `sent` ones, `running` had not ended when the load was given up. `died` is what `alive` said of the server,
    None while it lived.
    """

    def __init__(self, profile: LoadProfile, failures: list[str], sent: int, running: int, died: str | None) -> None:
        self.failures = failures
        self.died = died
        if died is not None:
            super().__init__(f"load {profile.name}: the server ended after {sent} requests were sent: {died}")
            return
        distinct = list(dict.fromkeys(failures))
        more = f"; and {number(len(distinct) - 3, 'other error')}" if len(distinct) > 3 else ""
        super().__init__(
            f"load {profile.name}: {len(failures)} of {sent} requests failed ({running} had not ended): "
            f"{'; '.join(distinct[:3])}{more}. "
            "Its figures are not used: answers that are missing or short are not throughput."
        )


@dataclass(slots=True, kw_only=True)
class LoadResult:
    """What a load measured. `windows` has one {metric: value} a window; `begin` and `end` are its `perf_counter` times.

    `sent` = `completed` + `cancelled` (what still ran when the last window closed). `client_cpu` is the share of one
    core that the client used in the windows: near 1, the client and not the server was measured. `invalid` says why
    the figures are not those of the profile (an open loop whose rate was not reached), or is None.
    """

    profile: LoadProfile
    windows: list[dict[str, float]] = field(default_factory=list)
    sent: int = 0
    completed: int = 0
    cancelled: int = 0
    client_cpu: float = 0.0
    begin: float = 0.0
    end: float = 0.0
    invalid: str | None = None

    def samples(self, metric: str) -> list[float]:
        """One value a window that has it."""
        return [window[metric] for window in self.windows if metric in window]


class _Load:
    def __init__(self, url: str, api_key: str | None, profile: LoadProfile, vocabulary: int, seed: int | None) -> None:
        self.url = f"{url}/generate"
        self.headers = headers_of(api_key)
        self.profile = profile
        self.ids = range(min(_FIRST_WORD, vocabulary // 2), vocabulary)
        self.random = random.Random(seed)
        self.prefix = random.Random(f"prefix of {profile.name}").choices(self.ids, k=profile.prefix)
        self.traces: list[Trace] = []
        self.failures: list[str] = []
        self.died: str | None = None
        self.finished = asyncio.Event()
        self.bounds: list[float] = []
        self.cpu: list[float] = []
        # Under way, by their place in `traces`: the oldest first.
        self.running: dict[int, Trace] = {}
        self._peak = 0
        self._warming = 0
        self._warm = False
        # Of the requests since the first window began: all, and those that had to wait for a stream.
        self._sent = 0
        self._held = 0
        self._given_up: float | None = None
        self._ended = 0
        self._heard = 0.0
        self._failed: float | None = None

    def body(self) -> bytes:
        fresh = self.random.choices(self.ids, k=self.profile.input - self.profile.prefix)
        sampling = {"max_new_tokens": self.profile.output, "ignore_eos": True, "temperature": 0.0}
        return json.dumps({"input_ids": self.prefix + fresh, "stream": True, "sampling_params": sampling}).encode()

    @property
    def warming(self) -> bool:
        """True while requests are sent that count for nothing: twice as many as were ever under way at once."""
        if self.bounds or self._warm:
            return False
        return len(self.traces) < max(self.profile.warmup_requests, 2 * self._peak)

    def _look_at_rate(self) -> None:
        """At a rate far out of reach, the warm-up's requests, so many as it asks for, would take minutes."""
        streams, rate = self.profile.concurrency, self.profile.rate
        least = max(4 * streams, _LEAST_WARMUP)
        if rate is not None and self._peak >= streams and len(self.traces) >= least:
            half = least // 2
            seconds = self.traces[-1].sent - self.traces[-half].sent
            self._warm = self._warm or seconds > _TOO_SLOW * half / rate

    async def request(self, session: aiohttp.ClientSession, *, held: bool = False) -> None:
        """Send one request and follow it to its end."""
        import aiohttp

        body = self.body()
        trace = Trace(time.perf_counter(), self.profile.input, warmup=self.warming, held=held)
        number = len(self.traces)
        self.traces.append(trace)
        self.running[number] = trace
        self._peak = max(self._peak, len(self.running))
        self._warming += trace.warmup
        if self.bounds:
            self._sent += 1
            self._held += held
        elif trace.warmup:
            self._look_at_rate()
        try:
            trace.error = await self._follow(session, body, trace)
        except (OSError, aiohttp.ClientError) as error:
            trace.error = f"connection: {type(error).__name__}: {error}"
        trace.ended = time.perf_counter()
        del self.running[number]
        self._account(trace)

    async def _follow(self, session: aiohttp.ClientSession, body: bytes, trace: Trace) -> str | None:
        stream = TokenStream()
        clock = time.perf_counter
        async with session.post(self.url, data=body, headers=self.headers) as response:
            if response.status != 200:
                text = (await response.text(errors="replace")).strip()[:200]
                return f"HTTP {response.status}: {text}"
            async for piece in response.content.iter_any():
                moment = clock()
                if trace.arrived(moment, stream.feed(piece)):
                    self._heard = moment
        return stream.problem(self.profile.output)

    def _account(self, trace: Trace) -> None:
        self._warming -= trace.warmup
        if trace.error is not None:
            self.failures.append(trace.error)
            self._failed = self._failed or trace.ended
        elif trace.warmup:
            if not self._warming and not self.warming:
                self._bound(trace)
        elif self.bounds:
            self._ended += 1
            if self._ended % self.profile.window_requests == 0:
                self._bound(trace)
        if self.failures and not self.running:
            self.finished.set()

    def _bound(self, trace: Trace) -> None:
        """A window ends, and the next begins, with this request's end."""
        if self._given_up is None and len(self.bounds) <= self.profile.windows and trace.ended is not None:
            self.bounds.append(trace.ended)
            self.cpu.append(time.thread_time())
        if len(self.bounds) > self.profile.windows:
            self.finished.set()

    async def _closed(self, session: aiohttp.ClientSession) -> None:
        while not self.failures and not self.finished.is_set():
            await self.request(session)

    async def _open(self, session: aiohttp.ClientSession, rate: float, tasks: set[asyncio.Task[Any]]) -> None:
        slots = asyncio.Semaphore(self.profile.concurrency)

        def over(task: asyncio.Task[Any]) -> None:
            slots.release()
            # One that failed by itself stays, for `run` to find.
            if task.cancelled() or task.exception() is None:
                tasks.discard(task)

        due = freed = time.perf_counter()
        while not self.failures and not self.finished.is_set():
            due += self.random.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            # Those too that came due while one before them waited, however many streams ended at once then.
            held = slots.locked() or due < freed
            await slots.acquire()
            if self.failures:
                return
            if held:
                freed = time.perf_counter()
                if not self.bounds:
                    # What a compile in the warm-up held up is not made up for in the windows.
                    due = freed
                elif self._hopeless(freed, overdue=(freed - due) * rate):
                    self._give_up(freed)
                    return
            task = asyncio.create_task(self.request(session, held=held))
            tasks.add(task)
            task.add_done_callback(over)

    def _hopeless(self, now: float, *, overdue: float) -> bool:
        """True if more requests will have waited for a stream than may, whatever the server does from now on.

        About `overdue` are waiting already. Asked only when one of them got its stream: a server that answers nothing
        any more is a stall. Not before all windows should have been over, so that the rate that is told is a rate.
        """
        profile = self.profile
        rate, planned = profile.rate, profile.windows * profile.window_requests
        if rate is None or now - self.bounds[0] < planned / rate:
            return False
        # Half of them, as they come at random; and no more than the windows are sure to send.
        waiting = min(overdue / 2, planned - profile.concurrency - self._sent)
        return self._held + max(waiting, 0) >= _HELD * (planned + profile.concurrency)

    def _give_up(self, now: float) -> None:
        """End with the whole windows that there are, or with the one that is cut short now: it counts for nothing."""
        self._given_up = now
        if len(self.bounds) == 1:
            self.bounds.append(now)
            self.cpu.append(time.thread_time())
        self.finished.set()

    @property
    def until(self) -> float:
        """When the load ended: with its last window, or when it was given up."""
        return self._given_up or self.bounds[-1]

    async def run(self, alive: Callable[[], str | None]) -> None:
        """Load until the last window closed, a request failed or was forgotten, or `alive` says what died; or until an
        open loop's rate is out of reach for certain.

        Any failure makes the figures useless, so none is sent after it; those under way have a few seconds to end.
        """
        async with connect() as session:
            tasks: set[asyncio.Task[Any]] = set()
            if self.profile.rate is None:
                tasks |= {asyncio.create_task(self._closed(session)) for _ in range(self.profile.concurrency)}
            else:
                tasks.add(asyncio.create_task(self._open(session, self.profile.rate, tasks)))
            waiter = asyncio.create_task(self.finished.wait())
            try:
                while not waiter.done() and self.died is None:
                    await asyncio.wait({waiter}, timeout=LOOK)
                    for task in [task for task in tasks if task.done()]:
                        task.result()
                    self.died = alive()
                    self._look(time.perf_counter())
            finally:
                for task in (*tasks, waiter):
                    task.cancel()
                await asyncio.gather(*tasks, waiter, return_exceptions=True)

    def _look(self, now: float) -> None:
        if self._failed is not None:
            if now - self._failed >= _GRACE:
                self.finished.set()
        elif not self.finished.is_set() and (stalls := self.stalled(now, self.profile.timeout)):
            self.failures += stalls
            self.finished.set()

    def stalled(self, now: float, quiet: float) -> list[str]:
        """Requests under way that got no token for `quiet` s, although no queue explains it.

        A silent stream may be waiting its turn: for its first token, where the server runs fewer at a time than are
        sent, or between two, since SGLang takes a request back when KV memory is short, puts it at the queue's end and
        later goes on with it. So silence alone is a stall only if the whole load is silent for `timeout`. But who
        waits in a queue is before all that come later: a stream is forgotten when a window's worth of requests was
        sent after its last token, or after itself, and answered to the end (#5).
        """
        silent = [trace for trace in self.running.values() if now - trace.heard >= quiet]
        if not silent:
            return []
        oldest = next(iter(self.running.values())).sent
        if now - max(self._heard, oldest) < self.profile.timeout:
            answered = [trace.sent for trace in self.traces if trace.ended is not None]
            many = self.profile.window_requests
            silent = [trace for trace in silent if len(answered) >= many and trace.heard < answered[-many]]
        return [
            f"stalled: no token for {now - trace.heard:.0f} s after {trace.tokens[-1] if trace.tokens else 0} tokens"
            for trace in silent
        ]

    def result(self) -> LoadResult:
        bounds = self.bounds
        completed = sum(trace.ended is not None for trace in self.traces)
        return LoadResult(
            profile=self.profile,
            windows=[metrics_of(self.traces, begin, end) for begin, end in itertools.pairwise(bounds)],
            sent=len(self.traces),
            completed=completed,
            cancelled=len(self.traces) - completed,
            client_cpu=(self.cpu[-1] - self.cpu[0]) / (bounds[-1] - bounds[0]),
            begin=bounds[0],
            end=bounds[-1],
            invalid=self._not_the_rate(),
        )

    def _not_the_rate(self) -> str | None:
        rate, begin, end = self.profile.rate, self.bounds[0], self.until
        sent = [trace for trace in self.traces if begin < trace.sent <= end]
        held = sum(trace.held for trace in sent)
        if rate is None or (self._given_up is None and (not held or held < _HELD * len(sent))):
            return None
        after = f" (given up after {end - begin:.0f} s)" if self._given_up is not None else ""
        return (
            f"the rate was not reached: {len(sent) / (end - begin):.3g} of {rate:g} requests a second were sent, since "
            f"all {self.profile.concurrency} streams (concurrency) were taken{after}: raise the one or lower the other"
        )


def run_load(
    url: str,
    profile: LoadProfile,
    *,
    api_key: str | None = None,
    vocabulary: int = 32_000,
    seed: int | None = None,
    alive: Callable[[], str | None] = lambda: None,
) -> LoadResult:
    """Run `profile` against the server at `url` and return its windows. Blocks; needs a thread without a running loop.

    Prompts are ids below `vocabulary`, new in every call unless `seed` is given. `alive` is asked twice a second and
    returns what died, or None. Raises LoadFailed if any request failed or the server died.
    """
    load = _Load(url, api_key, profile, vocabulary, seed)
    asyncio.run(load.run(alive))
    if not load.failures and load.died is None:
        load.failures += load.stalled(load.until, _QUIET)
    if load.failures or load.died is not None:
        raise LoadFailed(profile, load.failures, len(load.traces), len(load.running), load.died)
    return load.result()
