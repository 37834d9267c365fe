"""How a server ended → the `Failure`: kind, phase, signature and a message that begins with the conclusion. Pure.

What an exit status says: argparse's 2 is a refused argument. -9 and 137 say nothing, SGLang kills its own tree with
SIGKILL after any error, and its last line then blames the operating system's out-of-memory killer: host memory is
blamed only where the kernel or a container's counter says so.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpuserve.engine import patterns
from pytest_gpuserve.engine.causes import after_bar, is_build_heading
from pytest_gpuserve.model.failure import Failure, Kind
from pytest_gpuserve.model.phase import Phase
from pytest_gpuserve.serve.causes import Cause, explained, find_causes, first_cause, plain, unstamped
from pytest_gpuserve.serve.faults import compiler_killed, fault_of_gpu, fault_of_machine, killed_for_memory, memory_of
from pytest_gpuserve.serve.strangers import disturbed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpuserve.serve.strangers import Stranger
    from pytest_gpuserve.serve.watch import Stall

__all__ = ["Ending", "classify"]

_TEXT_LINES = 60
_TEXT_BYTES = 12_000
_LONG = 600
_ARGUMENTS_DUMP = 4_000  # characters of one line: longer ones are the dump of all arguments

# Whose code refuses: these files of SGLang look at the arguments, before anything of the model is loaded.
_REFUSERS = re.compile(r"sglang/(?:srt/(?:server_args|arg_groups/|configs/model_config|environ)|launch_server|cli/)")
_REFUSALS = frozenset({"ValueError", "AssertionError", "NotImplementedError", "TypeError", "ArgumentTypeError"})
_ABORTED = re.compile(r"signal 6$|exit (?:-6|134)$")
_NCCL = re.compile(r"NCCL error|ncclSystemError|ncclUnhandled|ncclInvalid|ncclInternal")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Everything that is known. `lines` is the log's end (up to 1 MB), `exit` main's `Popen.returncode` or None while
    it lives, `stall` the watch's verdict, `conclusion` the evidence's sentence and `evidence` its files.

    `kernel` are kernel messages since the start, `oom_kills` how many processes of our cgroup the kernel has killed for
    memory since then; `first_dead` describes the process that was seen to die first, such as
    `sglang::scheduler (pid 4242), signal 9`. `model_path` is what was launched, `draft_path` its draft model or empty.
    `draft`: the weights that were being loaded are a draft model's. `blind` is the flag that keeps the phases out of
    the log, empty if they are told.
    `strangers` are processes that are not the server's and used its GPUs; `unchecked` says why such could not be seen,
    if so.
    """

    phase: Phase
    lines: Sequence[str]
    exit: int | None
    stall: Stall | None = None
    conclusion: str = ""
    evidence: tuple[str, ...] = ()
    kernel: Sequence[str] = ()
    oom_kills: int = 0
    first_dead: str | None = None
    model_path: str = ""
    draft_path: str = ""
    draft: bool = False
    blind: str = ""
    strangers: tuple[Stranger, ...] = ()
    unchecked: str = ""


