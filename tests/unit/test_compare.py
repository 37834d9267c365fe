"""What became of each cell: pairing by identity, classes, and noise."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpuserve.compare import Change, compare
from pytest_gpuserve.compare.patch import make_patch
from pytest_gpuserve.compare.render import as_json, markdown, text
from pytest_gpuserve.compare.speed import compare_speeds
from pytest_gpuserve.model.failure import Failure, Kind
from pytest_gpuserve.model.phase import Phase
from pytest_gpuserve.report.store import read_run

GOLDEN = Path(__file__).parent / "golden"
BEFORE, AFTER = (read_run(GOLDEN / f"run_{side}.json") for side in ("before", "after"))
LIST = "matrices/known_bad.yaml"
CRASH = Failure.of(Kind.CRASH, Phase.WARMUP, "died", line="RuntimeError: Unsupported architecture").to_json()
OTHER = Failure.of(Kind.CRASH, Phase.WARMUP, "died", line="ValueError: page size").to_json()
LATER = CRASH | {"phase": "serving"}
INFRA = Failure.of(Kind.INFRA, Phase.SPAWN, "GPU 3 is held").to_json()


def cell(outcome: str = "passed", failure: dict | None = None, axes: dict | None = None, **more: Any) -> dict:
    axes = axes or {"attention": "triton"}
    return {
        "id": more.pop("id", f"sm120-m-{'+'.join(axes.values())}"),
        "arch": "sm120",
        "model": "m",
        "axes": axes,
        "baseline": {"attention": "triton"},
        "outcome": outcome,
        "failure": failure,
        "known_bad": None,
        "reason": "",
        "measurements": [],
        "server_starts": 1,
        **more,
    }


def run(*cells: dict, **more: Any) -> dict:
    return {
        "schema": 1,
        "simulated": False,
        "complete": True,
        "started": "2026-11-29T03:00:00Z",
        "finished": "2026-11-29T04:00:00Z",
        "command": [],
        "versions": {"sglang": "0.5.23"},
        "driver": {},
        "host": "h",
        "gpus": [],
        "matrices": [],
        "cells": list(cells),
        "checks": [],
        **more,
    }


def before(*cells: dict, **more: Any) -> dict:
    return run(*cells, **{"started": "2026-11-28T03:00:00Z", "versions": {"sglang": "0.5.10.post1"}, **more})


def changes(a: dict, b: dict) -> list[str]:
    return [str(row.change) for row in compare(a, b).rows]


@pytest.mark.parametrize(
    ("name", "render"), [("compare.txt", text), ("compare.md", markdown), ("compare.json", as_json)]
)
def test_golden(name: str, render: Callable[..., str], golden: Callable[[str, str], None]) -> None:
    comparison = compare(BEFORE, AFTER)
    golden(
        name, render(comparison, make_patch(comparison, AFTER, {LIST: (GOLDEN / "known_bad.yaml").read_text()}, LIST))
    )


# -- classes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "change", "finding"),
    [
        (cell(), cell("failed", CRASH), "BROKE", True),
        (cell("xpassed"), cell("xfailed", CRASH), "BROKE", True),
        (cell("failed", CRASH), cell(), "FIXED", False),
        (cell("xfailed", CRASH), cell("xpassed"), "FIXED", False),
        (cell("failed", CRASH), cell("failed", CRASH), "STILL-BAD", False),
        (cell("xfailed", CRASH), cell("failed", CRASH), "STILL-BAD", False),
        (cell("failed", CRASH), cell("failed", OTHER), "CHANGED", True),
        (cell("failed", CRASH), cell("failed", LATER), "CHANGED", True),
        (cell("failed", CRASH), cell("failed", CRASH | {"kind": "oom"}), "CHANGED", True),
        (cell(), cell("infra", INFRA), "NOT-RUN", True),
        (cell("failed", CRASH), cell("infra", INFRA), "NOT-RUN", True),
        (cell(), cell("not-run"), "NOT-RUN", True),
        (cell(), cell("blocked"), "NOT-RUN", True),
        (cell(), cell("skipped"), "NOT-RUN", True),
        (cell("not-run"), cell("not-run"), "NOT-RUN", False),
        (cell("infra", INFRA), cell(), "NOT-RUN", False),
        (cell("infra", INFRA), cell("failed", CRASH), "NOT-RUN", True),
        (cell("infra", INFRA), cell("xfailed", CRASH), "NOT-RUN", False),
        (cell(), cell(), "SAME", False),
        (cell(), cell("xpassed"), "SAME", False),
    ],
)
def test_classes(old: dict, new: dict, change: str, finding: bool) -> None:
    comparison = compare(before(old), run(new))
    assert [(str(row.change), row.finding) for row in comparison.rows] == [(change, finding)]
    assert comparison.exit_code == int(finding)


def test_one_entry_that_explains_both_failures_makes_them_one() -> None:
    known = {"known_bad": {"id": "KB-1"}}
    old, new = cell("xfailed", CRASH, **known), cell("xfailed", OTHER, **known)
    assert changes(before(old), run(new)) == ["STILL-BAD"]
    assert changes(before(old), run(new | {"known_bad": {"id": "KB-2"}})) == ["CHANGED"]
    assert changes(before(old), run(new | {"failure": LATER})) == ["CHANGED"], "another phase is another failure"
    assert changes(before(old), run(new | {"outcome": "changed"})) == ["CHANGED"]


def test_a_check_that_fails_beside_the_old_failure_is_a_change() -> None:
    def checks(answers: str) -> list[dict]:
        return [
            {"cell": "sm120-m-triton", "name": "canary", "outcome": "failed"},
            {"cell": "sm120-m-triton", "name": "answers", "outcome": answers},
        ]

    bad = cell("failed", CRASH)
    comparison = compare(before(bad, checks=checks("passed")), run(bad, checks=checks("failed")))
    assert str(comparison.rows[0].change) == "CHANGED"
    assert comparison.rows[0].reason.startswith("fails more checks: answers")
    assert changes(before(bad, checks=checks("blocked")), run(bad, checks=checks("failed"))) == ["STILL-BAD"]


def test_nothing_is_fixed_by_a_run_that_left_out_the_check_that_failed() -> None:
    """As with `-k ready`, or with --gpu-floors off after a cell that was too slow."""

    def checks(**outcomes: str) -> list[dict]:
        return [{"cell": "sm120-m-triton", "name": name, "outcome": outcome} for name, outcome in outcomes.items()]

    wrong = Failure.of(Kind.WRONG_OUTPUT, Phase.SERVING, "garbage").to_json()
    first = before(cell("xfailed", wrong, known_bad={"id": "KB-1"}), checks=checks(ready="passed", output="xfailed"))
    (row,) = compare(first, run(cell(), checks=checks(ready="passed"))).rows
    assert (str(row.change), row.finding) == ("NOT-RUN", True)
    assert "output did not run now (wrong-output in serving before)" in row.reason
    assert changes(first, run(cell(), checks=checks(ready="passed", output="skipped"))) == ["NOT-RUN"]
    assert changes(first, run(cell("xpassed"), checks=checks(ready="passed", output="passed"))) == ["FIXED"]


@pytest.mark.parametrize("failure", [CRASH, Failure.of(Kind.LEAK, Phase.STOPPED, "40 GiB in use").to_json()])
def test_a_start_that_serves_fixes_what_any_check_would_have_reported(failure: dict) -> None:
    """A start's failure is told by the cell's first check, a leak by its last: whichever these are in a run."""
    first = before(cell("failed", failure), checks=[{"cell": "sm120-m-triton", "name": "one", "outcome": "failed"}])
    other = [{"cell": "sm120-m-triton", "name": "other", "outcome": "passed"}]
    assert changes(first, run(cell(), checks=other)) == ["FIXED"]
    assert changes(first, run(cell(server_starts=0), checks=other)) == ["NOT-RUN"]


def test_a_cell_that_passed_until_the_run_was_cut_off_is_not_the_same() -> None:
    cut = [{"cell": "sm120-m-triton", "name": "throughput", "outcome": "not-run"}]
    (row,) = compare(before(cell()), run(cell(), checks=cut, complete=False)).rows
    assert (str(row.change), row.finding) == ("NOT-RUN", True)
    assert "passed until the run ended, without throughput" in row.reason
    assert changes(before(cell(), checks=cut), run(cell())) == ["NOT-RUN"]
    # A failure that was seen was seen.
    assert changes(before(cell()), run(cell("failed", CRASH), checks=cut)) == ["BROKE"]


# -- pairs -------------------------------------------------------------------------------------------------------------


def test_pairs_go_by_identity_not_by_order_or_id() -> None:
    cells = [cell(axes={"attention": level}, id=level) for level in ("triton", "fa3", "fa4")]
    renamed = [one | {"id": f"renamed-{number}"} for number, one in enumerate(reversed(cells))]
    assert changes(before(*cells), run(*renamed)) == ["SAME"] * 3
    gone_and_new = compare(before(*cells[:2]), run(*cells[1:]))
    assert {(row.id, str(row.change)) for row in gone_and_new.rows} == {
        ("triton", "GONE"),
        ("fa3", "SAME"),
        ("fa4", "NEW"),
    }
    assert gone_and_new.exit_code == 1, "a cell that is gone is a result that is lost"


def test_an_axis_only_one_record_has_stands_at_its_baseline() -> None:
    wider = {"attention": "triton", "graphs": "on"}
    cells = [cell(axes={"attention": "fa3", "graphs": graphs}, baseline=wider) for graphs in ("on", "off")]
    narrow = cell(axes={"attention": "fa3"}, id="narrow")
    assert [(row.id, str(row.change)) for row in compare(before(narrow), run(*cells)).rows] == [
        ("sm120-m-fa3+off", "NEW"),
        ("sm120-m-fa3+on", "SAME"),
    ]
    assert [(row.id, str(row.change)) for row in compare(before(*cells), run(narrow)).rows] == [
        ("sm120-m-fa3+off", "GONE"),
        ("narrow", "SAME"),
    ]


LEVELS = st.dictionaries(st.sampled_from(["a", "b", "c"]), st.sampled_from(["0", "1", "2"]), max_size=3)


@settings(deadline=None)
@given(st.lists(LEVELS, max_size=8), st.lists(LEVELS, max_size=8))
def test_every_cell_of_both_records_is_in_exactly_one_row(one: list[dict], other: list[dict]) -> None:
    def cells(levels: list[dict], side: str) -> list[dict]:
        known = {axis for axes in levels for axis in axes}
        base = dict.fromkeys(sorted(known), "0")
        return [cell(axes=base | axes, baseline=base, id=f"{side}{number}") for number, axes in enumerate(levels)]

    a, b = cells(one, "a"), cells(other, "b")
    rows = compare(before(*a), run(*b)).rows
    assert sorted(row.a["id"] for row in rows if row.a) == sorted(found["id"] for found in a)
    assert sorted(row.b["id"] for row in rows if row.b) == sorted(found["id"] for found in b)


# -- speed -------------------------------------------------------------------------------------------------------------


def rate(*samples: float, metric: str = "output_throughput", direction: str = "higher", **more: Any) -> dict:
    middle = sorted(samples)[len(samples) // 2]
    return {
        "load": "single-stream",
        "metric": metric,
        "unit": "tok/s",
        "direction": direction,
        "samples": list(samples),
        "median": middle,
        "verdict": "recorded",
        **more,
    }


def speeds(old: dict, new: dict, starts: int = 3, **more: Any) -> Any:
    a, b = (cell(measurements=[one], server_starts=starts) for one in (old, new))
    (row,) = compare(before(a, **more), run(b)).rows
    return row


def test_a_users_load_is_compared_with_itself_and_not_with_the_checks() -> None:
    mine = {**rate(50), "test": "test_mine.py::test_chat"}
    old, new = cell(measurements=[rate(100), mine]), cell(measurements=[{**mine, "median": 49.0}, rate(99)])
    found = {measure.load: (measure.before, measure.after) for measure in compare_speeds(old, new)}
    assert found == {"single-stream": (100, 99), "single-stream (test_mine.py::test_chat)": (50, 49)}


@pytest.mark.parametrize(
    ("old", "new", "starts", "change"),
    [
        (rate(100, 100, 100), rate(94, 94, 94), 3, "SLOWER"),
        (rate(100, 100, 100), rate(96, 96, 96), 3, "SAME"),
        (rate(100, 100, 100), rate(106, 106, 106), 3, "FASTER"),
        (rate(96, 100, 104), rate(86, 90, 94), 3, "SAME"),
        (rate(96, 100, 104), rate(66, 70, 74), 3, "SLOWER"),
        (rate(100, 100, 100), rate(86, 86, 86), 1, "SAME"),
        (rate(100, 100, 100), rate(84, 84, 84), 1, "SLOWER"),
        (rate(100), rate(86), 3, "SAME"),
        (rate(100), rate(12), 3, "SLOWER"),
        (rate(100, 100, 100, direction="lower"), rate(110, 110, 110, direction="lower"), 3, "SLOWER"),
        (rate(9, 9, 9, metric="p99_ttft_ms", direction="lower"), rate(99, 99, 99, metric="p99_ttft_ms"), 3, "SAME"),
        (rate(100, 100, 100), rate(50, 50, 50, metric="request_throughput"), 3, "SAME"),
    ],
)
def test_a_difference_counts_beyond_its_noise(old: dict, new: dict, starts: int, change: str) -> None:
    assert str(speeds(old, new, starts).change) == change


def test_what_is_undecided_says_why() -> None:
    assert speeds(rate(100), rate(90)).reason == (
        "undecided: single-stream output_throughput 100 → 90 tok/s (-10.0%); "
        "too few samples (1 and 1) to know the noise"
    )
    assert "one start" in speeds(rate(100, 100, 100), rate(90, 90, 90), 1).reason
    assert speeds(rate(100, 100, 100), rate(97, 97, 97)).reason == ""
    assert "undecided" in text(compare(before(cell(measurements=[rate(100)])), run(cell(measurements=[rate(90)]))))


@pytest.mark.parametrize(
    ("old", "new", "more", "said"),
    [
        (rate(100, 100, 100, unit="ms"), rate(10, 10, 10), {}, "measured in other units (ms)"),
        (rate(100, 100, 100, verdict="invalid", note="throttled"), rate(10, 10, 10), {}, "invalid before: throttled"),
        (rate(0, 0, 0), rate(10, 10, 10), {}, "nothing was measured before"),
        (rate(9, 9, 9, method="a1"), rate(99, 99, 99, method="b2"), {}, "measured in another way"),
        (rate(100, 100, 100), rate(10, 10, 10), {"simulated": True}, "one of the records is simulated"),
    ],
)
def test_what_cannot_be_compared_is_not(old: dict, new: dict, more: dict, said: str) -> None:
    row = speeds(old, new, **more)
    assert (str(row.change), row.reason) == ("SAME", f"speed not compared: {said}")


def test_speeds_of_other_gpus_are_not_compared() -> None:
    a = before(cell(measurements=[rate(9, 9, 9)]), gpus=[{"name": "H200"}])
    b = run(cell(measurements=[rate(99, 99, 99)]), gpus=[{"name": "RTX PRO 6000"}])
    comparison = compare(a, b)
    assert str(comparison.rows[0].change) == "SAME"
    assert "speeds are not compared: other GPUs (H200; RTX PRO 6000)" in comparison.warnings


def test_a_fallen_speed_is_shown_with_the_failure_it_causes() -> None:
    slow = Failure.of(Kind.SLOW, Phase.SERVING, "below its floor").to_json()
    now = [rate(11, verdict="below-floor"), rate(11, metric="request_throughput")]
    then = [rate(90), rate(90, metric="request_throughput")]
    (row,) = compare(before(cell(measurements=then)), run(cell("failed", slow, measurements=now))).rows
    assert str(row.change) == "BROKE"
    assert row.measures[0].verdict == "slower"
    assert row.reason.startswith("below its floor; single-stream output_throughput 90 → 11 tok/s (-87.8%)")
    assert "request_throughput" not in row.reason


def test_one_cause_is_not_told_metric_by_metric() -> None:
    names = ("output_throughput", "total_throughput", "request_throughput", "other", "another")
    old, new = ([rate(*[speed] * 3, metric=name) for name in names] for speed in (90, 45))
    (row,) = compare(before(cell(measurements=old)), run(cell(measurements=new))).rows
    assert str(row.change) == "SLOWER"
    assert row.reason.count("→") == 3
    assert row.reason.endswith("; and 2 more metrics")
    assert len(row.measures) == 5


# -- what is said of the whole -----------------------------------------------------------------------------------------


def warned(a: dict, b: dict) -> str:
    return "\n".join(compare(a, b).warnings)


def test_warnings() -> None:
    one = cell()
    assert warned(before(one), run(one)) == ""
    assert "first record is SIMULATED and the other is real" in warned(before(one, simulated=True), run(one))
    assert "both records are of simulated" in warned(before(one, simulated=True), run(one, simulated=True))
    assert "second run did not end by itself" in warned(before(one), run(one, complete=False))
    assert "are they swapped?" in warned(run(one), before(one))
    assert "both records are of the same run" in warned(run(one), run(one))
    flags = cell(flags={"mem-fraction-static": 0.8})
    assert warned(before(one | {"flags": {"mem-fraction-static": 0.9}}), run(flags)) == (
        "1 cell was launched with other flags than before under the same name, as sm120-m-triton: "
        "--mem-fraction-static 0.9 → 0.8"
    )
    env = {"NCCL_ALGO": "Ring", "CUDA_VISIBLE_DEVICES": "0"}
    moved = [one | {"env": env}, one | {"env": env | {"CUDA_VISIBLE_DEVICES": "1"}}]
    assert warned(before(moved[0]), run(moved[1])) == ""  # other GPUs were free that night
    for idle in ({}, {"NCCL_ALGO": "Ring"}):  # it was not launched with other variables: it was not launched
        assert warned(before(cell("infra") | {"env": idle, "server_starts": 0}), run(moved[1])) == ""
    bare = one | {"env": {}, "server_starts": 1}
    assert "NCCL_ALGO (unset) → Ring" in warned(before(bare), run(moved[1]))
    other = cell() | {"arch": "sm90"}
    assert "different architectures: sm120 with m, and sm120, sm90 with m" in warned(before(one), run(one, other))


def test_records_with_nothing_in_common_say_nothing() -> None:
    comparison = compare(before(cell()), run(cell() | {"arch": "sm90"}))
    assert comparison.exit_code == 2
    assert comparison.warnings[0] == "no cell is in both records: sm120 with m, and sm90 with m"
    assert "nothing could be compared" in text(comparison)
    assert compare(before(), run()).exit_code == 2


def test_what_moved_the_stack_first() -> None:
    a = before(cell(), versions={"sglang": "1", "zlib": "1", "attrs": "1"}, driver={"driver": "580"})
    b = run(cell(), versions={"sglang": "2", "zlib": "1", "numpy": "2"}, driver={"driver": "590"})
    assert list(map(str, compare(a, b).moved)) == [
        "sglang: 1 → 2",
        "driver: 580 → 590",
        "attrs: 1 → (absent)",
        "numpy: (absent) → 2",
    ]


def test_json_holds_every_row() -> None:
    data = json.loads(as_json(compare(BEFORE, AFTER)))
    assert len(data["rows"]) == 14
    assert data["counts"] == {str(change): number for change, number in compare(BEFORE, AFTER).counts.items()}
    assert {row["change"] for row in data["rows"]} == set(map(str, Change)) - {"GONE"}


def test_long_lists_are_cut_and_counted() -> None:
    cells = [cell(axes={"attention": f"l{number}"}) for number in range(500)]
    comparison = compare(before(*cells), run(*(one | {"outcome": "failed", "failure": CRASH} for one in cells)))
    assert "… and 300 more; --format json has all" in text(comparison)
    assert "… and 300 more." in markdown(comparison)
