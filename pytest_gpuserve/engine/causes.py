"""Words that tell why a server ended: SGLang's, and those of torch, NCCL and the compilers under it. Pure.

Tables and one small function for each of them; `serve.causes` reads a whole log with these. The words of SGLang were
read in the wheels 0.5.6, 0.5.8, 0.5.10.post1, 0.5.12, 0.5.15, 0.5.17, 0.5.20 and 0.5.23. All patterns are bounded: a
line of a log may be anything.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = [
    "Collective",
    "Reason",
    "after_bar",
    "build_reason",
    "collective_timeout",
    "device_assertion",
    "follows_from_assertion",
    "frame_name",
    "heap_error",
    "is_build_heading",
    "native_error",
    "says_nothing",
    "watchdog_end",
    "without_place",
]

_LONGEST = 2_000  # characters of a line that can be a reason; compiler command lines are longer
_SOURCE = r"[\w.+-]{1,80}\.(?:cuh?|cpp|cc|hpp|h|py)"

# ---- a progress bar that is still open -----------------------------------------------------------------------------

# tqdm ends a bar's line with `[00:04<00:10,  1.73it/s]` and no newline: the next writer's text stands behind it.
_BAR = re.compile(r"\[(?:\d{1,4}:)?\d\d:\d\d(?:<[\d:?]{1,10})?, {1,2}[^\[\]]{1,80}\]")


def after_bar(line: str) -> str:
    """What stands behind the last progress bar in `line`: all of it where there is no bar, "" where nothing follows."""
    if "/s" not in line and "/it" not in line and "%|" not in line:
        return line
    end = 0
    for bar in _BAR.finditer(line):
        end = bar.end()
    if not end:
        return line
    rest = line[end:].strip()
    return f"  {rest}" if rest.startswith('File "') else rest


# ---- native code ---------------------------------------------------------------------------------------------------

_NATIVE = (
    re.compile(r"^\s*what\(\):\s+(.*)$"),
    re.compile(r"^(?:\[[^\]]*\] )?(CUDA (?:[Ee]rror|runtime error|driver error)[ :(].*)$"),
    # SGLang's own custom all-reduce, and other kernels with the same macro: printed, then exit(1).
    re.compile(r"^(Failed: (?:(?:Cuda|CUDA|NCCL) error )?\S{1,300}:\d+ '.*)$"),
    re.compile(r"^\[E[^\]]{1,200}\] (\[PG .*Process group watchdog thread terminated with exception: .*)$"),
    re.compile(r"^\[[^\]]{1,200}\] (Caught signal \d+ \(.*)$"),
    re.compile(r"^(Got cutlass error: .*)$"),
    re.compile(r"^(LLVM ERROR: .*)$"),
    re.compile(r"^\S{1,300}: (?:\S{1,300}:\d+: )?[^`]{0,400}(Assertion `.*' failed\.?)$"),
    re.compile(r"^(Assertion failed: .*)$"),
    re.compile(r"^(Fatal Python error: .*)$"),
    re.compile(r"^(nvcc fatal\s*:.*|ptxas fatal\s*:.*)$"),
    re.compile(r"^(Segmentation fault.*|Bus error.*|Illegal instruction.*|Floating point exception.*)$"),
    re.compile(r"^!+ (.*(?:Segfault|segfault).*?) !+$"),
)
_NATIVE_HINT = re.compile(
    r"what\(\):|CUDA [Ee]rror|CUDA (?:runtime|driver) error|Failed: |cutlass error|LLVM ERROR|Assertion |"
    r"terminated with exception|Caught signal|"
    r"Fatal Python|fatal\s*:|Segmentation|Bus error|Illegal instr|Floating point exc|[Ss]egfault"
)
# glibc's words when the heap is broken. They come at the very end, often while a process that failed is torn down.
_HEAP = re.compile(
    r"^((?:free|malloc|realloc|calloc|munmap_chunk|malloc_consolidate|corrupted (?:size vs|double)|double free or)"
    r"[\w ().:!-]{0,100}|\*\*\* stack smashing detected \*\*\*.*)$"
)


def native_error(line: str) -> str | None:
    """The error that native code prints in `line` before it ends the process, or None."""
    if not _NATIVE_HINT.search(line):
        return None
    line = line[:_LONGEST]
    return next((found[1].strip() for pattern in _NATIVE if (found := pattern.match(line))), None)


def heap_error(line: str) -> str | None:
    """What the C library says of a broken heap: the cause only where nothing else is."""
    found = _HEAP.match(line) if line[:1] in "fmrcd*" else None
    return found[1].strip() if found else None


# ---- assertions on the device --------------------------------------------------------------------------------------

# torch and Triton, once for each thread: `…/Indexing.cu:9: f: block: [3,0,0], thread: [64,0,0] Assertion `…` failed.`
_DEVICE_ASSERTION = re.compile(
    rf"({_SOURCE}):\d+: .{{0,400}}?block: \[[\d, ]+\], thread: \[[\d, ]+\],? Assertion `(.{{1,300}}?)` failed"
)
# DeepGEMM, DeepEP and their kin.
_TRAP = re.compile(rf"Assertion failed: \S{{0,300}}?({_SOURCE}):\d+, (?:.{{0,100}}?, )?condition: (.{{1,300}})$")
_OUT_OF_BOUND = re.compile(r"(Out Of Bound Tensor access detected at dim\[\d+\]): (assert\([^)]{1,80}\))")
_FOLLOWS = re.compile(
    r"device-side assert|cudaErrorAssert|unspecified launch failure|unhandled cuda error|illegal instruction was"
)


def device_assertion(line: str) -> str | None:
    """The condition that did not hold on the GPU, and the file it stands in, if `line` tells of one."""
    if "ssert" not in line:
        return None
    line = line[:_LONGEST]
    found = _DEVICE_ASSERTION.search(line) or _TRAP.search(line) or _OUT_OF_BOUND.search(line)
    return f"`{found[2].strip()}` failed ({found[1]})" if found else None


def follows_from_assertion(text: str) -> bool:
    """True if the error `text` is how the host learns of an assertion that failed on its GPU."""
    return _FOLLOWS.search(text) is not None


# ---- watchdogs -----------------------------------------------------------------------------------------------------

# 0.5.6: `Watchdog timeout (self.watchdog_timeout=300)`; since 0.5.8 `Scheduler watchdog timeout
# (self.watchdog_timeout=300, self.soft=False)`, and the same of other processes.
_WATCHDOG = re.compile(r"(?:(\w[\w ]{0,60}) )?[Ww]atchdog timeout \((?:self\.watchdog_timeout=([\d.]{1,12}))?([^)]*)\)")


def watchdog_end(line: str) -> tuple[str, float] | None:
    """What SGLang's own watchdog says, and after how many seconds (0: unknown), if `line` is the end of a server. A
    soft watchdog only dumps stacks: its line is no end.
    """
    found = _WATCHDOG.search(line[:_LONGEST]) if "atchdog timeout (" in line else None
    if found is None or "soft=True" in found[3]:
        return None
    seconds = float(found[2]) if found[2] and found[2].count(".") < 2 else 0.0
    return f"{found[1] or 'Scheduler'} watchdog timeout", seconds


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective operation that did not end. `name` is empty if unknown, `rank` too, `seconds` 0."""

    name: str
    rank: str
    seconds: float


