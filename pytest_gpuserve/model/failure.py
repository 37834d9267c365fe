"""What went wrong with a cell: kind + phase + signature."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pytest_gpuserve.model.phase import Phase

__all__ = ["ADDRESS", "NUMBER", "Failure", "Kind", "normalise", "signature_of"]


class Kind(StrEnum):
    """Failure kinds. `infra` and `leak` are never turned into xfail or skip, whatever an entry says."""

    REJECTED = "rejected"
    CRASH = "crash"
    OOM = "oom"
    HANG = "hang"
    WRONG_OUTPUT = "wrong-output"
    SLOW = "slow"
    LEAK = "leak"
    FALLBACK = "fallback"
    INFRA = "infra"
    # A user's own assertion failed against a healthy server: not one of the design's server failures.
    ASSERTION = "assertion"


NEVER_EXPECTED = frozenset({Kind.INFRA, Kind.LEAK})

# An address is `0x…` at the beginning of a word: in `2560x248320` it is the middle of a tensor's shape.
ADDRESS = r"(?<![0-9A-Za-z])0x[0-9a-fA-F]+|\b(?=[0-9a-f]{0,31}[a-f])(?=[0-9a-f]{0,31}\d)[0-9a-f]{16,64}\b"
# Numbers by themselves, each of a shape (`7x5120`), of a quantity with its unit (`12GiB`, `600000ms`), of a process or
# a device (`TP0`, `rank3`). What is part of a name stays: `sm_120`, `compute_120f`, `fp8_e4m3`, `w8a8`.
NUMBER = (
    r"\b\d+(?:\.\d+)?\b|\b\d+(?=[xX]\d)|(?<=\d[xX])\d+(?=[xX]\d|\b)|"
    r"\b\d+(?:\.\d+)?(?=(?:[KMGT]i?B|[kKMGT]b|B|ms|us|µs|ns|s|min|h|x|it)\b)|"
    r"(?:(?<=\b[TDPE]P)|(?<=_[TDPE]P)|(?<=\b[Rr]ank)|(?<=\bGPU)|(?<=\bgpu))\d+\b"
)

_NORMALISE: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\x1b\[[0-9;?]*[A-Za-z]"), ""),
    (re.compile(r"^\[?\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[^\]]*\]\s*"), ""),
    (re.compile(r"\b(?:GPU|MIG)-[0-9a-fA-F-]{8,}\b"), "<uuid>"),
    (re.compile(ADDRESS), "<addr>"),
    (re.compile(r"(?<![\w.])(?:/[\w.+@~-]+){2,}/?"), "<path>"),
    (re.compile(NUMBER), "<n>"),
    (re.compile(r"\s+"), " "),
)

# `'...'` and `"..."` as repr writes them; an apostrophe within a word begins none.
_QUOTED = re.compile(r"""(?<![^\s(])(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")""")


def normalise(line: str) -> str:
    """`line` with addresses, numbers, pids, paths and timestamps replaced, so that two runs of one bug are equal."""
    for pattern, replacement in _NORMALISE:
        line = pattern.sub(replacement, line)
    return line.strip()


def signature_of(line: str) -> str:
    """The normalised line (at most 160 characters) and the first 8 hex digits of its SHA-256."""
    text = normalise(line)
    digest = hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:8]
    return f"{text[:160]} #{digest}" if text else f"#{digest}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One failure of one cell.

    `message` is written for a person: the conclusion first, then the evidence. `text` holds the lines a known-bad
    entry's pattern is searched in (the chosen error text and the log's end). `evidence` holds file names in the
    cell's folder.
    """

    kind: Kind
    phase: Phase
    message: str
    signature: str
    text: str = ""
    evidence: tuple[str, ...] = ()
    retryable: bool = False

    @classmethod
    def of(cls, kind: Kind, phase: Phase, message: str, *, line: str = "", text: str = "", **rest: Any) -> Failure:
        """A failure whose signature comes from `line`, or from the message where there is no log line.

        Of a wrong output's message what it quotes is left out: garbage is another one each time.
        """
        told = _QUOTED.sub("…", message) if kind is Kind.WRONG_OUTPUT else message
        return cls(
            kind=kind,
            phase=phase,
            message=message,
            signature=signature_of(line or told),
            text=text or line or message,
            **rest,
        )

    def to_json(self) -> dict[str, Any]:
        """As `run.json` and the supervisor's protocol carry it."""
        return {
            "kind": str(self.kind),
            "phase": str(self.phase),
            "signature": self.signature,
            "message": self.message,
            "text": self.text,
            "evidence": list(self.evidence),
            "retryable": self.retryable,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Failure:
        """Inverse of `to_json`."""
        return cls(
            kind=Kind(data["kind"]),
            phase=Phase(data["phase"]),
            signature=data["signature"],
            message=data["message"],
            text=data.get("text", ""),
            evidence=tuple(data.get("evidence", ())),
            retryable=bool(data.get("retryable", False)),
        )
