"""How a count is written: `1 cell`, `2 cells`, `2 x NVIDIA H200`."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

__all__ = ["counted", "machine", "number"]


def number(count: float, word: str, plural: str = "") -> str:
    """`count` with its word; `plural` where that is more than an s: `number(2, "entry", "entries")`."""
    text = f"{count:g}" if isinstance(count, float) else f"{count}"
    return f"{text} {word if count == 1 else plural or f'{word}s'}"


def counted(names: Iterable[str]) -> str:
    """Each name once, in order, with how often it is there: `2 x NVIDIA H200, 1 x NVIDIA B200`."""
    return ", ".join(f"{count} x {name}" for name, count in Counter(names).items())


def machine(gpus: Iterable[tuple[str, str]], archs: Collection[str]) -> str:
    """`2 x NVIDIA H200` of (name, arch) pairs: those that cells of these archs can run on, all if that is none."""
    everything = list(gpus)
    return counted([name for name, arch in everything if arch in archs] or (name for name, _ in everything))
