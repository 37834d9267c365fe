"""Reads `flags:` and `env:`, what a launch is made of, wherever a matrix gives them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pytest_gpuserve.matrix.walk import did_you_mean
from pytest_gpuserve.model.phase import hides_phases

if TYPE_CHECKING:
    from pytest_gpuserve.matrix.source import Node
    from pytest_gpuserve.matrix.walk import Reader
    from pytest_gpuserve.model.cell import FlagValue

__all__ = ["read_env", "read_flags", "read_name"]

_FLAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# What pytest's `-k` takes as one word (\w : + - . [ ] \ /), less what means something in ids (+ .), paths or shells.
_AXIS = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_OURS = frozenset({"host", "port", "nccl-port", "api-key", "model-path", "model"})
_OUR_VARIABLES = frozenset({"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"})
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


def read_flags(reader: Reader, node: Node | None) -> dict[str, FlagValue]:
    """SGLang's flags without dashes in front: true for one without value, false to leave it out, a list for several."""
    flags: dict[str, FlagValue] = {}
    if node is None:
        return flags
    for name, value in reader.mapping(node).items():
        where = node.keys[name]
        bare = name.strip("-").replace("_", "-")
        if bare in _OURS:
            reader.add(where, f"{node.path}: the flag '{bare}' is set by gpuserve itself")
        elif not _FLAG.fullmatch(name):
            close = did_you_mean(name, [bare]) if _FLAG.fullmatch(bare) else ""
            reader.add(
                where, f"'{name}' in {node.path}: a flag is written without dashes in front, with - inside{close}"
            )
        elif (read := _flag_value(reader, value)) is not None:
            flags[name] = read
            if name == "log-level" and hides_phases(read):
                reader.add(
                    where,
                    f"{node.path}: with log-level {read} the server logs no line that tells its phase: a hang or a "
                    "crash of its start is reported without one; use info",
                    warning=True,
                )
    return flags


def _flag_value(reader: Reader, node: Node) -> FlagValue | None:
    if node.items is not None:
        return list(reader.texts(node)) or None
    if node.plain and node.text in _YAML11_BOOL:
        meant = _YAML11_BOOL[node.text]
        reader.add(
            node,
            f"{node.path}: '{node.text}' is text, not a truth value: write {meant}, or quote it if you mean the text",
        )
        return None
    if reader.text(node, wanted="text, a number, true, false or a list") is None:
        return None
    return node.value


def read_env(reader: Reader, node: Node | None) -> dict[str, str]:
    """Environment variables. Values are text: an unquoted number counts as it is written (`1.10` stays `1.10`)."""
    env: dict[str, str] = {}
    if node is None:
        return env
    for name, value in reader.mapping(node).items():
        where = node.keys[name]
        if not _VARIABLE.fullmatch(name):
            reader.add(where, f"'{name}' in {node.path} cannot be the name of an environment variable")
        elif name in _OUR_VARIABLES or name.startswith("GPUSERVE_"):
            reader.add(where, f"{node.path}: the variable '{name}' is set by gpuserve itself")
        elif not value.is_scalar or (value.value is None and value.plain) or "\0" in value.text:
            reader.wrong(value, 'text (write "" for an empty value)')
        else:
            env[name] = value.text
    return env
