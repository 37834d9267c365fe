"""Every cell of every shipped matrix, asked of a real SGLang: what it refuses is gated by version, or known.

GPUSERVE_TEST_PREFLIGHT_PYTHONS names the interpreters (colon-separated); `tox -e preflight` builds two environments.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_gpuserve.matrix.expand import expand
from pytest_gpuserve.matrix.find import packaged_dir
from pytest_gpuserve.matrix.schema import load_matrix
from pytest_gpuserve.serve.environment import read_versions

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

PYTHONS = [one for one in os.environ.get("GPUSERVE_TEST_PREFLIGHT_PYTHONS", "").split(":") if one]
REASON = "GPUSERVE_TEST_PREFLIGHT_PYTHONS names no interpreter; tox -e preflight builds two"
ARCHS = sorted(path.stem for path in packaged_dir().glob("*.yaml") if path.stem != "known_bad")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "preflight_tables.py"


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("python", PYTHONS or [pytest.param("", marks=pytest.mark.skip(reason=REASON))])
def test_what_a_release_refuses_is_gated_or_known(python: str, arch: str) -> None:
    command = [sys.executable, str(SCRIPT), "--python", python, arch]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=850)
    assert done.returncode in (0, 1), done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")][1:]
    wanted = expand(load_matrix(packaged_dir() / f"{arch}.yaml"), arch, versions=read_versions(python, {}))
    assert len(rows) == len(wanted)
    assert [row for row in rows if "**not known**" in row] == []
    assert done.returncode == 0, done.stdout
