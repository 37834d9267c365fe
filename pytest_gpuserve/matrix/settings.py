"""Reads `flags:` and `env:`, what a launch is made of, wherever a matrix gives them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytest_gpuserve.engine.flags import canonical, refusal
from pytest_gpuserve.matrix.walk import did_you_mean
from pytest_gpuserve.model.phase import hides_phases

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpuserve.errors import Where
    from pytest_gpuserve.matrix.source import Node
    from pytest_gpuserve.matrix.walk import Reader
    from pytest_gpuserve.model.cell import FlagSetting

__all__ = ["LaunchSettings", "read_name", "read_settings", "variable_refusal"]

_FLAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# What pytest's `-k` takes as one word (\w : + - . [ ] \ /), less what means something in ids (+ .), paths or shells.
_AXIS = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
# Set for each start by the supervisor: a value of the file would be written over without a word.
_OUR_VARIABLES = frozenset({"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "TMPDIR", "SPT_NOENV"})
# Addresses, ports and ranks that a launcher of several processes would set: one value for every server of the matrix.
_FIXED_VARIABLES = re.compile(
    r"MASTER_ADDR|MASTER_PORT|RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|SGLANG_PORT|SGLANG_GRPC_PORT"
    r"|SGLANG_BACKUP_PORT_BASE|SGLANG_TCP_STORE_PORT|SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
)
_YAML11_BOOL = {"yes": "true", "on": "true", "no": "false", "off": "false"}


def read_name(reader: Reader, node: Node, name: str, what: str, *, dots: bool = True) -> bool:
    """True if `name` (a key of `node`) can be part of a cell's id, and so of `pytest -k`."""
    if len(name) <= 80 and (_NAME if dots else _AXIS).fullmatch(name):
        return True
    allowed = "letters, digits, _ . and -" if dots else "letters, digits, _ and -"
    shown = name if len(name) <= 80 else f"{name[:77]}..."
    reader.add(
        node.keys[name], f"'{shown}' cannot be the name of {what}: at most 80 {allowed} (pytest -k must take it)"
    )
    return False


@dataclass(slots=True)
class LaunchSettings:
    """The flags (by SGLang's own name, whatever spelling the file has) and variables that one mapping sets.

    A value None takes away what was set before. `places` says where each is written, by its fact.
    """

    flags: dict[str, FlagSetting] = field(default_factory=dict)
    env: dict[str, str | None] = field(default_factory=dict)
    places: dict[str, Where] = field(default_factory=dict)


def read_settings(reader: Reader, fields: Mapping[str, Node], *, first: bool = False) -> LaunchSettings:
    """The `flags` and `env` among these fields. In the `first` ones there is nothing yet that null could take away."""
    settings = LaunchSettings()
    _read_flags(reader, fields.get("flags"), settings)
    _read_env(reader, fields.get("env"), settings)
    if first:
        for kind, values in (("flag", settings.flags), ("env", settings.env)):
            for name in [name for name, value in values.items() if value is None]:
                reader.add(settings.places[f"{kind}.{name}"], _takes_nothing(kind, name))
    return settings


def _takes_nothing(kind: str, name: str) -> str:
    what = "the flag" if kind == "flag" else "the variable"
    return f"null takes {what} '{name}' away, and nothing before this sets it: remove the line, or see the name"


def _read_flags(reader: Reader, node: Node | None, settings: LaunchSettings) -> None:
    """Flags without dashes in front: true for one without value, false to leave it out, a list for several values."""
    spellings: dict[str, str] = {}
    for written, value in reader.mapping(node).items() if node is not None else ():
        assert node is not None
        where = node.keys[written]
        bare = written.strip("-").replace("_", "-")
        name = canonical(written)
        if (reason := refusal(bare)) is not None:
            reader.add(where, f"{node.path}: the flag '{bare}' cannot be set by a matrix: it {reason}")
        elif not _FLAG.fullmatch(written):
            close = did_you_mean(written, [bare]) if _FLAG.fullmatch(bare) else ""
            reader.add(
                where, f"'{written}' in {node.path}: a flag is written without dashes in front, with - inside{close}"
            )
        elif name in spellings:
            first = spellings[name]
            both = f"'{written}' and '{first}' (line {node.keys[first].line})"
            reader.add(where, f"{node.path}: {both} are one flag of SGLang, {name}: keep one of them")
        elif _is_null(value):
            settings.flags[name] = None
        elif (read := _flag_value(reader, value)) is not None:
            settings.flags[name] = read
            if name == "log-level" and hides_phases(read):
                reader.add(
                    where,
                    f"{node.path}: with log-level {read} the server logs no line that tells its phase: a hang or a "
                    "crash of its start is reported without one; use info",
                    warning=True,
                )
        spellings.setdefault(name, written)
        settings.places.setdefault(f"flag.{name}", where)


def _is_null(node: Node) -> bool:
    """True for a written-out null. An empty value is most likely a forgotten one, and is refused as such."""
    return node.is_scalar and node.value is None and node.plain and node.text != ""


def _flag_value(reader: Reader, node: Node) -> FlagSetting:
    if node.items is not None:
        return list(reader.texts(node)) or None
    if node.plain and node.text in _YAML11_BOOL:
        meant = _YAML11_BOOL[node.text]
        reader.add(
            node,
            f"{node.path}: '{node.text}' is text, not a truth value: write {meant}, or quote it if you mean the text",
        )
        return None
    if reader.text(node, wanted="text, a number, true, false, a list, or null to take it away") is None:
        return None
    return node.value


def variable_refusal(name: str) -> str | None:
    """Why nobody can set this variable for a server, as the end of a sentence; None if it can be set."""
    if name in _OUR_VARIABLES or name.startswith("GPUSERVE_"):
        return "is set by gpuserve itself"
    if _FIXED_VARIABLES.fullmatch(name):
        return (
            "cannot be set: it gives every server the same address, port or rank; gpuserve chooses ports for each start"
        )
    return None


def _read_env(reader: Reader, node: Node | None, settings: LaunchSettings) -> None:
    """Environment variables. Values are text: an unquoted number counts as it is written (`1.10` stays `1.10`)."""
    for name, value in reader.mapping(node).items() if node is not None else ():
        assert node is not None
        where = node.keys[name]
        settings.places[f"env.{name}"] = where
        if not _VARIABLE.fullmatch(name):
            reader.add(where, f"'{name}' in {node.path} cannot be the name of an environment variable")
        elif (reason := variable_refusal(name)) is not None:
            reader.add(where, f"{node.path}: the variable '{name}' {reason}")
        elif _is_null(value):
            settings.env[name] = None
        elif not value.is_scalar or (value.value is None and value.plain) or "\0" in value.text:
            reader.wrong(value, 'text (write "" for an empty value, null to take the variable away)')
        else:
            settings.env[name] = value.text
