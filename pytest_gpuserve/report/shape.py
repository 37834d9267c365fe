"""Is this a record? The types that every reader of a record takes for granted, as a table, checked once on reading."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_gpuserve.model.failure import Kind
from pytest_gpuserve.model.outcome import Outcome
from pytest_gpuserve.model.phase import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = ["cell_problem", "run_problem"]

Test = tuple[str, "Callable[[Any], bool]"]

_OUTCOMES, _KINDS, _PHASES = (frozenset(map(str, words)) for words in (Outcome, Kind, Phase))


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _mapping(value: Any) -> bool:
    return isinstance(value, dict)


def _objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _levels(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(level, str) for level in value.values())


def _number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _number_or_null(value: Any) -> bool:
    return value is None or isinstance(value, (int, float))


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and all(map(_number_or_null, value))


def _truth(value: Any) -> bool:
    return isinstance(value, bool)


# What must be there, and what may be; null counts as absent.
_RUN: dict[str, Test] = {
    "simulated": ("true or false", _truth),
    "complete": ("true or false", _truth),
    "started": ("text", _text),
    "versions": ("a mapping of texts", _levels),
    "gpus": ("a list of objects", _objects),
    "server_starts": ("a number", _number),
    "cells": ("a list of objects", _objects),
    "checks": ("a list of objects", _objects),
}
_RUN_MAYBE: dict[str, Test] = {
    "driver": ("a mapping of texts", _levels),
    "taken_for": ("an object of objects", lambda one: _mapping(one) and all(map(_mapping, one.values()))),
    "matrices": ("a list", lambda one: isinstance(one, list)),
}
_CELL: dict[str, Test] = {
    "id": ("text", _text),
    "arch": ("text", _text),
    "model": ("text", _text),
    "axes": ("a mapping of axes to levels", _levels),
    "outcome": ("an outcome", lambda value: _text(value) and value in _OUTCOMES),
}
_CELL_MAYBE: dict[str, Test] = {
    "baseline": ("a mapping of axes to levels", _levels),
    "failure": ("an object", _mapping),
    "known_bad": ("an object", _mapping),
    "flags": ("an object", _mapping),
    "env": ("an object", _mapping),
    "timings": ("an object", _mapping),
    "measurements": ("a list of objects", _objects),
    "server_starts": ("a number", _number),
}
_FAILURE: dict[str, Test] = {
    "kind": ("a kind of failure", lambda value: _text(value) and value in _KINDS),
    "phase": ("a phase", lambda value: _text(value) and value in _PHASES),
    "signature": ("text", _text),
    "message": ("text", _text),
}
_KNOWN_BAD: dict[str, Test] = {"id": ("text", _text)}
_KNOWN_BAD_MAYBE: dict[str, Test] = {
    "file": ("text", _text),
    "issue": ("text", _text),
    "line": ("a number", _number),
    "versions": ("a mapping of texts", _levels),
}
_MEASUREMENT: dict[str, Test] = {"load": ("text", _text), "metric": ("text", _text)}
_MEASUREMENT_MAYBE: dict[str, Test] = {"median": ("a number", _number), "samples": ("a list of numbers", _numbers)}
_CHECK: dict[str, Test] = {
    "name": ("text", _text),
    "cell": ("text", _text),
    "outcome": ("an outcome", lambda value: _text(value) and value in _OUTCOMES),
}


def run_problem(record: Mapping[str, Any]) -> str:
    """What is wrong with a run's record of the current schema, naming the place; empty if nothing is."""
    found = next(_wrong(record, _RUN, _RUN_MAYBE), "")
    if found:
        return found
    for number, check in enumerate(record["checks"]):
        for told in _wrong(check, _CHECK):
            return f"checks[{number}]: {told}"
    return ""


def cell_problem(cell: Mapping[str, Any]) -> str:
    """The same for a cell's record."""
    for told in _wrong(cell, _CELL, _CELL_MAYBE):
        return told
    parts = [
        ("failure", cell.get("failure"), _FAILURE, {}),
        ("known_bad", cell.get("known_bad"), _KNOWN_BAD, _KNOWN_BAD_MAYBE),
    ]
    for number, item in enumerate(cell.get("measurements") or ()):
        parts.append((f"measurements[{number}]", item, _MEASUREMENT, _MEASUREMENT_MAYBE))
    for place, part, must, may in parts:
        if part is not None:
            for told in _wrong(part, must, may):
                return f"{place}: {told}"
    return ""


def _wrong(value: Mapping[str, Any], must: Mapping[str, Test], may: Mapping[str, Test] | None = None) -> Iterator[str]:
    for name, (wanted, test) in must.items():
        if name not in value:
            yield f"'{name}' is missing"
        elif not test(value[name]):
            yield f"'{name}' must be {wanted}"
    for name, (wanted, test) in (may or {}).items():
        if value.get(name) is not None and not test(value[name]):
            yield f"'{name}' must be {wanted}"
