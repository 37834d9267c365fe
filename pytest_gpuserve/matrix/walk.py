"""Walks a file's tree, checks types and collects every problem instead of stopping at the first."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from pytest_gpuserve.errors import FileProblems, Problem, Where
from pytest_gpuserve.matrix.source import Node, parse_yaml
from pytest_gpuserve.model.words import number

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from pathlib import Path

__all__ = ["Reader", "did_you_mean"]

MAX_UNKNOWN = 20

_NOTHING: dict[str, Node] = {}


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'flags'?`, or the known words if none is close, or nothing if there are none."""
    words = list(dict.fromkeys(known))
    begun = [known for known in words if len(word) >= 3 and known.startswith(word)]
    close = difflib.get_close_matches(word, words, n=1) or begun
    if close:
        return f"; did you mean '{close[0]}'?"
    if not words:
        return ""
    shown = ", ".join(words[:12])
    return f"; known: {shown}{', …' if len(words) > 12 else ''}"


class Reader:
    """One file being read. Every method reports what is wrong and returns None (or nothing) then; it never raises."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def open(self, path: Path, *, schema: int = 1) -> Node | None:
        """The file's top mapping, if the file can be read and is of this `schema`."""
        source = parse_yaml(path)
        self.problems += source.problems
        if source.root is None:
            return None
        version = self.mapping(source.root).get("schema")
        if version is None:
            self.add(source.root.where, f"the key 'schema' is missing: write 'schema: {schema}'")
        elif version.value != schema or isinstance(version.value, bool):
            self.add(version.where, f"schema must be {schema}, got {version.kind}: this version reads no other")
            return None
        return source.root

    def finish(self) -> None:
        """Raises FileProblems if there was any problem (warnings are none)."""
        if any(not problem.warning for problem in self.problems):
            raise FileProblems(self.problems)

    def add(self, where: Where | Node, what: str, *, warning: bool = False) -> None:
        """Keeps a problem."""
        self.problems.append(Problem(where.where if isinstance(where, Node) else where, what, warning))

    def wrong(self, node: Node, wanted: str) -> None:
        """Keeps `PATH must be WANTED, got …`."""
        self.add(node, f"{node.path or 'the file'} must be {wanted}, got {node.kind}")

    def mapping(self, node: Node) -> Mapping[str, Node]:
        """The fields of a mapping, any keys."""
        if node.fields is None:
            self.wrong(node, "a mapping")
            return _NOTHING
        return node.fields

    def fields(self, node: Node, known: Collection[str], required: Iterable[str] = ()) -> Mapping[str, Node]:
        """The fields of a mapping whose keys are all `known`, with all the `required` ones."""
        fields = self.mapping(node)
        if node.fields is None:
            return fields
        unknown = [key for key in fields if key not in known]
        inside = f" in {node.path}" if node.path else ""
        for key in unknown[:MAX_UNKNOWN]:
            self.add(node.keys[key], f"unknown key '{key}'{inside}{did_you_mean(key, known)}")
        if len(unknown) > MAX_UNKNOWN:
            rest = number(len(unknown) - MAX_UNKNOWN, "more unknown key")
            self.add(node.keys[unknown[MAX_UNKNOWN]], f"{rest}{inside}")
        for key in required:
            if key not in fields:
                inside = f"{node.path} lacks" if node.path else "the file lacks"
                self.add(node, f"{inside} the key '{key}'")
        return {key: value for key, value in fields.items() if key in known}

    def items(self, node: Node) -> tuple[Node, ...]:
        """The items of a list."""
        if node.items is None:
            self.wrong(node, "a list")
            return ()
        return node.items

    def one_or_more(self, node: Node) -> tuple[Node, ...]:
        """The items of a list, or a scalar as the only item. At least one."""
        if node.items == ():
            self.wrong(node, "a value or a list of values, at least one")
        return (node,) if node.items is None else node.items

    def text(self, node: Node | None, *, wanted: str = "text") -> str | None:
        """A scalar's source text (unquoted numbers too), not empty."""
        if node is None:
            return None
        if not node.is_scalar or node.value is None or not node.text.strip():
            self.wrong(node, wanted)
            return None
        return node.text

    def texts(self, node: Node | None, *, wanted: str = "text") -> tuple[str, ...]:
        """One text or a list of them."""
        if node is None:
            return ()
        return tuple(text for item in self.one_or_more(node) if (text := self.text(item, wanted=wanted)) is not None)

    def one_of(self, node: Node | None, known: Collection[str]) -> str | None:
        """A text that is one of `known`."""
        text = self.text(node)
        if text is None or node is None or text in known:
            return text
        self.add(node, f"{node.path}: unknown value '{text}'{did_you_mean(text, known)}")
        return None

    def whole(self, node: Node | None, *, least: int = 0) -> int | None:
        """A whole number of at least `least`."""
        if node is None:
            return None
        value = node.value
        if isinstance(value, int) and not isinstance(value, bool) and value >= least:
            return value
        self.wrong(node, f"a whole number of at least {least}")
        return None

    def number(self, node: Node | None, *, positive: bool = True) -> float | None:
        """A number, above zero unless `positive` is False (then zero is allowed too)."""
        if node is None:
            return None
        value = node.value
        if (
            isinstance(value, (int, float))
            and not isinstance(value, bool)
            and (value > 0 or (value == 0 and not positive))
        ):
            return value
        self.wrong(node, "a number above zero" if positive else "a number, zero or more")
        return None

    def boolean(self, node: Node | None, *, default: bool = False) -> bool:
        """True or false."""
        if node is None:
            return default
        if isinstance(node.value, bool):
            return node.value
        self.wrong(node, "true or false")
        return default
