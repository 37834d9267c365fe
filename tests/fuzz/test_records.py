"""A damaged record is one message, never a traceback: in comparisons either way round and in every report."""

import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_gpuserve.compare.cli import compare_main
from pytest_gpuserve.errors import GpuserveError
from pytest_gpuserve.report import github, markdown, terminal
from pytest_gpuserve.report.store import read_run

GOLDEN = Path(__file__).parents[1] / "unit" / "golden"
BEFORE = GOLDEN / "run_before.json"
WHOLE = json.loads((GOLDEN / "run_after.json").read_text())
LIST = GOLDEN / "known_bad.yaml"


def places(value: Any, place: tuple = ()) -> Iterator[tuple]:
    if place:
        yield place
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        yield from places(item, (*place, name))


ODD = st.sampled_from([None, 0, -1, "", [], {}, "x", [1], {"a": 1}, True, 1e308, "\ud800", "GONE"])


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(places(WHOLE), key=str)), ODD)
def test_any_one_value_may_be_wrong(tmp_path: Path, place: tuple, value: object) -> None:
    record = json.loads(json.dumps(WHOLE))
    holder = record
    for name in place[:-1]:
        holder = holder[name]
    if value == "GONE":
        del holder[place[-1]]
    else:
        holder[place[-1]] = value
    path = tmp_path / "damaged.json"
    path.write_text(json.dumps(record))
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        for order, view in (((BEFORE, path), "text"), ((path, BEFORE), "markdown")):
            words = [*map(str, order), "--format", view, "--known-bad", str(LIST)]
            assert compare_main(words) in (0, 1, 2)
    try:
        run = read_run(path)
    except GpuserveError:
        assert str(path) in shown.getvalue()
        return
    markdown.summary(run)
    terminal.summary(run, 100)
    github.annotations(run)
