"""A text that a pattern matches: what the simulation prints for an entry with `match-re`."""

from __future__ import annotations

import re
from re import _constants, _parser  # type: ignore[attr-defined]  # the parser that `re.compile` itself uses
from typing import Any

__all__ = ["matches_anything", "sample_of"]

op: Any = _constants

_CATEGORIES = {
    op.CATEGORY_DIGIT: "7",
    op.CATEGORY_SPACE: " ",
    op.CATEGORY_WORD: "x",
    op.CATEGORY_NOT_DIGIT: "x",
    op.CATEGORY_NOT_SPACE: "x",
    op.CATEGORY_NOT_WORD: " ",
}
_ALPHABET = "x7 ._-:/()\n"
# Lines of a healthy start and of three unrelated failures: no one pattern describes a failure and fits them all.
_UNRELATED = (
    "Load weight begin. avail mem=94.12 GB",
    "The server is fired up and ready to roll!",
    "torch.OutOfMemoryError: CUDA out of memory.",
    "launch_server.py: error: unrecognized arguments: --no-such-flag",
    "ncclInvalidUsage",
    "42",
)


def matches_anything(pattern: re.Pattern[str]) -> bool:
    """True if the pattern matches the empty string, or lines that have nothing in common."""
    return pattern.search("") is not None or all(pattern.search(line) for line in _UNRELATED)


def sample_of(pattern: str) -> str | None:
    """A short text in which `pattern` is found, None where none could be made (look-arounds, say)."""
    try:
        text = "".join(_parts(_parser.parse(pattern, re.MULTILINE), {}))
        return text if re.search(pattern, text, re.MULTILINE) else None
    except (re.error, NotImplementedError, RecursionError):
        return None


def _parts(parsed: Any, groups: dict[int, str]) -> list[str]:
    return [_part(kind, argument, groups) for kind, argument in parsed]


def _part(kind: Any, argument: Any, groups: dict[int, str]) -> str:
    if kind is op.LITERAL:
        return chr(argument)
    if kind is op.NOT_LITERAL:
        return next(letter for letter in _ALPHABET if ord(letter) != argument)
    if kind is op.ANY:
        return "x"
    if kind is op.IN:
        return _member(argument)
    if kind is op.BRANCH:
        return "".join(_parts(argument[1][0], groups))
    if kind is op.SUBPATTERN:
        number, _, _, inside = argument
        groups[number] = "".join(_parts(inside, groups))
        return groups[number]
    if kind in (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT):
        least, _, inside = argument
        if least > 1000:
            raise NotImplementedError
        return "".join("".join(_parts(inside, groups)) for _ in range(least))
    if kind is op.ATOMIC_GROUP:
        return "".join(_parts(argument, groups))
    if kind is op.GROUPREF:
        return groups[argument]
    if kind is op.AT:
        return ""
    raise NotImplementedError


def _member(choices: list[tuple[Any, Any]]) -> str:
    """A character of a set such as `[a-z_]` or `[^()]`."""
    first, argument = choices[0]
    if first is op.NEGATE:
        for letter in _ALPHABET:
            if not any(_in(letter, kind, value) for kind, value in choices[1:]):
                return letter
        raise NotImplementedError
    if first is op.RANGE:
        return chr(argument[0])
    return _CATEGORIES[argument] if first is op.CATEGORY else chr(argument)


def _in(letter: str, kind: Any, value: Any) -> bool:
    if kind is op.LITERAL:
        return letter == chr(value)
    if kind is op.RANGE:
        least, most = value
        return ord(letter) in range(least, most + 1)
    tests = {
        op.CATEGORY_DIGIT: r"\d",
        op.CATEGORY_SPACE: r"\s",
        op.CATEGORY_WORD: r"\w",
        op.CATEGORY_NOT_DIGIT: r"\D",
        op.CATEGORY_NOT_SPACE: r"\S",
        op.CATEGORY_NOT_WORD: r"\W",
    }
    return re.match(tests[value], letter) is not None
