"""What a plan takes from earlier runs, and what it says of a build without a version."""

from __future__ import annotations

import json
import os

import pytest

DEV = "0.0.0.dev1+gdce8b0606"


@pytest.fixture
def earlier(project):
    """`earlier(name, …)`: an earlier run's record with the times of these cells."""

    def earlier(name: str, *cells: dict, simulated: bool = True, **fields: object) -> None:
        folder = project.path / ".gpuserve/runs" / name
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps({"schema": 1, "simulated": simulated, "cells": cells} | fields))

    return earlier


def took(seconds: float, level: str = "triton", outcome: str = "passed", matrix: str = "tiny") -> dict:
    return {
        "id": f"sm120-m-{level}",
        "arch": "sm120",
        "model": "m",
        "matrix": matrix,
        "axes": {"attention": level, "graphs": "on"},
        "outcome": outcome,
        "timings": {"total": seconds},
    }


def installed(project, version: str) -> tuple[str, ...]:
    """What names an environment with that SGLang."""
    info = project.path / "site-packages" / f"sglang-{version.replace('+', '_')}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: sglang\nVersion: {version}\n")
    path = os.pathsep.join([str(info.parent), os.environ["PYTHONPATH"]])
    return (f"--gpu-server-env=PYTHONPATH={path}",)


def planned(project, *args: str, **more) -> dict[str, str]:
    """The time of each cell, and the line with the totals."""
    result = project.run("--gpu-plan", *args, inprocess=True, **more)
    assert result.code == 0, result.text + result.errors
    rows = [line.split() for line in result.text.splitlines() if "1 GPU " in line]
    known = next(line for line in result.text.splitlines() if "the times of earlier" in line)
    return {row[0]: row[3] for row in rows} | {"known": known}


GUESSED = "1m50s"


def test_a_cells_time_is_that_of_the_newest_run_that_ran_it(project, earlier) -> None:
    """A later run of a share of the matrix, or of another one, hides none of it."""
    earlier("20261101T000000Z-a", took(10), took(20, "flashinfer"))
    earlier("20261102T000000Z-b", took(30))
    earlier("20261103T000000Z-c", took(40, matrix="another"), took(50, "flashinfer", "infra"))
    plan = planned(project)
    assert plan["sm120-m-baseline"] == "0m30s"
    assert plan["sm120-m-attention.flashinfer"] == "0m20s"
    assert plan["sm120-m-graphs.off"] == GUESSED
    assert "(2 of 3 from the times of earlier SIMULATED runs, the others guessed)" in plan["known"]


def test_a_real_runs_times_are_none_of_a_simulation(project, earlier) -> None:
    earlier("20261101T000000Z-a", took(10), simulated=False)
    assert planned(project)["sm120-m-baseline"] == GUESSED


def test_a_simulations_times_are_none_of_a_real_run(project, earlier) -> None:
    earlier("20261101T000000Z-a", took(10))
    earlier("20261102T000000Z-b", took(20, "flashinfer"), simulated=False)
    plan = planned(project, *installed(project, "0.5.23"), sim=None)
    assert plan["sm120-m-baseline"] == GUESSED
    assert plan["sm120-m-attention.flashinfer"] == "0m20s"
    assert "(1 of 3 from the times of earlier runs, the others guessed)" in plan["known"]


