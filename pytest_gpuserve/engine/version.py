"""Which release a version text means, for choices that depend on it."""

from __future__ import annotations

import re

from pytest_gpuserve.model.versions import unversioned

__all__ = ["release"]

# An unknown version is taken for a new one: old releases are known by name, and no release is older than them.
_NEWEST = (999,)


def release(version: str) -> tuple[int, ...]:
    """`"0.5.10.post1"` → `(0, 5, 10)`; epochs, suffixes and local parts are ignored; unknown text counts as newest.

    So does what a source checkout without tags calls itself (`0.0.0.dev1+g…`, `0.1.dev7+g…`).
    """
    found = re.match(r"v?(\d+(?:\.\d+)*)", version.strip())
    return tuple(int(part) for part in found[1].split(".")) if found and not unversioned(version) else _NEWEST
