"""Asks the installed SGLang about cells, in its own environment: one process an arch, all cells in it."""

from __future__ import annotations

import statistics
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpuserve import engine
from pytest_gpuserve.engine.flags import told_elsewhere
from pytest_gpuserve.preflight._fakegpu import ARCHS
from pytest_gpuserve.preflight.child import Child
from pytest_gpuserve.preflight.record import SCHEMA, VOLATILE, VOLATILE_ENV, settings_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from pytest_gpuserve.model.cell import Cell

__all__ = ["PRETENDED", "preflight"]

# The machine that SGLang sees, whatever this one is: so an answer is the same with a GPU and without.
PRETENDED = {"cuda": "13.0", "driver": "580.95.05"}

# What a launch would fill in; resolution neither binds nor connects.
_FILLED = {"host": "127.0.0.1", "port": "30000", "nccl_port": "30001", "api_key": "preflight"}
# Nothing is downloaded, and a real GPU of this machine is neither seen nor touched.
_ENV = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}


def preflight(
    cells: Sequence[Cell],
    *,
    arch: str,
    python: str,
    env: Mapping[str, str],
    versions: Mapping[str, str],
    model_dirs: Mapping[str, Path],
    cuda: str = PRETENDED["cuda"],
    driver: str = PRETENDED["driver"],
    gpus: int = 8,
    kernels: Mapping[str, str] | None = None,
    import_timeout: float = 300.0,
    cell_timeout: float = 60.0,
) -> dict[str, Any]:
    """The record (see record.py) of `cells`, all of `arch`, as `python`'s SGLang would take them on `gpus` such GPUs.

    `env` is the whole environment of that interpreter, to which each cell's own variables are added. `model_dirs` maps
    a model's name to a folder with `config.json` and a tokenizer. `kernels` {import name: version} are the kernel
    packages to pretend; None takes those that the installed SGLang requires. Timeouts in seconds. The answer does not
    depend on the order of the cells. UsageError where `python` cannot be run.
    """
    started, clock = datetime.now(UTC), time.monotonic()
    results = [_blank(cell, versions, python, model_dirs) for cell in cells]
    pending = [index for index, result in enumerate(results) if not result["outcome"]]
    request = {"arch": arch, "cuda": cuda, "driver": driver, "count": gpus, "cell_seconds": cell_timeout}
    request["kernels"] = None if kernels is None else dict(kernels)
    facts: dict[str, Any] = {}
    reason, processes = "", 0
    if arch not in ("cpu", *ARCHS):
        reason = f"no GPU of {arch} can be pretended, only of {', '.join(ARCHS)}: run the matrix on the GPU itself"
    common = _common([cells[index].env for index in pending])
    fixed: dict[int, set[str]] = {}  # the variables a cell must have before SGLang is imported
    while pending and not reason:
        processes += 1
        process_env = common | {name: cells[pending[0]].env[name] for name in sorted(fixed.get(pending[0], ()))}
        batch = [index for index in pending if process_env.items() <= cells[index].env.items()]
        asked = [
            {
                "argv": results[index]["argv"],
                "env": results[index]["env"],
                "model": str(model_dirs[cells[index].model.name]),
            }
            for index in batch
        ]
        with Child(python, {**env, **_ENV, **process_env}) as child:
            for line in child.ask({**request, "cells": asked}, import_timeout, cell_timeout + 30):
                if line["kind"] == "ready":
                    facts = facts or line
                elif line["kind"] == "cell":
                    index = batch[line["index"]]
                    scrub = _Scrub(str(model_dirs[cells[index].model.name]), env.get("HOME", ""))
                    _fill(results[index], line, facts["options"], scrub)
                elif line["kind"] == "deferred":
                    fixed.setdefault(batch[line["index"]], set()).update(line["names"])
                elif line["kind"] == "unavailable":
                    reason = line["reason"]
        pending = [index for index in pending if not results[index]["outcome"]]
    unavailable = f"preflight unavailable: SGLang {versions.get('sglang', '(none)')}: "
    for result in results:
        if not result["outcome"]:
            result |= {"outcome": "unavailable", "reason": reason}
        if result["outcome"] == "unavailable":
            result["reason"] = unavailable + result["reason"]
    reasons = [result["reason"] for result in results if result["outcome"] != "skipped"]
    if reason or (reasons and all(reasons)):
        reason = unavailable + reason if reason else reasons[0]
    seconds = [result["seconds"] for result in results if result["seconds"]]
    return {
        "schema": SCHEMA,
        "kind": "preflight",
        "arch": arch,
        "status": "unavailable" if reason else "ok",
        "reason": reason,
        "started": started.isoformat(timespec="seconds"),
        "seconds": {
            "total": round(time.monotonic() - clock, 3),
            "import": facts.get("import_seconds"),
            "cell_median": round(statistics.median(seconds), 4) if seconds else None,
            "cell_max": max(seconds, default=None),
            "processes": processes,
        },
        "versions": dict(versions),
        "python": facts.get("python"),
        "pretended": facts.get("pretended"),
        "options": facts.get("options", {}),
        "cells": results,
    }


