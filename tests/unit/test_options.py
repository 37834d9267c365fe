"""Options from flag, environment and ini, through pytest's own parser."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_gpuserve import options

if TYPE_CHECKING:
    from pytest_gpuserve.model.settings import Settings


@pytest.fixture
def resolve(pytester: pytest.Pytester, plugin_args: tuple[str, ...]):
    """`resolve("--gpu-plan", ini="gpu_stall = 3", env={…})` → Settings."""

    def parse(*args: str, ini: str = "", env: dict[str, str] | None = None) -> Settings:
        pytester.makeini(f"[pytest]\n{ini}\n")
        return options.resolve(pytester.parseconfig(*plugin_args, *args), env or {})

    return parse


def test_the_flag_beats_the_environment_beats_the_ini_beats_the_default(resolve) -> None:
    env = {"GPUSERVE_STALL": "2"}
    assert resolve().stall is None
    assert resolve(ini="gpu_stall = 3").stall == 3
    assert resolve(ini="gpu_stall = 3", env=env).stall == 2
    assert resolve("--gpu-stall", "1", ini="gpu_stall = 3", env=env).stall == 1


def test_every_option_can_be_given_in_every_way(resolve, pytester: pytest.Pytester) -> None:
    """The three spellings of the table are really read, and give the same value."""
    pytester.path.joinpath("file.yaml").write_text("")
    samples = {
        "matrix": "a,b",
        "sim": "8xsm120",
        "sim-scenario": "file.yaml",
        "strategy": "full",
        "known-bad": "file.yaml",
        "floors": "record",
        "report": "out",
        "shard": "2/3",
        "history": "file.yaml",
        "compare": "file.yaml",
        "budget": "2.5",
        "server-python": sys.executable,
        "server-env": "A=1",
        "version": "sglang=0.5.24.dev0",
        "lock-dir": "locks",
        "lock-timeout": "7",
        "stall": "8",
        "start-timeout": "9",
    }
    simulated = ("--gpu-sim", "1xsm120")
    for option in options.TABLE:
        # A scenario is for a simulation, and a preflight contradicts one.
        extra = simulated if option.name == "sim-scenario" else ()
        default = resolve(*extra)
        if option.kind == "switch":
            by_flag, text = resolve(*extra, option.flag), "true"
        else:
            text = samples[option.name]
            by_flag = resolve(*extra, f"{option.flag}={text}")
        assert getattr(by_flag, option.field) != getattr(default, option.field)
        assert resolve(*extra, env={option.env: text}) == by_flag
        assert resolve(*extra, ini=f"{option.ini} = {text}") == by_flag


def test_lists_are_repeatable(resolve, pytester: pytest.Pytester) -> None:
    one, two = (pytester.path / name for name in ("one.yaml", "two.yaml"))
    for path in (one, two):
        path.write_text("")
    assert resolve("--gpu-known-bad", str(one), "--gpu-known-bad", "two.yaml").known_bad == (one, two)
    assert resolve(env={"GPUSERVE_KNOWN_BAD": f"{one}:{two}"}).known_bad == (one, two)
    assert resolve(ini=f"gpu_known_bad =\n  {one}\n  two.yaml").known_bad == (one, two)
    # Values of variables may hold colons: those are not split.
    assert resolve(env={"GPUSERVE_SERVER_ENV": "LD_LIBRARY_PATH=/a:/b"}).server_env == ("LD_LIBRARY_PATH=/a:/b",)


@pytest.mark.parametrize(
    ("flag", "value", "wanted"),
    [
        ("--gpu-stall", "soon", "a number above 0"),
        ("--gpu-stall", "-1", "a number above 0"),
        ("--gpu-budget", "nan", "a number above 0"),
        ("--gpu-sim", "eight", "a count and an arch, such as 8xsm120"),
        ("--gpu-sim", "0xsm120", "a count and an arch"),
        ("--gpu-strategy", "pairwise", "one of one-at-a-time, full, listed"),
        ("--gpu-floors", "on", "one of check, record, off"),
        ("--gpu-matrix", " , ", "a matrix name"),
        ("--gpu-sim-scenario", "none.yaml", "a file that exists"),
        ("--gpu-server-env", "1A=2", "NAME or NAME=VALUE"),
        ("--gpu-server-python", "no-such-python", "the path of a Python interpreter"),
    ],
)
def test_a_bad_value_names_its_source_and_what_is_wanted(resolve, flag: str, value: str, wanted: str) -> None:
    option = next(option for option in options.TABLE if option.flag == flag)
    # An empty ini value is no value, so pytest's own way of writing is used for all three.
    for source, given in (
        (flag, {"args": (flag, value)}),
        (f"environment variable {option.env}", {"env": {option.env: value}}),
        (f"ini value {option.ini} in ", {"ini": f"{option.ini} = {value}"}),
    ):
        with pytest.raises(pytest.UsageError, match=re.escape(wanted)) as caught:
            resolve(*given.get("args", ()), ini=given.get("ini", ""), env=given.get("env"))
        assert str(caught.value).startswith(source)


def test_a_switch_in_the_environment_must_be_a_truth_value(resolve) -> None:
    assert resolve(env={"GPUSERVE_NO_CONTROL": "0"}).no_control is False
    with pytest.raises(pytest.UsageError, match="GPUSERVE_NO_CONTROL: 'maybe' is not true or false"):
        resolve(env={"GPUSERVE_NO_CONTROL": "maybe"})


def test_a_misspelt_variable_is_named_once(pytester: pytest.Pytester, plugin_args, monkeypatch) -> None:
    for name in ("GPUSERVE_FLOOR", "GPUSERVE_LOCKDIR", "GPUSERVE_SIM_DIR", "GPUSERVE_RUN_ID", "GPUSERVE_STALL"):
        monkeypatch.setenv(name, "7")
    pytester.makepyfile("def test_nothing(): pass")
    matrix = ("--gpu-matrix", "sm120", "--gpu-sim", "8xsm120", "--gpu-plan")
    shown = pytester.runpytest_inprocess(*plugin_args, *matrix).stdout.str()
    assert re.findall(r"variable (\w+)='7' is read by nobody: did you mean (\w+)\?", shown) == [
        ("GPUSERVE_FLOOR", "GPUSERVE_FLOORS"),
        ("GPUSERVE_LOCKDIR", "GPUSERVE_LOCK_DIR"),
    ]


def test_paths_start_where_they_were_written(resolve, pytester: pytest.Pytester, monkeypatch) -> None:
    below = pytester.mkdir("below")
    pytester.makeini("[pytest]\n")
    monkeypatch.chdir(below)
    root = pytester.path
    assert resolve(f"--rootdir={root}", "--gpu-lock-dir", "locks").lock_dir == below / "locks"
    assert resolve(f"--rootdir={root}", "--gpu-report", "out").report == root / "out"
    python = resolve("--gpu-server-python", "./venv/bin/python").server_python
    assert python == str(below / "venv/bin/python")


def test_a_virtual_environments_interpreter_is_not_resolved_to_the_one_it_links_to(resolve, pytester) -> None:
    link = pytester.path / "python"
    link.symlink_to(sys.executable)
    assert resolve("--gpu-server-python", str(link)).python == str(link)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--gpu-matrix", "a", "--gpu-plan", "--gpu-preflight"), "give one of them"),
        (("--gpu-matrix", "a", "--gpu-sim", "1xsm120", "--gpu-preflight"), "needs no GPU: leave --gpu-sim .* out"),
        (("--gpu-matrix", "a", "--gpu-sim-scenario", "s.yaml"), "give --gpu-sim NxARCH with it"),
    ],
)
def test_options_that_contradict_each_other(resolve, pytester: pytest.Pytester, args, message) -> None:
    pytester.path.joinpath("s.yaml").write_text("")
    with pytest.raises(pytest.UsageError, match=message):
        resolve(*args)


@pytest.fixture
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter in a folder of no project: the one that runs the tests may lie below this one's."""
    link = tmp_path_factory.mktemp("elsewhere") / "python"
    link.symlink_to(sys.executable)
    return str(link)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("pytest.ini", ""),
        ("pyproject.toml", "[tool.pytest.ini_options]\n"),
        ("tox.ini", "[tox]\n\n[pytest]\n"),
        ("setup.cfg", "[tool:pytest]\n"),
    ],
)
@pytest.mark.parametrize("below", ["", "below"])
def test_a_path_that_made_pytest_miss_the_configuration_is_refused(
    pytester: pytest.Pytester, plugin_args, monkeypatch, python: str, file: str, text: str, below: str
) -> None:
    """Before pytest knows our options it looks for its root directory among all words that are paths."""
    pytester.path.joinpath(file).write_text(text)
    pytester.path.joinpath(below).mkdir(exist_ok=True)
    monkeypatch.chdir(pytester.path / below)
    config = pytester.parseconfig(*plugin_args, "--gpu-server-python", python)
    with pytest.raises(pytest.UsageError, match=f"write --gpu-server-python={re.escape(python)}") as caught:
        options.resolve(config, {})
    assert f"missed {pytester.path / file}" in str(caught.value)
    for right in (
        (f"--gpu-server-python={python}",),
        (f"--rootdir={pytester.path}", "--gpu-server-python", python),
    ):
        assert options.resolve(pytester.parseconfig(*plugin_args, *right), {}).rootdir == pytester.path


