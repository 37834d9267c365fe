"""What the pages say is run: every command in them, by a test here or by the tox environment or workflow named here.

Commands are the lines of the ```bash blocks, what a table's last column shows as `pytest …` or `gpuserve …`, and every
`tox -e …`. A page's commands run in its order, in one project with small matrices; the simulation stands in for GPUs
and comes in by the environment, so that the words of the page are what is run. A command not known here fails.
"""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import yaml

from pytest_gpuserve import cli
from pytest_gpuserve.matrix.known_bad import load_known_bad
from pytest_gpuserve.matrix.scenario import load_scenario
from pytest_gpuserve.matrix.schema import load_matrix

ROOT = Path(__file__).parents[2]
GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [*GUIDES, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs/evidence").glob("*.md"))]

# What a test of the pages cannot run, and which environment of tox.ini does: the same, or more than the same.
TOX = {
    "tox": None,  # those of its env_list
    "tox -e real-cpu": "real-cpu",
    "tox -e gpu": "gpu",
    "tox -e page": "page",
    "pip install -e .": "lint",  # package = editable
    "pip install tox": "lint",  # what runs it was installed so
    'python -m venv /envs/new && /envs/new/bin/pip install "sglang==0.5.23"': "preflight",
}
# These ask a real SGLang: run here where `tox -e preflight` names two.
PREFLIGHT = {
    "pytest --gpu-matrix sm120 --gpu-preflight",
    "pytest --gpu-matrix sm80 --gpu-preflight --gpu-server-python=/opt/sglang/bin/python",
    "gpuserve preflight --matrix sm120 --gpu-server-python=/envs/old/bin/python -o old.json",
    "gpuserve preflight --matrix sm120 --gpu-server-python=/envs/new/bin/python -o new.json",
    "gpuserve compare old.json new.json",
}
# Steps of examples/nightly.yml, run by test_nightly_example.py. Once a machine is enough: it ends what dead runs of
# other tests leave, whose business that may still be.
NIGHTLY = {"gpuserve reap"}


@dataclass(frozen=True)
class Run:
    """How a command is run: its exit codes, a text it says, and what of the environment differs from the page's."""

    codes: tuple[int, ...] = (0,)
    says: str = "passed"
    env: tuple[tuple[str, str], ...] = ()


ALL = ("PYTEST_ADDOPTS", "")
BROKEN = (("GPUSERVE_SIM_SCENARIO", "broken.yaml"),)
SM80 = (("GPUSERVE_SIM", "2xsm80"), ("PYTEST_ADDOPTS", "-k 'ready and llama-mini-baseline'"))
RUN = {
    "pytest --gpu-matrix sm120 --gpu-sim 8xsm120": Run(),
    "pytest --gpu-matrix auto --gpu-server-python=/opt/sglang/bin/python": Run(),
    "pytest --gpu-matrix sm120 --gpu-plan": Run(says="2 server starts"),
    "pytest --gpu-matrix sm120 --gpu-sim 8xsm120 --gpu-plan": Run(says="SIMULATED plan"),
    "pytest --gpu-matrix auto": Run(),
    "pytest --gpu-matrix auto -n 4": Run(),
    "gpuserve compare before.json after.json": Run((1,), "BROKE"),
    "pytest --gpu-matrix sm120 --gpu-shard 1/2 --gpu-report one": Run(),
    "pytest --gpu-matrix sm120 --gpu-shard 2/2 --gpu-report two": Run(says="shard 2 of 2"),
    "gpuserve merge one two -o merged.json": Run(says="2 records"),
    "gpuserve report merged.json -o merged.html": Run(says="merged.html"),
    "gpuserve report before.json after.json -o both.html": Run(says="both.html"),
    "gpuserve report after.json --issue sm120-m-attention.flashinfer": Run(says="### Reproduction"),
    "gpuserve history sm120-m-baseline --simulated": Run(says="passed"),
    "gpuserve status": Run((0, 1), ""),  # 1: something else on this machine left something
    "gpuserve validate": Run(says="0 problems"),
    "pytest --gpu-matrix sm120 --gpu-server-python=/envs/old/bin/python --gpu-report old": Run(),
    "pytest --gpu-matrix sm120 --gpu-server-python=/envs/new/bin/python --gpu-report new": Run((1,), "failed", BROKEN),
    "gpuserve compare old new --patch bump.patch": Run((1,), "BROKE"),
    "git apply bump.patch": Run(says=""),
    "pytest --gpu-matrix sm80 --gpu-sim 2xsm80": Run(env=SM80),
    "pytest --gpu-matrix sm80": Run(env=SM80),
}
MATRIX = """
schema: 1
arch: [sm120]
models: {m: {shape: tiny-llama}}
axes:
  attention:
    triton: {flags: {attention-backend: triton}}
    flashinfer: {flags: {attention-backend: flashinfer}}
baseline: {attention: triton}
"""
# Loaded by its entry point where the project is installed, by name from a plain checkout.
PLUGIN = "" if "gpuserve" in {one.name for one in entry_points(group="pytest11")} else "-p pytest_gpuserve.plugin"
SCENARIO = "schema: 1\ndefaults: {phase-seconds: 0.01, tokens-per-second: 5000, memory-gib: 1}\n"
# A client that shares the machine keeps up with this, and what is compared with the baseline is clearly faster.
STEADY = SCENARIO.replace("5000", "1000") + "rules: [{when: {attention: triton}, then: {slow: 1.5}}]\n"
BREAKS = "rules: [{when: {attention: flashinfer}, then: {crash: {phase: weights, text: 'RuntimeError: no kernel'}}}]\n"


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def commands(page: Path) -> list[str]:
    """In the page's order, each once."""
    found = []
    pattern = r"^```bash\n(.*?)^```|^\|[^\n]*`((?:pytest|gpuserve) [^`\n]*)` \|$|`(tox -e [^`\n]*)`"
    for shown in re.findall(pattern, page.read_text(), re.DOTALL | re.MULTILINE):
        for line in "".join(shown).replace("\\\n", " ").splitlines():
            command = re.sub(r"\s+#.*", "", line).strip()
            if command and not command.startswith("#"):
                found.append(command)
    return list(dict.fromkeys(found))


WITH_COMMANDS = [page for page in GUIDES if commands(page)]


def environment(path: Path, version: str) -> None:
    """A virtual environment with a distribution called sglang and nothing in it: only its metadata is read."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", path], check=True)
    info = next(path.glob("lib/python*/site-packages")) / f"sglang-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with small matrices of its own."""
    root = tmp_path / "project"
    (root / "matrices").mkdir(parents=True)
    (root / "pytest.ini").write_text("[pytest]\n")
    (root / "matrices/sm120.yaml").write_text(MATRIX)
    (root / "matrices/sm80.yaml").write_text(blocks(ROOT / "docs/new-arch.md", "yaml")[0])
    (root / "matrices/known_bad.yaml").write_text("schema: 1\nentries: []\n")
    (root / "fast.yaml").write_text(SCENARIO)
    (root / "broken.yaml").write_text(SCENARIO + BREAKS)
    (root / "steady.yaml").write_text(STEADY)
    subprocess.run(["git", "init", "-q", root], check=True)
    return root


def shell(command: str, root: Path, run: Run) -> str:
    """Run the page's command as a user would; paths of environments are below the project's parent."""
    command = re.sub(r"(?<![\w.])/(envs|opt)/", rf"{root.parent}/\1/", command)
    # The command `gpuserve`, with or without an installation.
    command = re.sub(r"^gpuserve ", f"{sys.executable} -m pytest_gpuserve.cli ", command)
    command = re.sub(r"^pytest ", f"{sys.executable} -m pytest -p no:cacheprovider {PLUGIN}", command)
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(root.parent),
        "PYTHONPATH": str(ROOT),
        "GPUSERVE_LOCK_DIR": str(root.parent / "locks"),
        "GPUSERVE_STALL": "60",  # a start on a busy machine may be quiet for longer than the simulation's own 4 s
        **dict(run.env),
    }
    done = subprocess.run(["bash", "-ec", command], cwd=root, env=env, capture_output=True, text=True, timeout=120)
    text = done.stdout + done.stderr
    assert done.returncode in run.codes, f"{command}: exit {done.returncode}\n{text}"
    assert run.says in text, f"{command}: does not say {run.says!r}\n{text}"
    return text


