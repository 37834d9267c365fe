"""Which lines of a log say why the server died: first cause, not last echo. Pure.

Several processes write into one log. Their tracebacks may be interleaved line by line; torch prefixes the lines of a
rank (`[rank3]: `), SGLang prefixes the first one (`[… TP1] Scheduler hit an exception: Traceback`). After one rank dies
the others fail at it (connections closed, end of file), main is told by a signal, and the last line blames an
out-of-memory that never was. So: exceptions that SGLang itself calls fatal come first, then crashes of native code,
then other tracebacks; an echo is the cause only if there is nothing else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Cause", "find_causes", "first_cause", "plain", "unstamped"]

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_RANK = re.compile(r"^\[rank(\d+)\]:\s?")
_STAMP = re.compile(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d([^\]]*)\] ?")
_BEGIN = "Traceback (most recent call last)"
_FILE = re.compile(r'^\s+File "([^"]+)", line \d+')
_EXCEPTION = re.compile(r"^([A-Za-z_]\w*(?:\.\w+)*)(?:: (.*)|:?)$")
_HIT = re.compile(r"(\w+?)(?:Manager)? hit an exception")
_LEVELS = frozenset({"INFO", "WARNING", "ERROR", "DEBUG", "CRITICAL", "FATAL", "Traceback", "usage"})
_ARGPARSE = re.compile(r"^[\w.\- ]+: error: (.*)$")
_DIED = re.compile(
    r"Subprocess (?P<name>\S+) \(pid=(?P<pid>\d+)\) crashed with exit code (?P<code>-?\d+)|"
    r"(?P<rank>Rank \d+ scheduler) died during initialization \(exit code: (?P<status>-?\d+)\)"
)
_NATIVE = (
    re.compile(r"^\s*what\(\):\s+(.*)$"),
    re.compile(r"^(?:\[[^\]]*\] )?(CUDA [Ee]rror[ :(].*)$"),
    re.compile(r"^(Fatal Python error: .*)$"),
    re.compile(r"^(nvcc fatal\s*:.*|ptxas fatal\s*:.*)$"),
    re.compile(r"^(Segmentation fault.*|Bus error.*)$"),
)
_NATIVE_HINT = re.compile(r"what\(\):|CUDA [Ee]rror|Fatal Python|fatal\s*:|Segmentation|Bus error")
_NCCL = re.compile(r"NCCL WARN (.*)$")
_WATCHDOG = re.compile(r"(\w[\w ]*watchdog timeout) \(")

_ECHO_TYPES = frozenset(
    {
        "EOFError",
        "BrokenPipeError",
        "ConnectionResetError",
        "ConnectionRefusedError",
        "ConnectionError",
        "KeyboardInterrupt",
        "SystemExit",
        "CancelledError",
        "ZMQError",
        "RemoteDisconnected",
        "ReadTimeout",
        "ReadTimeoutError",
        "ProtocolError",
    }
)
_ECHO = re.compile(
    r"died during initialization|[Cc]onnection (?:closed|reset|refused)|closed by peer|remote process exited|"
    r"ncclRemoteError|Broken pipe|Watchdog caught collective operation timeout|recvValue failed|"
    r"[Ss]erver disconnected|cannot schedule new futures|Timed out (?:waiting|after)|wait timeout after|"
    r"Socket Timeout|another rank|peer (?:has )?died|"
    # abort() was called by whatever threw: its `what()` stands before.
    r"Fatal Python error: Aborted"
)
# An exception that only says that something else failed: what was raised from it says more.
_VAGUE = frozenset({"CalledProcessError", "KeyError", "AttributeError", "StopIteration", "IndexError", "TypeError"})
_MESSAGE_LINES = 12


@dataclass(slots=True)
class Cause:
    """One candidate. `line` is what a person should read, `block` what stands around it in the log.

    `kind` is `fatal` (SGLang says so), `native`, `traceback`, `argparse`, `watchdog`, `nccl` or `died` (of a process:
    `line` names it). `who` is the process, such as `scheduler TP1`, empty if unknown. `files` are the traceback's,
    outermost first. `at` is the index of its line.
    """

    kind: str
    line: str
    at: int
    who: str = ""
    type: str = ""
    message: str = ""
    files: tuple[str, ...] = ()
    block: tuple[str, ...] = ()

    @property
    def echo(self) -> bool:
        """True if this only says that somebody else died."""
        return self.kind == "died" or self.type.rpartition(".")[2] in _ECHO_TYPES or bool(_ECHO.search(self.line))


@dataclass(slots=True)
class _Raised:
    type: str
    message: list[str]
    at: int
    files: tuple[str, ...]
    link: str  # to the one before: "", "cause" or "context"

    @property
    def line(self) -> str:
        first = next((part.strip() for part in self.message if part.strip()), "")
        return f"{self.type}: {first}" if first else self.type


@dataclass(slots=True)
class _Trace:
    who: str
    fatal: bool
    voice: str
    raised: list[_Raised] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    link: str = ""
    open: bool = True


def plain(line: str) -> str:
    """Without colours, carriage returns and trailing blanks."""
    return (_ANSI.sub("", line) if "\x1b" in line else line).rstrip().rpartition("\r")[2]


def unstamped(line: str) -> str:
    """`plain`, and without SGLang's time and rank in front."""
    return _STAMP.sub("", plain(line))