@dataclass(frozen=True, slots=True)
class _Case:
    """An ending with what its log says. `said` is the cause with everything around it, for the tables of texts."""

    ending: Ending
    causes: Sequence[Cause]
    cause: Cause | None
    said: str

    @property
    def where(self) -> str:
        phase = self.ending.phase
        if self.ending.blind and phase.rank <= Phase.IMPORT.rank:
            return f"somewhere in its start ({self.ending.blind} hides the lines that tell the phase: use info)"
        if self.ending.draft:
            return f"in phase {phase}, of the draft model"
        return {Phase.IMPORT: "while importing", Phase.SPAWN: "at once"}.get(phase, f"in phase {phase}")

    @property
    def line(self) -> str:
        """The cause for a message, empty if unknown."""
        return _cut(self.cause.sentence) if self.cause else ""

    @property
    def real(self) -> bool:
        """There is a cause and it is no echo of somebody else's death."""
        return self.cause is not None and not self.cause.echo

    def failure(self, kind: Kind, message: str, *, line: str = "", retryable: bool = False) -> Failure:
        """`line` makes the signature; without it the cause's line does."""
        ending = self.ending
        if ending.conclusion and ending.conclusion not in message:
            message = f"{message.rstrip('.')}. {ending.conclusion}"
        line = line or (_steady(self.cause.line) if self.cause else "")
        text = self._text()
        return Failure.of(
            kind,
            ending.phase,
            message,
            line=line,
            # An entry that is written from this failure quotes the line of its signature: the text holds it.
            text=text if not line or line in text.splitlines() else f"{line}\n{text}".strip(),
            evidence=ending.evidence,
            retryable=retryable,
        )

    def _text(self) -> str:
        """What a known-bad entry is matched against: the cause, then the log's end."""
        tail = [text for line in self.ending.lines[-_TEXT_LINES:] if (text := plain(line)[:2000])]
        block = "\n".join(self.cause.block or (self.cause.line,)) if self.cause else ""
        return f"{block[:_TEXT_BYTES]}\n{chr(10).join(tail)[-_TEXT_BYTES:]}".strip()


def classify(ending: Ending) -> Failure:
    """What went wrong. A port that was taken, and a GPU that others used, make the failure `retryable`."""
    causes = find_causes(ending.lines)
    cause = first_cause(causes, alive_at=_last_progress(ending.lines))
    cause = explained(cause, causes, ending.lines) if cause else None
    said = "\n".join((cause.sentence, *cause.block) if cause else map(plain, ending.lines[-20:]))
    case = _Case(ending, causes, cause, said)
    rules = (_port, _stalled, _arguments, _infra, _memory, _watchdog, _collective)
    failure = next((failure for rule in rules if (failure := rule(case))), None) or _crash(case)
    return disturbed(failure, ending.strangers, ending.unchecked, said if cause else "")


def _last_progress(lines: Sequence[str]) -> int:
    """The index of the last line that shows the server getting on; of the line before, if an error stands behind it."""
    phase_of = patterns("").phase_of
    for at in range(len(lines) - 1, -1, -1):
        line = lines[at]
        if len(line) < _ARGUMENTS_DUMP and phase_of(line):
            behind = after_bar(plain(line))
            return at if not behind or phase_of(behind) else at - 1
    return -1


def _steady(line: str) -> str:
    """Without the list of choices, whose order changes from start to start."""
    return line.partition(" (choose from")[0]


def _cut(text: str) -> str:
    return text if len(text) <= _LONG else f"{text[:_LONG]} …"


# ---- rules, in order ---------------------------------------------------------------------------------------------


def _port(case: _Case) -> Failure | None:
    if case.ending.phase.rank >= Phase.SERVING.rank:
        return None
    fatal = patterns("").fatal
    for raw in reversed(case.ending.lines):
        if len(raw) < _ARGUMENTS_DUMP and fatal(raw):
            line = unstamped(raw)
            message = f"a port of the server was taken by another process: {_cut(line)}"
            return case.failure(Kind.INFRA, message, line=line, retryable=True)
    return None


def _stalled(case: _Case) -> Failure | None:
    stall = case.ending.stall
    if stall is None or case.ending.exit is not None:
        return None
    if case.real and case.cause and case.cause.kind in ("fatal", "native"):
        return None  # one process has crashed and the others wait for it for ever: that is a crash
    what = {
        "stall": f"the server hangs {case.where}",
        "total": f"phase {stall.phase} took longer than its limit of {stall.limit:.0f} s",
        "start-timeout": f"the server was not ready within {stall.limit:.0f} s",
    }[stall.why]
    told = case.ending.conclusion or f"no progress for {stall.quiet:.0f} s"
    # The signature must not depend on what happened to be measured.
    return case.failure(Kind.HANG, f"{what}: {told}", line=what)


