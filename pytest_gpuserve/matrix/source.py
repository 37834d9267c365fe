"""YAML files as trees that remember their lines: the only reader of YAML.

Scalars follow YAML 1.2's core schema: `on`, `yes`, `010`, `1:30` and dates are text (stock PyYAML reads True, 8,
90 and dates). What lets a small file mean something large or something else is refused: anchors, aliases, merge keys,
tags, duplicate keys, several documents, deep nesting, files over 1 MiB. The file is read as a stream of parser events,
so a hostile one is refused at its first bad line, before anything is expanded.
"""

from __future__ import annotations

import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from pytest_gpuserve.errors import FileProblems, Problem, Where

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["Node", "Scalar", "Source", "parse_yaml", "read_yaml"]

MAX_BYTES = 1 << 20
MAX_DEPTH = 50
MAX_NODES = 50_000
MAX_PROBLEMS = 100

Scalar = str | int | float | bool | None

_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
# At most 18 digits: longer ones are no count of anything, and int() of thousands of digits is refused by Python itself.
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,17})")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]{1,2})?")
_QUOTES = frozenset({"'", '"', "|", ">"})


@dataclass(frozen=True, slots=True)
class Node:
    """One value of a file and where it stands.

    `path` says it in words (`axes.attention.triton`). A scalar has its source `text`, its `value` and whether it was
    written `plain` (unquoted); a mapping has `fields` and the places of their keys in `keys`; a list has `items`.
    """

    where: Where
    path: str
    text: str = ""
    value: Scalar = None
    plain: bool = True
    style: str = ""
    fields: Mapping[str, Node] | None = None
    keys: Mapping[str, Where] = field(default_factory=dict)
    items: tuple[Node, ...] | None = None

    @property
    def is_scalar(self) -> bool:
        """True unless it is a mapping or a list."""
        return self.fields is None and self.items is None

    @property
    def kind(self) -> str:
        """What a message says was found: `a mapping`, `a list`, `nothing`, or the scalar as written."""
        if self.fields is not None:
            return "a mapping" if self.fields else "an empty mapping"
        if self.items is not None:
            return "a list" if self.items else "an empty list"
        if self.value is None:
            return "nothing"
        shown = self.text if len(self.text) <= 60 else f"{self.text[:57]}..."
        return f"'{shown}'" if isinstance(self.value, str) else shown


@dataclass(frozen=True, slots=True)
class Source:
    """What could be read. `root` is None when the tree cannot be trusted; duplicate keys leave it usable."""

    root: Node | None
    problems: tuple[Problem, ...]


def read_yaml(path: Path) -> Node:
    """The file's top mapping. FileProblems with every problem of reading it."""
    source = parse_yaml(path)
    if source.root is None or source.problems:
        raise FileProblems(source.problems)
    return source.root


def parse_yaml(path: Path) -> Source:
    """As `read_yaml`, but hands the problems back, so that a schema's can be reported beside them."""
    name = _display(path)
    try:
        text = _text_of(path, name)
    except FileProblems as refused:
        return Source(None, refused.problems)
    builder = _Builder(name, text)
    root = builder.build()
    return Source(root if builder.usable else None, tuple(builder.problems))


