"""Requests inside the server: generation, the prefix cache, the queue, the counters."""

from __future__ import annotations

import time
import uuid
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_gpuserve.model.phase import Phase
from pytest_gpuserve.sim.text import EOS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpuserve.sim.answer import Answer
    from pytest_gpuserve.sim.behaviour import Behaviour
    from pytest_gpuserve.sim.clock import TokenClock
    from pytest_gpuserve.sim.config import Config
    from pytest_gpuserve.sim.logs import Log
    from pytest_gpuserve.sim.ring import Ring
    from pytest_gpuserve.sim.text import Model

__all__ = ["Engine", "Generation", "Want"]

_BURST = 256  # tokens in one write, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """What one prompt asks for. `logprob_start` -1: no logprobs of the prompt; `top` alternatives a position."""

    prompt: list[int]
    max_new_tokens: int
    stream: bool = False
    logprobs: bool = False
    logprob_start: int = -1
    top: int = 0
    text_in_logprobs: bool = False
    rid: str = field(default_factory=lambda: uuid.uuid4().hex)


class Generation:
    """One prompt being answered; the token clock wakes it."""

    def __init__(self, engine: Engine, want: Want) -> None:
        model = engine.model
        self.want = want
        self.engine = engine
        self.model = model
        self.answer: Answer | None = None
        self.scratch: Any = None
        self.ids: list[int] = []
        self.finish: dict[str, Any] | None = None
        self.output_logprobs: list[list[Any]] = []
        self.output_top: list[list[list[Any]]] = []
        self.received = time.time()
        self.first: float | None = None
        self.finished: float | None = None
        states = model.states(want.prompt)
        self.cached = engine.cached(states, want)
        self._state = states[-1] if states else 0
        self.input_logprobs, self.input_top = self._prompt_logprobs(states)
        self.total, self._reason = self._plan(want.max_new_tokens)
        self.step = 1 if want.stream else max(1, self.total)

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.want.prompt)

    def _plan(self, wanted: int) -> tuple[int, dict[str, Any]]:
        stop = {"type": "stop", "matched": EOS}
        if self.model.output == "empty":
            return 1, stop
        if self.model.output == "short":
            return max(1, wanted // 2), stop
        return wanted, {"type": "length", "length": wanted}

    def emit(self, count: int) -> int:
        """The clock's call: `count` tokens are due."""
        answer = self.answer
        if answer is None or count <= 0:
            return 0
        if not self.want.stream:
            for _ in range(self.total):
                self._token()
            self._end()
            self._leave()
            return self.total
        if not answer.writable:
            return 0
        count = min(count, _BURST)
        events = []
        for _ in range(count):
            self._token()
            if len(self.ids) >= self.total:
                self._end()
            events.append(answer.event(self))
        answer.send(b"".join(events))
        if self.finish is not None:
            self._leave()
        return count

    def abort(self, message: str = "Abort in waiting queue") -> None:
        """Ends it now, with what there is."""
        self._reason = {"type": "abort", "message": message}
        self.close()

    def close(self) -> None:
        """Ends it with the tokens it has: an abort, or a request for none."""
        self._end()
        if self.answer is not None and self.want.stream:
            self.answer.send(self.answer.event(self))
        self._leave()

    def _end(self) -> None:
        self.finish = self._reason
        self.finished = time.time()

    def _leave(self) -> None:
        self.engine.left(self)
        if self.answer is not None:
            self.answer.finished()

    def _token(self) -> None:
        model, state = self.model, self._state
        last = len(self.ids) + 1 == self.total
        token = EOS if last and self._reason["type"] == "stop" else model.next_token(state)
        if self.first is None:
            self.first = time.time()
        self.ids.append(token)
        if self.want.logprobs:
            self.output_logprobs.append(self._entry(model.logprob(state, token, decode=True), token))
            if self.want.top:
                self.output_top.append(self._top(state, decode=True))
        self._state = model.after(state, token)
        self.engine.remember(self._state)

    def _entry(self, logprob: float | None, token: int) -> list[Any]:
        return [logprob, token, self.model.text(token) if self.want.text_in_logprobs else None]

    def _top(self, state: int, *, decode: bool) -> list[list[Any]]:
        return [self._entry(*pair) for pair in self.model.top(state, self.want.top, decode=decode)]

    def _prompt_logprobs(self, states: list[int]) -> tuple[list[list[Any]], list[Any]]:
        want = self.want
        if not want.logprobs or want.logprob_start < 0:
            return [], []
        tokens: list[list[Any]] = []
        tops: list[Any] = []
        for position in range(want.logprob_start, len(want.prompt)):
            token = want.prompt[position]
            if position == 0:
                tokens.append(self._entry(None, token))
                tops.append(None)
                continue
            # What reads the KV cache (positions behind a cached prefix) has the decode kernels' noise as well.
            decode = self.cached > 0
            tokens.append(self._entry(self.model.logprob(states[position - 1], token, decode=decode), token))
            tops.append(self._top(states[position - 1], decode=decode) if want.top else None)
        return tokens, tops if want.top else []


class Engine:
    """All requests of the server. `busy` requests are counted until their last token is out."""

    def __init__(
        self, config: Config, behaviour: Behaviour, model: Model, clock: TokenClock, ring: Ring, log: Log
    ) -> None:
        self.config = config
        self.behaviour = behaviour
        self.model = model
        self.clock = clock
        self.ring = ring
        self.log = log
        self.prompt_tokens = {False: 0, True: 0}
        self.generation_tokens = {False: 0, True: 0}
        self.requests = {False: 0, True: 0}
        self.aborted = 0
        self.cached_tokens = 0
        self._limit = int(config.args["max_running_requests"] or 2048)
        self._radix = not config.args["disable_radix_cache"]
        self._seen: set[int] = set()
        self._running: dict[Generation, None] = {}
        self._waiting: deque[Generation] = deque()
        self._asked = 0
        self._decoded = 0.0

    @property
    def busy(self) -> list[Generation]:
        """Unfinished ones, running first."""
        return [*self._running, *self._waiting]

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return len(self._running)

    @property
    def queued(self) -> int:
        """Requests that wait for a place in the batch."""
        return len(self._waiting)

    def tokens(self, *, stream: bool) -> int:
        """Generated tokens so far, those of running requests included: the counter moves with every token."""
        alive = sum(
            len(one.ids) if stream else self.clock.progress(one) for one in self._running if one.want.stream is stream
        )
        return self.generation_tokens[stream] + alive

    def cached(self, states: list[int], want: Want) -> int:
        """How many tokens of a prompt the radix cache has; remembers the prompt. The last token is always computed."""
        if not self._radix:
            return 0
        limit = len(states) - 1
        if want.logprobs and want.logprob_start >= 0:
            limit = min(limit, want.logprob_start)
        found = 0
        while found < limit and states[found] in self._seen:
            found += 1
        if len(self._seen) + len(states) > self.config.capacity:
            self._seen.clear()
        self._seen.update(states)
        page = int(self.config.args["page_size"])
        return found // page * page

    def remember(self, state: int) -> None:
        """A generated token's KV is in the cache, too."""
        if self._radix:
            self._seen.add(state)

    def flush(self) -> bool:
        """Forgets the cache; refused while requests run, as SGLang does."""
        if self._running or self._waiting:
            return False
        self._seen.clear()
        return True

    def submit(self, answer: Answer, generations: Sequence[Generation]) -> None:
        """Starts an answer's generations, or queues them. A scripted fault of the serving phases begins here."""
        self._asked += 1
        fault = self._fault()
        new = sum(one.prompt_tokens - one.cached for one in generations)
        cached = sum(one.cached for one in generations)
        self.cached_tokens += cached
        self.log.line(
            f"Prefill batch, #new-seq: {len(generations)}, #new-token: {new}, #cached-token: {cached}, token usage: "
            f"{self.usage:.2f}, #running-req: {self.running}, #queue-req: {self.queued}, #pending-token: 0, "
            f"cuda graph: {self.config.graphs}, input throughput (token/s): {new:.2f}"
        )
        for one in generations:
            one.answer = answer
        if fault == "hang":
            self._running.update(dict.fromkeys(generations))
        elif fault == "work":
            self._running.update(dict.fromkeys(generations))
            self.ring.work(lambda: self._begin(generations))
        else:
            self._waiting.extend(generations)
            self._fill()

    def _fault(self) -> str | None:
        """A fault of `ready` strikes the first request; one of `serving` the second: the first proves readiness."""
        behaviour, reached = self.behaviour, {Phase.READY: 1, Phase.SERVING: 2}
        if behaviour.hang in reached and self._asked >= reached[behaviour.hang]:
            return "hang"
        for fault in (behaviour.crash, behaviour.compile):
            if fault is not None and self._asked == reached.get(fault.phase):
                return "work"
        return None

    @property
    def usage(self) -> float:
        """Share of the KV cache in use."""
        used = sum(one.prompt_tokens + len(one.ids) for one in self._running)
        return min(1.0, used / self.config.capacity)

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._limit:
            one = self._waiting.popleft()
            self._running[one] = None
            self._begin([one])

    def _begin(self, generations: Sequence[Generation]) -> None:
        for one in generations:
            if one in self._running:
                if one.total:
                    self.clock.start(one)
                else:
                    one.close()

    def left(self, one: Generation) -> None:
        """A generation ended by itself or by an abort."""
        stream = one.want.stream
        self.prompt_tokens[stream] += one.prompt_tokens
        self.generation_tokens[stream] += len(one.ids)
        self.requests[stream] += 1
        if one.finish is not None and one.finish["type"] == "abort":
            self.aborted += 1
        self.forget(one)

    def forget(self, one: Generation) -> None:
        """Takes it out; its client may be gone."""
        self.clock.stop(one)
        self._running.pop(one, None)
        if one in self._waiting:
            self._waiting.remove(one)
        self._fill()

    def abort(self, rid: str | None) -> int:
        """Ends the requests whose id begins with `rid`, or all; how many."""
        chosen = [one for one in self.busy if rid is None or one.want.rid.startswith(rid)]
        for one in chosen:
            one.abort()
        return len(chosen)

    def report(self) -> None:
        """The line about the decode batch, once a second while tokens come."""
        if self.clock.running and self.clock.throughput:
            tokens = sum(one.prompt_tokens + len(one.ids) for one in self._running)
            self.log.line(
                f"Decode batch, #running-req: {self.running}, #token: {tokens}, token usage: {self.usage:.2f}, "
                f"cuda graph: {self.config.graphs}, gen throughput (token/s): {self.clock.throughput:.2f}, "
                f"#queue-req: {self.queued}"
            )
