"""The command line of a cell."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pytest_gpuserve.engine.flags import canonical, refusal, size_problem, tensor_parallel
from pytest_gpuserve.engine.version import release
from pytest_gpuserve.errors import UsageError
from pytest_gpuserve.model import phase

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpuserve.model.cell import Cell, FlagValue

__all__ = ["argv", "draft_model", "hides_phases", "launcher"]

# `sglang serve` exists from 0.5.6 on; from 0.5.10 on the module form prints that it is only "still supported". The
# console script is not used: an unpacked SGLang on PYTHONPATH has none, and a moved environment a wrong first line.
_SERVE_PREFERRED = (0, 5, 10)
_SERVE = ("-c", "from sglang.cli.main import main; main()", "serve")
_MODULE = ("-m", "sglang.launch_server")

_DRAFT_MODEL = "speculative-draft-model-path"
_LOG_LEVEL = "log-level"


def launcher(python: str, version: str) -> tuple[str, ...]:
    """How that release is started, interpreter first: everything of the command line that is not a flag."""
    return (python, *(_SERVE if release(version) >= _SERVE_PREFERRED else _MODULE))


def argv(cell: Cell, *, python: str, version: str, model_path: str) -> tuple[str, ...]:
    """The command line, with `{host}`, `{port}`, `{nccl_port}` and `{api_key}` left open.

    A flag's value True gives the bare flag, False leaves it out, a list gives several values. Adds the `--tp-size`
    with which the server takes all GPUs of the cell, unless one is set, `--device cpu` for the arch `cpu`, and
    `--enable-metrics`, which the token counter of the hang watch needs. UsageError where the cell sets what the
    supervisor must choose, or sizes that do not take its GPUs; files with such cells are refused before.
    """
    flags = _by_own_name(cell.flags)
    place = f" ({cell.where})" if cell.where else ""
    for name in flags:
        if (reason := refusal(name)) is not None:
            raise UsageError(f"cell {cell.id}: --{name} cannot be a flag of a matrix: it {reason}; remove it{place}")
    defaults: dict[str, FlagValue] = {}
    if cell.arch == "cpu":
        defaults["device"] = "cpu"
    elif problem := size_problem(flags, cell.gpus):
        raise UsageError(f"cell {cell.id}: {problem}{place}")
    if "tp-size" not in flags and (size := tensor_parallel(flags, cell.gpus)) > 1:
        defaults["tp-size"] = size
    defaults["enable-metrics"] = True
    return (
        *launcher(python, version),
        *("--model-path", model_path),
        *("--host", "{host}"),
        *("--port", "{port}"),
        *("--nccl-port", "{nccl_port}"),
        *("--api-key", "{api_key}"),
        *(word for name, value in {**defaults, **flags}.items() for word in _words(name, value)),
    )


def draft_model(flags: Mapping[str, FlagValue]) -> str:
    """The draft model that a cell's flags name, as they name it; empty without one."""
    value = _by_own_name(flags).get(_DRAFT_MODEL)
    return value if isinstance(value, str) else ""


def hides_phases(flags: Mapping[str, FlagValue]) -> str:
    """The flag that keeps the phases out of the log, such as `--log-level warning`; empty if none does."""
    level = _by_own_name(flags).get(_LOG_LEVEL)
    return f"--{_LOG_LEVEL} {level}" if phase.hides_phases(level) else ""


def _by_own_name(flags: Mapping[str, FlagValue]) -> dict[str, FlagValue]:
    """The flags under SGLang's own names, without dashes in front."""
    return {canonical(name.lstrip("-")): value for name, value in flags.items()}


def _words(name: str, value: FlagValue) -> tuple[str, ...]:
    if value is True:
        return (f"--{name}",)
    if value is False:
        return ()
    if isinstance(value, list):
        return (f"--{name}", *(str(item) for item in value))
    text = str(value)
    # argparse would take a value that begins with a dash for the next flag, unless it is a negative number.
    if text.startswith("-") and not re.fullmatch(r"-\d+(\.\d+)?", text):
        return (f"--{name}={text}",)
    return f"--{name}", text
