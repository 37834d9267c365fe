"""What one simulated server does: the merged `defaults` and `then` of a scenario's rules, as the caller wrote them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpuserve.model.phase import Phase

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Behaviour", "Compile", "Crash", "load_behaviour"]

OUTPUTS = frozenset({"garbage", "nan", "repeat", "empty", "short"})
LOGS = frozenset({"flood", "no-newline", "binary", "silent"})
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Crash:
    """An exception in a scheduler. `exit` is the server's exit code; None: as SGLang, which kills itself (-9)."""

    phase: Phase
    text: str
    exit: int | None = None


@dataclass(frozen=True, slots=True)
class Compile:
    """A compiler child that burns CPU, without a log line, for `seconds` of `phase`."""

    phase: Phase
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """One server's script. Times in seconds, memory in bytes a GPU, rates in tokens a second.

    `rate` is what one stream gets; all streams together get at most `saturation` (see `clock`).
    `hold_memory` is how long GPU memory stays taken after a scheduler's end; infinity for ever.
    """

    phase_seconds: float = 0.0
    rate: float = 500.0
    memory: int = 40 * GIB
    reject: str | None = None
    crash: Crash | None = None
    hang: Phase | None = None
    compile: Compile | None = None
    slow: float = 1.0
    output: str | None = None
    fallback: str | None = None
    exit_zero: bool = False
    ignore_sigterm: bool = False
    escape_session: bool = False
    zombies: int = 0
    hold_memory: float = 0.0
    port_taken: str | None = None
    log: str | None = None

    @property
    def stream_rate(self) -> float:
        """Tokens a second of one stream, slowness included."""
        return self.rate / self.slow

    @property
    def saturation(self) -> float:
        """Tokens a second of all streams together: at least 16 streams' worth, at least 20,000; slowness included."""
        return max(20_000.0, 16 * self.rate) / self.slow

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Behaviour:
        """From the keys of a scenario. ValueError names a key or value that is not one of them."""
        unknown = sorted(data.keys() - _READERS.keys())
        if unknown:
            raise ValueError(f"unknown keys {unknown}; known are {sorted(_READERS)}")
        fields: dict[str, Any] = {}
        for key, value in data.items():
            name, read = _READERS[key]
            try:
                fields[name] = read(value)
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{key}: {value!r} is not understood ({error})") from error
        return cls(**fields)


def _text_among(allowed: frozenset[str]) -> Any:
    def read(value: object) -> str:
        if value not in allowed:
            raise ValueError(f"one of {sorted(allowed)} is needed")
        return str(value)

    return read


def _positive(value: float) -> float:
    if isinstance(value, bool) or not float(value) > 0:
        raise ValueError("a number above 0 is needed")
    return float(value)


def _seconds(value: float) -> float:
    if isinstance(value, bool) or not float(value) >= 0:
        raise ValueError("seconds, 0 or more, are needed")
    return float(value)


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError("true or false is needed")
    return value


def _phase(value: str) -> Phase:
    # What goes wrong while a server stops, goes wrong while it drains.
    return Phase.DRAINING if value == Phase.STOPPED else Phase(value)


def _crash(value: Mapping[str, Any]) -> Crash:
    text = str(value.get("text", "RuntimeError: simulated crash"))
    code = value.get("exit")
    return Crash(_phase(value["phase"]), text, None if code is None else int(code))


def _compile(value: Mapping[str, Any]) -> Compile:
    return Compile(_phase(value["phase"]), _seconds(value["seconds"]))


def _port_taken(value: object) -> str | None:
    if value == "once":
        return "once"
    return "always" if _flag(value) else None


def _hold(value: object) -> float:
    return float("inf") if value == "forever" else _seconds(float(str(value)))


def _memory(value: float) -> int:
    return int(_seconds(value) * GIB)


_READERS: dict[str, tuple[str, Any]] = {
    "phase-seconds": ("phase_seconds", _seconds),
    "tokens-per-second": ("rate", _positive),
    "memory-gib": ("memory", _memory),
    "reject": ("reject", str),
    "crash": ("crash", _crash),
    "hang": ("hang", _phase),
    "compile": ("compile", _compile),
    "slow": ("slow", _positive),
    "output": ("output", _text_among(OUTPUTS)),
    "fallback": ("fallback", str),
    "exit-zero": ("exit_zero", _flag),
    "ignore-sigterm": ("ignore_sigterm", _flag),
    "escape-session": ("escape_session", _flag),
    "zombies": ("zombies", int),
    "hold-memory": ("hold_memory", _hold),
    "port-taken": ("port_taken", _port_taken),
    "log": ("log", _text_among(LOGS)),
}


def load_behaviour(path: str | None) -> Behaviour:
    """From a JSON file; without one, a healthy server. ValueError says what in the file is wrong."""
    if not path:
        return Behaviour()
    try:
        data = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"GPUSERVE_SIM_BEHAVIOUR={path}: {error}") from error
    try:
        return Behaviour.of(data)
    except ValueError as error:
        raise ValueError(f"GPUSERVE_SIM_BEHAVIOUR={path}: {error}") from error
