"""Known-bad entries: a predicate over cells, version ranges, and the failure that is expected."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from pytest_gpuserve.model.failure import NEVER_EXPECTED, Failure, Kind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpuserve.errors import Where
    from pytest_gpuserve.model.phase import Phase
    from pytest_gpuserve.model.predicate import Predicate

__all__ = ["Expectation", "KnownBad", "Mode"]


class Mode(StrEnum):
    """`xfail` launches the cell and expects the failure; `skip` never launches it."""

    XFAIL = "xfail"
    SKIP = "skip"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """The failure an entry expects. `phases` empty means any phase; without a pattern any text matches."""

    kind: Kind
    phases: tuple[Phase, ...] = ()
    match: str | None = None
    match_re: str | None = None

    def explains(self, failure: Failure) -> bool:
        """True if `failure` is the expected one; `infra` and `leak` never are."""
        if failure.kind in NEVER_EXPECTED or failure.kind is not self.kind:
            return False
        if self.phases and failure.phase not in self.phases:
            return False
        text = f"{failure.text}\n{failure.message}"
        if self.match is not None and self.match not in text:
            return False
        return self.match_re is None or re.search(self.match_re, text, re.MULTILINE) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownBad:
    """One entry of `known_bad.yaml`. `versions` maps distributions (and driver, cuda, nccl) to PEP 440 ranges."""

    id: str
    when: Predicate
    expect: Expectation
    versions: Mapping[str, str] = field(default_factory=dict)
    mode: Mode = Mode.XFAIL
    strict: bool = False
    confirmed: bool = True
    source: str = ""
    grade: str = ""
    issue: str = ""
    reason: str = ""
    added: str = ""
    review_by: str = ""
    where: Where | None = None

    @property
    def specificity(self) -> tuple[int, int]:
        """Order among entries that match one cell: more terms, then a pattern, is more specific."""
        pattern = self.expect.match is not None or self.expect.match_re is not None
        return len(self.when.terms) + len(self.versions), int(pattern) + len(self.expect.phases[:1])
