"""Finds the files that a run reads: matrices by name, and the known-bad lists."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpuserve.errors import UsageError
from pytest_gpuserve.matrix.walk import did_you_mean
from pytest_gpuserve.model.arch import family_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["KNOWN_BAD", "available", "find_matrices", "known_bad_paths", "packaged_dir"]

KNOWN_BAD = "known_bad"
_SUFFIXES = (".yaml", ".yml")


def packaged_dir() -> Path:
    """The shipped matrices: `pytest_gpuserve/matrices` in a wheel, `matrices` beside the package in a checkout."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "matrices"
    return inside if inside.is_dir() else package.parent / "matrices"


def available(rootdir: Path) -> dict[str, Path]:
    """The matrices that can be named: those of `ROOTDIR/matrices` before the shipped ones."""
    found: dict[str, Path] = {}
    for folder in (rootdir / "matrices", packaged_dir()):
        for path in sorted(folder.glob("*.yaml")) if folder.is_dir() else ():
            if path.stem != KNOWN_BAD:
                found.setdefault(path.stem, path)
    return found


def find_matrices(names: Sequence[str], rootdir: Path, archs_here: Sequence[str], without: str = "") -> list[Path]:
    """The files of `names`, each once, in order. UsageError that lists what there is for a name that is none.

    A name is a file, else `ROOTDIR/matrices/NAME.yaml`, else the shipped one. `auto` stands for the matrices named
    like the archs here, or else like their families (`sm121`, else `sm12x`); the project's, of either name, before the
    shipped ones. `without` says why there are no archs here, if so.
    """
    there = available(rootdir)
    paths: list[Path] = []
    for name in names:
        if name == "auto":
            paths += _of_archs(archs_here, rootdir, there, without)
        else:
            paths.append(_of_name(name, rootdir, there))
    unique: dict[Path, Path] = {}
    for path in paths:
        unique.setdefault(path.resolve(), path)
    return list(unique.values())


def known_bad_paths(rootdir: Path, more: Iterable[Path] = ()) -> list[Path]:
    """The known-bad lists of a run, each once: the shipped one, `ROOTDIR/matrices/known_bad.yaml`, and `more`.

    The first two may be missing; UsageError if one of `more` is.
    """
    paths = [
        path for folder in (packaged_dir(), rootdir / "matrices") if (path := folder / f"{KNOWN_BAD}.yaml").is_file()
    ]
    for path in more:
        if not path.is_file():
            raise UsageError(f"the known-bad list {path} is not a file (--gpu-known-bad)")
        paths.append(path)
    unique: dict[Path, Path] = {}
    for path in paths:
        unique.setdefault(path.resolve(), path)
    return list(unique.values())


def _listed(there: dict[str, Path]) -> str:
    return f"There are: {', '.join(there)}." if there else "There is none."


def _of_name(name: str, rootdir: Path, there: dict[str, Path]) -> Path:
    if name:
        path = Path(name).expanduser()
        if path.is_file():
            return path
        if "/" in name or path.suffix in _SUFFIXES:
            kind = "is a folder" if path.is_dir() else "does not exist"
            raise UsageError(f"the matrix file {name} {kind}. {_listed(there)}")
    if name in there:
        return there[name]
    if name == KNOWN_BAD:
        raise UsageError(f"{KNOWN_BAD} is the list of known failures, not a matrix. {_listed(there)}")
    close = did_you_mean(name, there)
    hint = close.partition("; known:")[0] or "."
    raise UsageError(
        f"there is no matrix '{name}'{hint} {_listed(there)} "
        f"Give a file, or the name of one in {rootdir / 'matrices'} or {packaged_dir()}."
    )


def _of_archs(archs_here: Sequence[str], rootdir: Path, there: dict[str, Path], without: str) -> list[Path]:
    if not archs_here:
        why = f": {without.rstrip('.')}" if without else ""
        # The reason may name these already.
        hint = "" if "--gpu-plan" in why else " Name one, with --gpu-plan, --gpu-preflight or --gpu-sim 8xsm120."
        raise UsageError(f"'auto' is the matrix of the GPUs here, and there are none{why}. {_listed(there)}{hint}")
    found = []
    for arch in dict.fromkeys(archs_here):
        named = [there[name] for name in (arch, family_of(arch)) if name in there]
        own = [path for path in named if path.parent == rootdir / "matrices"]
        path = next(iter(own or named), None)
        if path is None:
            raise UsageError(f"'auto' found {arch} here, for which there is no matrix {arch}.yaml. {_listed(there)}")
        found.append(path)
    return found
