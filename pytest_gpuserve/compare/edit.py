"""Edits a known-bad list as text: what is not edited keeps every comment, quote and blank line.

Each edit is proved before it is handed out: the new text is read again and must differ from the old in that entry only.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpuserve.errors import GpuserveError
from pytest_gpuserve.matrix.source import Node, parse_yaml

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["KnownBadText", "Uneditable", "scalar"]

_PLAIN = re.compile(r"[A-Za-z][\w.+/-]*")
_WORDS = frozenset({"true", "false", "null", "yes", "no", "on", "off", "nan", "inf"})
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?")
# YAML counts these as line breaks too; an editor of lines must not.
_BREAKS = re.compile(r"\r(?!\n)|[\x85\u2028\u2029]")
EMPTY = "schema: 1\nentries: []\n"


class Uneditable(GpuserveError):
    """This file's layout cannot be edited by line; the text says what to do by hand."""


def scalar(value: object) -> str:
    """A value as YAML that every YAML version reads back as the same text (or number, or truth value)."""
    if isinstance(value, bool):
        return "true" if value else "false"
    # A log's undecodable bytes, which YAML cannot hold, become question marks.
    text = str(value).encode("utf-8", "replace").decode()
    if isinstance(value, (int, float)) and _NUMBER.fullmatch(text):
        return text
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    # What is printable stands as it is, so that a person can read it.
    return '"' + "".join(ch if ch.isprintable() else f"\\U{ord(ch):08x}" for ch in escaped) + '"'


