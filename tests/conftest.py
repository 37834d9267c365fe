"""A project of a test's own, with the plugin, a small matrix and a simulated machine."""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import signal
import textwrap
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

# Pytester forgets what a run inside this process imported, but not what packages remember of it: without these, a
# second such run would meet two copies of every class.
import pytest_gpuserve.compare
import pytest_gpuserve.compare.render
import pytest_gpuserve.gpu.nvml
import pytest_gpuserve.plugin.active
import pytest_gpuserve.serve.environment
import pytest_gpuserve.suite  # noqa: F401

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

ROOT = Path(__file__).parent.parent
try:
    from hypothesis import HealthCheck, settings
except ImportError:
    pass  # the README's first command runs in this checkout too, with nothing but what the plugin itself needs
else:
    # An example is judged by what it shows, never by how long a busy machine took over it. Where CI is set hypothesis
    # has a profile of its own, which stays as it is otherwise.
    settings.register_profile("gpuserve", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("gpuserve")
# Under nohup this is ignored, and so it would be by the pytests that tests start and hang up on.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# The same of one started in the background by a shell without job control, for Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Loaded by its entry point where the project is installed, by name from a plain checkout.
INSTALLED = any(point.name == "gpuserve" for point in importlib.metadata.entry_points(group="pytest11"))
PLUGIN = () if INSTALLED else ("-p", "pytest_gpuserve.plugin")

MATRIX = """
schema: 1
arch: [sm120]
models:
  m: {shape: llama-3, gpus: 1}
axes:
  attention:
    triton: {flags: {attention-backend: triton}}
    flashinfer: {flags: {attention-backend: flashinfer}}
  graphs:
    on: {}
    off: {flags: {disable-cuda-graph: true}}
baseline: {attention: triton, graphs: on}
"""
FAST = "defaults: {phase-seconds: 0.01, tokens-per-second: 5000, memory-gib: 1}\n"


@dataclass
class Result:
    """A pytest run: exit code, text, and the record of its latest run (None if there is none)."""

    run: pytest.RunResult
    folder: Path | None

    @property
    def code(self) -> int:
        return int(self.run.ret)

    @property
    def text(self) -> str:
        return self.run.stdout.str()

    @property
    def errors(self) -> str:
        return self.run.stderr.str()

    @property
    def record(self) -> dict[str, Any]:
        assert self.folder is not None, self.text + self.errors
        return json.loads((self.folder / "run.json").read_text())

    @property
    def cells(self) -> dict[str, dict[str, Any]]:
        """The cells' records by id, without the common beginning."""
        return {cell["id"].removeprefix("sm120-m-"): cell for cell in self.record["cells"]}

    @property
    def outcomes(self) -> dict[str, str]:
        return {name: cell["outcome"] for name, cell in self.cells.items()}

    @property
    def checks(self) -> dict[tuple[str, str], str]:
        return {
            (check["cell"].removeprefix("sm120-m-"), check["name"]): check["outcome"] for check in self.record["checks"]
        }

    @property
    def events(self) -> list[dict[str, Any]]:
        assert self.folder is not None
        return [json.loads(line) for line in (self.folder / "events.jsonl").read_text().splitlines()]


SPEEDS = """
import itertools
from pytest_gpuserve.manager import measuring

real = measuring.run_load
LEVELS = itertools.cycle({levels})

def scripted(url, profile, **more):
    result = real(url, profile, **more)
    level = next(LEVELS)
    for window, noise in zip(result.windows, itertools.cycle({noise})):
        window["output_throughput"] = level * noise
    return result

measuring.run_load = scripted
"""


class Project:
    """Files in a folder, and pytest run in it: `project.run("-n2", scenario="rules: …")`."""

    def __init__(self, pytester: pytest.Pytester) -> None:
        self.pytester = pytester
        self.path = pytester.path
        self.file("matrices/tiny.yaml", MATRIX)
        self.file("pytest.ini", "[pytest]\n")

    def file(self, name: str, text: str) -> Path:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    def speeds(self, *levels: float, noise: tuple[float, ...] = (1.0,), more: str = "") -> None:
        """Loads measure these `output_throughput`s in turns, whatever the machine does; each window times its noise."""
        self.file("conftest.py", SPEEDS.format(levels=levels, noise=noise) + more)

    def stall(self, phase: str, seconds: float = 2.0) -> None:
        """Servers are called hung after so long in that phase; in any other a busy machine may be quiet as long."""
        matrix = self.path / "matrices" / "tiny.yaml"
        matrix.write_text(f"{matrix.read_text()}limits: {{{phase}: {{stall: {seconds}}}}}\n")

    def scenario(self, rules: str = "", name: str = "scenario.yaml") -> Path:
        """A fast scenario; `rules` are the items of its list."""
        body = f"rules:\n{textwrap.indent(textwrap.dedent(rules), '  ')}" if rules else ""
        return self.file(name, f"schema: 1\n{FAST}{body}")

    def run(
        self,
        *args: str,
        rules: str = "",
        matrix: str = "tiny",
        sim: str | None = "4xsm120",
        inprocess: bool = False,
        timeout: float = 100,
    ) -> Result:
        """Run pytest with the plugin; a subprocess unless told otherwise (xdist, signals and servers want one)."""
        words = [*PLUGIN, "-p", "no:cacheprovider", "--gpu-matrix", matrix]
        if sim is not None:
            words += ["--gpu-sim", sim]
            if "--gpu-sim-scenario" not in args:
                words += ["--gpu-sim-scenario", str(self.scenario(rules))]
        words += args
        if inprocess:
            result = self.pytester.runpytest_inprocess(*words)
        else:
            result = self.pytester.runpytest_subprocess(*words, timeout=timeout)
        latest = self.path / ".gpuserve" / "runs" / "latest"
        return Result(result, latest.resolve() if latest.exists() else None)


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Project:
    """An empty project; one option of ours comes from the environment, and locks are its own."""
    for name in list(os.environ):
        if (
            name.startswith(("GPUSERVE_", "GITHUB_", "PYTEST_TIMEOUT", "PYTEST_XDIST"))
            or name == "CUDA_VISIBLE_DEVICES"
        ):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setenv("XDG_CACHE_HOME", str(pytester.path / "cache"))
    # A simulation's own limit is 4 s, which a start on a busy machine may be without a sign of life.
    monkeypatch.setenv("GPUSERVE_STALL", "60")
    return Project(pytester)


@pytest.fixture
def plugin_args() -> tuple[str, ...]:
    """What loads the plugin into a pytest of a test's own."""
    return PLUGIN


@pytest.fixture
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], AbstractContextManager[None]]:
    """`with alone():` for what ends that which dead runs left on the whole machine, or counts on finding it."""
    # The workers' folders lie side by side.
    path = tmp_path_factory.getbasetemp().parent / "reaping.lock"

    @contextmanager
    def held() -> Iterator[None]:
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    return held


@pytest.fixture
def reaping(alone: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """The same, for all of a test."""
    with alone():
        yield