def _blank(cell: Cell, versions: Mapping[str, str], python: str, model_dirs: Mapping[str, Path]) -> dict[str, Any]:
    """A cell's entry before it is asked; already with an outcome where it will not be."""
    result: dict[str, Any] = {
        "id": cell.id,
        "arch": cell.arch,
        "model": cell.model.name,
        "axes": dict(cell.axes),
        "flags": dict(cell.flags),
        "env": dict(cell.env),
        "argv": [],
        "outcome": "",
        "reason": "",
        "rejection": None,
        "rewritten": {},
        "settings": {},
        "resolved": {},
        "env_set": {},
        "warnings": [],
        "notes": [],
        "gate": {},
        "seconds": None,
    }
    model_dir = model_dirs.get(cell.model.name)
    if cell.not_applicable:
        return result | {"outcome": "skipped", "reason": cell.not_applicable}
    if model_dir is None:
        return result | {"outcome": "unavailable", "reason": f"no folder for model {cell.model.name}"}
    version = versions.get("sglang", "")
    words = engine.argv(cell, python=python, version=version, model_path=str(model_dir))
    arguments = words[len(engine.launcher(python, version)) :]
    return result | {"argv": [_filled(word) for word in arguments]}


def _filled(word: str) -> str:
    for name, value in _FILLED.items():
        word = word.replace(f"{{{name}}}", value)
    return word


def _common(environments: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The variables that all cells set to the same value: the process can have them before it imports SGLang."""
    if not environments:
        return {}
    shared = set(environments[0].items()).intersection(*(environment.items() for environment in environments))
    return dict(sorted(shared))


def _fill(result: dict[str, Any], line: Mapping[str, Any], options: Mapping[str, Any], scrub: _Scrub) -> None:
    """One answer of the child, put into the cell's entry."""
    result["argv"] = scrub(result["argv"])
    result["seconds"] = line["seconds"]
    for name in ("warnings", "notes", "gate"):
        result[name] = scrub(line.get(name) or result[name])
    result["env_set"] = {
        name: value for name, value in scrub(line.get("env_set", {})).items() if name not in VOLATILE_ENV
    }
    if "unavailable" in line:
        result |= {"outcome": "unavailable", "reason": scrub(line["unavailable"])}
    elif "rejection" in line:
        result |= {"outcome": "rejected", "rejection": scrub(line["rejection"])}
    else:
        resolved = {name: value for name, value in scrub(line["resolved"]).items() if name not in VOLATILE}
        settings = settings_of(resolved)
        rewritten = _rewritten(result["flags"], resolved, settings, options)
        result |= {
            "outcome": "rewritten" if rewritten else "accepted",
            "rewritten": rewritten,
            "settings": settings,
            "resolved": resolved,
        }


def _rewritten(
    flags: Mapping[str, Any], resolved: Mapping[str, Any], settings: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """{field: {asked, resolved}} of the flags whose value did not survive; `auto` asks for nothing.

    A backend for prefill or decode that nobody named takes the place of the common one that was.
    """
    changed = {}
    for flag, asked in flags.items():
        field = _field_of(f"--{flag.lstrip('-')}", resolved, options)
        if field is None or asked is False or asked == "auto" or told_elsewhere(flag, flags, resolved):
            continue
        got = resolved[field]
        comparable = got is None or isinstance(got, (bool, int, float, str)) or isinstance(asked, list)
        if comparable and not _same(asked, got):
            changed[field] = {"asked": asked, "resolved": got}
    common = flags.get("attention-backend")
    for stage in ("prefill", "decode"):
        name = f"{stage}_attention_backend"
        if common and "attention_backend" not in changed and name.replace("_", "-") not in flags:
            got = settings.get(name, common)
            if got != common:
                changed[name] = {"asked": common, "resolved": got}
    return changed


def _field_of(option: str, resolved: Mapping[str, Any], options: Mapping[str, Any]) -> str | None:
    """The resolved argument that an option sets: its argparse name, or that of one of its aliases."""
    if option not in options:
        return None
    dest = options[option]["dest"]
    names = [dest, *(text.lstrip("-").replace("-", "_") for text, other in options.items() if other["dest"] == dest)]
    return next((name for name in names if name in resolved), None)


def _same(asked: Any, got: Any) -> bool:
    if isinstance(asked, list):
        return isinstance(got, list) and [str(item) for item in asked] == [str(item) for item in got]
    if isinstance(asked, bool) or isinstance(got, bool):
        return str(asked).lower() == str(got).lower()
    try:
        return float(asked) == float(got)
    except (TypeError, ValueError):
        return str(asked) == str(got)


class _Scrub:
    """Replaces this machine's folders, in anything made of JSON types."""

    def __init__(self, model_dir: str, home: str) -> None:
        self._replace = ((model_dir, "<model>"), (home, "~"))

    def __call__(self, value: Any) -> Any:
        if isinstance(value, str):
            for folder, name in self._replace:
                if len(folder) > 1:
                    value = value.replace(folder, name)
            return value
        if isinstance(value, list):
            return [self(item) for item in value]
        if isinstance(value, dict):
            return {key: self(item) for key, item in value.items()}
        return value
