"""Which floors hold, what they ask for in numbers, and what the record says of them."""

from __future__ import annotations

import json

import pytest

from pytest_gpuserve.errors import Where
from pytest_gpuserve.matrix.types import METRICS, Floor, Matrix
from pytest_gpuserve.measure.floors import Beside, Past, bound_of, measurements, needs_of, verdict_of
from pytest_gpuserve.measure.history import past_of, runs_before
from pytest_gpuserve.measure.profile import BUILT_IN, LoadProfile, profile_named
from pytest_gpuserve.model.cell import Cell, ModelSpec
from pytest_gpuserve.model.predicate import Predicate
from pytest_gpuserve.model.record import CellRecord

MODEL = ModelSpec(name="m", shape="llama-3")
BASE = {"attention": "triton", "nccl": "default"}
GPUS = [{"uuid": "GPU-1", "name": "RTX"}]
METHOD = BUILT_IN["single-stream"].method


def cell(**axes: str) -> Cell:
    merged = BASE | axes
    name = "+".join(f"{axis}.{level}" for axis, level in axes.items()) or "baseline"
    return Cell(id=f"sm120-m-{name}", arch="sm120", model=MODEL, axes=merged, deltas=tuple(axes), matrix="x")


def floor(metric: str = "output_throughput", load: str = "single-stream", when: dict | None = None, **form) -> Floor:
    return Floor(when=Predicate.of(when or {}), load=load, metric=METRICS[metric], where=Where("m.yaml", 9, 3), **form)


def matrix(tmp_path, *floors: Floor) -> Matrix:
    path = tmp_path / "x.yaml"
    return Matrix(name="x", path=path, archs=("sm120",), models={"m": MODEL}, baseline=BASE, floors=floors)


