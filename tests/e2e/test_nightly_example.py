"""`examples/nightly.yml`: its `run:` steps, two nights in a row, with simulated GPUs in place of the real ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml

EXAMPLE = Path(__file__).parents[2] / "examples" / "nightly.yml"

MATRIX = """
schema: 1
arch: [sm120]
models: {llama: {shape: llama-3}}
axes:
  attention:
    triton: {flags: {attention-backend: triton}}
    fa3: {flags: {attention-backend: fa3}}
  graphs:
    on: {}
    off: {flags: {disable-cuda-graph: true}}
baseline: {attention: triton, graphs: on}
"""


def wheel(folder: Path, version: str) -> Path:
    """A distribution called sglang with nothing in it: the environment under test is asked for its metadata only."""
    info = f"sglang-{version}.dist-info"
    path = folder / f"sglang-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def job():
    return yaml.safe_load(EXAMPLE.read_text())["jobs"]["sm120"]


@pytest.fixture
def project(tmp_path):
    root = tmp_path / "project"
    (root / "matrices").mkdir(parents=True)
    (root / "matrices" / "sm120.yaml").write_text(MATRIX)
    (root / "pytest.ini").write_text("[pytest]\n")
    return root


def environment(project):
    return {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "HOME": str(project),
        "PIP_NO_INDEX": "1",
        "GITHUB_ACTIONS": "true",
        "GITHUB_STEP_SUMMARY": str(project / "summary.md"),
        "GPUSERVE_SIM": "2xsm120",
        "GPUSERVE_LOCK_DIR": str(project / "locks"),
        "GPUSERVE_STALL": "60",  # a start on a busy machine may be quiet for longer than the simulation's own 4 s
    }


def run(step, project):
    """One step in a shell of its own, as a runner does it."""
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
    env = environment(project)
    done = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, f"{step.get('name')}: {done.returncode}\n{done.stdout}\n{done.stderr}"


def night(job, project, version, alone):
    """Run the steps as a runner would; the text of the step summary."""
    (project / "requirements.lock").write_text(f"{wheel(project, version)}\n")
    summary = project / "summary.md"
    summary.write_text("")
    for step in job["steps"]:
        if "run" in step:
            # It ends what other tests' dead runs left, too: not while they still look at it.
            with alone() if step["run"].strip() == "gpuserve reap" else nullcontext():
                run(step, project)
    return summary.read_text()


@pytest.mark.timeout(600)
def test_two_nights(job, project, alone):
    first = night(job, project, "0.5.17", alone)
    assert "SIMULATED" in first
    record = json.loads((project / ".gpuserve/last/run.json").read_text())
    assert record["complete"]
    assert record["versions"]["sglang"] == "0.5.17"
    assert {cell["id"]: cell["outcome"] for cell in record["cells"]} == {
        "sm120-llama-baseline": "passed",
        "sm120-llama-attention.fa3": "xfailed",
        "sm120-llama-graphs.off": "passed",
    }
    second = night(job, project, "0.5.23", alone)
    assert "0.5.17" in second
    assert "0.5.23" in second
    after = json.loads((project / ".gpuserve/last/run.json").read_text())
    assert (after["versions"]["sglang"], after["started"] > record["started"]) == ("0.5.23", True)
    assert (project / ".gpuserve/junit.xml").is_file()


RUN = ".gpuserve/runs/1/run.json"
WHOLE = {"complete": True, "outcomes": {"passed": 3, "failed": 1}}


@pytest.mark.parametrize(
    ("record", "kept"),
    [
        pytest.param(WHOLE, True, id="whole"),
        pytest.param(WHOLE | {"complete": False}, False, id="ended"),
        pytest.param({"complete": True, "outcomes": {"passed": 2, "not-run": 2}}, False, id="over its budget"),
        pytest.param(None, False, id="ended before it had a record"),
    ],
)
def test_only_a_night_that_got_to_every_cell_is_what_the_next_is_compared_with(job, project, record, kept):
    folder = (project / RUN).parent
    folder.mkdir(parents=True)
    (folder.parent / "latest").symlink_to(folder.name)
    (project / ".gpuserve/last").mkdir()
    reference = project / ".gpuserve/last/run.json"
    reference.write_text("the night before")
    begun = project / ".gpuserve/begun"
    begun.touch()
    (project / RUN).write_text(json.dumps(record or WHOLE))
    os.utime(project / RUN, (begun.stat().st_mtime + (-3600 if record is None else 60),) * 2)
    run(next(step for step in job["steps"] if step.get("name") == "Keep the record"), project)
    assert (reference.read_text() != "the night before") is kept
    assert (project / "summary.md").exists() is not kept


def test_a_checkout_leaves_the_runs_of_earlier_nights(job):
    (checkout,) = [step for step in job["steps"] if step.get("uses", "").startswith("actions/checkout@")]
    assert checkout["with"] == {"clean": False}


def test_no_step_that_runs_a_command_needs_what_only_github_can_fill_in(job):
    assert not [step for step in job["steps"] if "${{" in step.get("run", "")]


def test_what_is_published_is_what_the_steps_leave(job):
    uses = {step["uses"].partition("@")[0]: step for step in job["steps"] if "uses" in step}
    kept = uses["actions/cache/save"]["with"]
    assert kept == {key: uses["actions/cache/restore"]["with"][key] for key in ("path", "key")}
    assert uses["actions/cache/restore"]["with"]["restore-keys"] == kept["key"].partition("${{")[0]
    assert "github.run_attempt" in kept["key"]  # a key is written once, and a run may be started again
    assert ".gpuserve/runs/latest/" in uses["actions/upload-artifact"]["with"]["path"]


def test_it_runs_each_night_and_when_the_lock_file_changes():
    triggers = yaml.load(EXAMPLE.read_text(), Loader=yaml.BaseLoader)["on"]
    assert triggers["schedule"][0]["cron"]
    assert triggers["push"]["paths"] == ["requirements.lock"]
