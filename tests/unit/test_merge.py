"""Records put together: what makes one of several, what is refused, and that every report takes the result."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpuserve.compare import compare
from pytest_gpuserve.compare.merge import Part, merge
from pytest_gpuserve.errors import UsageError
from pytest_gpuserve.report.command import report_main
from pytest_gpuserve.report.markdown import summary
from pytest_gpuserve.report.parts import by_stack
from pytest_gpuserve.report.store import read_run, write_json_atomic

GOLDEN = Path(__file__).parent / "golden"
RUN = read_run(GOLDEN / "run_after.json")


def split(run: dict[str, Any], count: int, chance: random.Random) -> list[dict[str, Any]]:
    """The run as `count` shards of it would have recorded it: a model in one of them."""
    models = sorted({cell["model"] for cell in run["cells"]})
    place = {model: chance.randrange(count) for model in models}
    whole = [cell["id"] for cell in run["cells"]]
    shards = []
    for index in range(count):
        cells = [cell for cell in run["cells"] if place[cell["model"]] == index]
        names = {cell["id"] for cell in cells}
        checks = [check for check in run["checks"] if check["cell"] in names]
        shard = {"index": index + 1, "of": count, "whole": whole}
        starts = sum(cell["server_starts"] for cell in cells)
        shards.append({**run, "cells": cells, "checks": checks, "shard": shard, "server_starts": starts})
    return shards


def parts(records: list[dict[str, Any]]) -> list[Part]:
    return [Part(Path(f"{number}.json"), record) for number, record in enumerate(records)]


def renamed(run: dict[str, Any], arch: str, **changes: Any) -> dict[str, Any]:
    copy = json.loads(json.dumps(run).replace('"sm120', f'"{arch}'))
    return copy | changes


@given(st.integers(min_value=1, max_value=5), st.randoms(use_true_random=False))
def test_the_shards_of_a_run_make_the_run(count: int, chance: random.Random) -> None:
    merged = merge(parts(split(RUN, count, chance)))
    assert [cell["id"] for cell in merged["cells"]] == [cell["id"] for cell in RUN["cells"]]
    for mine, whole in zip(merged["cells"], RUN["cells"], strict=True):
        assert {**mine, "part": 0} == {**whole, "part": 0, "folder": whole.get("folder") or ""}
    assert sorted(map(str, merged["checks"])) == sorted(map(str, RUN["checks"]))
    for name in ("outcomes", "versions", "driver", "simulated", "complete", "gpus"):
        assert merged[name] == RUN[name], name
    assert merged["server_starts"] == sum(cell["server_starts"] for cell in RUN["cells"])


def test_every_report_takes_it(tmp_path: Path) -> None:
    merged = merge(parts(split(RUN, 3, random.Random(1))), beside=tmp_path)
    write_json_atomic(tmp_path / "merged.json", merged)
    again = read_run(tmp_path / "merged.json")
    assert len(by_stack(again)) == 1
    assert {row.change for row in compare(RUN, again).rows} <= {"SAME", "STILL-BAD", "NOT-RUN"}
    assert summary(again)
    assert report_main([str(tmp_path / "merged.json"), "-o", str(tmp_path / "r.html")]) == 0


def refused(records: list[dict[str, Any]], *allow: str) -> str:
    with pytest.raises(UsageError) as raised:
        merge(parts(records), allow)
    return str(raised.value)


def test_a_missing_shard_is_named_with_its_cells() -> None:
    shards = split(RUN, 2, random.Random(0))
    left = next(shard for shard in shards if shard["cells"])
    absent = next(shard for shard in shards if shard is not left)
    text = refused([left])
    assert f"of shard {absent['shard']['index']}, which is not here" in text
    assert absent["cells"][0]["id"] in text
    assert len(merge(parts([left]), ["missing"])["cells"]) == len(left["cells"])


def test_a_cell_in_two_records_is_named_and_the_later_one_counts_if_told() -> None:
    later = {**RUN, "started": "2030-01-01T00:00:00.000Z", "cells": [{**RUN["cells"][0], "reason": "later"}]}
    text = refused([RUN, later])
    assert RUN["cells"][0]["id"] in text
    assert "0.json" in text
    for order in ([RUN, later], [later, RUN]):
        assert merge(parts(order), ["duplicates"])["cells"][0]["reason"] == "later"


def test_shards_of_different_counts_are_refused_whatever_is_allowed() -> None:
    two, three = split(RUN, 2, random.Random(0)), split(RUN, 3, random.Random(0))
    text = refused([*two, *three], "missing", "duplicates", "stacks", "simulated")
    assert "0.json is of 2" in text or "1.json is of 2" in text


def test_a_simulation_among_real_runs_is_refused() -> None:
    real, simulated = renamed(RUN, "sm100", simulated=False), {**RUN, "simulated": True}
    assert "1.json: SIMULATED, among real runs" in refused([real, simulated])
    assert merge(parts([real, simulated]), ["simulated"])["simulated"] is True


def test_one_arch_on_two_stacks_is_refused_and_two_archs_on_two_are_kept_apart(tmp_path: Path) -> None:
    half = len(RUN["cells"]) // 2
    first, second = {**RUN, "cells": RUN["cells"][:half]}, {**RUN, "cells": RUN["cells"][half:]}
    moved = {**second, "versions": {**RUN["versions"], "sglang": "0.5.99"}}
    assert "sm120 on two stacks: 0.json and 1.json differ in sglang" in refused([first, moved])
    other = renamed(RUN, "sm100", versions={**RUN["versions"], "sglang": "0.5.99"})
    merged = merge(parts([RUN, other]))
    assert "sglang" not in merged["versions"]
    one, two = by_stack(merged)
    assert (one["versions"]["sglang"], two["versions"]["sglang"]) == (RUN["versions"]["sglang"], "0.5.99")
    write_json_atomic(tmp_path / "both.json", merged)
    assert report_main([str(tmp_path / "both.json"), "-o", str(tmp_path / "r.html")]) == 0


def test_merged_archs_are_compared_each_with_its_own() -> None:
    before = merge(parts([RUN, renamed(RUN, "sm100")]))
    after = merge(parts([RUN, renamed(RUN, "sm100", versions={**RUN["versions"], "sglang": "0.5.99"})]))
    comparison = compare(before, after)
    assert len(comparison.rows) == 2 * len(RUN["cells"])
    assert [str(item) for item in comparison.moved] == [f"sm100: sglang: {RUN['versions']['sglang']} → 0.5.99"]


def test_a_part_that_did_not_end_makes_the_whole_incomplete() -> None:
    assert merge(parts([RUN, renamed(RUN, "sm100", complete=False)]))["complete"] is False


def test_the_cells_folders_are_named_from_the_merged_file(tmp_path: Path) -> None:
    cell = {**RUN["cells"][0], "folder": "cells/x"}
    merged = merge([Part(tmp_path / "runs" / "a" / "run.json", {**RUN, "cells": [cell]})], beside=tmp_path / "out")
    assert merged["cells"][0]["folder"] == "../runs/a/cells/x"
