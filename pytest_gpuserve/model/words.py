"""How a count is written: `1 cell`, `2 cells`."""

from __future__ import annotations

__all__ = ["number"]


def number(count: float, word: str, plural: str = "") -> str:
    """`count` with its word; `plural` where that is more than an s: `number(2, "entry", "entries")`."""
    text = f"{count:g}" if isinstance(count, float) else f"{count}"
    return f"{text} {word if count == 1 else plural or f'{word}s'}"
