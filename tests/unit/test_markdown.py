"""summary.md: what is new first, within GitHub's limit, and nothing in it becomes markup."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpuserve.compare import compare, render
from pytest_gpuserve.report.markdown import escape, fit, summary
from pytest_gpuserve.report.store import read_run

GOLDEN = Path(__file__).parent / "golden"
BEFORE, RUN = (read_run(GOLDEN / f"run_{side}.json") for side in ("before", "after"))


def changed(**changes: object) -> dict:
    return json.loads(json.dumps(RUN)) | changes


def test_golden(golden: Callable[[str, str], None]) -> None:
    golden("summary.md", summary(RUN))


def test_a_comparison_comes_first() -> None:
    told = render.markdown(compare(BEFORE, RUN))
    text = summary(RUN, told)
    assert text.index("## Compared") < text.index("## Known-bad cells that fail in another way")
    assert "### BROKE (2)" in text


@pytest.mark.parametrize("limit", [0, 300, 2000, 5000, 1 << 20])
def test_it_is_cut_by_cells_and_says_how_many(limit: int) -> None:
    many = [dict(RUN["cells"][0], id=f"cell-{number}-é") for number in range(300)]
    text = summary(changed(cells=[*RUN["cells"], *many]), "## Compared\n" + "- a line\n" * 300, limit)
    assert len(text.encode()) <= limit
    if limit in (2000, 5000):
        assert "left out here: the report would be over" in text
    if limit == 1 << 20:
        assert "cell-299-é" in text


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text(), max_size=60), st.integers(min_value=0, max_value=3000))
def test_fit_never_exceeds_its_limit(lines: list[str], limit: int) -> None:
    told = fit(lines, limit)
    assert len(told.encode("utf-8", "backslashreplace")) <= max(limit, 0)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a|b", "a\\|b"),
        ("`x` *y* _z_", "\\`x\\` \\*y\\* \\_z\\_"),
        ("<script>alert(1)</script>", "&lt;script&gt;alert(1)&lt;/script&gt;"),
        ("first\nsecond", "first"),
        ("@octocat see https://x.y", "&#64;octocat see https&#58;//x.y"),
        ("[a](b) ![c](d)", "\\[a\\](b) \\!\\[c\\](d)"),
        ("5 < 6 & 7", "5 &lt; 6 &amp; 7"),
    ],
)
def test_text_of_a_log_stays_text(text: str, shown: str) -> None:
    assert escape(text) == shown


@settings(deadline=None)
@given(st.text())
def test_a_table_cell_is_one_line_without_a_bare_bar(text: str) -> None:
    shown = escape(text)
    assert len(shown.splitlines()) <= 1
    assert "|" not in shown.replace("\\|", "")


def test_simulated_is_said() -> None:
    assert "**SIMULATED**" in summary(changed(simulated=True))
    assert "**INCOMPLETE**" in summary(changed(complete=False))
