"""Where a cell's model is on this machine. Nothing is ever downloaded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpuserve import engine
from pytest_gpuserve.errors import UsageError
from pytest_gpuserve.models.materialise import materialise

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpuserve.model.cell import Cell, ModelSpec

__all__ = ["draft_path", "local_path", "missing_model", "model_path"]


def _hub(environ: Mapping[str, str]) -> Path:
    home = Path(environ.get("HF_HOME") or Path(environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    return Path(environ.get("HF_HUB_CACHE") or home / "hub").expanduser()


def local_path(name: str, environ: Mapping[str, str] = os.environ) -> Path | None:
    """The folder of a model given as a path, or as `owner/name` that the Hugging Face cache has a snapshot of."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder.absolute()
    if name.count("/") != 1 or name.startswith(("/", ".", "~")):
        return None
    snapshots = _hub(environ) / f"models--{name.replace('/', '--')}" / "snapshots"
    if not snapshots.is_dir():
        return None
    found = [one for one in snapshots.iterdir() if (one / "config.json").exists()]
    return max(found, key=lambda one: one.stat().st_mtime, default=None)


def missing_model(cell: Cell) -> str | None:
    """Why a cell of an optional model cannot run here, or None if it can. Its draft model is as optional as itself."""
    spec = cell.model
    if spec.path is not None and local_path(spec.path) is None:
        return f"the optional model {spec.path} is not on this machine (nothing is downloaded)"
    draft = engine.draft_model(cell.flags)
    if draft and local_path(draft) is None:
        return (
            f"the draft model {draft} of the optional model {spec.name} is not on this machine (nothing is downloaded)"
        )
    return None


def draft_path(cell: Cell, *, simulated: bool) -> str:
    """The draft model as the cell's flags name it, empty without one. UsageError if a real server would not find it."""
    draft = engine.draft_model(cell.flags)
    if draft and not simulated and local_path(draft) is None:
        raise UsageError(
            f"the draft model {draft} (speculative-draft-model-path) is not on this machine, and nothing is "
            "downloaded: fetch it first"
        )
    return draft


def model_path(spec: ModelSpec, *, python: str, env: Mapping[str, str], simulated: bool) -> str:
    """What `--model-path` gets. A shape is made on first use, with weights unless the server is simulated.

    UsageError if a path is not here, MachineError if the weights could not be made.
    """
    if spec.path is not None:
        found = local_path(spec.path)
        if found is not None:
            return str(found)
        if simulated:
            return spec.path
        raise UsageError(f"the model {spec.path} is not on this machine, and nothing is downloaded: fetch it first")
    return str(materialise(spec, python=python, env=env, weights=not simulated))
