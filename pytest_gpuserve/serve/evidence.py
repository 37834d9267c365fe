"""Everything a person would look at before the kill, gathered in at most 15 s, into the cell's folder.

Never raises: what cannot be had is named with the reason, in the file where it would stand. Each part runs in a
thread of its own, since any of them may block: NVML in a wedged driver, `/proc` of a process in the kernel, py-spy.
"""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from pytest_gpuserve.gpu import process
from pytest_gpuserve.model.phase import Phase
from pytest_gpuserve.serve.conclude import Facts, conclusion
from pytest_gpuserve.serve.kernel import messages
from pytest_gpuserve.serve.progress import name_of
from pytest_gpuserve.serve.sockets import sockets_of
from pytest_gpuserve.serve.stacks import dump_stacks
from pytest_gpuserve.serve.watch import Activity

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest_gpuserve.model.gpu import Probe, Reading
    from pytest_gpuserve.serve.procs import Proc
    from pytest_gpuserve.serve.sockets import Socket
    from pytest_gpuserve.serve.stacks import Dump
    from pytest_gpuserve.serve.watch import Stall

__all__ = ["Evidence", "gather"]

# How long the processes are watched. The watch has measured a stall over the whole quiet time: then a glance will do,
# and the verdict is not late.
_WINDOW = 1.2
_GLANCE = 0.3
_LOG_END = 64 << 10
_RECENT = 3_600.0
_ROW = "{:>7} {:>7} {:>2} {:>6} {:>8} {:>9} {:>12} {:>12}  {:<24} {}"
_SOCKET = "{:<12} {:<28} {:<28} {:>8}  {}"
_HEALTH_TIMEOUT = 1.5
_KEY = re.compile(r"(--(?:admin-)?api-key[ =])\S+")


@dataclass(frozen=True, slots=True)
class Evidence:
    """`files` are the names written in the folder, `sentence` is the conclusion (empty if the server just ended),
    `kernel` are kernel messages since the start, and `readings` what the GPUs showed.
    """

    files: tuple[str, ...]
    facts: Facts
    sentence: str
    kernel: tuple[str, ...] = ()
    readings: tuple[Reading, ...] = ()


@dataclass(slots=True)
class _Found:
    """What the parts have found so far; each writes only its own fields."""

    procs: Sequence[Proc] = ()
    activity: tuple[Activity, ...] = ()
    sockets: Sequence[Socket] = ()
    dumps: Sequence[Dump] = ()
    readings: list[Reading] = field(default_factory=list)
    health: str = ""
    kernel: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)


def gather(
    folder: Path,
    *,
    tree: Callable[[], Sequence[Proc]],
    probe: Probe | None,
    uuids: Sequence[str],
    log: Path,
    stall: Stall | None,
    port: int | None,
    python: str,
    phase: Phase,
    health: str = "",
    began: float | None = None,
    budget: float = 15.0,
    draft: bool = False,
    blind: str = "",
) -> Evidence:
    """Writes the evidence files and draws the conclusion. `tree` looks at our processes now; `health` is the last word
    of the readiness endpoint; `began` is when the server was started, in seconds since the epoch, the earliest kernel
    message of interest. `draft` and `blind` are those of `Facts`. Without a `stall` the server has ended: then no
    stacks are taken and nothing is asked.
    """
    deadline = monotonic() + budget
    window = _GLANCE if stall is not None and stall.processes else _WINDOW
    found = _Found()
    gatherer = _Gatherer(folder, found)
    parts: list[tuple[str, Callable[[], str]]] = [
        ("processes.txt", lambda: _processes(found, tree, stall, window)),
        ("sockets.txt", lambda: _sockets(found, tree())),
        ("gpus.txt", lambda: _gpus(found, probe, uuids)),
        ("kernel.txt", lambda: _kernel(found, began if began is not None else time.time() - _RECENT)),
        ("log-end.txt", lambda: _log_end(log)),
    ]
    if stall is not None and port is not None and phase.rank >= Phase.WARMUP.rank:
        parts.append(("health.txt", lambda: _health(found, port)))
    if stall is not None:
        parts.append(("stacks.txt", lambda: _stacks(found, tree, python, window, deadline - 1.0)))
    gatherer.run(parts, deadline)
    facts = replace(_facts(found, stall, port, phase), draft=draft, blind=blind)
    sentence = conclusion(facts)
    summary = {
        "sentence": sentence,
        "stall": stall.to_json() if stall else None,
        "facts": asdict(facts),
        "readiness": health,
        "listening": [f"{one.host}:{one.port} (pid {one.pid})" for one in found.sockets if one.state == "listen"],
    }
    gatherer.write("evidence.json", json.dumps(summary, indent=1, default=str))
    return Evidence(tuple(sorted(found.files)), facts, sentence, tuple(found.kernel), tuple(found.readings))