def simulated(run: Run) -> Run:
    env = (("GPUSERVE_SIM", "8xsm120"), ("GPUSERVE_SIM_SCENARIO", "fast.yaml"), ("PYTEST_ADDOPTS", "-k test_ready"))
    return Run(run.codes, run.says, (*env, *run.env))


@pytest.fixture
def recorded(project: Path) -> Path:
    for file, scenario, codes in (("before.json", "fast.yaml", (0,)), ("after.json", "broken.yaml", (1,))):
        env = (("GPUSERVE_SIM_SCENARIO", scenario),)
        shell("pytest --gpu-matrix sm120", project, simulated(Run(codes, "SIMULATED", env)))
        shutil.copy(project / ".gpuserve/runs/latest/run.json", project / file)
    return project


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name)
def test_the_commands_of_a_page(page: Path, project: Path, request: pytest.FixtureRequest) -> None:
    todo = [command for command in commands(page) if command in RUN]
    if any("before.json after.json" in command for command in todo):
        request.getfixturevalue("recorded")
    for path, version in (("opt/sglang", "0.5.23"), ("envs/old", "0.5.17"), ("envs/new", "0.5.23")):
        if any(f"/{path}/" in command for command in todo):
            environment(project.parent / path, version)
    for command in todo:
        text = shell(command, project, simulated(RUN[command]))
        assert not command.startswith("pytest") or "SIMULATED" in text