_WORK = re.compile(r"Watchdog caught collective operation timeout: Work\w+\((.{0,600})")
_OPERATION = re.compile(r"OpType=(\w{1,40})")
_RANK = re.compile(r"[Rr]ank (\d{1,6})\b")
_RAN = re.compile(r"ran for (\d{1,12}) milliseconds")
_TIMEOUT = re.compile(r"Timeout\(ms\)=(\d{1,12})")
_GLOO = re.compile(r"Timed out waiting (\d{1,12})ms for (\w{1,20}) operation to complete")
_DEEPEP = re.compile(r"DeepEP error: (?:CPU recv timeout|timeout \((\w{1,20}) CPU\))")
_STUCK = re.compile(
    r"ProcessGroupNCCL's watchdog got stuck for (\d{1,8}) seconds|due to ProcessGroupNCCL watchdog hang"
)


def collective_timeout(line: str) -> Collective | None:
    """The collective that torch's watchdog of a process group gives up in `line`, or None."""
    if "atchdog" not in line and "Timed out waiting" not in line and "DeepEP" not in line:
        return None
    line = line[:_LONGEST]
    rank = next(iter(_RANK.findall(line.partition("Watchdog caught")[0])[-1:]), "")
    if work := _WORK.search(line):
        name = _OPERATION.search(work[1])
        ran = _RAN.search(work[1]) or _TIMEOUT.search(work[1])
        return Collective(name[1] if name else "", rank, int(ran[1]) / 1000 if ran else 0.0)
    if gloo := _GLOO.search(line):
        return Collective(f"{gloo[2]} (gloo)", rank, int(gloo[1]) / 1000)
    if deepep := _DEEPEP.search(line):
        return Collective(f"DeepEP's {deepep[1] or 'dispatch'}", rank, 0.0)
    if stuck := _STUCK.search(line):
        return Collective("", rank, float(stuck[1] or 0))
    return None


