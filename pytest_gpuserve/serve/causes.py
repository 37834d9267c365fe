"""Which lines of a log say why the server died: first cause, not last echo. Pure.

Several processes write into one log. Their tracebacks may be interleaved line by line; torch prefixes the lines of a
rank (`[rank3]: `), SGLang prefixes the first one (`[… TP1] Scheduler hit an exception: Traceback`). After one rank dies
the others fail at it (connections closed, end of file), main is told by a signal, and the last line blames an
out-of-memory that never was. So: exceptions that SGLang itself calls fatal come first, then crashes of native code,
then other tracebacks; an echo is the cause only if there is nothing else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pytest_gpuserve.engine import causes as words

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Cause", "explained", "find_causes", "first_cause", "plain", "unstamped"]

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_RANK = re.compile(r"^\[rank(\d+)\]:\s?")
_STAMP = re.compile(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d([^\]]*)\] ?")
_BEGIN = "Traceback (most recent call last)"
_FILE = re.compile(r'^\s+File "([^"]+)", line \d+(?:,? in ([^\s(]+))?')
_EXCEPTION = re.compile(r"^([A-Za-z_]\w*(?:\.\w+)*)(?:: (.*)|:?)$")
_HIT = re.compile(r"(\w+?)(?:Manager)? hit an exception")
_NO_EXCEPTIONS = frozenset(
    {
        "INFO",
        "WARNING",
        "ERROR",
        "DEBUG",
        "CRITICAL",
        "FATAL",
        "Traceback",
        "usage",
        "FAILED",
        "ninja",
        "collect2",
        "sh",
    }
)
_ARGPARSE = re.compile(r"^[\w.\- ]+: error: (.*)$")
_DIED = re.compile(
    r"Subprocess (?P<name>\S+) \(pid=(?P<pid>\d+)\) crashed with exit code (?P<code>-?\d+)|"
    r"(?P<rank>Rank \d+ scheduler) died during initialization \(exit code: (?P<status>-?\d+)\)"
)
_NCCL = re.compile(r"NCCL WARN (.*)$")

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
_ASSERTED = "device-side assert: "
_MESSAGE_LINES = 12
# Where a compiler's words are looked for, in lines below and above the error that only says that a build failed; and
# Python's frames below the last words of native code.
_BELOW, _ABOVE, _FRAMES_BELOW = 600, 200, 400
_BOILERPLATE = re.compile(
    r"^(?:CUDA kernel errors might|Search for `|For debugging consider|Compile with `|Possible solutions|"
    r"Exception raised from|Device-side assertions|\d+\. )"
)


@dataclass(slots=True)
class Cause:
    """One candidate. `line` is what a person should read, `block` what stands around it in the log.

    `kind` is `fatal` (SGLang says so), `native`, `traceback`, `argparse`, `watchdog`, `collective` (one that did not
    end: `message` names it), `nccl`, `heap` (the C library finds it broken) or `died` (of a process: `line` names it).
    `who` is the process, such as `scheduler TP1`, empty if unknown. `files` are the traceback's, outermost first. `at`
    is the index of its line.

    Where the error that was raised only says that something failed, it is the `heading`, and `line` the reason.
    `seconds` are a watchdog's. `killed`: a compiler was ended by SIGKILL.
    """

    kind: str
    line: str
    at: int
    who: str = ""
    type: str = ""
    message: str = ""
    files: tuple[str, ...] = ()
    block: tuple[str, ...] = ()
    frames: tuple[tuple[str, str], ...] = ()
    heading: str = ""
    seconds: float = 0.0
    killed: bool = False

    @property
    def sentence(self) -> str:
        """What a person should read: the error that was raised, and its reason where that stands elsewhere."""
        return f"{self.heading}: {self.line}" if self.heading else self.line

    @property
    def echo(self) -> bool:
        """True if this only says that somebody else died."""
        return (
            self.kind in ("died", "collective")
            or self.type.rpartition(".")[2] in _ECHO_TYPES
            or bool(_ECHO.search(self.line))
        )


@dataclass(slots=True)
class _Raised:
    type: str
    message: list[str]
    at: int
    count: int  # of the lines read so far: an answer to whether the next one follows at once
    frames: tuple[tuple[str, str], ...]
    link: str  # to the one before: "", "cause" or "context"

    @property
    def line(self) -> str:
        """The type and the message's first line, with the second one where the first only announces it."""
        parts = [part.strip() for part in self.message if part.strip()]
        first = " ".join(parts[:2]) if parts and parts[0].endswith(":") else "".join(parts[:1])
        return f"{self.type}: {first}" if first else self.type