def test_of_a_report_directory_a_run_compares_with_the_latest_of_its_own_kind(project, earlier) -> None:
    project.run("-k", "baseline and ready")
    gone = took(10) | {"id": "sm120-m-gone", "axes": {"attention": "gone"}}
    fields = {"complete": True, "started": "", "versions": {}, "gpus": [], "server_starts": 0, "checks": []}
    earlier("29991101T000000Z-a", gone, simulated=False, **fields)
    latest = project.path / ".gpuserve/runs/latest"
    latest.unlink()
    latest.symlink_to("29991101T000000Z-a")
    result = project.run("-k", "baseline and ready", "--gpu-compare=.gpuserve")
    assert result.code == 0, result.text
    assert "1 SAME" in result.text
    assert "GONE" not in result.text
    alone = project.path / "alone/runs"
    alone.mkdir(parents=True)
    (project.path / ".gpuserve/runs/29991101T000000Z-a").rename(alone / "latest")
    result = project.run("-k", "baseline and ready", "--gpu-compare=alone", inprocess=True)
    assert (result.code, "none of its 1 run is a simulated one, as this run is" in result.errors) == (4, True)


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "TMPDIR", "MASTER_PORT", "GPUSERVE_LEASE"])
def test_what_is_set_for_each_start_cannot_be_set_by_an_option_either(project, name: str) -> None:
    """It would be written over, or break the next start, without a word."""
    result = project.run(f"--gpu-server-env={name}=1", inprocess=True)
    assert result.code == 4
    assert f"--gpu-server-env {name}: the variable " in result.errors


def test_a_mark_may_use_any_spelling_of_a_flag(project) -> None:
    path = project.path / "matrices/tiny.yaml"
    path.write_text(path.read_text().replace("off: {flags: {", "off: {flags: {expert-parallel-size: 1, "))
    project.file(
        "test_mine.py",
        """
        import pytest

        @pytest.mark.gpu_cells(**{"flag.ep": 1})
        def test_mine(gpu_cell):
            assert gpu_cell.flags["ep-size"] == 1
        """,
    )
    result = project.run("test_mine.py", "--collect-only", "-q", inprocess=True)
    assert [line for line in result.text.splitlines() if "::" in line] == [
        "test_mine.py::test_mine[sm120-m-graphs.off]"
    ]


def test_a_build_without_a_version_is_named_wherever_its_run_is_read(project) -> None:
    where = installed(project, DEV)
    named = f"sglang {DEV} is a build without a version, commit dce8b0606: it is taken for newer than every release"
    result = project.run("--gpu-plan", *where, inprocess=True)
    assert f"gpuserve: {named}" in result.text
    assert f"note: {named}" in result.text
    result = project.run("-k", "baseline and ready", *where)
    assert result.code == 0, result.text
    assert f"gpuserve: {named}" in result.text
    assert named in " ".join(result.text.rpartition("SIMULATED cells")[2].split())
    assert named in (result.folder / "summary.md").read_text().replace("\\", "")
    taken = {"version": None, "reason": "--gpu-version sglang=VERSION says otherwise", "commit": "dce8b0606"}
    assert result.record["taken_for"] == {"sglang": taken}
    assert result.record["versions"]["sglang"] == DEV
    result = project.run("--gpu-plan", "--gpu-version=sglang=0.5.24.dev0", *where, inprocess=True)
    assert "it is taken for 0.5.24.dev0 (--gpu-version)" in result.text


def test_a_run_of_which_most_is_skipped_says_so_in_header_and_summary(project) -> None:
    path = project.path / "matrices/tiny.yaml"
    path.write_text(path.read_text().replace("flags: {", 'requires: {sglang: ">=99"}, flags: {', 2))
    path.write_text(path.read_text().replace('triton: {requires: {sglang: ">=99"}, ', "triton: {"))
    path.write_text(path.read_text().replace("off: {flags", 'off: {requires: {sglang: ">=98"}, flags'))
    result = project.run("-k", "ready", *installed(project, "0.5.6"))
    assert result.code == 0, result.text
    line = "2 of 3 cells are skipped for one reason: they need another sglang than 0.5.6"
    assert result.text.count(line) == 2
    assert line in (result.folder / "summary.md").read_text()


def test_sizes_that_do_not_fit_are_refused_before_any_start(project) -> None:
    """By a plan and by a run alike, with the place."""
    path = project.path / "matrices/tiny.yaml"
    path.write_text(path.read_text().replace("gpus: 1}", "gpus: 4, flags: {tensor-parallel-size: 8}}"))
    for args in (("--gpu-plan",), ()):
        result = project.run(*args, inprocess=True)
        assert result.code == 4
        place = "matrices/tiny.yaml:5:40: model m: "
        assert f"{place}tp-size 8 takes 8 GPUs, more than the model's gpus: 4" in result.errors
        assert result.folder is None
