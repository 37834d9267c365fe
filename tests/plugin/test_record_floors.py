"""`--gpu-floors record` with a matrix of the installed package: the command that it prints really works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest_gpuserve

PACKAGE = Path(pytest_gpuserve.__file__).parent
STEADY = "- {when: {}, then: {tokens-per-second: 2000}}"
CELL = "sm120-llama-mini-baseline"


def test_floors_of_a_packaged_matrix_become_a_matrix_of_the_project(project, tmp_path_factory, monkeypatch) -> None:
    site = tmp_path_factory.mktemp("site")
    shutil.copytree(PACKAGE, site / "pytest_gpuserve", ignore=shutil.ignore_patterns("__pycache__"))
    if not (PACKAGE / "matrices").is_dir():
        shutil.copytree(PACKAGE.parent / "matrices", site / "pytest_gpuserve" / "matrices")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ["PYTHONPATH"]]))
    project.speeds(2000, noise=(1, 0.99, 1.01))
    only = ("-k", f"{CELL} and throughput")
    result = project.run(*only, "--gpu-floors", "record", matrix="sm120", rules=STEADY)
    assert result.code == 0, result.text
    assert str(site) in result.text
    command = re.search(r"apply with: (git .*)", result.text)
    assert command is not None, result.text
    subprocess.run(command[1].split(), check=True)
    result = project.run(*only, matrix="sm120", rules=STEADY)
    assert result.code == 0, result.text
    assert f"({project.path / 'matrices' / 'sm120.yaml'})" in result.text
    (row,) = [one for one in result.record["cells"][0]["measurements"] if one["metric"] == "output_throughput"]
    assert re.search(r"matrices/sm120\.yaml:\d+$", row["floor"]["where"])