class _Gatherer:
    """Runs the parts side by side and writes what each returns; a part that is late or fails leaves its reason."""

    def __init__(self, folder: Path, found: _Found) -> None:
        self._folder = folder
        self._found = found
        self._lock = threading.Lock()
        self._closed = False

    def run(self, parts: Sequence[tuple[str, Callable[[], str]]], deadline: float) -> None:
        threads = []
        for name, part in parts:
            thread = threading.Thread(target=self._one, args=(name, part), daemon=True)
            thread.start()
            threads.append((name, thread))
        for name, thread in threads:
            thread.join(max(0.0, deadline - monotonic()))
            if thread.is_alive():
                self.write(name, "this did not come within the time for evidence\n")
        with self._lock:
            self._closed = True

    def _one(self, name: str, part: Callable[[], str]) -> None:
        try:
            text = part()
        except Exception as error:  # noqa: BLE001 (evidence is never fatal)
            text = f"this could not be read: {type(error).__name__}: {error}\n"
        with self._lock:
            if not self._closed:
                self._write(name, text)

    def write(self, name: str, text: str) -> None:
        with self._lock:
            self._write(name, text)

    def _write(self, name: str, text: str) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / name).write_text(_KEY.sub(r"\1<secret>", text), encoding="utf-8", errors="replace")
        except OSError:
            return  # a full disk takes the file, not the verdict
        if name not in self._found.files:
            self._found.files.append(name)


def _processes(found: _Found, tree: Callable[[], Sequence[Proc]], stall: Stall | None, window: float) -> str:
    before = {(proc.pid, proc.started): proc for proc in tree()}
    began = monotonic()
    if any(proc.state not in "ZX" for proc in before.values()):
        time.sleep(window)
    found.procs = tree()
    window = max(monotonic() - began, 1e-3)
    rows = [
        _ROW.format("pid", "ppid", "st", "cpu %", "rss MiB", "writes/s", "B/s written", "B/s read", "wchan", "name")
    ]
    activity = []
    for proc in found.procs:
        old = before.get((proc.pid, proc.started), proc)
        one = Activity(
            pid=proc.pid,
            name=name_of(proc),
            state=proc.state,
            wchan=proc.wchan,
            cpu=round((proc.cpu - old.cpu) / window, 3),
            writes=round((proc.syscw - old.syscw) / window, 2),
            written=round((proc.wchar - old.wchar) / window, 1),
        )
        activity.append(one)
        numbers = (
            f"{100 * one.cpu:.1f}",
            f"{proc.rss / 2**20:.0f}",
            f"{one.writes:.1f}",
            f"{one.written:.0f}",
            f"{(proc.rchar - old.rchar) / window:.0f}",
        )
        rows.append(_ROW.format(proc.pid, proc.ppid, proc.state, *numbers, proc.wchan or "-", one.name))
        rows.append(f"        {proc.cmdline[:2000] or proc.comm}")
    found.activity = tuple(activity)
    if all(proc.state in "ZX" for proc in found.procs):
        rows.append("no process of the server is left alive")
    table = "\n".join(rows)
    stacks = "".join(f"\n\n{name_of(proc)} (pid {proc.pid}), threads\n{_threads(proc.pid)}" for proc in found.procs)
    return f"{_over_the_stall(stall)}over {window:.1f} s\n{table}{stacks}\n"


def _over_the_stall(stall: Stall | None) -> str:
    if stall is None:
        return ""
    rows = [
        f"{proc.pid:>7} {proc.state} {100 * proc.cpu:>6.1f} % CPU, {proc.writes:.2f} writes/s, "
        f"{proc.written:.1f} B/s, {proc.name}"
        for proc in stall.processes
    ]
    return "\n".join([f"over the {stall.quiet:.0f} s without progress (the last was: {stall.last})", *rows, "\n"])


