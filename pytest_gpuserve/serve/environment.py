"""The versions in the environment under test, from its metadata, without importing SGLang (which takes 15 s)."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from pytest_gpuserve.errors import UsageError
from pytest_gpuserve.model.versions import is_version, unversioned
from pytest_gpuserve.model.words import number

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["newest_tag", "origin_of", "read_versions"]

_TIMEOUT = 60.0
_NEXT = "name the interpreter of the environment under test with --gpu-server-python"

# Runs there: only the standard library, and the names and versions in *.dist-info. Where a distribution is there twice
# the first on sys.path counts, as for an import. METADATA's head is enough: its body is the long description.
_THERE = """
import json, os, re, sys
found = {}
origins = {}
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
                word = re.sub(r"[-_.]+", "-", fields["Name"]).lower()
                if word not in found:
                    found[word] = fields["Version"]
                    try:
                        with open(os.path.join(path, "direct_url.json"), encoding="utf-8") as file:
                            told = json.load(file)
                        if "dir_info" in told:
                            origins[word] = told["url"]
                    except (OSError, ValueError, KeyError, TypeError):
                        if os.path.basename(folder) not in ("site-packages", "dist-packages"):
                            origins[word] = "file://" + os.path.abspath(folder)
            break
print(json.dumps({"python": "%d.%d.%d" % sys.version_info[:3], "found": found, "origins": origins}))
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
# Of each interpreter and environment that was asked: its versions, and the folders that distributions were built from.
_known: dict[tuple[str, tuple[tuple[str, str], ...]], tuple[dict[str, str], dict[str, str]]] = {}


def read_versions(python: str, env: Mapping[str, str]) -> dict[str, str]:
    """Distribution → version in the environment of the interpreter `python`, run with `env` added to ours.

    Every distribution by its canonical name, and under our own words `sglang`, `sglang-kernel`, `flashinfer`, `torch`,
    `triton`, `transformers`, `nccl` and `cuda` where something carries it; `python` is the interpreter's own.
    UsageError if it is no Python, or has no SGLang. Asked once a process for each interpreter and environment.
    """
    return dict(_asked(python, env)[0])


def origin_of(name: str, python: str, env: Mapping[str, str]) -> Path | None:
    """The local folder that this distribution (or word of ours) was installed from, None if from anywhere else."""
    origins = _asked(python, env)[1]
    url = next((origins[one] for one in (name, *_ALIASES.get(name, ())) if one in origins), None)
    parts = urlsplit(url) if url else None
    return Path(unquote(parts.path)) if parts is not None and parts.scheme == "file" else None


def newest_tag(folder: Path) -> tuple[str, str]:
    """The newest version among the tags that the checkout of `folder` is built upon, and its commit.

    Each is empty where git does not say: it is not installed, the folder is no project of a checkout, the checkout is
    shallow or another user's. Tags of other parts of a repository (`gateway-v0.3.1`) do not count.
    """
    # What merely lies inside of some other repository is no project of it.
    if not _git(folder, "ls-files", "--", "pyproject.toml", "setup.py", "setup.cfg"):
        return "", ""
    commit = _git(folder, "rev-parse", "--short=9", "HEAD").strip()
    tags = _git(folder, "tag", "--merged", "HEAD", "--list", "v[0-9]*", "[0-9]*").split()
    versions = [tag.removeprefix("v") for tag in tags if is_version(tag) and not unversioned(tag)]
    if not versions:
        return "", commit
    from packaging.version import Version

    return str(max(map(Version, versions))), commit


def _git(folder: Path, *words: str) -> str:
    """What git answers about the checkout of `folder`; empty if it cannot."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            env={**env, "GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace") if done.returncode == 0 else ""


def _asked(python: str, env: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    key = (python, tuple(sorted(env.items())))
    if key not in _known:
        _known[key] = _read(python, env)
    return _known[key]


def _read(python: str, env: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    answer = _ask(python, env)
    try:
        told = json.loads(answer)
        found = {str(name): str(version) for name, version in told["found"].items()}
        origins = {str(name): str(url) for name, url in told["origins"].items()}
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
    return versions, origins


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
