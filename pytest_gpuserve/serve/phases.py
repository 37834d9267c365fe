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
    it, and a straggler's line never leads back. Two exceptions. With overlapped weight loading (`Prepared capture-safe
    model`) the real weights come after each graph capture, so its end leads back to `weights`. With a draft model every
    rank sets up a second model when the target's graphs are captured: a rank that says again that it begins leads back
    to `weights`, and from then on `draft` is true while the phase is `weights`.

    `phase` is the present one, `since` the time it was entered. Times are seconds of one monotonic clock.
    """

    def __init__(self, patterns: Patterns, *, now: float) -> None:
        self.phase = Phase.SPAWN
        self.since = now
        self._patterns = patterns
        self._overlap = False
        self._set_up: set[tuple[Phase, str]] = set()
        self._second = False
        self._spent: dict[Phase, float] = {}

    def feed(self, line: str, now: float) -> Phase | None:
        """The phase that this line led to, or None if it led nowhere. The first line of all leads to `import`."""
        phase = self._patterns.phase_of(line)
        if phase is not None and self._again(phase, line):
            return self._move(Phase.WEIGHTS, now)
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

    @property
    def draft(self) -> bool:
        """True while the weights that are being loaded are a draft model's."""
        return self._second and self.phase is Phase.WEIGHTS

    def _again(self, phase: Phase, line: str) -> bool:
        """True if the rank that logs `line` begins to set up one more model: the draft model."""
        if phase not in (Phase.DIST_INIT, Phase.WEIGHTS) or not self._patterns.sets_up_model(line):
            return False
        beginning = phase, self._patterns.rank_of(line)
        if beginning not in self._set_up:
            self._set_up.add(beginning)
            return False
        loaded = Phase.KV_CACHE.rank <= self.phase.rank < Phase.WARMUP.rank
        if loaded and not self._overlap:
            self._second = True
        return loaded and not self._overlap

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
