"""The options, once: `TABLE` feeds `--help`, the ini file, the environment, the docs and `Settings`.

Kept light: it is imported by every pytest run of every project that has the plugin installed.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from pytest_gpuserve.model.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = ["TABLE", "Option", "add", "docs_table", "given", "resolve"]

_SIM = re.compile(r"[1-9]\d{0,3}x(?:sm\d{2,3})")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Where pytest's configuration begins in a file of several tools.
_SECTION = re.compile(r"^\[(tool\.pytest(\.ini_options)?|tool:pytest|pytest)\]", re.MULTILINE)
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off", ""})


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a value was written: named in messages, and where its relative paths start."""

    text: str
    base: Path


def _names(value: str, _base: Path) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in value.split(",") if name.strip()))
    if not names:
        raise ValueError("a matrix name, a path, `auto`, or several with commas between")
    return names


def _text(value: str, _base: Path) -> str:
    return value


def _sim(value: str, _base: Path) -> str:
    if not _SIM.fullmatch(value):
        raise ValueError("a count and an arch, such as 8xsm120")
    return value


def _path(value: str, base: Path) -> Path:
    if not value:
        raise ValueError("a path")
    return base / Path(value).expanduser()


def _file(value: str, base: Path) -> Path:
    path = _path(value, base)
    if not path.exists():
        raise ValueError(f"a file that exists (there is no {path})")
    return path


def _python(value: str, base: Path) -> str:
    # Not resolved: the interpreter of a virtual environment is a link, and its own path is what finds the packages.
    if os.sep in value:
        return os.path.normpath(base / Path(value).expanduser())
    found = shutil.which(value)
    if found is None:
        raise ValueError(f"the path of a Python interpreter (no {value!r} on PATH)")
    return found


def _variable(value: str, _base: Path) -> str:
    if not _NAME.fullmatch(value.partition("=")[0]):
        raise ValueError("NAME or NAME=VALUE")
    return value


def _version(value: str, _base: Path) -> tuple[str, str]:
    from pytest_gpuserve.model.versions import read_taken

    return read_taken(value)


def _positive(value: str, _base: Path) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 < number < float("inf"):
        raise ValueError("a number above 0")
    return number


def _share(value: str, _base: Path) -> tuple[int, int]:
    index, slash, count = value.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise ValueError("K/N with K from 1 to N, such as 2/3")
    return int(index), int(count)


def _one_of(*words: str) -> Callable[[str, Path], str]:
    def parse(value: str, _base: Path) -> str:
        if value not in words:
            raise ValueError("one of " + ", ".join(words))
        return value

    return parse


@dataclass(frozen=True, slots=True)
class Option:
    """One option. `parse(text, base)` raises ValueError with what it wants; relative paths start at `base`.

    `kind` is `value`, `switch` (a flag without a value) or `list` (repeatable flag; in the environment values are
    split at `os.pathsep`, in the ini file by line).
    """

    name: str
    help: str
    parse: Callable[[str, Path], object] = _text
    metavar: str | None = None
    kind: str = "value"
    default: str = "none"

    @property
    def flag(self) -> str:
        """As on the command line: `--gpu-lock-dir`."""
        return f"--gpu-{self.name}"

    @property
    def field(self) -> str:
        """Its name in `Settings`: `lock_dir`."""
        return self.name.replace("-", "_")

    @property
    def ini(self) -> str:
        """As in the ini file, and as argparse stores it: `gpu_lock_dir`."""
        return f"gpu_{self.field}"

    @property
    def env(self) -> str:
        """As in the environment: `GPUSERVE_LOCK_DIR`."""
        return f"GPUSERVE_{self.field.upper()}"


