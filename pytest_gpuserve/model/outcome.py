"""Outcomes of checks and cells, worst first."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["RED", "Outcome", "worst"]


class Outcome(StrEnum):
    """A check's outcome; a cell's is the worst of its checks'. Defined worst first."""

    INFRA = "infra"
    FAILED = "failed"
    CHANGED = "changed"
    BLOCKED = "blocked"
    XFAILED = "xfailed"
    XPASSED = "xpassed"
    PASSED = "passed"
    SKIPPED = "skipped"
    NOT_RUN = "not-run"


_SEVERITY = {outcome: rank for rank, outcome in enumerate(Outcome)}
RED = frozenset({Outcome.INFRA, Outcome.FAILED, Outcome.CHANGED, Outcome.BLOCKED})


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """The worst of `outcomes`; of nothing, `not-run`."""
    return min(outcomes, key=_SEVERITY.__getitem__, default=Outcome.NOT_RUN)
