"""report.html in a real browser: `tox -e page` (needs Chromium on the machine; nothing is downloaded)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpuserve.report.html import Side, page
from pytest_gpuserve.report.store import read_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.browser
ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "unit" / "golden"
BEFORE, RUN = (read_run(GOLDEN / f"run_{side}.json") for side in ("before", "after"))
HOSTILE = "</script><script>window.pwned=1</script><img src=x onerror='window.pwned=1'>\x1b[31m"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: run `tox -e page`")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Opens a report; afterwards, no error was said and no request left the page."""
    problems: list[str] = []
    context = browser.new_context(viewport={"width": 1400, "height": 1000})

    def opened(text: str, fragment: str = "") -> Any:
        file = tmp_path / "report.html"
        file.write_text(text, encoding="utf-8")
        tab = context.new_page()
        tab.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.on("request", lambda request: problems.append(request.url) if request.url != tab.url else None)
        tab.goto(f"{file.as_uri()}{fragment}")
        problems[:] = [problem for problem in problems if not problem.startswith(file.as_uri())]
        tab.wait_for_selector("html[data-ready]")
        return tab

    yield opened
    context.close()
    # The page's one picture is an empty `data:` icon: it asks nobody.
    assert [problem for problem in problems if not problem.startswith(("data:", "blob:"))] == []


def visible(tab: Any) -> int:
    return tab.locator("#map tbody tr:not([hidden]) .square:not(.off)").count()


def test_the_map_shows_every_cell_and_filters_it(show: Callable[..., Any]) -> None:
    tab = show(page([Side(RUN)]))
    assert visible(tab) == len(RUN["cells"])
    red = sum(cell["outcome"] == "failed" for cell in RUN["cells"])
    tab.click("#tools button:has-text('failed')  >> nth=0")
    assert visible(tab) == red
    assert tab.inner_text("#shown").startswith(f"{red} of {len(RUN['cells'])} cells match")
    tab.click("#tools button:has-text('failed')  >> nth=0")
    name = RUN["cells"][0]["id"]
    tab.fill("input[type=search]", name)
    assert 1 <= visible(tab) < len(RUN["cells"])


def test_a_cell_opens_by_keyboard_and_by_its_address(show: Callable[..., Any]) -> None:
    tab = show(page([Side(RUN)]))
    tab.focus(".square[tabindex='0']")
    first = tab.evaluate("document.activeElement.getAttribute('aria-label')")
    tab.keyboard.press("ArrowDown")
    second = tab.evaluate("document.activeElement.getAttribute('aria-label')")
    assert second != first
    tab.keyboard.press("Enter")
    title = tab.inner_text("#cell-title")
    assert second.startswith(title)
    address = tab.evaluate("location.hash")
    tab.keyboard.press("Escape")
    tab.wait_for_selector("dialog:not([open])", state="attached")
    assert tab.evaluate("document.activeElement.getAttribute('aria-label')") == second
    again = show(page([Side(RUN)]), address)
    assert again.inner_text("#cell-title") == title


def test_a_cell_tells_all_that_its_record_holds(show: Callable[..., Any]) -> None:
    cell = next(cell for cell in RUN["cells"] if cell["outcome"] == "failed")
    tab = show(page([Side(RUN)]), f"#0/{cell['id']}")
    text = tab.inner_text("dialog")
    assert cell["failure"]["message"].splitlines()[0] in text
    for flag in cell["flags"]:
        assert f"--{flag}" in text
    assert "Launched as" in text


def test_text_of_a_server_is_inert(show: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "log-end.txt").write_text(HOSTILE)
    failure = {
        "kind": "crash",
        "phase": "warmup",
        "signature": HOSTILE,
        "message": HOSTILE,
        "text": HOSTILE,
        "evidence": [HOSTILE],
    }
    cell = {
        **RUN["cells"][0],
        "outcome": "failed",
        "reason": HOSTILE,
        "failure": failure,
        "folder": "c",
        "notes": [HOSTILE],
    }
    cell |= {
        "known_bad": {
            "id": HOSTILE,
            "issue": "javascript:window.pwned=1",
            "reason": HOSTILE,
            "file": HOSTILE,
            "line": 1,
        }
    }
    tab = show(page([Side({**RUN, "cells": [cell], "matrices": [HOSTILE]}, tmp_path)]), f"#0/{cell['id']}")
    assert "window.pwned" in tab.inner_text("dialog")
    assert tab.evaluate("window.pwned") is None
    assert tab.locator("dialog a").count() == 0, "only https addresses become links"
    assert "\x1b" not in tab.inner_text("dialog")


def test_two_records_stand_side_by_side(show: Callable[..., Any]) -> None:
    tab = show(page([Side(BEFORE), Side(RUN)]))
    assert tab.locator("#map thead tr").count() == 2
    every = tab.locator("#map tbody tr:not([hidden])").count()
    tab.click("text=only rows that differ")
    fewer = tab.locator("#map tbody tr:not([hidden])").count()
    assert 0 < fewer < every


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(browser: Any, tmp_path: Path, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    file = tmp_path / "report.html"
    file.write_text(page([Side(BEFORE), Side(RUN)]), encoding="utf-8")
    cell = next(cell for cell in RUN["cells"] if cell["outcome"] == "failed")
    tab = browser.new_page(color_scheme=scheme, bypass_csp=True)
    for fragment in ("", f"#1/{cell['id']}"):
        tab.goto("about:blank")
        tab.goto(f"{file.as_uri()}{fragment}")
        tab.wait_for_selector("html[data-ready]")
        found = axe.run(tab).response["violations"]
        serious = [(one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")]
        assert serious == []
    tab.close()


def test_two_thousand_cells_filter_without_a_wait(show: Callable[..., Any]) -> None:
    cells = []
    for number in range(2000):
        cell = json.loads(json.dumps(RUN["cells"][number % len(RUN["cells"])]))
        cells.append(
            cell
            | {
                "id": f"m{number % 7}-a.l{number // 7}",
                "model": f"m{number % 7}",
                "axes": {"a": f"l{number // 7}"},
                "baseline": {"a": "x"},
            }
        )
    tab = show(page([Side({**RUN, "cells": cells})]))
    assert visible(tab) == 2000
    tab.fill("input[type=search]", "l28")
    assert 0 < visible(tab) < 200