TABLE: tuple[Option, ...] = (
    Option(
        "matrix",
        "Run these matrices: a file, else ROOTDIR/matrices/NAME.yaml, else the packaged one; `auto` takes those of the "
        "GPUs that are here",
        _names,
        "NAME|PATH|auto[,…]",
    ),
    Option("plan", "Print cells, expected outcomes, GPUs and estimated time, launch nothing", kind="switch"),
    Option(
        "preflight",
        "Resolve every cell through the installed SGLang's own arguments for that arch, without a GPU",
        kind="switch",
    ),
    Option("sim", "Simulate a machine of N GPUs of ARCH, and the servers; reports say SIMULATED", _sim, "NxARCH"),
    Option("sim-scenario", "Scripted faults and speeds for the simulation", _file, "FILE"),
    Option(
        "strategy",
        "Which cells: one-at-a-time (baseline, then each single delta), full, or listed",
        _one_of("one-at-a-time", "full", "listed"),
        "NAME",
        default="the matrix's",
    ),
    Option("known-bad", "More known-bad entries (repeatable)", _file, "PATH", kind="list"),
    Option(
        "floors",
        "Throughput floors: check asserts, record only measures, off skips",
        _one_of("check", "record", "off"),
        "check|record|off",
        default="check",
    ),
    Option(
        "no-control",
        "Do not re-run the baseline inside the same lease after an unexpected hang, crash or oom",
        kind="switch",
    ),
    Option("report", "Where records, logs and reports go, relative to rootdir", _path, "DIR", default=".gpuserve"),
    Option(
        "compare",
        "After the run, compare with this record, or with the latest run of a report directory; never changes the exit "
        "code",
        _file,
        "FILE",
    ),
    Option(
        "shard",
        "Run this machine's share of the cells: the K-th of N, the same on every machine; a model stays whole",
        _share,
        "K/N",
    ),
    Option(
        "history",
        "The record whose times balance the shards; give the same file to all of them",
        _file,
        "FILE",
        default="estimates from the matrix alone",
    ),
    Option("budget", "Start no new cell after that many minutes; the rest is not-run", _positive, "MINUTES"),
    Option(
        "server-python",
        "The interpreter of the environment under test",
        _python,
        "PATH",
        default="the one running pytest",
    ),
    Option(
        "server-env",
        "Set a variable for the server, or let the caller's through (repeatable)",
        _variable,
        "NAME[=VALUE]",
        kind="list",
    ),
    Option(
        "version",
        "What a build without a version of its own (0.0.0.dev1+g…) is to be taken for (repeatable)",
        _version,
        "DIST=VERSION",
        kind="list",
        default="the newest tag of its checkout, else newer than every release",
    ),
    Option("lock-dir", "Where the GPU locks of this machine are", _path, "DIR", default="machine-wide"),
    Option("lock-timeout", "How long to wait for GPUs", _positive, "SECONDS", default="3600"),
    Option("stall", "How long a server may show no progress in any phase", _positive, "SECONDS", default="by phase"),
    Option("start-timeout", "How long a start may take however it progresses", _positive, "SECONDS"),
)


def add(parser: pytest.Parser) -> None:
    """Declare every option to argparse and the ini file. Values stay text: `resolve` parses those of all sources."""
    group = parser.getgroup("gpuserve", "hardware compatibility of SGLang (pytest-gpuserve)")
    for option in TABLE:
        text = f"{option.help}. Default: {option.default}. ini {option.ini}, env {option.env}".replace("%", "%%")
        if option.kind == "switch":
            group.addoption(option.flag, dest=option.ini, action="store_true", default=None, help=text)
        else:
            action = "append" if option.kind == "list" else "store"
            group.addoption(
                option.flag, dest=option.ini, action=action, default=None, metavar=option.metavar, help=text
            )
        kind: Literal["linelist", "string"] = "linelist" if option.kind == "list" else "string"
        parser.addini(option.ini, option.help, type=kind, default=None)


def given(config: pytest.Config) -> bool:
    """True if any source asks for a matrix. Cheap: asked in every run of every project.

    UsageError if a flag of ours is given without one: it would do nothing, silently.
    """
    matrix, *others = TABLE
    if any(True for _ in _values(matrix, config, os.environ)):
        return True
    idle = [option.flag for option in others if getattr(config.option, option.ini, None)]
    if idle:
        raise pytest.UsageError(
            f"{', '.join(idle)}: nothing to do without --gpu-matrix; give it, or `--gpu-matrix auto`"
        )
    return False


def _values(option: Option, config: pytest.Config, environ: Mapping[str, str]) -> Iterator[tuple[_Source, Any]]:
    """The raw values of one option by source, the strongest first."""
    flag = getattr(config.option, option.ini, None)
    cwd = config.invocation_params.dir
    if flag is not None:
        yield _Source(option.flag, cwd), flag
    if option.env in environ:
        text = environ[option.env]
        if text or option.kind == "switch":
            yield _Source(f"environment variable {option.env}", cwd), text
    ini = config.getini(option.ini)
    if ini not in (None, "", []):
        yield _Source(f"ini value {option.ini} in {config.inipath}", config.rootpath), ini


def _switch(raw: object) -> bool:
    word = str(raw).strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ValueError("true or false")


