"""Proposed floors: a patch that git applies, from whatever layout a matrix has, and that the run then meets."""

from __future__ import annotations

import subprocess

import pytest

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
    "a list": (
        "floors:\n  # why\n  - when: {graphs: off}\n    load: batch\n"
        "    output_throughput: {at-least: 5, unit: tok/s}\n"
    ),
    "a list in the middle": (
        "floors:\n- load: batch\n  output_throughput: {at-least: 5, unit: tok/s}\n\n# loads\nloads:\n"
        "  chat: {concurrency: 4, input: 8, output: 8}\n"
    ),
}


def record(*, samples=(500.0, 501.0, 499.0, 500.5, 499.5), verdict="recorded", outcome="passed", load="single-stream"):
    row = {"metric": "output_throughput", "load": load, "samples": list(samples), "unit": "tok/s", "verdict": verdict}
    row |= {"median": 500.0, "spread": 0.5}
    cell = {"id": "sm120-m-baseline", "matrix": "x", "arch": "sm120", "model": "m", "axes": {"graphs": "on"}}
    cell |= {"outcome": outcome, "gpus": [{"name": "RTX"}], "measurements": [row]}
    return {"cells": [cell], "versions": {"sglang": "0.5.23"}, "started": "2026-11-29T10:00:00", "simulated": False}


def make(tmp_path, tail: str):
    path = tmp_path / "matrices" / "x.yaml"
    path.parent.mkdir(exist_ok=True)
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
    assert all(line in text for line in (HEAD + LAYOUTS[layout]).splitlines() if line != "floors: []")
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
    "one", [record(verdict="invalid"), record(outcome="failed"), record(load="batch[windows=2]")], ids=str
)
def test_what_is_no_measure_of_the_cell_proposes_nothing(tmp_path, one) -> None:
    assert propose(one, [make(tmp_path, "")], tmp_path).patch == ""


@pytest.mark.parametrize(("samples", "floor"), [((3.456,) * 5, 3.28), ((27654.3,) * 5, 26200.0), ((0.5,) * 3, 0.475)])
def test_floors_are_rounded_down_to_three_digits(tmp_path, samples, floor) -> None:
    matrix = make(tmp_path, "")
    found = propose(record(samples=samples), [matrix], tmp_path)
    assert f"at-least: {floor:g}," in found.patch
