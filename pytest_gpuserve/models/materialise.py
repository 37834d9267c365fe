"""Make a shape's folder once: config, tokenizer and, where a server will load them, weights."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from pytest_gpuserve.errors import MachineError, UsageError
from pytest_gpuserve.models import shapes
from pytest_gpuserve.models.tokenizer import tokenizer_config, tokenizer_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpuserve.model.cell import ModelSpec

__all__ = ["cache_dir", "materialise"]

_INSIDE = Path(__file__).parent / "inside"


def cache_dir() -> Path:
    """`$XDG_CACHE_HOME/pytest-gpuserve/models`, else under `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "pytest-gpuserve" / "models"


def _digest(config: Mapping[str, object], *, weights: bool) -> str:
    """What the folder depends on: the config and the code that makes the weights."""
    state = hashlib.sha256(json.dumps([config, weights], sort_keys=True).encode())
    if weights:
        for source in sorted(_INSIDE.glob("*.py")):
            state.update(source.read_bytes())
    return state.hexdigest()[:12]


def materialise(
    spec: ModelSpec,
    *,
    python: str,
    env: Mapping[str, str],
    weights: bool,
    cache: Path | None = None,
    timeout: float = 600,
) -> Path:
    """The folder SGLang loads for `spec`, made if it is not there yet.

    A `path` model is returned as it is; UsageError if it is not local (nothing is ever downloaded). A `shape` is made
    in the cache: `weights` asks for seeded weights, made by `python` (the environment under test, with `env`) with its
    own torch. Several processes may ask at once. MachineError with the maker's own words if that fails.
    """
    if spec.path is not None:
        local = Path(spec.path).expanduser()
        if not local.is_dir():
            raise UsageError(
                f"model {spec.name}: {spec.path} is not a local folder. "
                "Nothing is downloaded: fetch it first, or mark it optional."
            )
        return local.resolve()
    if spec.shape is None:
        raise UsageError(f"model {spec.name} has neither a shape nor a path")
    config = shapes.config_of(spec.shape, layers=spec.layers, quantization=spec.properties.get("quantization"))
    root = cache or cache_dir()
    folder = root / f"{spec.shape}-{config['num_hidden_layers']}-{_digest(config, weights=weights)}"
    if folder.is_dir():
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f".{folder.name}.lock", timeout=timeout):
            if not folder.is_dir():
                _make(folder, config, python=python, env=env, weights=weights, timeout=timeout)
    except OSError as error:
        raise MachineError(
            f"model {spec.name}: cannot write {folder}: {error}. Free some space, or set XDG_CACHE_HOME."
        ) from error
    return folder


def _make(
    folder: Path, config: dict[str, object], *, python: str, env: Mapping[str, str], weights: bool, timeout: float
) -> None:
    # By one who was killed: gigabytes perhaps, and nobody's while the lock is ours. The names are mkdtemp's.
    for left in folder.parent.glob(f".{folder.name}.????????"):
        shutil.rmtree(left, ignore_errors=True)
    making = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        vocabulary, context = config["vocab_size"], config["max_position_embeddings"]
        assert isinstance(vocabulary, int)
        assert isinstance(context, int)
        (making / "config.json").write_text(json.dumps(config, indent=1))
        (making / "tokenizer.json").write_text(json.dumps(tokenizer_json(vocabulary), ensure_ascii=False))
        (making / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(context), indent=1))
        (making / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
        if weights:
            _make_weights(making, python=python, env=env, timeout=timeout)
        making.chmod(0o755)
        making.rename(folder)
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _make_weights(folder: Path, *, python: str, env: Mapping[str, str], timeout: float) -> None:
    command = [python, str(_INSIDE / "make.py"), str(folder)]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        raise MachineError(
            f"making the weights of {folder.name} took more than {timeout:.0f} s: {' '.join(command)}"
        ) from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise MachineError(
            f"making the weights of {folder.name} failed with exit {done.returncode}: {last}\n"
            f"It ran: {' '.join(command)}\n"
            "The environment under test needs torch; name another with --gpu-server-python."
        )