class KnownBadText:
    """The text of one `known_bad.yaml`. Every edit replaces `text`; on Uneditable it is as it was."""

    def __init__(self, text: str, name: str = "known_bad.yaml") -> None:
        self.text = text
        self.name = name
        self._root = self._parse(text)

    @property
    def ids(self) -> tuple[str, ...]:
        """The entries' ids, in file order."""
        return tuple(self._id(entry) for entry in self._entries())

    def versions(self, entry_id: str) -> dict[str, str]:
        """The entry's version ranges as written; empty if it has none. KeyError for an unknown id."""
        node = (self._entry(entry_id).fields or {}).get("versions")
        return {name: value.text for name, value in (node.fields or {}).items()} if node else {}

    def line(self, entry_id: str) -> int:
        """The line, from 1, that the entry begins on. KeyError for an unknown id."""
        return self._entry(entry_id).where.line

    def remove(self, entry_id: str) -> None:
        """Takes the entry's lines out; comments above it stay."""
        entry = self._entry(entry_id)
        lines = self._lines()
        first, end = self._span(entry, lines)
        blank_before = first == 0 or not lines[first - 1].strip()
        if blank_before and end < len(lines) and not lines[end].strip():
            end += 1
        del lines[first:end]
        if len(self._entries()) == 1:
            key = self._root_key()
            head, colon, tail = lines[key.line - 1].partition(":")
            lines[key.line - 1] = f"{head}{colon} []{tail}"
        expected = [item for item in self._plain_entries() if item["id"] != entry_id]
        self._accept("".join(lines), expected, f"remove {entry_id}")

    def bound(self, entry_id: str, distribution: str, spec: str) -> None:
        """Sets the range of one distribution in the entry's `versions`."""
        entry = self._entry(entry_id)
        lines = self._lines()
        quoted = f'"{spec}"'
        versions = (entry.fields or {}).get("versions")
        known = (versions.fields or {}).get(distribution) if versions else None
        if known is not None:
            self._replace(lines, known, quoted)
        elif versions is not None and versions.fields is not None:
            self._insert_key(lines, versions, f"{distribution}: {quoted}")
        else:
            self._insert_key(lines, entry, f"versions: {{{distribution}: {quoted}}}", before="expect")
        expected = self._plain_entries()
        for item in expected:
            if item["id"] == entry_id:
                item["versions"] = {**item.get("versions", {}), distribution: spec}
        self._accept("".join(lines), expected, f"bound {entry_id} with {distribution} {spec}")

    def add(self, entries: Sequence[Mapping[str, str]]) -> None:
        """Appends entries: each maps keys to values written as YAML already (see `scalar`), `id` first."""
        lines = self._lines()
        newline = "\r\n" if lines and lines[0].endswith("\r\n") else "\n"
        if lines and not lines[-1].endswith("\n"):
            lines[-1] += newline
        present = self._entries()
        blank = False
        if present:
            first, end = self._span(present[-1], lines)
            indent = len(lines[first]) - len(lines[first].lstrip())
            blank = len(present) > 1 and not lines[first - 1].strip()
        else:
            key = self._root_key()
            head, _, tail = lines[key.line - 1].partition(":")
            # `entries: []`, perhaps with a comment, becomes `entries:`.
            lines[key.line - 1] = head + ":" + re.sub(r"^\s*\[\s*\]|^\s*(?:null|~)(?=\s)", "", tail)
            end, indent = key.line, 2
        new: list[str] = []
        for fields in entries:
            new += [newline] if blank else []
            new += [
                f"{' ' * indent}{'  ' if number else '- '}{key}: {value}{newline}"
                for number, (key, value) in enumerate(fields.items())
            ]
        lines[end:end] = new
        text = "".join(lines)
        what = f"add {', '.join(fields['id'] for fields in entries)}"
        added = self._plain_entries(self._parse(text))[len(present) :]
        if [set(entry) for entry in added] != [set(fields) for fields in entries]:
            raise self._cannot(what)
        self._accept(text, [*self._plain_entries(), *added], what)

    def _accept(self, text: str, expected: list[dict[str, Any]], what: str) -> None:
        root = self._parse(text)
        others = [
            {key: _plain(value) for key, value in (one.fields or {}).items() if key != "entries"}
            for one in (self._root, root)
        ]
        if self._plain_entries(root) != expected or others[0] != others[1]:
            raise self._cannot(what)
        self.text, self._root = text, root

    def _cannot(self, what: str) -> Uneditable:
        return Uneditable(f"{self.name}: cannot {what} by editing lines: the file's layout is unusual. Do it by hand.")

    def _parse(self, text: str) -> Node:
        if _BREAKS.search(text):
            raise Uneditable(f"{self.name}: holds line breaks other than \\n and \\r\\n: edit it by hand.")
        with tempfile.TemporaryDirectory(prefix="gpuserve-") as folder:
            path = Path(folder) / "known_bad.yaml"
            path.write_bytes(text.encode())
            source = parse_yaml(path)
        if source.root is None or source.problems:
            raise Uneditable(f"{self.name}: cannot be read; `gpuserve validate` says why.")
        return source.root

    def _entries(self) -> tuple[Node, ...]:
        return _items(self._root)

    def _plain_entries(self, root: Node | None = None) -> list[dict[str, Any]]:
        return [{"id": ""} | _plain(item) for item in _items(root or self._root) if item.fields is not None]

    @staticmethod
    def _id(entry: Node) -> str:
        node = (entry.fields or {}).get("id")
        return node.text if node else ""

    def _entry(self, entry_id: str) -> Node:
        for entry in self._entries():
            if self._id(entry) == entry_id:
                return entry
        raise KeyError(entry_id)

    def _root_key(self) -> Any:
        if "entries" not in self._root.keys:
            raise Uneditable(f"{self.name}: has no 'entries' list.")
        return self._root.keys["entries"]

    def _lines(self) -> list[str]:
        return re.findall(r"[^\n]*\n|[^\n]+", self.text)

    def _span(self, entry: Node, lines: list[str]) -> tuple[int, int]:
        """The entry's lines, from 0, end exclusive: comments at the dash's column or left of it are not its own."""
        first = self._dash(entry, lines)
        indent = len(lines[first]) - len(lines[first].lstrip())
        starts = [self._dash(item, lines) for item in self._entries()]
        starts += [key.line - 1 for key in self._root.keys.values()]
        end = min((start for start in starts if start > first), default=len(lines))
        while end > first + 1:
            text = lines[end - 1].strip()
            column = len(lines[end - 1]) - len(lines[end - 1].lstrip())
            if text and not (text.startswith("#") and column <= indent):
                break
            end -= 1
        return first, end

    def _dash(self, entry: Node, lines: list[str]) -> int:
        line, before = entry.where.line - 1, lines[entry.where.line - 1][: entry.where.col - 1]
        while not before.strip() and line > 0:
            line -= 1
            before = lines[line].split("#")[0]
        if before.strip() != "-":
            raise Uneditable(f"{self.name}:{entry.where.line}: entries are not one a line group: edit it by hand.")
        return line

    def _replace(self, lines: list[str], node: Node, text: str) -> None:
        row, start = node.where.line - 1, node.where.col - 1
        rest = lines[row][start:]
        if node.style == '"':
            found = re.match(r'"(?:[^"\\]|\\.)*"', rest)
        elif node.style == "'":
            found = re.match(r"'(?:[^']|'')*'", rest)
        else:
            found = re.match(re.escape(node.text), rest)
        if not found:
            raise self._cannot(f"replace the value at line {node.where.line}")
        lines[row] = lines[row][:start] + text + rest[found.end() :]

    def _insert_key(self, lines: list[str], mapping: Node, text: str, before: str = "") -> None:
        row, start = mapping.where.line - 1, mapping.where.col - 1
        if lines[row][start : start + 1] == "{":
            comma = ", " if mapping.fields else ""
            lines[row] = f"{lines[row][: start + 1]}{text}{comma}{lines[row][start + 1 :]}"
            return
        # A line of its own, before a key that begins its line.
        places = [key for key in mapping.keys.values() if not lines[key.line - 1][: key.col - 1].strip()]
        wanted = mapping.keys.get(before)
        place = wanted if wanted in places else next(iter(places), None)
        if place is None:
            raise self._cannot(f"insert {text}")
        newline = "\r\n" if lines[row].endswith("\r\n") else "\n"
        lines.insert(place.line - 1, " " * (place.col - 1) + text + newline)


def _items(root: Node) -> tuple[Node, ...]:
    node = (root.fields or {}).get("entries")
    return (node.items or ()) if node else ()


def _plain(node: Node) -> Any:
    if node.fields is not None:
        return {key: _plain(value) for key, value in node.fields.items()}
    if node.items is not None:
        return [_plain(item) for item in node.items]
    return node.value
