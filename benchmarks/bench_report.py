"""How fast report.html of 2,000 cells is made, opens and filters, in Chromium: `python benchmarks/bench_report.py`.

Needs the dependency group `page` and the machine's Chromium. Prints medians of five; goals: opened within 1 s, filtered
within 100 ms, at most 2 MB.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "unit")]

from test_html import many  # noqa: E402

from pytest_gpuserve.report.html import Side, page  # noqa: E402

# Until the page has drawn itself and the browser has laid it out.
FILTER = """() => { const field = document.querySelector("input[type=search]"); const from = performance.now();
field.value = "level28"; field.dispatchEvent(new Event("input", {bubbles: true}));
document.body.getBoundingClientRect(); return performance.now() - from; }"""


def main() -> None:
    run = many(2000)
    begun = time.perf_counter()
    text = page([Side(run)])
    made = time.perf_counter() - begun
    opened, filtered = [], []
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        file = Path(folder) / "report.html"
        file.write_text(text, encoding="utf-8")
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for _ in range(5):
            tab = browser.new_page()
            tab.goto(file.as_uri())
            tab.wait_for_selector("html[data-ready]")
            opened.append(tab.evaluate("performance.getEntriesByName('drawn')[0].startTime"))
            filtered.append(tab.evaluate(FILTER))
            tab.close()
        browser.close()
    figures = {"bytes": len(text.encode()), "made_s": made, "open_ms": median(opened), "filter_ms": median(filtered)}
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