def _display(path: Path) -> str:
    """Relative to the current directory where the file is below it: shorter, and what GitHub's annotations want."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)


def _text_of(path: Path, name: str) -> str:
    def refuse(what: str, line: int = 1, col: int = 1) -> FileProblems:
        return FileProblems([Problem(Where(name, line, col), what)])

    try:
        state = path.stat()
        if stat.S_ISDIR(state.st_mode):
            raise refuse("is a directory, not a YAML file")
        if not stat.S_ISREG(state.st_mode):
            raise refuse("is not a regular file (a pipe or a device): give a YAML file")
        if state.st_size > MAX_BYTES:
            raise refuse(f"is {state.st_size / MAX_BYTES:.1f} MiB: such a file may have at most 1 MiB")
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise refuse("there is no such file") from None
    except (OSError, ValueError) as error:
        raise refuse(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > MAX_BYTES:
        raise refuse("is larger than 1 MiB: such a file may have at most 1 MiB")
    if b"\0" in data:
        before = data[: data.index(b"\0")]
        raise refuse("holds a NUL byte: a binary file (or UTF-16), not YAML in UTF-8", before.count(b"\n") + 1)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        line, col = before.count(b"\n") + 1, error.start - (before.rfind(b"\n") + 1) + 1
        raise refuse(f"byte 0x{data[error.start]:02x} is not UTF-8 text", line, col) from None


class _Stop(Exception):
    """Enough is wrong: stop reading."""


class _Builder:
    """Builds the tree from parser events; keeps every problem until there are too many."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.text = text
        self.problems: list[Problem] = []
        self.usable = True
        self.nodes = 0

    def build(self) -> Node | None:
        loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's, 10 times faster, where it was built in
        events: Iterator[Any] = yaml.parse(self.text, Loader=loader)
        try:
            return self._documents(events)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line, col = (mark.line + 1, mark.column + 1) if mark else (1, 1)
            context = f" {error.context}" if error.context else ""
            self._fatal(Where(self.name, line, col), f"is not YAML: {error.problem}{context}{self._hint(line, col)}")
        except yaml.YAMLError as error:
            position = getattr(error, "position", 0)
            before = self.text.encode()[:position].decode(errors="ignore")
            line = before.count("\n") + 1
            what = f"character {getattr(error, 'character', 0)!r} is not allowed in YAML"
            self._fatal(Where(self.name, line, len(before) - before.rfind("\n")), what)
        except _Stop:
            self.usable = False
        return None

    def _documents(self, events: Iterator[Any]) -> Node | None:
        root: Node | None = None
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                if root is not None:
                    self._fatal(self._at(event), "a second YAML document begins here: a file holds one")
                    return None
                if event.tags:
                    self._fatal(self._at(event), "%TAG directives are not allowed")
                root = self._node(next(events), events, "", 1)
        if root is None:
            self._fatal(Where(self.name), "is empty")
        elif root.fields is None:
            self._fatal(root.where, f"the file must be a mapping of keys, got {root.kind}")
        return root

    def _node(self, event: Any, events: Iterator[Any], path: str, depth: int) -> Node:
        where = self._at(event)
        self.nodes += 1
        if self.nodes > MAX_NODES:
            self._fatal(where, f"holds more than {MAX_NODES:,} values: the rest of the file was not read")
            raise _Stop
        if isinstance(event, yaml.AliasEvent):
            self._fatal(where, f"alias '*{event.anchor}': aliases are not allowed, write the value out")
            return Node(where, path)
        if event.anchor is not None:
            self._fatal(where, f"anchor '&{event.anchor}': anchors are not allowed, write the value out")
        if event.tag is not None:
            hint = "; a comparison must be quoted" if event.tag.startswith("!=") else ""
            self._fatal(where, f"tag '{event.tag}': tags are not allowed{hint}")
        if isinstance(event, yaml.ScalarEvent):
            style = event.style if event.style in _QUOTES else ""
            value = _resolve(event.value) if not style else event.value
            return Node(where, path, event.value, value, not style, style)
        if depth > MAX_DEPTH:
            self._fatal(where, f"is nested deeper than {MAX_DEPTH} levels")
            raise _Stop
        if isinstance(event, yaml.SequenceStartEvent):
            items: list[Node] = []
            while not isinstance(event := next(events), yaml.SequenceEndEvent):
                items.append(self._node(event, events, f"{path}[{len(items)}]", depth + 1))
            return Node(where, path, items=tuple(items))
        return self._mapping(where, events, path, depth)

    def _mapping(self, where: Where, events: Iterator[Any], path: str, depth: int) -> Node:
        fields: dict[str, Node] = {}
        keys: dict[str, Where] = {}
        while not isinstance(event := next(events), yaml.MappingEndEvent):
            key = self._node(event, events, path, depth + 1)
            at = f"{path}.{key.text}" if path else key.text
            value = self._node(next(events), events, at, depth + 1)
            if not key.is_scalar:
                self._fatal(key.where, f"a key must be text, got {key.kind}")
            elif key.text == "<<" and key.plain:
                self._fatal(key.where, "merge keys ('<<') are not allowed, write the keys out")
            elif key.text in fields:
                self._add(key.where, f"{at} is given twice (first at line {keys[key.text].line})")
            else:
                fields[key.text] = value
                keys[key.text] = key.where
        return Node(where, path, fields=fields, keys=keys)

    def _at(self, event: Any) -> Where:
        mark = event.start_mark
        return Where(self.name, mark.line + 1, mark.column + 1)

    def _hint(self, line: int, col: int) -> str:
        """What usually is behind libyaml's terse words at this character."""
        lines = self.text.splitlines()
        here = lines[line - 1] if line <= len(lines) else ""
        character = here[col - 1 : col]
        if character == "\t" or "\t" in here[: len(here) - len(here.lstrip())]:
            return "; YAML is indented with spaces, this is a tab"
        if character in (">", "@", "`", "%", "|"):
            return f'; a value that begins with {character} must be quoted, as in "{character}1"'
        return ""

    def _fatal(self, where: Where, what: str) -> None:
        self.usable = False
        self._add(where, what)

    def _add(self, where: Where, what: str) -> None:
        self.problems.append(Problem(where, what))
        if len(self.problems) >= MAX_PROBLEMS:
            self.problems.append(
                Problem(where, f"more than {MAX_PROBLEMS} problems: the rest of the file was not read")
            )
            raise _Stop


def _resolve(text: str) -> Scalar:
    """A plain scalar's value in YAML 1.2's core schema, numbers in decimal only."""
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if _INT.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text
