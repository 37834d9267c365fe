"""Log lines → phases. Pure: the caller gives the time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpuserve.model.phase import Phase

if TYPE_CHECKING:
    from pytest_gpuserve.engine import Patterns

__all__ = ["PhaseTracker"]


class PhaseTracker:
    """Where one server is, from its log.

    Ranks pass a phase up to seconds apart and their lines interleave: a phase is entered when the first rank enters
    it, and a straggler's line never leads back. One exception: with overlapped weight loading (`Prepared capture-safe
    model`) the real weights come after each graph capture, so its end leads back to `weights`.

    `phase` is the present one, `since` the time it was entered. Times are seconds of one monotonic clock.
    """

    def __init__(self, patterns: Patterns, *, now: float) -> None:
        self.phase = Phase.SPAWN
        self.since = now
        self._patterns = patterns
        self._overlap = False
        self._spent: dict[Phase, float] = {}

    def feed(self, line: str, now: float) -> Phase | None:
        """The phase that this line led to, or None if it led nowhere. The first line of all leads to `import`."""
        phase = self._patterns.phase_of(line)
        if phase is not None:
            return self.enter(phase, now)
        if self.phase is Phase.SPAWN:
            self._overlap = self._patterns.overlap(line)
            return self.enter(Phase.IMPORT, now)
        if not self._overlap:
            self._overlap = self._patterns.overlap(line)
        elif self.phase is Phase.GRAPH_CAPTURE and self._patterns.graph_end(line):
            return self._move(Phase.WEIGHTS, now)
        return None

    def enter(self, phase: Phase, now: float) -> Phase | None:
        """Enters a phase, also one that no log line tells of: `import` once the interpreter runs, `ready` when the
        readiness endpoint says so, `serving` after the first real answer, `stopped`. None if the server is already
        there or further.
        """
        return self._move(phase, now) if phase.rank > self.phase.rank else None

    def timings(self, now: float) -> dict[Phase, float]:
        """Seconds spent in each phase entered so far, the present one included, in the phases' own order."""
        spent = dict(self._spent)
        spent[self.phase] = spent.get(self.phase, 0.0) + now - self.since
        return {phase: spent[phase] for phase in Phase if phase in spent}

    def _move(self, phase: Phase, now: float) -> Phase:
        self._spent[self.phase] = self._spent.get(self.phase, 0.0) + now - self.since
        self.phase, self.since = phase, now
        return phase
