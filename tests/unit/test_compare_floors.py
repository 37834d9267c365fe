"""Proposed floors: a patch that git applies, from whatever layout a matrix has, and that the run then meets."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from pytest_gpuserve.compare import floors
from pytest_gpuserve.compare.floors import propose
from pytest_gpuserve.matrix.schema import load_matrix

HEAD = """\
schema: 1
arch: [sm120]   # one
models:
  m: {shape: llama-3}
axes:
  graphs:
    on: {}
    off: {flags: {disable-cuda-graph: true}}
baseline: {graphs: on}
"""
LAYOUTS = {
    "no floors": "",
    "no line end": "strategy: full",
    "an empty list": "floors: []\n",
    "an empty list with a comment": "floors: []  # none yet\nstrategy: full\n",
    "a list": (
        "floors:\n  # why\n  - when: {graphs: off}\n    load: batch\n"
        "    output_throughput: {at-least: 5, unit: tok/s}\n"
    ),
    "a list in the middle": (
        "floors:\n- load: batch\n  output_throughput: {at-least: 5, unit: tok/s}\n\n# loads\nloads:\n"
        "  chat: {concurrency: 4, input: 8, output: 8}\n"
    ),
}


def record(
    *, samples=(500.0, 501.0, 499.0, 500.5, 499.5), verdict="recorded", outcome="passed", load="single-stream", test=""
):
    row = {"metric": "output_throughput", "load": load, "samples": list(samples), "unit": "tok/s", "verdict": verdict}
    row |= {"median": 500.0, "spread": 0.5, "test": test}
    cell = {"id": "sm120-m-baseline", "matrix": "x", "arch": "sm120", "model": "m", "axes": {"graphs": "on"}}
    cell |= {"outcome": outcome, "gpus": [{"name": "RTX"}], "measurements": [row]}
    return {"cells": [cell], "versions": {"sglang": "0.5.23"}, "started": "2026-11-29T10:00:00", "simulated": False}


def make(tmp_path, tail: str):
    path = tmp_path / "matrices" / "x.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(HEAD + tail)
    return load_matrix(path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_git_applies_the_patch_and_the_matrix_has_the_floor(tmp_path, layout) -> None:
    matrix = make(tmp_path, LAYOUTS[layout])
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    found = propose(record(), [matrix], tmp_path)
    assert found.root == tmp_path
    (tmp_path / "floors.patch").write_text(found.patch)
    subprocess.run(["git", "apply", "floors.patch"], cwd=tmp_path, check=True)
    after = load_matrix(matrix.path)
    new = [floor for floor in after.floors if floor.load == "single-stream"]
    assert len(after.floors) == len(matrix.floors) + 1
    assert [floor.limit for floor in new] == [475.0]  # 5 %, the noise being less
    assert new[0].when.names == ("model", "graphs")
    assert list(after.loads) == list(matrix.loads)
    text = matrix.path.read_text()
    assert all(line in text for line in (HEAD + LAYOUTS[layout]).splitlines() if "floors: []" not in line)
    assert ("# none yet" in text) == ("# none yet" in LAYOUTS[layout])
    assert "500 tok/s (MAD 0.5) in 5 windows, 1 x RTX, sglang 0.5.23, 2026-11-29" in text


def test_a_floor_that_is_there_stays_and_is_named(tmp_path) -> None:
    matrix = make(
        tmp_path,
        "floors:\n  - when: {model: m}\n    load: single-stream\n    output_throughput: {at-least: 60, unit: tok/s}\n",
    )
    found = propose(record(), [matrix], tmp_path)
    assert found.patch == ""
    assert "x.yaml:13 stays at 60; sm120-m-baseline supports 475" in found.said[0]


@pytest.mark.parametrize(
    ("when", "stays"),
    [
        ("gpus: 1", True),
        ("gpus: 2", False),
        ("flag.mem-fraction-static: 0.8", True),
        ("flag.disable-cuda-graph: true", False),
        ("env.NCCL_ALGO: Ring", True),
        ("model.attention: gqa", True),
    ],
)
def test_a_floor_is_there_whatever_its_when_names(tmp_path, when, stays) -> None:
    tail = (
        "defaults: {flags: {mem-fraction-static: 0.8}, env: {NCCL_ALGO: Ring}}\n"
        f"floors:\n  - when: {{{when}}}\n    load: single-stream\n"
        "    output_throughput: {at-least: 60, unit: tok/s}\n"
    )
    found = propose(record(), [make(tmp_path, tail)], tmp_path)
    assert (found.patch == "") is stays
    assert ("stays at 60" in found.said[0]) is stays


@pytest.mark.parametrize(
    ("one", "told"),
    [
        (record(verdict="invalid"), "1 invalid (sm120-m-baseline: single-stream)"),
        (record(outcome="failed"), "1 failed (sm120-m-baseline)"),
        (record(outcome="skipped"), "1 skipped (sm120-m-baseline)"),
        (record(load="batch[windows=2]"), "1 not measured (sm120-m-baseline)"),
        (record(test="test_mine.py::test_load"), "1 not measured (sm120-m-baseline)"),
    ],
    ids=["invalid", "failed", "skipped", "a changed load", "a test of the user's"],
)
def test_what_is_no_measure_of_the_cell_proposes_nothing_and_is_named(tmp_path, one, told) -> None:
    found = propose(one, [make(tmp_path, "")], tmp_path)
    assert (found.patch, found.said) == ("", (f"left out: {told}",))


def test_many_cells_that_are_left_out_are_counted_in_one_line(tmp_path) -> None:
    one = record()
    for number in range(5):
        one["cells"].append(record(outcome="failed")["cells"][0] | {"id": f"bad-{number}"})
    one["cells"].append(record(verdict="invalid")["cells"][0] | {"id": "hot"})
    found = propose(one, [make(tmp_path, "")], tmp_path)
    left = "left out: 5 failed (bad-0, bad-1, bad-2 and 2 more), 1 invalid (hot: single-stream)"
    assert found.said == (left, "1 floor proposed for matrices/x.yaml")


def test_a_cell_whose_noise_leaves_nothing_is_named_and_the_others_keep_their_floors(tmp_path) -> None:
    one = record()
    noisy = record(samples=(100.0, 900.0, 500.0, 250.0, 740.0))["cells"][0] | {"id": "sm120-m-graphs.off"}
    noisy["axes"] = {"graphs": "off"}
    noisy["measurements"][0]["spread"] = 250.0
    one["cells"].append(noisy)
    found = propose(one, [make(tmp_path, "")], tmp_path)
    assert found.patch.count("at-least") == 1
    assert "graphs: on" in found.patch
    assert found.said[0] == (
        "none for sm120-m-graphs.off, single-stream: the windows vary too much (500 tok/s with a MAD of 250)"
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_windows_line_ends_stay(tmp_path, layout) -> None:
    path = make(tmp_path, LAYOUTS[layout]).path
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    (tmp_path / "floors.patch").write_bytes(propose(record(), [load_matrix(path)], tmp_path).patch.encode())
    subprocess.run(["git", "-C", tmp_path, "apply", "floors.patch"], check=True)
    assert b"475" in path.read_bytes()
    assert path.read_bytes().count(b"\n") == path.read_bytes().count(b"\r\n")


NO_PATCH = pytest.mark.skipif(shutil.which("patch") is None, reason="no patch here")


@pytest.mark.parametrize(
    "command", [["git", "apply"], pytest.param(["patch", "-p1", "-i"], marks=NO_PATCH)], ids=["git", "patch"]
)
@pytest.mark.parametrize("git", [True, False])
def test_the_floors_of_a_matrix_from_elsewhere_go_into_a_copy_of_the_projects_own(tmp_path, command, git) -> None:
    theirs = make(tmp_path / "elsewhere", "")
    before = theirs.path.read_bytes()
    project = tmp_path / "repository" / "project"
    project.mkdir(parents=True)
    if git:
        subprocess.run(["git", "init", "-q", project.parent], check=True)
    found = propose(record(), [theirs], project)
    assert "a copy of" in found.said[0]
    assert found.said[0].endswith("use it with --gpu-matrix x")
    (tmp_path / "floors.patch").write_text(found.patch)
    subprocess.run([*command, tmp_path / "floors.patch"], cwd=found.root, check=True)
    assert [floor.limit for floor in load_matrix(project / "matrices" / "x.yaml").floors] == [475.0]
    assert theirs.path.read_bytes() == before
    # A second time there is a file of that name.
    found = propose(record(), [theirs], project)
    assert found.patch == ""
    assert "is there already: add them by hand" in found.said[0]


@pytest.mark.parametrize(("samples", "floor"), [((3.456,) * 5, 3.28), ((27654.3,) * 5, 26200.0), ((0.5,) * 3, 0.475)])
def test_floors_are_rounded_down_to_three_digits(tmp_path, samples, floor) -> None:
    matrix = make(tmp_path, "")
    found = propose(record(samples=samples), [matrix], tmp_path)
    assert f"at-least: {floor:g}," in found.patch


def test_an_installed_package_is_not_the_projects_own_even_below_it(tmp_path, monkeypatch) -> None:
    theirs = make(tmp_path / ".venv", "")
    monkeypatch.setattr(floors, "packaged_dir", lambda: theirs.path.parent)
    assert "+++ b/matrices/x.yaml" in propose(record(), [theirs], tmp_path).patch
    # In a checkout of this project the packaged matrices are its own.
    assert "--- a/matrices/x.yaml" in propose(record(), [theirs], tmp_path / ".venv").patch
