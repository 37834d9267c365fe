"""Records: what `run.json`, `cell.json` and reports are made of (schema in docs/record.md)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pytest_gpuserve.model.failure import Failure
from pytest_gpuserve.model.outcome import Outcome

__all__ = ["SCHEMA", "CellRecord", "CheckRecord", "Measurement"]

SCHEMA = 1


@dataclass(slots=True, kw_only=True)
class Measurement:
    """One metric of one load on one cell, with `sglang.bench_serving`'s names.

    `direction` is `higher` or `lower` (what is better). `verdict` is `ok`, `below-floor`, `inconclusive`, `invalid`
    or `recorded` (no floor applies). `floor` holds what was asked and the line that set it. `method` is the hash of the
    measuring recipe: only equal ones are compared. `starts` says how many of the samples each server start gave. `test`
    is the node id, without the cell, of the user's test whose `load()` this was; empty: the built-in check.
    """

    metric: str
    unit: str
    direction: str
    load: str
    samples: list[float]
    median: float
    spread: float
    verdict: str = "recorded"
    floor: dict[str, Any] | None = None
    note: str = ""
    method: str = ""
    starts: list[int] = field(default_factory=list)
    test: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(slots=True, kw_only=True)
class CheckRecord:
    """One test run against a cell's server. `duration` in seconds, `nodeid` as pytest names it."""

    name: str
    cell: str
    outcome: Outcome
    duration: float = 0.0
    failure: Failure | None = None
    nodeid: str = ""
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "name": self.name,
            "cell": self.cell,
            "outcome": str(self.outcome),
            "duration": round(self.duration, 4),
            "failure": self.failure.to_json() if self.failure else None,
            "nodeid": self.nodeid,
            "reason": self.reason,
        }


@dataclass(slots=True, kw_only=True)
class CellRecord:
    """One cell of a run: what was launched, what came of it, what it took."""

    id: str
    arch: str
    model: str
    axes: dict[str, str]
    outcome: Outcome = Outcome.NOT_RUN
    failure: Failure | None = None
    known_bad: dict[str, Any] | None = None
    reason: str = ""
    matrix: str = ""
    baseline: dict[str, str] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    argv: list[str] = field(default_factory=list)
    gpus: list[dict[str, Any]] = field(default_factory=list)
    resolved: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, Any] = field(default_factory=dict)
    measurements: list[dict[str, Any]] = field(default_factory=list)
    telemetry: dict[str, Any] = field(default_factory=dict)
    output: dict[str, Any] = field(default_factory=dict)
    teardown: dict[str, Any] = field(default_factory=dict)
    control: dict[str, Any] | None = None
    server_starts: int = 0
    notes: list[str] = field(default_factory=list)
    folder: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types, in the documented order."""
        data = {name: getattr(self, name) for name in self.__slots__}
        data["outcome"] = str(self.outcome)
        data["failure"] = self.failure.to_json() if self.failure else None
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> CellRecord:
        """Inverse of `to_json`; unknown keys are ignored (a newer minor record)."""
        known = {name: data[name] for name in cls.__slots__ if name in data}
        known["outcome"] = Outcome(data["outcome"])
        known["failure"] = Failure.from_json(data["failure"]) if data.get("failure") else None
        return cls(**known)