def test_a_path_that_made_pytest_take_another_projects_configuration_is_refused(
    pytester: pytest.Pytester, plugin_args, monkeypatch
) -> None:
    here, other = pytester.mkdir("here"), pytester.mkdir("other")
    (other / "pytest.ini").write_text("[pytest]\n")
    (other / "python").symlink_to(sys.executable)
    monkeypatch.chdir(here)
    config = pytester.parseconfig(*plugin_args, "--gpu-server-python", str(other / "python"))
    with pytest.raises(pytest.UsageError, match=r"another project's: write --gpu-server-python="):
        options.resolve(config, {})


def test_where_there_is_no_configuration_a_path_loses_nothing(
    pytester: pytest.Pytester, plugin_args, monkeypatch, python: str
) -> None:
    words = [*plugin_args, "--gpu-server-python", python]
    settings = options.resolve(pytester.parseconfig(*words), {})
    assert (settings.rootdir, settings.report) == (pytester.path, pytester.path / ".gpuserve")
    # As pytest would have it: a project file without pytest's section still marks the root.
    pytester.path.joinpath("pyproject.toml").write_text("[project]\n")
    monkeypatch.chdir(pytester.mkdir("below"))
    assert options.resolve(pytester.parseconfig(*words), {}).rootdir == pytester.path


def test_a_flag_without_a_matrix_is_not_silently_ignored(pytester: pytest.Pytester, plugin_args) -> None:
    with pytest.raises(pytest.UsageError, match="--gpu-plan, --gpu-stall: nothing to do without --gpu-matrix"):
        options.given(pytester.parseconfig(*plugin_args, "--gpu-plan", "--gpu-stall", "3"))
    assert not options.given(pytester.parseconfig(*plugin_args))
    assert options.given(pytester.parseconfig(*plugin_args, "--gpu-matrix", "x"))


def test_the_docs_are_up_to_date() -> None:
    page = Path(__file__).parents[2] / "docs" / "options.md"
    assert options.docs_table() in page.read_text()


def test_the_docs_table_has_a_line_for_every_option() -> None:
    lines = options.docs_table().splitlines()[2:]
    assert len(lines) == len(options.TABLE)
    for option, line in zip(options.TABLE, lines, strict=True):
        assert line.startswith(f"| `{option.flag}")
        assert f"`{option.ini}` | `{option.env}` |" in line
        assert len(re.findall(r"(?<!\\)\|", line)) == 6