def _parsed(option: Option, raw: object, base: Path) -> object:
    if option.kind == "switch":
        return _switch(raw)
    if option.kind == "list":
        # A drive of one variable may hold `:`; only paths are split at it.
        parts = raw if isinstance(raw, list) else str(raw).split(os.pathsep if option.parse is _file else "\n")
        return tuple(option.parse(str(part).strip(), base) for part in parts if str(part).strip())
    return option.parse(str(raw).strip(), base)


def resolve(config: pytest.Config, environ: Mapping[str, str] = os.environ) -> Settings:
    """Every option from its strongest source. UsageError names the source of a value that is wrong.

    A variable that looks like one of ours and is read by nobody is a PytestConfigWarning, once: not in workers.
    """
    rootdir = _root_of(config)
    found: dict[str, Any] = {"report": rootdir / ".gpuserve"}
    for option in TABLE:
        source, raw = next(_values(option, config, environ), (None, None))
        if source is None:
            continue
        base = rootdir if option.name == "report" else source.base
        try:
            found[option.field] = _parsed(option, raw, base)
        except ValueError as error:
            raise pytest.UsageError(f"{source.text}: {raw!r} is not {error}") from None
    if not hasattr(config, "workerinput"):
        for name, meant in _misspelt(environ):
            config.issue_config_time_warning(
                pytest.PytestConfigWarning(
                    f"environment variable {name}={environ[name]!r} is read by nobody: did you mean {meant}?"
                ),
                stacklevel=2,
            )
    settings = Settings(rootdir=rootdir, **found)
    if settings.sim_scenario and not settings.sim:
        raise pytest.UsageError("--gpu-sim-scenario scripts a simulated machine: give --gpu-sim NxARCH with it")
    if settings.plan and settings.preflight:
        raise pytest.UsageError("--gpu-plan and --gpu-preflight are two different questions: give one of them")
    if settings.preflight and settings.sim:
        raise pytest.UsageError(
            "--gpu-preflight asks the SGLang that is installed, and needs no GPU: leave --gpu-sim (GPUSERVE_SIM) out"
        )
    return settings


def _misspelt(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Variables that differ little from an option's, and that option's. Others of the prefix are servers' marks."""
    import difflib  # 6 ms, that runs without a matrix need not pay

    known = {option.field.upper(): option.env for option in TABLE}
    for name in sorted(environ):
        prefix, _, rest = name.partition("_")
        if prefix == "GPUSERVE" and rest not in known:
            for near in difflib.get_close_matches(rest, known, 1, cutoff=0.8):
                yield name, known[near]


def _root_of(config: pytest.Config) -> Path:
    """The root directory as pytest would have found it, had it not mistaken a path of ours for a test path.

    It looks for the root before it knows our options, among all words that are paths. UsageError if it missed the
    project's configuration, or took another one's: then more than the root is wrong.
    """
    root, cwd = config.rootpath, config.invocation_params.dir
    if root == cwd or config.option.rootdir or config.option.inifilename:
        return root
    words = [str(word) for word in config.invocation_params.args]
    flags = {option.flag for option in TABLE}
    for flag, value in itertools.pairwise(words):
        place = cwd / value
        if flag in flags and place.exists() and not place.is_relative_to(cwd):
            break
    else:
        return root
    # What lies in the root itself or above it, pytest has seen.
    between = [base for base in (cwd, *cwd.parents) if not root.is_relative_to(base)]
    missed = next((path for base in between if (path := _configuration(base))), None)
    if missed is None and cwd.is_relative_to(root):
        return next((base for base in between if (base / "pyproject.toml").is_file()), cwd)
    told = f"and missed {missed}" if missed else "which is another project's"
    raise pytest.UsageError(
        f"pytest took {value} for a test path, and so {root} for the root directory, {told}: "
        f"write {flag}={value}, or give --rootdir"
    )


def _configuration(folder: Path) -> Path | None:
    """The file in `folder` that configures pytest, if there is one."""
    for name in ("pytest.toml", ".pytest.toml", "pytest.ini", ".pytest.ini"):
        if (folder / name).is_file():
            return folder / name
    for name in ("pyproject.toml", "tox.ini", "setup.cfg"):
        file = folder / name
        if file.is_file() and _SECTION.search(file.read_text(errors="replace")):
            return file
    return None


def docs_table() -> str:
    """The options as a Markdown table, for docs/options.md."""
    lines = ["| option | ini | environment | default | meaning |", "|---|---|---|---|---|"]
    for option in TABLE:
        shape = f"{option.flag} {option.metavar}" if option.metavar else option.flag
        shape = shape.replace("|", "\\|")
        lines.append(f"| `{shape}` | `{option.ini}` | `{option.env}` | {option.default} | {option.help} |")
    return "\n".join(lines) + "\n"