def test_the_first_run_needs_nothing_but_what_the_plugin_itself_needs(tmp_path: Path) -> None:
    """In this checkout: what its own tests need besides is not installed by the README's first command."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    for requirement in groups["test"]:
        missing = re.match(r"\w+", requirement)[0]
        (tmp_path / f"{missing}.py").write_text(f"raise ModuleNotFoundError('No module named {missing}')")
    # Nor is what they bring into pytest, which is here.
    env = (("PYTHONPATH", f"{tmp_path}:{ROOT}"), ("PYTEST_ADDOPTS", "-p no:hypothesispytest"))
    run = Run(says="SIMULATED plan", env=env)
    shell("pytest --gpu-matrix sm120 --gpu-sim 8xsm120 --gpu-plan", ROOT, run)


TESTS = [(page, number, text) for page in GUIDES for number, text in enumerate(blocks(page, "python"))]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("page", "number", "text"), TESTS, ids=[f"{name(page)}-{n}" for page, n, _ in TESTS])
def test_a_test_that_a_page_shows_runs_in_its_cells(page: Path, number: int, text: str, project: Path) -> None:
    """With the loads that the page defines."""
    loads = re.findall(r"`(\w+: \{concurrency: [^`]*\})`", page.read_text())
    with (project / "matrices/sm120.yaml").open("a") as matrix:
        matrix.write("".join(["loads:\n", *(f"  {load}\n" for load in loads)]) if loads else "")
    # The page leaves out what every such file begins with.
    (project / "test_mine.py").write_text(text if "import pytest" in text else f"import pytest\n{text}")
    run = Run(says="2 passed", env=(ALL, ("GPUSERVE_SIM_SCENARIO", "steady.yaml")))
    shell("pytest --gpu-matrix sm120 test_mine.py", project, simulated(run))


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name)
def test_every_command_of_a_page_is_run_somewhere(page: Path) -> None:
    unknown = [one for one in commands(page) if one not in RUN.keys() | TOX.keys() | PREFLIGHT | NIGHTLY]
    assert not unknown, f"{name(page)} shows commands that no test runs: enter them in {Path(__file__).name}"


def test_what_is_known_is_in_the_pages() -> None:
    shown = {command for page in GUIDES for command in commands(page)}
    assert not (RUN.keys() | TOX.keys() | PREFLIGHT | NIGHTLY) - shown


def test_the_environments_and_steps_that_run_the_rest_exist() -> None:
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    there = {section.removeprefix("testenv:") for section in tox.sections() if section.startswith("testenv:")}
    assert {env for env in TOX.values() if env} <= there
    assert {env.strip() for env in tox["tox"]["env_list"].split(",")} - {"py"} <= there
    assert tox["testenv:lint"]["package"] == "editable"
    assert tox["testenv:preflight"]["commands"].startswith("\npytest {posargs:tests/e2e -m real -k preflight")
    workflow = yaml.safe_load((ROOT / "examples/nightly.yml").read_text())
    steps = [step.get("run", "").strip() for job in workflow["jobs"].values() for step in job["steps"]]
    assert set(steps) >= NIGHTLY


PYTHONS = [one for one in os.environ.get("GPUSERVE_TEST_PREFLIGHT_PYTHONS", "").split(":") if one]


@pytest.mark.real
@pytest.mark.skipif(len(PYTHONS) < 2, reason="GPUSERVE_TEST_PREFLIGHT_PYTHONS does not name two interpreters")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", [page for page in WITH_COMMANDS if PREFLIGHT & set(commands(page))], ids=name)
def test_the_preflight_commands_of_a_page(page: Path, project: Path) -> None:
    old, new = PYTHONS[0], PYTHONS[-1]
    for path, python in (("opt/sglang", new), ("envs/old", old), ("envs/new", new)):
        wrapper = project.parent / path / "bin/python"
        wrapper.parent.mkdir(parents=True)
        wrapper.write_text(f'#!/bin/sh\nexec {python} "$@"\n')
        wrapper.chmod(0o755)
    for command in commands(page):
        if command in PREFLIGHT:
            # README's command asks the SGLang beside pytest; here there is none.
            env = () if "python" in command else (("GPUSERVE_SERVER_PYTHON", new),)
            shell(command, project, Run((0, 1), "", env))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_command_that_a_page_mentions_exists(page: Path) -> None:
    assert set(re.findall(r"`gpuserve ([a-z-]+)", page.read_text())) <= cli.COMMANDS.keys()


WHOLE = [
    (page, number, text) for page in PAGES for number, text in enumerate(blocks(page, "yaml")) if "schema:" in text
]


@pytest.mark.parametrize(("page", "number", "text"), WHOLE, ids=[f"{name(page)}-{n}" for page, n, _ in WHOLE])
def test_a_file_that_a_page_shows_whole_loads(page: Path, number: int, text: str, tmp_path: Path) -> None:
    file = tmp_path / "file.yaml"
    file.write_text(text)
    keys = yaml.safe_load(text).keys()
    load = (
        load_matrix if "arch" in keys else (lambda one: load_known_bad([one])) if "entries" in keys else load_scenario
    )
    assert load(file)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        target, _, anchor = link.partition("#")
        if "://" in target:
            continue
        file = (page.parent / target) if target else page
        assert file.exists(), f"{name(page)}: {link}"
        if anchor:
            titles = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}, link
