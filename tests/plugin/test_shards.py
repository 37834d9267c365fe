"""`--gpu-shard`: shares that make the whole, and a machine for which there is nothing to do."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from pytest_gpuserve.cli import main

if TYPE_CHECKING:
    from pathlib import Path

MATRIX = """
schema: 1
arch: [sm120]
models:
  a: {shape: tiny-llama}
  b: {shape: tiny-llama}
  c: {shape: tiny-llama}
axes:
  attention:
    triton: {flags: {attention-backend: triton}}
    flashinfer: {flags: {attention-backend: flashinfer}}
baseline: {attention: triton}
"""
READY = ("-k", "test_ready")


@pytest.fixture(autouse=True)
def matrix(project) -> None:
    project.file("matrices/three.yaml", MATRIX)


def test_three_shards_and_a_merge_are_one_whole_run(project, tmp_path: Path, capsys) -> None:
    whole = project.run(*READY, matrix="three")
    records = []
    for index in (1, 2, 3):
        share = project.run(f"--gpu-shard={index}/3", *READY, matrix="three")
        assert share.code == 0
        assert f"shard {index} of 3: 2 cells of 6" in share.text
        assert len({cell["model"] for cell in share.record["cells"]}) == 1
        records.append(str(share.folder))
    merged = tmp_path / "merged.json"
    assert main(["merge", *records, "-o", str(merged)]) == 0
    found = json.loads(merged.read_text())
    order = {cell["id"]: place for place, cell in enumerate(whole.record["cells"])}
    assert sorted(order) == sorted(cell["id"] for cell in found["cells"])
    assert found["outcomes"] == whole.record["outcomes"]
    assert found["server_starts"] == whole.record["server_starts"]
    assert len(found["checks"]) == len(whole.record["checks"])
    # A shard that was forgotten is named.
    capsys.readouterr()
    assert main(["merge", *records[:2], "-o", str(tmp_path / "x.json")]) == 2
    assert "of shard 3, which is not here" in capsys.readouterr().err
    assert not (tmp_path / "x.json").exists()


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_shard_without_cells_is_green_and_says_so(project, workers: str) -> None:
    result = project.run("--gpu-shard=4/4", "-n", workers, matrix="three")
    assert result.code == 0
    assert "shard 4 of 4 has no cell" in result.text
    assert result.record["cells"] == []
    assert result.record["shard"]["of"] == 4


def test_a_selection_that_leaves_nothing_of_a_shard_is_not_green(project) -> None:
    result = project.run("--gpu-shard=1/3", "-k", "nothing", matrix="three")
    assert result.code == pytest.ExitCode.NO_TESTS_COLLECTED


@pytest.mark.parametrize("value", ["0/3", "4/3", "1", "a/b", "1/0", "-1/3"])
def test_what_is_no_share_is_a_usage_error(project, value: str) -> None:
    result = project.run(f"--gpu-shard={value}", matrix="three")
    assert result.code == pytest.ExitCode.USAGE_ERROR
    assert "is not K/N with K from 1 to N" in result.errors


def test_a_history_that_cannot_be_read_is_a_usage_error(project) -> None:
    broken = project.file("history.json", "{")
    result = project.run("--gpu-shard=1/2", f"--gpu-history={broken}", matrix="three")
    assert result.code == pytest.ExitCode.USAGE_ERROR
    assert "--gpu-history: " in result.errors
    assert "not a record" in result.errors


def test_a_history_balances_the_shards(project) -> None:
    cells = [
        {"id": f"sm120-{model}-{rest}", "arch": "sm120", "model": model, "axes": {}, "outcome": "passed"}
        | {"timings": {"total": 300.0 if model == "b" else 10.0}}
        for model in "abc"
        for rest in ("baseline", "attention.flashinfer")
    ]
    history = project.file("history.json", json.dumps({"schema": 0, "simulated": True, "cells": cells}))
    words = ("--gpu-shard=1/2", "--gpu-plan")
    assert "sm120-b-baseline" not in project.run(*words, matrix="three").text
    balanced = project.run(*words, f"--gpu-history={history}", matrix="three").text
    assert "sm120-b-baseline" in balanced
    assert "sm120-a-baseline" not in balanced