def _arguments(case: _Case) -> Failure | None:
    ending, cause = case.ending, case.cause
    if ending.phase.rank > Phase.IMPORT.rank:
        return None
    if ending.exit == 2:
        told = next((found for found in reversed(case.causes) if found.kind == "argparse"), None)
        if told:
            message = f"SGLang refuses the arguments: {_cut(told.line)}"
            return case.failure(Kind.REJECTED, message, line=_steady(told.line))
    refused = (
        ending.exit not in (None, 0)
        and cause is not None
        and cause.kind == "traceback"
        and cause.type in _REFUSALS
        and any(_REFUSERS.search(file) for file in cause.files)
        and fault_of_machine(case.said, "") is None
    )
    return case.failure(Kind.REJECTED, f"SGLang refuses the arguments: {case.line}") if refused else None


def _infra(case: _Case) -> Failure | None:
    said = fault_of_machine(case.said, _model_of(case))
    if said is None:
        sick = fault_of_gpu(case.ending.kernel)
        if sick is None:
            return None
        said = f"the kernel reports a sick GPU: {sick}"
    return case.failure(Kind.INFRA, f"{said}: {case.line}" if case.cause else said)


def _model_of(case: _Case) -> str:
    """The model that an error is about: the draft where it names that one, or comes from the code that loads it."""
    ending = case.ending
    names_draft = bool(ending.draft_path) and _names(ending.draft_path, case.said)
    names_target = bool(ending.model_path) and _names(ending.model_path, case.said)
    files = case.cause.files if case.cause else ()
    if names_draft or ending.draft or (not names_target and any("/speculative" in file for file in files)):
        return f"the draft model {ending.draft_path}".rstrip()
    return ending.model_path


def _names(path: str, text: str) -> bool:
    return re.search(rf"(?<![\w.-]){re.escape(path.rstrip('/'))}(?![\w.-]*[\w-])", text) is not None


def _memory(case: _Case) -> Failure | None:
    ending = case.ending
    if case.cause and (memory := memory_of(case.said)):
        return case.failure(Kind.OOM, f"{memory} memory ran out {case.where}: {case.line}")
    if case.cause and (case.cause.killed or is_build_heading(case.line)):
        return _compiler_killed(case, case.cause)
    killed = ending.exit in (-signal.SIGKILL, 137) or (ending.first_dead or "").endswith("signal 9")
    if case.real or not killed:
        return None
    pid = re.search(r"pid (\d+)", ending.first_dead or "")
    proof = killed_for_memory(ending.kernel, pid[1] if pid else None)
    if proof is None and ending.oom_kills:
        proof = f"the cgroup's count of out-of-memory kills rose by {ending.oom_kills}"
    if proof is None:
        return None
    message = f"host memory ran out {case.where}: the kernel killed {ending.first_dead or 'the server'} ({proof})"
    return case.failure(Kind.OOM, message, line="host memory ran out: killed by the kernel")


def _compiler_killed(case: _Case, cause: Cause) -> Failure | None:
    """A build that failed since the kernel took a compiler's memory back: by the kernel's word, or by the signal."""
    ending = case.ending
    if cause.heading and not cause.killed and not cause.line.startswith("FAILED"):
        return None  # the compiler had a reason of its own, whatever else was killed on this machine
    proof = compiler_killed(ending.kernel)
    if proof is None and ending.oom_kills:
        proof = f"the cgroup's count of out-of-memory kills rose by {ending.oom_kills}"
    if proof is None and not cause.killed:
        return None
    proof = (
        proof
        or "estimated: little but the kernel kills a compiler so, but neither its log nor a cgroup's count says it"
    )
    message = (
        f"host memory ran out {case.where}: a compiler was killed ({proof}); MAX_JOBS in the matrix' env bounds how "
        "many run at once"
    )
    return case.failure(Kind.OOM, f"{message}: {case.line}", line="host memory ran out: a compiler was killed")