def find_causes(lines: Sequence[str]) -> list[Cause]:
    """Every candidate, in the log's order."""
    reader = _Reader()
    for at, raw in enumerate(lines):
        if len(raw) < 20_000:  # longer is the dump of all arguments
            reader.read(plain(raw), at)
    found = [*reader.found, *(_cause_of(trace) for trace in reader.traces if trace.raised)]
    return sorted(found, key=lambda cause: cause.at)


def first_cause(causes: Sequence[Cause], *, alive_at: int = -1) -> Cause | None:
    """The cause among the candidates. `alive_at` is the last line that shows the server getting on: a traceback
    before it, unless SGLang called it fatal, was only reported and survived.
    """
    for kind in ("fatal", "native", "traceback", "watchdog"):
        for cause in causes:
            if cause.kind == kind and not cause.echo and (kind == "fatal" or cause.at > alive_at):
                return cause
    for kinds in (("nccl",), ("fatal", "native", "traceback"), ("died",)):
        for cause in causes:
            if cause.kind in kinds and cause.at > alive_at:
                return cause
    return None


class _Reader:
    def __init__(self) -> None:
        self.found: list[Cause] = []
        self.traces: list[_Trace] = []

    def read(self, line: str, at: int) -> None:
        voice = ""
        if line.startswith("[rank") and (rank := _RANK.match(line)):
            voice, line = f"rank {rank[1]}", line[rank.end() :]
        if _BEGIN in line:
            self._begin(line, voice)
            return
        if self.traces and self._continue(line, voice, at):
            return
        self._other(line, at)

    def _begin(self, line: str, voice: str) -> None:
        for trace in reversed(self.traces):
            if trace.voice == voice and trace.link and not trace.open:
                trace.open, trace.files = True, []
                return
        hit = _HIT.search(line)
        stamp = _STAMP.match(line)
        rank = stamp[1].strip() if stamp else ""
        name = hit[1].lower() if hit else ""
        who = " ".join(part for part in (name or ("process" if rank else ""), rank or voice) if part)
        self.traces.append(_Trace(who=who, fatal=hit is not None, voice=voice))

    def _continue(self, line: str, voice: str, at: int) -> bool:
        """Takes the line in if it belongs to a traceback."""
        if line.startswith((" ", "\t")):
            trace = self._newest(voice, opened=True)
            if trace and (place := _FILE.match(line)):
                trace.files.append(place[1])
            return trace is not None and "what():" not in line
        if line.startswith("The above exception was the direct cause"):
            return self._link(voice, "cause")
        if line.startswith("During handling of the above exception"):
            return self._link(voice, "context")
        if _STAMP.match(line):
            self._close_messages(voice)
            return False
        trace = self._oldest(voice)
        match = _EXCEPTION.match(line)
        if trace and match and match[1].rpartition(".")[2] not in _LEVELS:
            trace.raised.append(_Raised(match[1], [match[2] or ""], at, tuple(trace.files), trace.link))
            trace.open, trace.link = False, ""
            return True
        return self._message(line, voice, at)

    def _message(self, line: str, voice: str, at: int) -> bool:
        trace = self._newest(voice, opened=False)
        if trace is None or not trace.raised or trace.link:
            return False
        last = trace.raised[-1]
        if len(last.message) >= _MESSAGE_LINES or at - last.at != len(last.message):
            return False
        last.message.append(line)
        return bool(line) and _NATIVE_HINT.search(line) is None and "error: " not in line

    def _close_messages(self, voice: str) -> None:
        trace = self._newest(voice, opened=False)
        if trace and trace.raised:
            trace.raised[-1].message.extend([""] * _MESSAGE_LINES)

    def _link(self, voice: str, link: str) -> bool:
        trace = self._newest(voice, opened=False)
        if trace:
            trace.link = link
        return trace is not None

    def _newest(self, voice: str, *, opened: bool) -> _Trace | None:
        return next((trace for trace in reversed(self.traces) if trace.voice == voice and trace.open is opened), None)

    def _oldest(self, voice: str) -> _Trace | None:
        """Of several open tracebacks the first one is the first to end: nothing else tells them apart."""
        return next((trace for trace in self.traces if trace.voice == voice and trace.open and trace.files), None)

    def _other(self, line: str, at: int) -> None:
        if "error: " in line and (match := _ARGPARSE.match(line)):
            self.found.append(Cause("argparse", match[1], at, block=(line,)))
        elif "NCCL WARN" in line and (match := _NCCL.search(line)):
            self.found.append(Cause("nccl", match[1], at, block=(line,)))
        elif ended := _ended(line):
            self.found.append(Cause("died", ended, at, block=(line,)))
        elif "watchdog timeout" in line and (match := _WATCHDOG.search(line)):
            self.found.append(Cause("watchdog", match[1], at, block=(line,)))
        elif _NATIVE_HINT.search(line):
            match = next((found for pattern in _NATIVE if (found := pattern.match(line))), None)
            if match:
                self.found.append(Cause("native", match[1].strip(), at, block=(line,)))


