"""Is the server getting anywhere? A verdict by lack of progress (`progress`, `news`), never by the clock alone.

A phase that shows no progress for its stall limit is stalled. Waiting for a compile lock that somebody's living
compile holds (`compile_lock`) counts as compiling. While requests run only the token counter and compilers count:
vllm#41834 had health and metrics answering 200 over a wedged engine.

A state machine over samples: no I/O, the caller gives the time.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pytest_gpuserve.model.phase import STARTUP, Phase
from pytest_gpuserve.serve.news import LogNews
from pytest_gpuserve.serve.progress import Look, Signals, name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pytest_gpuserve.model.launch import Limits
    from pytest_gpuserve.serve.procs import Proc

__all__ = ["Activity", "Look", "Stall", "Status", "Watch"]

_ASK_EVERY = 5.0
_COMPILING_FOR = 5.0  # compilers come one after another, with gaps


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What one process did while nothing progressed. `cpu` is a share of one core; writes and bytes are per second."""

    pid: int
    name: str
    state: str
    wchan: str
    cpu: float
    writes: float
    written: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """The verdict, with what was seen while waiting for it. `why` is `stall`, `total` or `start-timeout`.

    `seconds` is how long the server has been in the phase, `quiet` how long without progress, `limit` what was
    exceeded; `last` names the last progress, `echo` the line that came `echoes` times since then. `utilization` is
    the highest GPU utilisation since then in percent, None if unknown. `in_flight` are the requests the server said
    it had, in the serving phase.
    """

    phase: Phase
    why: str
    seconds: float
    quiet: float
    limit: float
    last: str
    echo: str = ""
    echoes: int = 0
    utilization: int | None = None
    in_flight: int | None = None
    processes: tuple[Activity, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types, for the evidence folder."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What a `tick` event says. `last` names the last progress."""

    phase: Phase
    seconds: float
    quiet: float
    compiling: bool
    last: str
    stall: Stall | None


class Watch:
    """`line` for every log line, `enter` for every phase, `look` about once a second; `look` returns the status.

    A stall is reported at every look until something progresses. `compile_lock` names the living compile that holds a
    lock our server may be waiting for, or returns None; it is asked once half of the limit is gone, every 5 s.
    """

    def __init__(
        self,
        limits: Mapping[Phase, Limits],
        *,
        now: float,
        phase: Phase = Phase.SPAWN,
        start_timeout: float | None = None,
        compile_lock: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._limits = limits
        self._started = now
        self._start_timeout = start_timeout
        self._compile_lock = compile_lock
        self._armed = self._certain = False
        self._previous: Look | None = None
        self._compiled = self._asked = float("-inf")
        self.enter(phase, now)

    def line(self, line: str) -> None:
        """One log line; it counts at the next look."""
        self._fresh |= self._log.fresh(line)

    def enter(self, phase: Phase, now: float) -> None:
        """The server is in another phase: its own limits hold, and everything is news again."""
        self.phase = phase
        self._entered = now
        self._log = LogNews()
        self._fresh = False
        self._signals = Signals(phase, self._previous)
        self._tokens: int | None = None
        self._progress(f"it entered {phase}", now, self._previous)

    def arm(self, now: float, *, certain: bool = False) -> None:
        """From now on the serving phase is judged: requests are expected to run.

        Without `certain` the server must itself report requests (running, queued or open) for quiet to count, so that
        a test may idle. With it the caller knows that requests are under way: SGLang refreshes its gauges only every
        40 decode steps, so they can read 0 over a request that hangs early.
        """
        self._armed, self._certain = True, certain
        self._progress("requests began", now, self._previous)

    def disarm(self) -> None:
        """No request is expected: an idle server is not judged."""
        self._armed = False

    def look(self, look: Look) -> Status:
        """Takes in one look and says where the server stands."""
        compiled, visibly = self._signals.compilers(look)
        if visibly:
            self._compiled = look.now
        news = self._signals.news(look)
        fresh, self._fresh = self._fresh, False
        log = "a new log line" if fresh else None
        usual = self._served(look, log) if self.phase is Phase.SERVING else log or news
        what = compiled or usual or self._lock(look.now)
        if what:
            self._progress(what, look.now, look)
        else:
            self._note(look)
        self._previous = look
        return Status(
            phase=self.phase,
            seconds=look.now - self._entered,
            quiet=look.now - self._since,
            compiling=look.now - self._compiled <= _COMPILING_FOR,
            last=self._last,
            stall=self._verdict(look),
        )

    def _progress(self, what: str, now: float, look: Look | None) -> None:
        self._last = what
        self._since = now
        self._counters = {proc.pid: (proc.cpu, proc.wchar, proc.syscw) for proc in look.procs} if look else {}
        self._utilization: int | None = None
        self._log.quieten()

    def _note(self, look: Look) -> None:
        """Keeps what the evidence will tell of the quiet time."""
        for proc in look.procs:
            self._counters.setdefault(proc.pid, (proc.cpu, proc.wchar, proc.syscw))
        known = [value for value in look.gpu_utilization.values() if value is not None]
        if known:
            self._utilization = max(*known, self._utilization or 0)

    def _served(self, look: Look, log: str | None) -> str | None:
        if not self._armed:
            return "it was idle"
        if look.load is None or look.load.tokens is None:
            # No counter: a release without metrics, or a server that does not answer any more.
            return log
        before, self._tokens = self._tokens, look.load.tokens
        if before is None or look.load.tokens != before:
            return "tokens"
        return None if self._certain or look.load.in_flight else "it was idle"

    def _lock(self, now: float) -> str | None:
        limits = self._limits.get(self.phase)
        quiet = now - self._since
        if limits is None or quiet < limits.stall / 2:
            return None
        if now - self._asked < _ASK_EVERY and quiet < limits.stall:
            return None
        self._asked = now
        holder = self._compile_lock()
        if holder is None:
            return None
        self._compiled = now
        return f"it waits for {holder}"

    def _verdict(self, look: Look) -> Stall | None:
        limits = self._limits.get(self.phase)
        if self._start_timeout is not None and self.phase in STARTUP and look.now - self._started > self._start_timeout:
            return self._stall("start-timeout", self._start_timeout, look)
        if limits is None or (self.phase is Phase.SERVING and not self._armed):
            return None
        if limits.total is not None and look.now - self._entered > limits.total:
            return self._stall("total", limits.total, look)
        if look.now - self._since >= limits.stall:
            return self._stall("stall", limits.stall, look)
        return None

    def _stall(self, why: str, limit: float, look: Look) -> Stall:
        echo = self._log.echo()
        window = max(look.now - self._since, 1e-3)
        return Stall(
            phase=self.phase,
            why=why,
            seconds=look.now - self._entered,
            quiet=look.now - self._since,
            limit=limit,
            last=self._last,
            echo=echo.line if echo else "",
            echoes=echo.times if echo else 0,
            utilization=self._utilization,
            in_flight=look.load.in_flight if look.load else None,
            processes=tuple(self._activity(proc, window) for proc in look.procs),
        )

    def _activity(self, proc: Proc, window: float) -> Activity:
        cpu, wchar, syscw = self._counters.get(proc.pid, (proc.cpu, proc.wchar, proc.syscw))
        return Activity(
            pid=proc.pid,
            name=name_of(proc),
            state=proc.state,
            wchan=proc.wchan,
            cpu=round((proc.cpu - cpu) / window, 3),
            writes=round((proc.syscw - syscw) / window, 2),
            written=round((proc.wchar - wchar) / window, 1),
        )
