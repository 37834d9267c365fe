"""`gpuserve compare`: exit codes, files, and one message where it cannot."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from pytest_gpuserve.compare.cli import compare_main
from pytest_gpuserve.matrix.find import known_bad_paths
from pytest_gpuserve.matrix.known_bad import ISSUE_PLACEHOLDER, load_known_bad
from pytest_gpuserve.report.store import Events, new_run_folder, write_json_atomic

GOLDEN = Path(__file__).parent / "golden"
BEFORE, AFTER = str(GOLDEN / "run_before.json"), str(GOLDEN / "run_after.json")
PREFLIGHT = {
    "schema": 1,
    "kind": "preflight",
    "arch": "sm90",
    "status": "ok",
    "versions": {"sglang": "0.5.23"},
    "options": {},
    "cells": [],
}


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git repository with a list two folders down; the current directory is the project's, below its root."""
    (tmp_path / "project" / "matrices").mkdir(parents=True)
    shutil.copy(GOLDEN / "known_bad.yaml", tmp_path / "project" / "matrices")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path


def test_the_patch_it_writes_is_one_that_git_applies_from_the_root(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare_main([BEFORE, AFTER, "--patch", "bump.patch"]) == 1
    shown = capsys.readouterr().out
    patch = Path("bump.patch").read_text()
    assert patch in shown
    assert patch.startswith("diff --git a/project/matrices/known_bad.yaml b/project/matrices/known_bad.yaml\n")
    subprocess.run(["git", "apply", "project/bump.patch"], cwd=repository, check=True)
    assert ISSUE_PLACEHOLDER in Path("matrices/known_bad.yaml").read_text()
    assert compare_main([BEFORE, AFTER, "--patch", "-"]) == 1
    assert capsys.readouterr().out.startswith("diff --git ")


def test_a_list_that_the_record_names_is_patched_too(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("matrices/known_bad.yaml").rename("mine.yaml")
    after = json.loads(Path(AFTER).read_text())
    for cell in after["cells"]:
        if cell["known_bad"]:
            cell["known_bad"]["file"] = "mine.yaml"
    write_json_atomic(Path("after.json"), after)
    assert compare_main([BEFORE, "after.json", "--patch", "bump.patch"]) == 1
    assert "KB-0007 bounded in project/mine.yaml" in capsys.readouterr().out
    subprocess.run(["git", "apply", "project/bump.patch"], cwd=repository, check=True)
    assert "<0.5.23" in Path("mine.yaml").read_text()
    assert ISSUE_PLACEHOLDER in Path("matrices/known_bad.yaml").read_text(), "new entries go to the project's list"


@pytest.mark.usefixtures("repository")
def test_a_new_entry_has_an_id_that_no_list_read_beside_it_has() -> None:
    Path("matrices/known_bad.yaml").unlink()
    assert compare_main([BEFORE, AFTER, "--patch", "bump.patch"]) == 1
    subprocess.run(["git", "apply", "project/bump.patch"], cwd=Path.cwd().parent, check=True)
    path = Path("matrices/known_bad.yaml")
    path.write_text(path.read_text().replace(ISSUE_PLACEHOLDER, "https://github.com/sgl-project/sglang/issues/1"))
    shipped, mine = known_bad_paths(Path.cwd())
    assert len(load_known_bad([shipped, mine])) > len(load_known_bad([shipped]))


def test_formats_and_output(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare_main([BEFORE, AFTER, "--format", "json", "-o", "out.json"]) == 1
    assert capsys.readouterr().out == ""
    data = json.loads(Path("out.json").read_text())
    assert (data["findings"], data["patch"][:10]) == (5, "diff --git")
    assert compare_main([BEFORE, AFTER, "--format", "markdown"]) == 1
    assert capsys.readouterr().out.startswith("## Compared: ")
    assert compare_main([AFTER, AFTER]) == 0


def test_a_killed_run_can_be_compared(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    after = json.loads(Path(AFTER).read_text())
    folder = new_run_folder(repository / ".gpuserve")
    events = Events(folder)
    head = {name: value for name, value in after.items() if name not in ("cells", "checks", "outcomes")}
    planned = [cell | {"outcome": "not-run", "failure": None} for cell in after["cells"]]
    events.write("run", **head | {"complete": False}, planned=planned)
    events.close()
    assert compare_main([BEFORE, str(repository / ".gpuserve")]) == 1
    shown = capsys.readouterr().out
    assert "WARNING: the second run did not end by itself" in shown
    assert "11 NOT-RUN" in shown
    assert "SAME" not in shown


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["gone.json", AFTER], "gone.json: no such file"),
        ([BEFORE, "."], "no run in this folder"),
        ([BEFORE, "newer.json"], "newer.json: written with schema 99"),
        ([BEFORE, "torn.json"], "torn.json: not a record"),
        ([BEFORE, "preflight.json"], "preflight.json is a preflight and the other is a run"),
        ([BEFORE, AFTER, "--known-bad", "gone.yaml"], "gone.yaml: no such known-bad list"),
        ([BEFORE, AFTER, "--known-bad", "broken.yaml"], "broken.yaml: cannot be read; `gpuserve validate` says why"),
        ([BEFORE, AFTER, "--patch", "no/such/folder"], "cannot write no/such/folder"),
    ],
)
def test_what_it_cannot_do_is_one_message_and_exit_2(
    repository: Path, capsys: pytest.CaptureFixture[str], args: list[str], said: str
) -> None:
    Path("newer.json").write_text('{"schema": 99, "cells": []}')
    Path("torn.json").write_bytes(Path(AFTER).read_bytes()[:5000])
    Path("broken.yaml").write_text("a: [")
    write_json_atomic(Path("preflight.json"), PREFLIGHT)
    assert compare_main(args) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("gpuserve compare: ")
    assert said in shown.err
    assert "Traceback" not in shown.err


def test_two_preflights(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_json_atomic(Path("a.json"), PREFLIGHT)
    write_json_atomic(Path("b.json"), {"schema": 1, "kind": "preflight", "runs": [PREFLIGHT]})
    assert compare_main(["a.json", "b.json"]) == 2
    assert capsys.readouterr().out.startswith("Bump report: sglang 0.5.23 → 0.5.23\n")
