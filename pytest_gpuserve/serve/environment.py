"""The versions in the environment under test, from its metadata, without importing SGLang (which takes 15 s)."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpuserve.errors import UsageError
from pytest_gpuserve.model.words import number

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["read_versions"]

_TIMEOUT = 60.0
_NEXT = "name the interpreter of the environment under test with --gpu-server-python"

# Runs there: only the standard library, and the names and versions in *.dist-info. Where a distribution is there twice
# the first on sys.path counts, as for an import. METADATA's head is enough: its body is the long description.
_THERE = """
import json, os, re, sys
found = {}
for folder in sys.path:
    try:
        names = os.listdir(folder or ".")
    except OSError:
        continue
    for name in sorted(names):
        if not name.endswith((".dist-info", ".egg-info")):
            continue
        path = os.path.join(folder or ".", name)
        for inner in ("METADATA", "PKG-INFO", ""):
            try:
                with open(os.path.join(path, inner) if inner else path, encoding="utf-8", errors="replace") as file:
                    head = file.read(4096).partition("\\n\\n")[0]
            except OSError:
                continue
            fields = dict(re.findall(r"^(Name|Version): *(.+?) *$", head, re.M))
            if len(fields) == 2:
                found.setdefault(re.sub(r"[-_.]+", "-", fields["Name"]).lower(), fields["Version"])
            break
print(json.dumps({"python": "%d.%d.%d" % sys.version_info[:3], "found": found}))
"""

# Our word → distributions that carry it, the first that is installed counts.
_ALIASES: dict[str, tuple[str, ...]] = {
    "sglang": ("sglang",),
    "sglang-kernel": ("sglang-kernel", "sgl-kernel", "sgl-kernel-cpu", "sglang-kernel-cpu"),
    "flashinfer": ("flashinfer-python", "flashinfer"),
    "torch": ("torch",),
    "triton": ("triton", "pytorch-triton"),
    "transformers": ("transformers",),
    "nccl": ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11"),
    "cuda": ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime-cu11"),
}
_known: dict[tuple[str, tuple[tuple[str, str], ...]], dict[str, str]] = {}


def read_versions(python: str, env: Mapping[str, str]) -> dict[str, str]:
    """Distribution → version in the environment of the interpreter `python`, run with `env` added to ours.

    Every distribution by its canonical name, and under our own words `sglang`, `sglang-kernel`, `flashinfer`, `torch`,
    `triton`, `transformers`, `nccl` and `cuda` where something carries it; `python` is the interpreter's own.
    UsageError if it is no Python, or has no SGLang. Asked once a process for each interpreter and environment.
    """
    key = (python, tuple(sorted(env.items())))
    if key not in _known:
        _known[key] = _read(python, env)
    return dict(_known[key])


def _read(python: str, env: Mapping[str, str]) -> dict[str, str]:
    answer = _ask(python, env)
    try:
        told = json.loads(answer)
        found = {str(name): str(version) for name, version in told["found"].items()}
        found_python = str(told["python"])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"{python} is not a Python interpreter: it answered {answer[:200]!r}; {_NEXT}") from None
    versions = dict(found)
    for word, carriers in _ALIASES.items():
        version = next((found[name] for name in carriers if name in found), None)
        if version:
            versions[word] = version
    # `2.11.0+cu130` → 13.0: the CUDA that torch was built with, where no runtime is installed as a distribution.
    built = re.search(r"\+cu(\d+)(\d)$", versions.get("torch", ""))
    if "cuda" not in versions and built:
        versions["cuda"] = f"{built[1]}.{built[2]}"
    versions["python"] = found_python
    if "sglang" not in versions:
        none = f"none of its {number(len(found), 'distribution')} is called sglang"
        raise UsageError(
            f"{python} (Python {found_python}) has no SGLang: {none}; install it there (pip install sglang), or {_NEXT}"
        )
    return versions


def _ask(python: str, env: Mapping[str, str]) -> str:
    # Paths of ours would be searched there too, and a warning about its options is no answer.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    try:
        done = subprocess.run(
            [python, "-c", _THERE],
            env={**inherited, **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT,
            check=False,
            cwd="/",
        )
    except FileNotFoundError:
        missing = f"the interpreter of the server does not exist: {python}"
        if Path(python).exists():
            missing = f"the interpreter {python} cannot be run: the program its first line names does not exist"
        raise UsageError(f"{missing}; {_NEXT}") from None
    except PermissionError:
        what = "is a folder" if os.path.isdir(python) else "is not executable for this user"  # noqa: PTH112 (it may not be looked at)
        raise UsageError(f"the interpreter of the server {what}: {python}; {_NEXT}") from None
    except OSError as error:
        raise UsageError(f"{python} cannot be run: {error.strerror}; {_NEXT}") from None
    except subprocess.TimeoutExpired:
        raise UsageError(f"{python} did not answer within {_TIMEOUT:.0f} s; {_NEXT}") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        why = said[-1][:300] if said else f"it ended with exit status {done.returncode}"
        raise UsageError(f"{python} cannot be asked for its versions: {why}; {_NEXT}")
    return done.stdout.decode(errors="replace").strip()
