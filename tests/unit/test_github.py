"""Annotations on a known-bad entry's own line, and the step summary's limit."""

import json
import re
from collections.abc import Callable
from pathlib import Path

from pytest_gpuserve.report import github
from pytest_gpuserve.report.store import read_run

GOLDEN = Path(__file__).parent / "golden"
RUN = read_run(GOLDEN / "run_after.json")
COMMAND = re.compile(r"::(error|warning|notice) (?:file=([^,:]+),line=(\d+),)?title=([^,:]*)::(.*)")


def xpassed(**known: object) -> dict:
    run = json.loads(json.dumps(RUN))
    run["cells"][2]["known_bad"] |= known
    return run


def test_golden(golden: Callable[[str, str], None]) -> None:
    golden("annotations.txt", "\n".join(github.annotations(RUN)) + "\n")


def test_strict_is_an_error_and_reported_is_a_notice() -> None:
    levels = [
        COMMAND.fullmatch(github.annotations(xpassed(**known))[0])[1]  # type: ignore[index]
        for known in ({"strict": True}, {}, {"confirmed": False})
    ]
    assert levels == ["error", "warning", "notice"]


def test_files_are_relative_to_the_workspace() -> None:
    lines = github.annotations(xpassed(file="/w/repo/matrices/known_bad.yaml"), Path("/w/repo"))
    assert "file=matrices/known_bad.yaml,line=5," in lines[0]
    lines = github.annotations(xpassed(file="/elsewhere/known_bad.yaml"), Path("/w/repo"))
    assert "file=/elsewhere/known_bad.yaml,line=5," in lines[0]


def test_properties_and_data_are_escaped() -> None:
    run = xpassed(file="a,b:c\n%.yaml", id="KB-1,x:y\r")
    (line,) = github.annotations(run)
    assert "\n" not in line
    assert "\r" not in line
    match = COMMAND.fullmatch(line)
    assert match is not None
    assert match[2] == "a%2Cb%3Ac%0A%25.yaml"
    assert match[4] == "KB-1%2Cx%3Ay%0D passes"
    assert match[5].startswith("KB-1,x:y%0D passes in ")


def test_at_most_ten_errors_first_and_the_rest_is_counted() -> None:
    run = json.loads(json.dumps(RUN))
    template = run["cells"][2]
    run["cells"] = [
        template
        | {"id": f"c{number}", "known_bad": template["known_bad"] | {"id": f"KB-{number}", "strict": number == 14}}
        for number in range(15)
    ]
    lines = github.annotations(run)
    assert len(lines) == 10
    assert lines[0].startswith("::error ")
    assert "KB-14" in lines[0]
    assert lines[-1] == "::notice title=gpuserve::6 more known-bad entries pass; the summary lists them."


def test_the_step_summary_is_given_what_room_is_left(tmp_path: Path) -> None:
    path = tmp_path / "summary"
    path.write_text("x" * (github.STEP_LIMIT - 100))
    asked = []

    def render(limit: int) -> str:
        asked.append(limit)
        return "é" * 80

    github.append_step_summary(render, path)
    assert asked == [100]
    assert path.stat().st_size == github.STEP_LIMIT
    github.append_step_summary(render, path)
    assert path.stat().st_size == github.STEP_LIMIT