# ---- builds at run time --------------------------------------------------------------------------------------------

# What is raised says only that a compiler failed; what the compiler said stands lines below it (flashinfer#4410).
_BUILD = re.compile(
    r"Ninja build failed|[Nn]inja exited with|Command '?\[?'?[^' ]{0,200}\b(?:ninja|nvcc|ptxas|cicc|c\+\+|g\+\+|gcc)\b|"
    r"Triton PTX codegen error|PTXAS error|[Ee]rror building extension|Error compiling objects for extension|"
    r"NV(?:CC|RTC) compilation failed|[Cc]ompilation failed|[Ff]ailed to compile"
)
_TRITON_PLACE = re.compile(r"CompilationError: at \d+:\d+:")
_CARET = re.compile(r"^\s*\^+\s*$")
_REASON_HINT = re.compile(
    r"fatal|error|ERROR|memory|died due to|died with|Killed|not found|cannot find|undefined reference|Assertion|"
    r"No space left|FAILED: \[code|collect2|Segmentation|Illegal instr|Aborted|exited with"
)
_KILLED = (
    re.compile(r"((?:nvcc error\s*: )?'[^']{1,80}' died due to signal 9\b.*)"),
    re.compile(r"((?:fatal error: )?Killed signal terminated program \S+)"),
    re.compile(r"(died with <Signals\.SIGKILL: 9>|FAILED: \[code=137\]|exit(?:ed with)? status 137\b)"),
    re.compile(r"^(?:\S{1,200}: .{0,60})?(Killed)(?:\s.{0,300})?$"),
)
_REASONS = (
    re.compile(r"((?:virtual memory exhausted|out of memory allocating|LLVM ERROR: out of memory).*)"),
    re.compile(r"(nvcc error\s*: .*)"),
    re.compile(r"((?:nvcc|nvlink|cicc) fatal\s*:.*)"),
    re.compile(r"(ptxas fatal\s*: (?!Ptx assembly aborted).*)"),
    re.compile(r"^ptxas [^;]{1,400}; (error\s*: .*)"),
    re.compile(r"((?:fatal|catastrophic) error\s*:.*)"),
    re.compile(r"(LLVM ERROR: .*)"),
    re.compile(r"(?:^|[\s:])(error(?: #\d{1,6}(?:-D)?)?\s*: .*)"),
    re.compile(r"^((?:Segmentation fault|Illegal instruction|Aborted).*)"),
    re.compile(r"(\bld: cannot find .*|undefined reference to .*|\S{1,200}: (?:command )?not found)$"),
    re.compile(r"(Assertion [`'(].*)"),
    re.compile(r"(No space left on device)"),
)
_WEAK = re.compile(r"(ptxas fatal\s*:.*|collect2: .*|FAILED: \[code=\d+\])")


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a build failed, in the compiler's own words. `killed`: somebody ended the compiler with SIGKILL."""

    text: str
    killed: bool = False


def is_build_heading(line: str) -> bool:
    """True if `line` only says that something could not be compiled."""
    return bool(_BUILD.search(line[:_LONGEST]) or _TRITON_PLACE.search(line))