def _watchdog(case: _Case) -> Failure | None:
    cause = case.cause
    if cause is None or cause.kind != "watchdog":
        return None
    after = f" after {cause.seconds:.0f} s" if cause.seconds else ""
    whose = f" ({cause.who})" if cause.who else ""
    return case.failure(
        Kind.HANG, f"the server hung {case.where} and its own watchdog ended it{after}: {case.line}{whose}"
    )


def _collective(case: _Case) -> Failure | None:
    """Torch's watchdog ends a rank whose collective did not end, by an abort: the hang is the failure, not that death.

    Where another process died before, of something else, the others only waited for it.
    """
    cause, dead = case.cause, case.ending.first_dead
    if cause is None or cause.kind != "collective" or (dead and not _ABORTED.search(dead)):
        return None
    late = [found for found in case.causes if found.kind == "collective"]
    names = sorted({found.message for found in late if found.message})
    ranks = sorted({int(found.who.removeprefix("rank ")) for found in late if found.who})
    which = " and ".join(names) or "a collective operation"
    where = f" of rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if ranks else ""
    seconds = max(found.seconds for found in late)
    lasted = f" within {seconds:.0f} s" if seconds else ""
    differ = ": the ranks wait for different collectives" if len(names) > 1 else ""
    message = f"the server hung {case.where}: {which}{where} did not end{lasted}{differ}"
    return case.failure(Kind.HANG, message, line=f"the server hung in a collective: {which} did not end")


def _crash(case: _Case) -> Failure:
    ending, cause = case.ending, case.cause
    if cause and case.real:
        who = cause.who or ("a process" if ending.exit is None else "the server")
        alive = " and the server did not end" if ending.exit is None else ""
        reason = f"{case.line}{_nccl_reason(case)}{_last_batch(case, cause)}"
        return case.failure(Kind.CRASH, f"{who} crashed {case.where}{alive}: {reason}")
    if ending.first_dead:
        message = f"{ending.first_dead}: it died first, {case.where}, without a word in the log"
        return case.failure(Kind.CRASH, message, line=re.sub(r" \(pid \d+\)", "", ending.first_dead))
    if cause:
        return case.failure(Kind.CRASH, f"the server crashed {case.where}: {case.line}")
    end = _silent_end(ending.exit)
    return case.failure(Kind.CRASH, f"{end} ({case.where})", line=end)


def _nccl_reason(case: _Case) -> str:
    """NCCL's own warning: the exception says no more than `invalid usage`."""
    if case.cause is None or case.cause.kind == "nccl" or not _NCCL.search(case.said):
        return ""
    warning = next((found.line for found in case.causes if found.kind == "nccl"), "")
    return f" (NCCL: {_cut(warning)})" if warning else ""


def _last_batch(case: _Case, cause: Cause) -> str:
    """What the server was at when it crashed under load: a request may do what a flag does not."""
    if case.ending.phase.rank < Phase.READY.rank:
        return ""
    batch = patterns("").batch_of
    last = next(filter(None, map(batch, reversed(case.ending.lines[: cause.at + 1]))), "")
    return f" (its last batch: {last})" if last else ""


def _silent_end(exit_status: int | None) -> str:
    if exit_status is None:
        return "the server stopped working without a reason in its log"
    if exit_status == 0:
        return "the server ended by itself with exit status 0"
    number = -exit_status if exit_status < 0 else exit_status - 128
    if number == signal.SIGKILL:
        return (
            "the server was killed (SIGKILL) without a reason in its log; that is no proof of an out-of-memory, "
            "SGLang also kills its own tree"
        )
    try:
        return f"the server died of {signal.Signals(number).name} without a reason in its log"
    except ValueError:
        return f"the server ended with exit status {exit_status} without a reason in its log"