@dataclass(slots=True)
class _Trace:
    who: str
    fatal: bool
    voice: str
    raised: list[_Raised] = field(default_factory=list)
    frames: list[tuple[str, str]] = field(default_factory=list)
    link: str = ""
    open: bool = True


def plain(line: str) -> str:
    """Without colours, carriage returns and trailing blanks."""
    return (_ANSI.sub("", line) if "\x1b" in line else line).rstrip().rpartition("\r")[2]


def unstamped(line: str) -> str:
    """`plain`, and without an open progress bar and SGLang's time and rank in front."""
    line = plain(line)
    return _STAMP.sub("", words.after_bar(line) or line)


def find_causes(lines: Sequence[str]) -> list[Cause]:
    """Every candidate, in the log's order, as the log has it: `explained` adds what stands elsewhere."""
    reader = _Reader()
    for at, text in _pieces(lines):
        reader.read(text, at)
    causes = [*reader.found, *(_cause_of(trace) for trace in reader.traces if trace.raised)]
    return sorted(causes, key=lambda cause: cause.at)


def _pieces(lines: Sequence[str]) -> Iterator[tuple[int, str]]:
    """The lines as a person reads them, with their indices: one for each carriage return, without progress bars."""
    for at, raw in enumerate(lines):
        if len(raw) >= 20_000:  # the dump of all arguments
            continue
        for piece in raw.rstrip().split("\r"):
            line = plain(piece)
            text = words.after_bar(line)
            if text or not line:
                yield at, text


def first_cause(causes: Sequence[Cause], *, alive_at: int = -1) -> Cause | None:
    """The cause among the candidates. `alive_at` is the last line that shows the server getting on: a traceback
    before it, unless SGLang called it fatal, was only reported and survived.
    """
    for kind in ("fatal", "native", "traceback", "watchdog"):
        for cause in causes:
            if cause.kind == kind and not cause.echo and (kind == "fatal" or cause.at > alive_at):
                return cause
    for kinds in (("collective",), ("nccl",), ("fatal", "native", "traceback"), ("heap",), ("died",)):
        for cause in causes:
            if cause.kind in kinds and cause.at > alive_at:
                return cause
    return None


class _Reader:
    def __init__(self) -> None:
        self.found: list[Cause] = []
        self.traces: list[_Trace] = []
        self._asserted = False  # on a device: thousands of threads may say so
        self._count = 0

    def read(self, line: str, at: int) -> None:
        self._count += 1
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
                trace.open, trace.frames = True, []
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
                trace.frames.append((place[1], place[2] or ""))
            return "what():" not in line if trace else self._message(line, voice)
        if line.startswith("The above exception was the direct cause"):
            return self._link(voice, "cause")
        if line.startswith("During handling of the above exception"):
            return self._link(voice, "context")
        if _STAMP.match(line):
            self._close_messages(voice)
            return False
        trace = self._oldest(voice)
        match = _EXCEPTION.match(line)
        if trace and match and match[1].rpartition(".")[2] not in _NO_EXCEPTIONS:
            trace.raised.append(_Raised(match[1], [match[2] or ""], at, self._count, tuple(trace.frames), trace.link))
            trace.open, trace.link = False, ""
            return True
        return self._message(line, voice)

    def _message(self, line: str, voice: str) -> bool:
        trace = self._newest(voice, opened=False)
        if trace is None or not trace.raised or trace.link:
            return False
        last = trace.raised[-1]
        if len(last.message) >= _MESSAGE_LINES or self._count - last.count != len(last.message):
            return False
        last.message.append(line)
        return bool(line) and "error: " not in line and not _stands_alone(line)

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
        return next((trace for trace in self.traces if trace.voice == voice and trace.open and trace.frames), None)

    def _other(self, line: str, at: int) -> None:
        if "error: " in line and (match := _ARGPARSE.match(line)):
            self.found.append(Cause("argparse", match[1], at, block=(line,)))
        elif "NCCL WARN" in line and (match := _NCCL.search(line)):
            self.found.append(Cause("nccl", match[1], at, block=(line,)))
        elif ended := _ended(line):
            self.found.append(Cause("died", ended, at, block=(line,)))
        elif end := words.watchdog_end(line):
            stamp = _STAMP.match(line)
            who = stamp[1].strip() if stamp else ""
            self.found.append(Cause("watchdog", end[0], at, who=who, block=(line,), seconds=end[1]))
        elif late := words.collective_timeout(line):
            self.found.append(_collective(late, line, at))
        elif assertion := words.device_assertion(line):
            if not self._asserted:
                self._asserted = True
                self.found.append(Cause("native", f"{_ASSERTED}{assertion}", at, message=assertion, block=(line,)))
        elif error := words.native_error(line):
            self.found.append(Cause("native", error, at, block=(line,)))
        elif error := words.heap_error(line):
            self.found.append(Cause("heap", error, at, block=(line,)))


