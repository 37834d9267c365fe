"""What in a log is news. A server that writes the same line for ever must not look alive, a progress bar must."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Echo", "LogNews"]

# More kinds of lines than any phase of any start has; after that many the log is noise and no longer counts.
_KINDS = 50_000
_RESTARTS = 50
_LINE = 2_000
_PREFIX = 48

# Digits and hexadecimal letters go, so that a line whose only change is a number, an address or a request id is the
# same line: `waiting 1 s`, `waiting 2 s` is no progress. What remains of English is still distinct enough.
_STRIP = str.maketrans("", "", "0123456789abcdefABCDEF")
_RANK = re.compile(r"\b(?:DP|PP|TP|EP|CP)\d+")
# A position moves on: `3/25` of a progress bar, `17it [00:09` of one that has no end.
_POSITION = re.compile(r"(?<![\d/.:])(\d+)/(\d+)(?![\d/])|\b(\d+)it \[")


@dataclass(frozen=True, slots=True)
class Echo:
    """A line that came again and again without being news."""

    line: str
    times: int


class LogNews:
    """Remembers the lines of one phase. `fresh` is called for every line; about two microseconds each."""

    def __init__(self) -> None:
        self._kinds: set[str] = set()
        self._positions: dict[tuple[str, str], tuple[int, int]] = {}
        self._echoes: dict[str, tuple[str, int]] = {}
        self._last = ""

    def fresh(self, line: str) -> bool:
        """Whether the line says something that no line of this phase said before.

        News is a text that is new apart from numbers, or a position `n/m` further than any before. Each rank has its
        own news. Empty lines are none.
        """
        line = line[:_LINE]
        if line == self._last:
            kind = self._kind(line)
            self._echo(kind, line)
            return False
        self._last = line
        kind = self._kind(line)
        if not kind.strip():
            return False
        if kind not in self._kinds:
            if len(self._kinds) >= _KINDS:
                return False
            self._kinds.add(kind)
            self._moved(kind, line)
            return True
        if self._moved(kind, line):
            return True
        self._echo(kind, line)
        return False

    def echo(self) -> Echo | None:
        """The line that came most often since `quieten`, if one came more than twice."""
        if not self._echoes:
            return None
        line, times = max(self._echoes.values(), key=lambda entry: entry[1])
        return Echo(line.strip(), times) if times > 2 else None

    def quieten(self) -> None:
        """Forgets the echoes, not the news: the server has just made progress."""
        self._echoes.clear()

    @staticmethod
    def _kind(line: str) -> str:
        kind = line.translate(_STRIP)
        prefix = line[:_PREFIX]
        return kind + "".join(_RANK.findall(prefix)) if "P" in prefix else kind

    def _echo(self, kind: str, line: str) -> None:
        if ' HTTP/1.1" ' in line:  # somebody asks; with our own questions it says nothing
            return
        self._echoes[kind] = (line, self._echoes.get(kind, ("", 0))[1] + 1)

    def _moved(self, kind: str, line: str) -> bool:
        if not _may_count(line):
            return False
        moved = False
        for done, whole, endless in _POSITION.findall(line):
            key = (kind, whole)
            position = int(done or endless)
            furthest, restarts = self._positions.get(key, (-1, 0))
            if position <= 1 < furthest and restarts < _RESTARTS:  # the next bar of the same length
                self._positions[key] = (position, restarts + 1)
                moved = True
            elif position > furthest:
                self._positions[key] = (position, restarts)
                moved = True
        return moved


def _may_count(line: str) -> bool:
    """Whether a digit stands on both sides of a slash, or a bar without an end: spares the pattern on most lines."""
    at = line.find("/")
    while at > 0:
        if line[at - 1].isdigit() and line[at + 1 : at + 2].isdigit():
            return True
        at = line.find("/", at + 1)
    return "it [" in line
