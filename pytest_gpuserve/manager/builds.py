"""Builds without a version of their own: what each counts as in this run, and what a reader must know of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpuserve.errors import UsageError
from pytest_gpuserve.matrix.walk import did_you_mean
from pytest_gpuserve.matrix.when import version_of
from pytest_gpuserve.model.versions import TakenFor, commit_of, unversioned
from pytest_gpuserve.report.describe import IMPORTANT
from pytest_gpuserve.report.remarks import builds, mostly_skipped
from pytest_gpuserve.serve.environment import newest_tag, origin_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pytest_gpuserve.matrix.types import Level, Matrix
    from pytest_gpuserve.model.cell import Cell, ModelSpec
    from pytest_gpuserve.model.knownbad import KnownBad
    from pytest_gpuserve.model.settings import Settings

__all__ = ["remarks_of", "taken_for"]


def taken_for(
    settings: Settings,
    versions: Mapping[str, str],
    matrices: Iterable[Matrix],
    entries: Iterable[KnownBad],
    variables: Mapping[str, str],
) -> tuple[dict[str, TakenFor], list[str]]:
    """What every unversioned build that some range asks about counts as; and which `--gpu-version` is of no use.

    UsageError for a `--gpu-version` of what is not installed, or two of one distribution.
    """
    said = _said(settings, versions)
    asked = [name for matrix in matrices for name in _required(matrix)]
    asked += [name for entry in entries for name in entry.versions]
    found: dict[str, TakenFor] = {}
    for name in dict.fromkeys([*IMPORTANT, *asked, *said]):
        installed = version_of(name, versions)
        if installed is None or not unversioned(installed):
            continue
        commit = commit_of(installed)
        if name in said:
            found[name] = TakenFor(version=said[name], reason="--gpu-version", commit=commit)
            continue
        folder = origin_of(name, settings.python, variables)
        tag, head = newest_tag(folder) if folder is not None else ("", "")
        if tag:
            found[name] = TakenFor(
                version=tag, reason=f"the newest tag of its checkout {folder}", commit=head or commit
            )
        else:
            reason = f"--gpu-version {name}=VERSION says otherwise"
            found[name] = TakenFor(version=None, reason=reason, commit=commit or head)
    unused = [
        f"--gpu-version {name}={version} is not used: {name} {version_of(name, versions)} has a version of its own"
        for name, version in said.items()
        if name not in found
    ]
    return found, unused


def _said(settings: Settings, versions: Mapping[str, str]) -> dict[str, str]:
    said: dict[str, str] = {}
    for name, version in settings.version:
        if version_of(name, versions) is None:
            raise UsageError(
                f"--gpu-version {name}={version}: {settings.python} has no {name}{did_you_mean(name, sorted(versions))}"
            )
        if said.setdefault(name, version) != version:
            raise UsageError(f"--gpu-version says {name}={said[name]} and {name}={version}: give one of them")
    return said


def _required(matrix: Matrix) -> list[str]:
    owners: list[ModelSpec | Level] = [*matrix.models.values()]
    owners += [level for levels in matrix.axes.values() for level in levels.values()]
    return [name for owner in owners for name in owner.requires]


def remarks_of(cells: Sequence[Cell], versions: Mapping[str, str], taken: Mapping[str, TakenFor]) -> list[str]:
    """For the header and the plan: builds without a version, and that most cells are skipped for one reason."""
    mostly = mostly_skipped([cell.not_applicable for cell in cells if cell.not_applicable], len(cells))
    record = {"versions": versions, "taken_for": {name: one.to_json() for name, one in taken.items()}}
    return [*([mostly] if mostly else []), *builds(record)]