def _stands_alone(line: str) -> bool:
    """True if the line is a candidate by itself, even right below an exception's."""
    return bool(
        words.native_error(line) or words.collective_timeout(line) or words.device_assertion(line) or _ended(line)
    )


def _collective(late: words.Collective, line: str, at: int) -> Cause:
    return Cause(
        "collective",
        f"the collective {late.name or 'operation'} did not end",
        at,
        who=f"rank {late.rank}" if late.rank else "",
        message=late.name,
        block=(line,),
        seconds=late.seconds,
    )


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
    late = words.collective_timeout(chosen.line)
    if late:
        return _collective(late, chosen.line, trace.raised[0].at)
    ended = _ended(chosen.line)
    block = [line for raised in trace.raised for line in (raised.line, *raised.message[1:]) if line.strip()]
    return Cause(
        kind="died" if ended else "fatal" if trace.fatal else "traceback",
        line=ended or chosen.line,
        at=trace.raised[0].at,
        who=trace.who,
        type=chosen.type,
        message=next((part for part in chosen.message if part.strip()), ""),
        files=tuple(file for raised in trace.raised for file, _ in raised.frames),
        block=tuple(block),
        frames=chosen.frames,
    )


# ---- what an error does not say itself ---------------------------------------------------------------------------


def explained(cause: Cause, causes: Sequence[Cause], lines: Sequence[str]) -> Cause:
    """The cause with the reason that stands elsewhere in the log: a compiler's, an assertion's, or the place."""
    if cause.kind not in ("fatal", "traceback", "native"):
        return cause
    if words.is_build_heading(cause.line):
        return _built(cause, lines)
    assertion = next((found.message for found in causes if found.line.startswith(_ASSERTED)), "")
    if assertion and assertion not in cause.line and words.follows_from_assertion(cause.line):
        return _with_line(cause, f"{cause.line}: {assertion}")
    if last := _last_error(cause):
        return _with_line(cause, f"{cause.line} (last error: {last})")
    if words.says_nothing(cause.message if cause.type else cause.line) or _SEGFAULT.search(cause.line):
        frames = cause.frames or _frames_below(lines[cause.at : cause.at + _FRAMES_BELOW])
        place = words.frame_name(frames, cause.line) or _second_line(cause)
        return _with_line(cause, f"{words.without_place(cause.line)} (in {place})" if place else cause.line)
    return cause


_SEGFAULT = re.compile(r"Segmentation fault|[Ss]egfault|Bus error|Illegal instruction|Floating point exception")


def _last_error(cause: Cause) -> str:
    """What NCCL names below its exception: `Cuda failure 1 'invalid argument'`."""
    lines = [line.strip() for line in cause.block]
    return lines[lines.index("Last error:") + 1] if "Last error:" in lines[:-1] else ""


def _with_line(cause: Cause, line: str) -> Cause:
    return cause if line == cause.line else replace(cause, line=line, block=(line, *cause.block))


def _built(cause: Cause, lines: Sequence[str]) -> Cause:
    below = [plain(line) for line in lines[cause.at : cause.at + _BELOW]]
    above = [plain(line) for line in lines[max(0, cause.at - _ABOVE) : cause.at]]
    reason = words.build_reason(cause.line, below) or words.build_reason(cause.line, above)
    error = f"{cause.type}: {cause.message.strip()}" if cause.type and cause.message else cause.line
    if reason is None:
        return _with_line(cause, error)
    heading = re.sub(r"(?:\. Ninja output)?[:\s]*$", "", error)
    heading = heading if len(heading) <= 120 else f"{heading[:120]} …"
    return replace(
        cause, line=reason.text, heading=heading, killed=reason.killed, block=(reason.text, cause.line, *cause.block)
    )


def _second_line(cause: Cause) -> str:
    """The first further line of the error that is not what torch says below each."""
    others = (line.strip() for line in cause.block if line.strip() not in ("", cause.line))
    return next((line for line in others if not _BOILERPLATE.match(line) and cause.message not in line), "")


def _frames_below(lines: Sequence[str]) -> list[tuple[str, str]]:
    """The frames that Python prints of the thread that received a fatal signal: innermost first, here last."""
    frames: list[tuple[str, str]] = []
    inside = False
    for line in map(plain, lines):
        if line.startswith("Current thread "):
            inside = True
        elif inside and (place := _FILE.match(line)):
            frames.append((place[1], place[2] or ""))
        elif inside:
            break
    return frames[::-1]
