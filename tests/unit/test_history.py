"""A cell over runs: what is told of each, and where its speed steps."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpuserve.report.command import history_lines
from pytest_gpuserve.report.history import Night, history_of, steps


def night(started: str, speed: float | None = None, outcome: str = "passed", **versions: str) -> Night:
    speeds = {} if speed is None else {"single-stream": speed}
    return Night(started=started, outcome=outcome, failure="", speeds=speeds, versions=versions, simulated=False)


def test_a_step_is_found_where_it_is() -> None:
    chance = random.Random(5)
    values = [90 * chance.uniform(0.98, 1.02) for _ in range(12)] + [70 * chance.uniform(0.98, 1.02) for _ in range(8)]
    assert steps(values) == [12]


def test_a_gap_of_nights_without_a_value_moves_no_step() -> None:
    assert steps([90.0, 91.0, None, 90.5, None, 60.0, None, 61.0]) == [5]


@pytest.mark.parametrize(
    "values",
    [[], [90.0], [90.0, 40.0], [90.0, 91.0, 40.0], [90.0] * 9, [90.0, 80.0] * 6, [90, 79, 88, 80, 91, 78, 90, 80]],
)
def test_one_odd_night_and_the_noise_between_starts_are_no_step(values: list[float]) -> None:
    assert steps(values) == []


@given(st.lists(st.one_of(st.none(), st.floats(min_value=1, max_value=1e6)), max_size=40))
def test_every_step_stands_at_a_night_that_measured(values: list[float | None]) -> None:
    found = steps(values)
    assert found == sorted(set(found))
    assert all(values[index] is not None for index in found)


def test_what_moved_stands_between_the_runs() -> None:
    nights = [night("2026-12-01T02:00:00.000Z", 90.0, torch="2.13"), night("2026-12-02", 91.0, torch="2.14")]
    lines = history_lines(nights)
    assert lines == [
        "2026-12-01T02:00:00  passed      single-stream 90.0 tok/s",
        "  torch 2.13 → 2.14",
        "2026-12-02  passed      single-stream 91.0 tok/s",
    ]


def test_a_run_without_the_cell_is_left_out() -> None:
    cell = {"id": "a", "outcome": "failed", "failure": {"kind": "hang", "phase": "warmup"}}
    runs = [{"started": "1", "cells": []}, {"started": "2", "cells": [cell], "simulated": True}]
    (only,) = history_of(runs, "a")
    assert (only.started, only.failure, only.simulated) == ("2", "hang in warmup", True)
