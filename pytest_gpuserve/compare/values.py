"""What a comparison of two runs says, as values."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["FINDINGS", "Change", "Comparison", "Measure", "Moved", "Row"]


class Change(StrEnum):
    """What became of a cell between two records, in the order reports list it."""

    BROKE = "BROKE"
    CHANGED = "CHANGED"
    SLOWER = "SLOWER"
    FIXED = "FIXED"
    FASTER = "FASTER"
    NOT_RUN = "NOT-RUN"
    GONE = "GONE"
    NEW = "NEW"
    STILL_BAD = "STILL-BAD"
    SAME = "SAME"


# A result that is lost is a finding too: else a night that ran nothing would read as "nothing broke".
FINDINGS = frozenset({Change.BROKE, Change.CHANGED, Change.SLOWER, Change.NOT_RUN, Change.GONE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One metric of one load, before and after. `change` and `threshold` are relative: -0.2 is a fifth less.

    `verdict` is `slower`, `faster`, `same` or `not-comparable`; `note` says why, or what weakens it.
    """

    load: str
    metric: str
    unit: str
    before: float
    after: float
    change: float
    threshold: float
    verdict: str
    note: str = ""

    def __str__(self) -> str:
        text = f"{self.load} {self.metric} {self.before:.4g} → {self.after:.4g} {self.unit} ({self.change:+.1%})"
        return f"{text}; {self.note}" if self.note else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """One thing of the environment that differs; `before` or `after` is empty where the record has it not.

    `order` has the two versions as they count in ranges; None where one is no version, or a build without one.
    """

    what: str
    before: str
    after: str
    order: tuple[str, str] | None = None

    def __str__(self) -> str:
        return f"{self.what}: {self.before or '(absent)'} → {self.after or '(absent)'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One cell in both records. `before` and `after` are its states in words, `reason` what a reader needs to know.

    `a` and `b` are the cell's records, None where it is in one only.
    """

    change: Change
    id: str
    before: str
    after: str
    reason: str = ""
    measures: tuple[Measure, ...] = ()
    a: Mapping[str, Any] | None = None
    b: Mapping[str, Any] | None = None
    finding: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two records compared. `title` names what was compared; `warnings` are about the comparison as a whole.

    `comparable` is False when no cell is in both: then the classes say nothing. `simulated` is True if either record
    is of a simulation, `mixed` if only one is. `unordered` are the builds of either
    side, by name, of which nobody can say whether they are newer than a release.
    """

    title: str
    warnings: tuple[str, ...]
    moved: tuple[Moved, ...]
    rows: tuple[Row, ...]
    simulated: bool
    comparable: bool
    mixed: bool = False
    unordered: Mapping[str, str] = field(default_factory=dict)

    @property
    def counts(self) -> dict[Change, int]:
        """How many cells of each class there are, in report order."""
        counted = Counter(row.change for row in self.rows)
        return {change: counted[change] for change in Change if counted[change]}

    @property
    def findings(self) -> int:
        """How many rows make `gpuserve compare` exit with 1."""
        return sum(row.finding for row in self.rows)

    @property
    def exit_code(self) -> int:
        """0 without findings, 1 with some, 2 when nothing could be compared."""
        if not self.comparable:
            return 2
        return int(self.findings > 0)
