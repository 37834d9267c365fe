"""The errors a user sees. Each says what, where, the evidence and the next step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["FileProblems", "GpuserveError", "MachineError", "Problem", "UsageError", "Where"]


class GpuserveError(Exception):
    """Root of this project's errors; `str()` is the whole message for a terminal."""


class UsageError(GpuserveError):
    """The user asked for something that cannot be done: pytest exits 4, the `gpuserve` command 2."""


class MachineError(GpuserveError):
    """The machine cannot do it now (no driver, GPU taken, disk full): outcome `infra`, never the cell's fault."""


@dataclass(frozen=True, slots=True, order=True)
class Where:
    """A place in a file a user wrote; line and column count from 1."""

    file: str
    line: int = 1
    col: int = 1

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.col}"


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One thing wrong in one file. `warning` problems never make a command fail."""

    where: Where
    what: str
    warning: bool = False

    def __str__(self) -> str:
        return f"{self.where}: {'warning: ' if self.warning else ''}{self.what}"


class FileProblems(UsageError):
    """Every problem of the files that were read, at once, in file order."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(sorted(set(problems)))
        super().__init__("\n".join(str(problem) for problem in self.problems))
