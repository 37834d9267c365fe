"""The terminal's table: fits its width, says what is red first, and what to do next."""

import json
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpuserve.report import markdown
from pytest_gpuserve.report.describe import bounded, one_line, retirements
from pytest_gpuserve.report.store import read_run
from pytest_gpuserve.report.terminal import next_steps, summary, table

GOLDEN = Path(__file__).parent / "golden"
RUN = read_run(GOLDEN / "run_after.json")
FOLDER = Path(".gpuserve/runs/20261129T030000Z-0a1b2c")


def changed(**changes: object) -> dict:
    return json.loads(json.dumps(RUN)) | changes


@pytest.mark.parametrize("width", [80, 140])
def test_golden(width: int, golden: Callable[[str, str], None]) -> None:
    lines = summary(RUN, width, FOLDER)
    shown = "\n".join(f"{' '.join(sorted(markup)):<11}| {text}" for text, markup in lines)
    golden(f"terminal_{width}.txt", shown + "\n")


@settings(max_examples=50, deadline=None)
@given(st.integers(min_value=20, max_value=400), st.text(), st.text(min_size=1))
def test_the_table_stays_within_its_width_whatever_a_log_said(width: int, message: str, name: str) -> None:
    run = changed()
    run["cells"][3]["failure"]["message"] = run["cells"][3]["reason"] = message
    run["cells"][3]["id"] = name
    for text, _ in table(run, width):
        assert len(text) < width
        assert all(unicodedata.category(character) not in ("Cc", "Cs") for character in text)


def test_red_comes_first_and_passes_of_a_large_run_are_counted() -> None:
    cells = [dict(RUN["cells"][0], id=f"p{number}") for number in range(5000)]
    failed = dict(RUN["cells"][3], id="the-failure")
    lines = table(changed(cells=[*cells, failed]), 200)
    assert lines[1][0].startswith("the-failure")
    assert lines[1][1] == {"red": True, "bold": True}
    assert [text for text, _ in lines[2:]] == ["… and 5000 more, which passed"]


def test_simulated_and_incomplete_are_said_before_anything_else() -> None:
    lines = [text for text, _ in summary(changed(simulated=True, complete=False), 100)]
    assert lines[0].startswith("SIMULATED")
    assert lines[1].startswith("INCOMPLETE")
    assert sum("SIMULATED" in line for line in lines) == 3, "above the table, with the counts, and what seems to pass"


def test_an_entry_that_still_fails_somewhere_is_not_retired() -> None:
    run = changed()
    assert [(entry.id, entry.line) for entry in retirements(run)] == [("KB-0007", 5)]
    run["cells"][6]["known_bad"] = run["cells"][2]["known_bad"]
    assert retirements(run) == []
    passes, fails = run["cells"][2]["id"], run["cells"][6]["id"]
    assert f"KB-0007 passes in {passes} and still fails in {fails}: narrow its 'when'" in next_steps(run)[-1][0]
    assert f"| {markdown.escape(passes)} | {markdown.escape(fails)} |" in markdown.summary(run)


@pytest.mark.parametrize(
    ("spec", "version", "old", "result"),
    [
        (">=0.5.10", "0.5.23", "0.5.10.post1", ">=0.5.10,<0.5.23"),
        ("", "2.13.0+cu130", "2.11.0+cu130", "<2.13.0"),
        (">=0.5.10", "0.5.23", None, ">=0.5.10,<0.5.23"),
        (">=0.5.23", "0.5.23", None, None),
        ("==0.5.23", "0.5.23", None, None),
        ("==0.5.*", "0.5.23", None, "==0.5.*,<0.5.23"),
        (">=0.5.16,<0.5.23", "0.5.22", None, ">=0.5.16,<0.5.22"),
        (">=0.5.16,<0.5.20", "0.5.22", None, ">=0.5.16,<0.5.20,<0.5.22"),
        (">=0.5.16,!=0.5.18", "0.5.20", "0.5.22", "!=0.5.18,>0.5.20"),
        ("", "0.5.6", "0.5.10", ">0.5.6"),
        (">=0.5.20", "0.5.23", "0.5.10", None),
        ("", "not a version", "0.5.10", None),
        (">=what", "0.5.23", "0.5.10", None),
    ],
)
def test_bounding_a_range(spec: str, version: str, old: str | None, result: str | None) -> None:
    assert bounded(spec, version, old) == result


def test_one_line_of_a_log() -> None:
    assert one_line("\n \x1b[31mError\x1b[0m:\tx\udcff\r\nsecond") == "Error: x"
    assert one_line("") == one_line("\n\n") == ""
    assert one_line("abcdef", 4) == "abc…"
