"""Python stacks of the server's processes, through py-spy where it is installed and permitted."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from pytest_gpuserve.serve.progress import name_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpuserve.serve.procs import Proc

__all__ = ["Dump", "dump_stacks", "find_py_spy", "frames_of"]

_AT_ONCE = 4
_EACH = 6.0
_MOST = 24
_FRAME = re.compile(r"^    (\S.*) \((.+?)(?::(\d+))?\)$")


@dataclass(frozen=True, slots=True)
class Dump:
    """py-spy's text for one process, or why there is none. `frames` are its main thread's, innermost first, such as
    `capture_one_batch_size (cuda_graph_runner.py:661)`.
    """

    pid: int
    name: str
    text: str
    frames: tuple[str, ...] = ()


def find_py_spy(python: str) -> str | None:
    """Beside our interpreter, on the PATH, or beside the server's."""
    beside = (Path(interpreter).parent / "py-spy" for interpreter in (sys.executable, python))
    ours, theirs = (str(path) if os.access(path, os.X_OK) else None for path in beside)
    return ours or shutil.which("py-spy") or theirs


def dump_stacks(procs: Sequence[Proc], python: str, *, deadline: float) -> list[Dump]:
    """One dump a process, four at a time, until `deadline` (monotonic). Never raises."""
    program = find_py_spy(python)
    if program is None:
        return [Dump(0, "", "py-spy is not installed: pip install 'pytest-gpuserve[hang]' for stacks of a hung server")]
    wanted = [proc for proc in procs if proc.state not in "ZX" and _is_python(proc)][:_MOST]

    def one(proc: Proc) -> Dump:
        text = _run(program, proc, deadline - monotonic())
        return Dump(proc.pid, name_of(proc), text, frames_of(text, proc.pid))

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(one, wanted))


def _is_python(proc: Proc) -> bool:
    return "python" in proc.cmdline or proc.comm.startswith(("python", "sglang", "pt_main")) or "sglang" in proc.cmdline


def _run(program: str, proc: Proc, left: float) -> str:
    if left <= 0.2:
        return "no time was left for this process"
    # A stopped process cannot be paused: py-spy would wait for it.
    careful = ["--nonblocking"] if proc.state in "TtD" else []
    command = [program, "dump", "--pid", str(proc.pid), *careful]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=min(_EACH, left), check=False
        )
    except subprocess.TimeoutExpired:
        return f"py-spy did not answer within {min(_EACH, left):.0f} s"
    except OSError as error:
        return f"py-spy cannot be run: {error}"
    if done.returncode == 0:
        return done.stdout.decode(errors="replace")
    reason = done.stderr.decode(errors="replace").strip() or f"exit status {done.returncode}"
    hint = " (it needs the right to trace: root, CAP_SYS_PTRACE, or kernel.yama.ptrace_scope=0)"
    return f"py-spy: {reason}{hint if 'ermission' in reason or 'ermitted' in reason else ''}"


def frames_of(text: str, pid: int) -> tuple[str, ...]:
    """The main thread's frames in a dump of `pid`, innermost first; files without their folders. The thread has a name
    only if the program has imported `threading`, but always the process's number.
    """
    frames: list[str] = []
    inside = False
    for line in text.splitlines():
        if line.startswith("Thread "):
            inside = '"MainThread"' in line or line.split(maxsplit=2)[1] == str(pid)
        elif inside and (match := _FRAME.match(line)):
            place = match[2].rpartition("/")[2] + (f":{match[3]}" if match[3] else "")
            frames.append(f"{match[1]} ({place})")
        elif inside and not line.strip():
            inside = False
    return tuple(frames)
