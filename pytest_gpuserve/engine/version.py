"""Which release a version text means, for choices that depend on it."""

from __future__ import annotations

import re

__all__ = ["release"]

# An unknown version is taken for a new one: old releases are known by name, and no release is older than them.
_NEWEST = (999,)


def release(version: str) -> tuple[int, ...]:
    """`"0.5.10.post1"` → `(0, 5, 10)`; epochs, suffixes and local parts are ignored; unknown text counts as newest.

    `0.0.0…` is what a source checkout without tags calls itself: newest too.
    """
    found = re.match(r"v?(\d+(?:\.\d+)*)", version.strip())
    numbers = tuple(int(part) for part in found[1].split(".")) if found else ()
    return numbers if any(numbers) else _NEWEST
