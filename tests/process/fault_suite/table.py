"""The table of faults: what each is called, what it needs, and what one performance of it comes to."""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .scene import Counts, Scene

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FAULTS", "Fault", "Result", "fault"]


@dataclass(frozen=True, slots=True)
class Result:
    """One performance: the four counts, what was wrong with outcome and message (empty: nothing), seconds."""

    counts: Counts
    wrong: str
    seconds: float

    @property
    def sound(self) -> bool:
        """All four zero, and the right outcome."""
        return not self.wrong and self.counts.numbers() == (0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Fault:
    """`cause` sets a run up, does the harm, and asserts the outcome. `missing` says why it cannot be done here."""

    name: str
    cause: Callable[[Scene], None]
    slow: bool
    gpus: int
    processes: bool
    missing: Callable[[], str]

    def perform(self) -> Result:
        """Once, in a scene of its own."""
        began = time.monotonic()
        scene = Scene(gpus=self.gpus, processes=self.processes)
        wrong = ""
        try:
            self.cause(scene)
        except AssertionError as error:
            frames = traceback.extract_tb(error.__traceback__)
            where = next((one for one in reversed(frames) if "fault_suite" in one.filename), frames[-1])
            wrong = f"{where.line}: {error}" if str(error) else str(where.line)
        finally:
            counts = scene.close()
        return Result(counts, wrong, time.monotonic() - began)


FAULTS: list[Fault] = []


def fault(
    name: str, *, slow: bool = False, gpus: int = 2, processes: bool = True, missing: Callable[[], str] = str
) -> Callable[[Callable[[Scene], None]], Callable[[Scene], None]]:
    """Puts a function into the table."""

    def enter(cause: Callable[[Scene], None]) -> Callable[[Scene], None]:
        FAULTS.append(Fault(name, cause, slow, gpus, processes, missing))
        return cause

    return enter
