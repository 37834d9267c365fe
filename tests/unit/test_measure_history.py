"""Which earlier runs a floor may be relative to: sound records of sound cells, measured by the cell's own check."""

from __future__ import annotations

import json
import warnings

import pytest

from pytest_gpuserve.measure.history import past_of, runs_before
from pytest_gpuserve.model.cell import Cell, ModelSpec

CELL = Cell(id="sm120-m-baseline", arch="sm120", model=ModelSpec(name="m"), axes={"graphs": "on"})


def run(folder, name: str, median: object = 100.0, *, outcome: str = "passed", **fields: object) -> None:
    row = {"metric": "output_throughput", "load": "small", "method": "x", "verdict": "ok", "median": median} | fields
    cell = {"arch": "sm120", "model": "m", "axes": {"graphs": "on"}, "gpus": [{"name": "RTX"}], "outcome": outcome}
    keep(folder, name, json.dumps({"simulated": False, "cells": [cell | {"measurements": [row]}]}))


def keep(folder, name: str, text: str) -> None:
    path = folder / "runs" / name / "run.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)


def past(folder, skipped=warnings.warn) -> tuple[float, ...]:
    names = {"load": "small", "metric": "output_throughput", "method": "x", "gpus": ["RTX"]}
    runs = runs_before(folder, folder / "runs" / "this", skipped)
    return past_of(runs, CELL, **names, simulated=False, last=9).medians


@pytest.mark.parametrize(
    "odd",
    [
        {"verdict": "invalid"},
        {"verdict": "below-floor"},
        {"verdict": ["ok"]},
        {"outcome": "failed"},
        {"outcome": "xfailed"},
        {"outcome": "changed"},
        {"test": "test_mine.py::test_load"},
        {"median": None},
    ],
    ids=str,
)
def test_what_is_no_measure_of_the_cell_is_no_history(tmp_path, odd) -> None:
    run(tmp_path, "1")
    run(tmp_path, "2", **({"median": 7.0} | odd))
    assert past(tmp_path) == (100.0,)


def test_a_noisy_run_is_history_like_a_lucky_one(tmp_path) -> None:
    run(tmp_path, "1", verdict="inconclusive", outcome="skipped")
    run(tmp_path, "2", 120.0, verdict="recorded")
    assert past(tmp_path) == (120.0, 100.0)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{torn", "Expecting property name"),
        ("[" * 100_000, "recursion"),
        ("[]", "the record must be objects"),
        ("{}", "it has no cells"),
        ('{"cells": ["x"]}', "cells must be objects"),
        ('{"cells": {"a": 1}}', "cells must be objects"),
        ('{"cells": [{"gpus": ["RTX"]}]}', "gpus of a cell must be objects"),
        ('{"cells": [{"measurements": ["odd"]}]}', "measurements of a cell must be objects"),
        ('{"cells": [{"measurements": [{"median": "fast"}]}]}', "must be a number, got 'fast'"),
        ('{"cells": [{"measurements": [{"median": NaN}]}]}', "must be a number, got nan"),
        ('{"cells": [{"measurements": [{"median": true}]}]}', "must be a number, got True"),
        (f'{{"cells": [{{"measurements": [{{"median": {"9" * 400}}}]}}]}}', "too large"),
    ],
    ids=lambda value: value[:30],
)
def test_a_record_that_is_none_of_ours_is_left_out_and_named(tmp_path, text, told) -> None:
    run(tmp_path, "1")
    keep(tmp_path, "2", text)
    said: list[str] = []
    assert past(tmp_path, said.append) == (100.0,)
    assert len(said) == 1
    assert str(tmp_path / "runs" / "2" / "run.json") in said[0]
    assert told in said[0]


def test_it_is_said_as_a_warning(tmp_path) -> None:
    keep(tmp_path, "1", "[]")
    with pytest.warns(UserWarning, match=r"1/run\.json: left out of the history"):
        assert past(tmp_path) == ()