def _ended(line: str) -> str | None:
    """The death of a process that this line reports, without SGLang's guess at the reason."""
    match = _DIED.search(line) if "crashed with" in line or "died during" in line else None
    if match is None:
        return None
    code = int(match["code"] or match["status"])
    who = f"{match['name']} (pid {match['pid']})" if match["name"] else match["rank"]
    return f"{who} died with {f'signal {-code}' if code < 0 else f'exit status {code}'}"


def _cause_of(trace: _Trace) -> Cause:
    chosen = trace.raised[-1]
    for earlier, later in zip(reversed(trace.raised[:-1]), reversed(trace.raised[1:]), strict=True):
        text = " ".join(earlier.message[0].split())
        said_again = bool(text) and text in " ".join(" ".join(later.message).split())
        caused = later.link == "cause" and earlier.type.rpartition(".")[2] not in _VAGUE
        if not (said_again or caused):
            break
        chosen = earlier
    ended = _ended(chosen.line)
    block = [line for raised in trace.raised for line in (raised.line, *raised.message[1:]) if line.strip()]
    return Cause(
        kind="died" if ended else "fatal" if trace.fatal else "traceback",
        line=ended or chosen.line,
        at=trace.raised[0].at,
        who=trace.who,
        type=chosen.type,
        message=next((part for part in chosen.message if part.strip()), ""),
        files=tuple(file for raised in trace.raised for file in raised.files),
        block=tuple(block),
    )
