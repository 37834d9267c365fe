"""report.html: what it holds, that nothing in it is markup, and how large it gets."""

import base64
import gzip
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuserve.report.html import Side, identity, page, past_of
from pytest_gpuserve.report.store import cell_folder, read_run

GOLDEN = Path(__file__).parent / "golden"
BEFORE, RUN = (read_run(GOLDEN / f"run_{side}.json") for side in ("before", "after"))
PREFLIGHT_CELL = {
    "id": "sm120-m-attention.fa3",
    "arch": "sm120",
    "model": "m",
    "axes": {"attention": "fa3"},
    "flags": {"attention-backend": "fa3"},
    "env": {},
    "argv": ["--attention-backend", "fa3"],
    "outcome": "accepted",
    "rejection": None,
    "settings": {},
    "gate": {"fa3": "rejected: FlashAttention v3 Backend requires SM>=80 and SM<=90"},
}


def data_of(text: str) -> dict[str, Any]:
    """What the page's script unpacks."""
    packed = re.search(r'<script type="text/plain" id="data">([^<]*)</script>', text)
    assert packed
    return json.loads(gzip.decompress(base64.b64decode(packed.group(1))))


def test_it_holds_every_cell_with_its_checks_and_its_difference_from_the_baseline() -> None:
    (record,) = data_of(page([Side(RUN)]))["records"]
    assert [cell["id"] for cell in record["cells"]] == [cell["id"] for cell in RUN["cells"]]
    for shown, cell in zip(record["cells"], RUN["cells"], strict=True):
        baseline = cell["baseline"]
        assert shown["delta"] == [f"{a}.{b}" for a, b in cell["axes"].items() if b != baseline.get(a, b)]
        assert len(shown["checks"]) == sum(check["cell"] == cell["id"] for check in RUN["checks"])


def test_the_same_records_give_the_same_file() -> None:
    assert page([Side(RUN), Side(BEFORE)]) == page([Side(RUN), Side(BEFORE)])


def test_it_says_how_each_record_was_come_by() -> None:
    preflight = {"kind": "preflight", "arch": "sm120", "versions": {"sglang": "0.5.23"}, "cells": [PREFLIGHT_CELL]}
    sides = [Side({**RUN, "simulated": False}), Side({**RUN, "simulated": True}), Side(preflight)]
    real, simulated, foretold = data_of(page(sides))["records"]
    assert real["proof"] == "real run"
    assert simulated["proof"].startswith("SIMULATED")
    assert foretold["proof"] == "preflight (arguments): nothing was launched"
    (cell,) = foretold["cells"]
    # Accepted by the arguments is not the last word: the registry's refusal is what a launch dies of.
    assert (cell["outcome"], cell["failure"]["kind"]) == ("foretold-failure", "crash")


HOSTILE = "</script><script>alert(1)</script>\x1b[31m\u202e::error::x"


def test_no_text_of_a_record_becomes_part_of_the_page(tmp_path: Path) -> None:
    cell = {**RUN["cells"][0], "id": HOSTILE, "model": HOSTILE, "reason": HOSTILE, "outcome": "failed", "folder": "c"}
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "log-end.txt").write_text(HOSTILE)
    hostile = {**RUN, "cells": [cell], "matrices": [HOSTILE], "versions": {"sglang": HOSTILE}}
    text, sound = page([Side(hostile, tmp_path)]), page([Side(RUN)])
    assert text.count("<script") == sound.count("<script")
    assert "alert(1)" not in re.sub(r"<title>.*?</title>", "", text)
    assert data_of(text)["records"][0]["cells"][0]["log_end"] == HOSTILE


def test_it_loads_nothing() -> None:
    text = page([Side(RUN)])
    assert "default-src 'none'" in text
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!data:)""", text)


def many(count: int) -> dict[str, Any]:
    """A run of `count` cells that differ as those of a real one do: hashes, times, measurements, messages."""
    chance = random.Random(7)
    cells = []
    for number in range(count):
        cell = json.loads(json.dumps(RUN["cells"][number % len(RUN["cells"])]))
        phases = {name: round(chance.uniform(0, 30), 3) for name in ("import", "weights", "graph-capture")}
        samples = [round(chance.gauss(90, 3), 2) for _ in range(5)]
        speed = {"metric": "output_throughput", "unit": "tok/s", "load": "single-stream", "samples": samples}
        cell |= {
            "id": f"sm120-m{number % 7}-a.level{number}",
            "outcome": "failed" if number % 10 == 0 else "xfailed" if number % 2 else "passed",
            "model": f"m{number % 7}",
            "axes": {"a": f"level{number}"},
            "baseline": {"a": "x"},
            "timings": {"phases": phases, "total": sum(phases.values())},
            "measurements": [{**speed, "median": sorted(samples)[2], "spread": 1.5, "verdict": "ok"}],
            "folder": f"cells/{number}",
        }
        cells.append(cell)
    return {**RUN, "cells": cells}


def test_two_thousand_cells_are_at_most_two_megabytes(tmp_path: Path) -> None:
    run, chance = many(2000), random.Random(3)
    for cell in run["cells"]:
        folder = tmp_path / cell["folder"]
        folder.mkdir(parents=True)
        words = " ".join(f"{chance.randrange(1 << 30):x}" for _ in range(400))
        (folder / "log-end.txt").write_text(words)
    text = page([Side(run, tmp_path)])
    assert len(text.encode()) <= 2_000_000
    data = data_of(text)
    urgent = [cell for cell in data["records"][0]["cells"] if cell["outcome"] in ("failed", "changed", "infra")]
    assert urgent
    assert all(cell.get("log_end") for cell in urgent), "what is red keeps its log when room runs out"
    assert data["logs_left_out"] > 0


def test_earlier_runs_are_told_oldest_first_by_what_the_cell_is() -> None:
    past = past_of([BEFORE, RUN])
    cell = RUN["cells"][0]
    (record,) = data_of(page([Side(RUN, history=past)]))["records"]
    started = [entry["started"] for entry in record["cells"][0]["history"]]
    runs = [one for one in (BEFORE, RUN) if any(identity(other) == identity(cell) for other in one["cells"])]
    assert started == [one["started"] for one in runs]


@pytest.mark.parametrize("missing", ["gpus", "driver", "checks", "command"])
def test_a_record_may_lack_what_it_does_not_need(missing: str) -> None:
    run = {name: value for name, value in RUN.items() if name != missing}
    assert data_of(page([Side(run)]))["records"][0]["cells"]


def test_a_log_that_is_not_there_costs_nothing(tmp_path: Path) -> None:
    assert cell_folder(tmp_path, "x").exists() is False
    assert "log_end" not in data_of(page([Side(RUN, tmp_path)]))["records"][0]["cells"][0]
