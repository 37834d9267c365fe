"""Versions: which lie in a range, and which cannot be ordered at all. The only place that compares them.

A build of a checkout without tags calls itself `0.0.0.dev1+g<commit>` (SGLang's) or `0.1.dev7+g<commit>` (what
setuptools-scm falls back to): that is no version, and compared as one it would be older than every release.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from packaging.version import Version

__all__ = ["TakenFor", "admits", "commit_of", "counted", "is_version", "orderable", "read_taken", "unversioned"]

# packaging is imported where it is needed: a supervisor asks only whether a build has a version, and must start fast.
_UNVERSIONED = re.compile(r"v?(?:0+(?:\.0+)*(?:[.-]?dev\d*)?|0\.1(?:\.0)?[.-]?dev\d*)(?:\+.*)?", re.IGNORECASE)
_COMMIT = re.compile(r"\+(?:.*\.)?g([0-9a-f]{6,40})(?![0-9a-z])")
# What a build without a version counts as, where nobody says more: development goes on from the newest release.
_NEWEST = "999999"


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenFor:
    """What a build without a version counts as in ranges, and who says so.

    `version` is None where nobody does: then it is newer than every release. `commit` is empty where it is not known.
    """

    version: str | None
    reason: str
    commit: str = ""

    def to_json(self) -> dict[str, Any]:
        """As `run.json` carries it."""
        return {"version": self.version, "reason": self.reason, "commit": self.commit}


def unversioned(version: str) -> bool:
    """True for what a build without tags calls itself: it orders with no release and with no other such build."""
    return _UNVERSIONED.fullmatch(version.strip()) is not None


def commit_of(version: str) -> str:
    """The commit in a version's local part, `dce8b0606` of `0.0.0.dev1+gdce8b0606`; empty if it names none."""
    found = _COMMIT.search(version)
    return found[1] if found else ""


def counted(versions: Mapping[str, str], taken: Mapping[str, TakenFor]) -> dict[str, str]:
    """The versions as they count in ranges: builds without one as what they are taken for."""
    return {**versions, **{name: one.version for name, one in taken.items() if one.version is not None}}


def read_taken(text: str) -> tuple[str, str]:
    """`sglang=0.5.24.dev0` as distribution and version. ValueError with what it wants."""
    from packaging.utils import canonicalize_name

    name, _, version = (part.strip() for part in text.partition("="))
    if not name or not is_version(version) or unversioned(version):
        raise ValueError("DIST=VERSION with a version that orders, such as sglang=0.5.24.dev0")
    return str(canonicalize_name(name)), version


def orderable(record: Mapping[str, Any]) -> dict[str, str]:
    """The versions in a run's record that can be compared with others, driver included, as they count in ranges."""
    versions = {**(record.get("driver") or {}), **(record.get("versions") or {})}
    taken = record.get("taken_for") or {}
    found = {name: str((taken.get(name) or {}).get("version") or version) for name, version in versions.items()}
    return {name: version for name, version in found.items() if is_version(version) and not unversioned(version)}


@lru_cache(maxsize=4096)
def is_version(text: str) -> bool:
    """True for what PEP 440 calls a version: nothing else can be compared."""
    from packaging.version import InvalidVersion, Version

    try:
        Version(text)
    except InvalidVersion:
        return False
    return True


@lru_cache(maxsize=4096)
def admits(range_: str, version: str) -> bool:
    """True if `version` lies in `range_`, which is written as PEP 440 has it.

    `<`, `<=`, `>` and `>=` go by PEP 440's order of versions and nothing else, so that every version lies on exactly
    one side of a bound: 0.5.23rc1 and 0.5.23.dev5 are older than 0.5.23 and in `<0.5.23`; 0.5.10.post1 is newer than
    0.5.10 and in `>0.5.10`. (pip leaves those out of both sides.) Local parts (`+cu130`) do not count. A build without
    a version is newer than every release. What is not PEP 440 lies in no range.
    """
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        installed = Version(_NEWEST if unversioned(version) else version)
    except InvalidVersion:
        return False
    return all(_holds(part.operator, part.version, installed) for part in SpecifierSet(range_))


def _holds(operator: str, bound: str, installed: Version) -> bool:
    from packaging.specifiers import Specifier
    from packaging.version import Version

    if operator not in ("<", "<=", ">", ">="):
        return Specifier(f"{operator}{bound}").contains(installed, prereleases=True)
    mine, limit = Version(installed.public), Version(bound)
    if operator.startswith("<"):
        return mine < limit or (operator == "<=" and mine == limit)
    return mine > limit or (operator == ">=" and mine == limit)