def build_reason(heading: str, lines: Sequence[str]) -> Reason | None:
    """The line of a compiler's output that says why, None if no line does. `heading` is the error that was raised."""
    if _TRITON_PLACE.search(heading):
        return _below_caret(lines)
    return _compiler_said(lines) or _compiler_said([heading])


def _below_caret(lines: Iterable[str]) -> Reason | None:
    """Triton quotes the kernel's source with a caret under the place, and then says what is wrong there."""
    seen = False
    for line in lines:
        if seen and line.strip():
            return Reason(line.strip())
        seen = seen or _CARET.match(line) is not None
    return None


def _compiler_said(lines: Iterable[str]) -> Reason | None:
    weak = None
    for line in _joined(lines):
        if not _REASON_HINT.search(line):
            continue
        # A command of thousands of characters ends with how it ended; nothing else in it is a reason.
        text = line if len(line) <= _LONGEST else line[-200:]
        if killed := _first(_KILLED, text):
            return Reason(killed, killed=True)
        found = _first(_REASONS, text) if text is line else None
        if found and not _BUILD.search(found):
            return Reason(found)
        if weak is None and (last := _WEAK.search(text)):
            weak = Reason(last[1].strip())
    return weak


def _joined(lines: Iterable[str]) -> Iterator[str]:
    """The lines, with what NVRTC says below `file(120): error:` behind that."""
    held = ""
    for line in lines:
        if line.rstrip().endswith("error:"):
            held = line.rstrip()
            continue
        yield f"{held} {line.strip()}" if held else line
        held = ""


def _first(patterns: Iterable[re.Pattern[str]], line: str) -> str | None:
    return next((found[1].strip() for pattern in patterns if (found := pattern.search(line))), None)


# ---- errors that say nothing ---------------------------------------------------------------------------------------

# The last words of an error after which nobody knows what was called with what. Only errors that come at once, from the
# call that failed: where the frame of an asynchronous one stands is chance.
_NOTHING = re.compile(
    r"^(?:\W*|\(?-?\d+\)?|(?:(?:CUDA|Cuda|cuda|HIP|Triton) ?(?:driver |runtime )?[Ee]rror[^:']{0,20}[:' ]*)?"
    r"(?:an? )?(?:invalid (?:argument|value|configuration argument|resource handle|device context|device function|"
    r"device symbol|usage|parameter)s?|operation not (?:supported|permitted)|not (?:supported|implemented|permitted)|"
    r"unknown error|internal error|Error Internal|initialization error|assertion (?:error|failed)|failed|error|"
    r"list index out of range|index out of range|'NoneType' object (?:is not \w+|has no attribute '\w+'))\W*)$",
    re.IGNORECASE,
)
_PLACE = re.compile(rf"({_SOURCE})(?::\d|\(\d|, line)")
_AT = re.compile(r"[ (]{1,2}(?:at|in) \S{1,300}:\d{1,6}\)?$")
_LIBRARY = re.compile(r"/torch/|/lib/python3[.\d]*/(?!site-packages|dist-packages)|^<|/threading\.py|/contextlib\.py")


def says_nothing(message: str) -> bool:
    """True if the end of `message` does not tell what failed: `invalid argument`, an assertion without a text."""
    text = without_place(message.strip()[:_LONGEST])
    quoted = re.search(r"'([^']{1,80})'$", text)
    return any(_NOTHING.match(part) for part in (text, text.rpartition(": ")[2], quoted[1] if quoted else "x"))


def without_place(line: str) -> str:
    """`line` without the ` at FILE:LINE` at its end, whose path differs from machine to machine."""
    return _AT.sub("", line)


def frame_name(frames: Sequence[tuple[str, str]], line: str = "") -> str:
    """`function (file)` of the innermost frame that is not torch's or Python's own; else the file that `line` names."""
    ours = [frame for frame in frames if not _LIBRARY.search(frame[0])] or list(frames)
    if ours:
        file, function = ours[-1]
        name = file.rpartition("/")[2]
        return f"{function} ({name})" if function and not function.startswith("<") else name
    place = _PLACE.search(line[:_LONGEST])
    return place[1] if place else ""
