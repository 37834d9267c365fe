"""The command line of a cell."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

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

# argparse takes `--tp` only as an abbreviation of `--tp-size`, and calls `--pp` ambiguous: written out here.
_WRITTEN_OUT = {
    "tp": "tp-size",
    "dp": "dp-size",
    "pp": "pp-size",
    "ep": "ep-size",
    "speculative-algo": "speculative-algorithm",
}
_PARALLEL_SIZES = frozenset(
    {
        "tp-size",
        "tensor-parallel-size",
        "dp-size",
        "data-parallel-size",
        "pp-size",
        "pipeline-parallel-size",
        "ep-size",
        "expert-parallel-size",
    }
)
_DRAFT_MODEL = ("speculative-draft-model-path", "speculative-draft-model")
_LOG_LEVEL = "log-level"
_OURS = ("model-path", "model", "host", "port", "nccl-port", "api-key")


def launcher(python: str, version: str) -> tuple[str, ...]:
    """How that release is started, interpreter first: everything of the command line that is not a flag."""
    return (python, *(_SERVE if release(version) >= _SERVE_PREFERRED else _MODULE))


def argv(cell: Cell, *, python: str, version: str, model_path: str) -> tuple[str, ...]:
    """The command line, with `{host}`, `{port}`, `{nccl_port}` and `{api_key}` left open.

    A flag's value True gives the bare flag, False leaves it out, a list gives several values. Adds `--tp-size` for
    more than one GPU unless a parallel size is set, `--device cpu` for the arch `cpu`, and `--enable-metrics`, which
    the token counter of the hang watch needs. UsageError where the cell sets what the supervisor must choose.
    """
    flags = {_WRITTEN_OUT.get(name, name): value for name, value in _without_dashes(cell).items()}
    taken = [name for name in _OURS if name in flags]
    if taken:
        raise UsageError(
            f"cell {cell.id}: --{taken[0]} cannot be a flag of a matrix, pytest-gpuserve sets it for each start; "
            f"remove it{f' ({cell.where})' if cell.where else ''}"
        )
    defaults: dict[str, FlagValue] = {}
    if cell.arch == "cpu":
        defaults["device"] = "cpu"
    if cell.gpus > 1 and not _PARALLEL_SIZES & flags.keys():
        defaults["tp-size"] = cell.gpus
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
    given = {name.lstrip("-"): value for name, value in flags.items()}
    return next((value for name in _DRAFT_MODEL if isinstance(value := given.get(name), str)), "")


def hides_phases(flags: Mapping[str, FlagValue]) -> str:
    """The flag that keeps the phases out of the log, such as `--log-level warning`; empty if none does."""
    level = next((value for name, value in flags.items() if name.lstrip("-") == _LOG_LEVEL), None)
    return f"--{_LOG_LEVEL} {level}" if phase.hides_phases(level) else ""


def _without_dashes(cell: Cell) -> dict[str, FlagValue]:
    return {name.lstrip("-"): value for name, value in cell.flags.items()}


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