def record(samples: list[float], *, uuid: str = "GPU-1", **more: object) -> CellRecord:
    row = {"metric": "output_throughput", "load": "single-stream", "samples": samples, "verdict": "recorded"}
    row |= {"median": sorted(samples)[len(samples) // 2], "method": METHOD} | more
    gpus = [{"uuid": uuid, "name": "RTX"}]
    return CellRecord(id="sm120-m-baseline", arch="sm120", model="m", axes=BASE, gpus=gpus, measurements=[row])


def bound(one: Floor, reference: CellRecord | None = None, past: Past = Past(), **more: object):  # noqa: B008
    beside = Beside(name="sm120-m-baseline", record=reference, gpus=["GPU-1"], **more)
    return bound_of(one, beside, past, method=METHOD)


def test_a_cell_measures_for_its_own_floors_and_for_those_who_are_compared_with_it(tmp_path) -> None:
    cells = [cell(), cell(nccl="tuned"), cell(attention="fa3"), cell(attention="fa3", nccl="tuned")]
    mine = matrix(
        tmp_path,
        floor(when={"nccl": "tuned", "attention": "triton"}, ratio=1.2),
        floor(load="batch", when={"nccl": "tuned", "attention": "fa3"}, ratio=1.1, of={"nccl": "default"}),
        floor("p99_ttft_ms", when={"attention": "fa3", "nccl": "default"}, limit=50.0),
    )
    needs = needs_of(cells, {"x": mine})
    assert needs["sm120-m-baseline"].floors == ()
    assert needs["sm120-m-baseline"].loads == ("single-stream",)
    assert needs["sm120-m-nccl.tuned"].references == ("sm120-m-baseline",)
    assert set(needs["sm120-m-attention.fa3"].loads) == {"batch", "single-stream"}
    assert needs["sm120-m-attention.fa3+nccl.tuned"].references == ("sm120-m-attention.fa3",)


def test_a_ratio_to_the_cell_itself_asks_for_nothing(tmp_path) -> None:
    mine = matrix(tmp_path, floor(ratio=0.9))
    needs = needs_of([cell(), cell(nccl="tuned")], {"x": mine})
    assert needs["sm120-m-baseline"].floors == ()
    assert needs["sm120-m-nccl.tuned"].floors == mine.floors
    assert needs_of([cell()], {"x": matrix(tmp_path)}) == {}


def test_floors_in_numbers_name_the_line_that_set_them() -> None:
    found = bound(floor(limit=60.0))
    assert (found.limit, found.where, found.text) == (60.0, "m.yaml:9", "at-least 60 tok/s")
    found = bound(floor(ratio=1.2), record([50.0, 50.5, 49.5]))
    assert found.limit == pytest.approx(60)
    assert (found.reference.error > 0, found.reference.count) == (True, 1)
    assert found.text == "at-least 1.2 × sm120-m-baseline (50 tok/s)"
    found = bound(floor(history_ratio=0.9, history_last=3), past=Past(medians=(100.0, 90.0, 110.0, 1.0), runs=9))
    assert found.limit == pytest.approx(90)
    assert found.note == ""
    assert bound(floor("p99_ttft_ms", limit=50.0)).text == "at-most 50 ms"


@pytest.mark.parametrize(
    ("reference", "told"),
    [
        (None, "sm120-m-baseline has no result in this session"),
        (CellRecord(id="b", arch="sm120", model="m", axes=BASE), "no measurement"),
        (record([50.0], verdict="invalid", note="throttled"), "invalid: throttled"),
        (record([50.0], method="other"), "by another method"),
    ],
    ids=["absent", "failed", "invalid", "another method"],
)
def test_without_a_reference_nothing_is_judged(reference, told) -> None:
    found = bound(floor(ratio=1.2), reference)
    assert told in found.missing
    verdict = verdict_of(found, [[1.0] * 5], None)
    assert verdict.verdict == "inconclusive"
    assert "m.yaml:9" in verdict.text
    assert told in verdict.text


def test_a_reference_on_other_gpus_is_said_and_decides_nothing() -> None:
    found = bound(floor(ratio=1.2), record([50.0] * 5, uuid="GPU-2"))
    assert found.note == "sm120-m-baseline ran on other GPUs (GPU-2)"
    assert (found.limit, found.reference.count) == (60, 0)
    assert verdict_of(found, [[10.0] * 5], None).verdict == "inconclusive"
    assert verdict_of(found, [[61.0] * 5], None).verdict == "ok"
    # Started here too, only that counts.
    found = bound(floor(ratio=1.2), record([50.0] * 5, uuid="GPU-2"), starts=[[20.0] * 5])
    assert (found.limit, found.reference.count) == (24, 1)
    assert verdict_of(found, [[10.0] * 5], None).verdict == "below-floor"


def test_further_starts_of_a_reference_count_with_its_first() -> None:
    found = bound(floor(ratio=1.0), record([100.0] * 5), starts=[[110.0] * 5, [104.0] * 5])
    assert (found.limit, found.reference.count, found.reference.error) == (104, 3, 5)
    mixed = record([100.0] * 5 + [90.0] * 5 + [95.0] * 5, median=95.0, starts=[5, 5, 5])
    assert bound(floor(ratio=1.0), mixed).reference.count == 3


def test_the_check_of_a_reference_comes_before_what_a_users_test_measured() -> None:
    mine = record([100.0] * 5)
    mine.measurements = [
        {**mine.measurements[0], "median": 10.0, "samples": [10.0] * 5, "test": "t.py::test"},
        *mine.measurements,
    ]
    assert bound(floor(ratio=1.0), mine).limit == 100


def test_an_invalid_measurement_is_never_below_a_floor() -> None:
    verdict = verdict_of(bound(floor(limit=60.0)), [[1.0] * 5], "GPU GPU-1 was held back by HwThermalSlowdown")
    assert verdict.verdict == "invalid"
    assert "HwThermalSlowdown" in verdict.text


def test_the_record_has_every_metric_and_the_worst_verdict() -> None:
    profile = BUILT_IN["single-stream"]
    window = {"output_throughput": 50.0, "mean_ttft_ms": 10.0}
    verdicts = [
        verdict_of(bound(floor(limit=40.0)), [[50.0] * 5], None),
        verdict_of(bound(floor(limit=90.0)), [[50.0] * 5], None),
    ]
    rows = {row.metric: row for row in measurements(profile, [[window] * 5], verdicts, None)}
    assert set(rows) == {"output_throughput", "mean_ttft_ms"}
    speed = rows["output_throughput"].to_json()
    assert (speed["verdict"], speed["unit"], speed["direction"]) == ("below-floor", "tok/s", "higher")
    assert speed["floor"] == {"text": "at-least 90 tok/s", "where": "m.yaml:9", "limit": 90.0, "note": ""}
    assert (rows["mean_ttft_ms"].verdict, rows["mean_ttft_ms"].direction) == ("recorded", "lower")
    assert {row.method for row in rows.values()} == {profile.method}


def test_history_is_of_the_same_cell_gpus_and_method(tmp_path) -> None:
    def run(name: str, median: float, **changes: object) -> None:
        one = record([median], **{k: v for k, v in changes.items() if k in ("method", "verdict")}).to_json()
        one |= {"outcome": "passed"} | {
            name: value for name, value in changes.items() if name in ("axes", "gpus", "matrix")
        }
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps({"simulated": changes.get("simulated", False), "cells": [one]}))

    run("1", 10.0)
    run("2", 20.0)
    run("3", 30.0)
    run("4", 999.0, method="other")
    run("5", 999.0, axes=BASE | {"nccl": "tuned"})
    run("6", 999.0, gpus=GPUS * 2)
    run("7", 999.0, simulated=True)
    run("8", 999.0, verdict="below-floor")
    run("81", 999.0, matrix="another")
    run("9", 40.0)
    (tmp_path / "runs" / "95").mkdir()
    (tmp_path / "runs" / "95" / "run.json").write_text("{torn")
    run("99", 50.0)
    said: list[str] = []
    found = past_of(
        runs_before(tmp_path, tmp_path / "runs" / "99", said.append),
        cell(),
        load="single-stream",
        metric="output_throughput",
        method=METHOD,
        gpus=["RTX"],
        simulated=False,
        last=3,
    )
    assert found.medians == (40.0, 30.0, 20.0)
    assert len(said) == 1
    assert "95/run.json" in said[0]
    assert bound(floor(history_ratio=0.9, history_last=5), past=Past(runs=7)).missing.startswith(
        "no history: 7 records"
    )


def test_a_method_is_what_is_measured_and_not_what_it_is_called() -> None:
    one = LoadProfile(name="a", concurrency=8)
    assert one.method == LoadProfile(name="b", concurrency=8, timeout=5).method
    assert len({one.method, LoadProfile(name="a", concurrency=9).method, LoadProfile(name="a", prefix=3).method}) == 3


@pytest.mark.parametrize("profile", [*BUILT_IN.values(), LoadProfile(name="open", rate=3.5, concurrency=4)])
def test_warm_up_is_at_least_twice_the_concurrency(profile) -> None:
    assert profile.warmup_requests >= 2 * profile.concurrency


def test_an_unknown_load_names_those_there_are() -> None:
    with pytest.raises(Exception, match="single-stream, batch, saturate"):
        profile_named("chat", {})