def _threads(pid: int) -> str:
    """Every thread's state and wait channel, the main thread's kernel stack where it may be read (root)."""
    lines = []
    try:
        tasks = sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda task: int(task.name))
    except OSError as error:
        return f"  {error.strerror}"
    for task in tasks[:200]:
        stat = _text(task / "stat")
        state = stat.rpartition(")")[2].split()[0] if stat else "?"
        lines.append(
            f"  {task.name:>7} {state} {_text(task / 'wchan').strip() or '-':<24} {_text(task / 'comm').strip()}"
        )
    stack = _text(Path(f"/proc/{pid}/stack")).strip()
    return "\n".join([*lines, "  kernel stack:", *(f"    {line}" for line in (stack or "not readable").splitlines())])


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _sockets(found: _Found, procs: Sequence[Proc]) -> str:
    found.sockets = sockets_of(proc.pid for proc in procs)
    names = {proc.pid: name_of(proc) for proc in procs}
    rows = [
        _SOCKET.format(one.state, f"{one.host}:{one.port}", one.peer, one.waiting, f"{names[one.pid]} (pid {one.pid})")
        for one in found.sockets
    ]
    return "\n".join([_SOCKET.format("state", "local", "peer", "unread", "process"), *rows, ""])


def _health(found: _Found, port: int) -> str:
    """One question now: the readiness endpoint's last word may be old. `/health` needs no key."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_HEALTH_TIMEOUT)
    try:
        connection.request("GET", "/health")
        answer = connection.getresponse()
        found.health = str(answer.status)
        return f"GET /health: {answer.status}\n{answer.read(2000).decode(errors='replace')}\n"
    except (OSError, http.client.HTTPException) as error:
        return f"GET /health: {type(error).__name__}: {error} (waited up to {_HEALTH_TIMEOUT:g} s)\n"
    finally:
        connection.close()


def _gpus(found: _Found, probe: Probe | None, uuids: Sequence[str]) -> str:
    if probe is None:
        return "no probe\n"
    rows = []
    for uuid in uuids:
        reading = probe.read(uuid)
        found.readings.append(reading)
        rows.append(_told(reading))
    return "\n\n".join(rows) + "\n"


def _told(reading: Reading) -> str:
    """A reading for people: what could not be read has no figure."""

    def of(value: float | None, unit: str, scale: float = 1.0) -> str:
        return f"? {unit}" if value is None else f"{value / scale:.4g} {unit}"

    rows = [
        f"memory in use  {of(reading.memory_used, 'GiB', 2**30)}",
        f"utilization    {of(reading.utilization, '%')}",
        f"power          {of(reading.power, 'W')} of {of(reading.power_limit, 'W')}",
        f"SM clock       {of(reading.sm_clock, 'MHz')} of {of(reading.sm_clock_max, 'MHz')}",
        f"temperature    {of(reading.temperature, '°C')}",
        f"throttled by   {', '.join(reading.throttle) or 'nothing'}",
    ]
    if reading.processes is None:
        rows.append("processes      not listed by this driver or in this container")
    rows += [
        f"{of(one.memory, 'GiB', 2**30):<14} {process.describe(one.pid, identified=one.start is not None)}"
        for one in reading.processes or ()
    ]
    return "\n".join([reading.uuid, *(f"  {row}" for row in rows)])


def _kernel(found: _Found, since: float) -> str:
    found.kernel, reason = messages(since)
    told = "\n".join(found.kernel) or "nothing of interest since the start"
    return f"{told}\n{f'not all could be read: {reason}' if reason else ''}\n"


def _log_end(log: Path) -> str:
    with log.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _LOG_END))
        return file.read().decode(errors="replace").replace("\r", "\n")


def _stacks(found: _Found, tree: Callable[[], Sequence[Proc]], python: str, window: float, deadline: float) -> str:
    # py-spy pauses what it looks at: not while the processes' activity is measured.
    time.sleep(window + 0.1)
    found.dumps = dump_stacks(tree(), python, deadline=deadline)
    return "\n\n".join(f"{dump.name} (pid {dump.pid})\n{dump.text}" if dump.pid else dump.text for dump in found.dumps)


def _facts(found: _Found, stall: Stall | None, port: int | None, phase: Phase) -> Facts:
    known: dict[str, Any] = {}
    if stall:
        known = {
            "why": stall.why,
            "quiet": stall.quiet,
            "limit": stall.limit,
            "last": stall.last,
            "echo": stall.echo,
            "echoes": stall.echoes,
            "in_flight": stall.in_flight,
        }
    now = [reading.utilization for reading in found.readings if reading.utilization is not None]
    listening = {one.port for one in found.sockets if one.state == "listen"}
    return Facts(
        phase=phase,
        port_open=port in listening if port is not None and found.procs else None,
        health=found.health,
        utilization=stall.utilization if stall and stall.utilization is not None else max(now, default=None),
        # Rates over the whole quiet time where the watch has them: a second is too short to tell one write a second.
        processes=stall.processes if stall and stall.processes else found.activity,
        frames=tuple((dump.pid, dump.frames[:5]) for dump in found.dumps if dump.frames),
        **known,
    )
