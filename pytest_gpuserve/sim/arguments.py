"""SGLang's command line: every option of 0.5.23, refused with argparse's own words.

`options.json` holds what `ServerArgs.add_cli_args` of that version registers (names, kind, type, choices, default):
531 options. Building an argparse parser of all of them takes longer than a simulated start, so the parser first gets
only those that the command line can mean (abbreviations included) and all of them when there is an error to print.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["parse_arguments"]


def human_readable_int(text: str) -> int:
    """`4096`, `8k`, `1M`: SGLang's own type, whose name appears in argparse's error."""
    scale = {"k": 10**3, "K": 1 << 10, "m": 10**6, "M": 1 << 20, "g": 10**9, "G": 1 << 30}.get(text[-1:], 1)
    return int(text) if scale == 1 else int(float(text[:-1]) * scale)


_TYPES: dict[str, Any] = {"int": int, "float": float, "json": json.loads, "count": human_readable_int}


class _Refused(Exception):
    """The small parser found an error: the full one prints it."""


class _Quiet(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _Refused(message)


def _options() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(Path(__file__).with_name("options.json").read_text())
    return rows


def _add(parser: argparse.ArgumentParser, rows: Iterable[dict[str, Any]]) -> None:
    for row in rows:
        names, kind = row["options"], row.get("kind", "value")
        given: dict[str, Any] = {"dest": row["dest"]} if "dest" in row else {}
        if kind == "flag":
            given["action"] = "store_true"
        elif kind == "switch":
            given |= {"action": argparse.BooleanOptionalAction, "default": row.get("default", False)}
        else:
            given |= {"type": _TYPES.get(row.get("type", ""), str), "default": row.get("default")}
            given |= {key: row[key] for key in ("nargs", "choices") if key in row}
        if names[0] == "--model-path":
            given["required"] = True
        parser.add_argument(*names, **given)


def _spellings(row: dict[str, Any]) -> list[str]:
    names: list[str] = row["options"]
    if row.get("kind") == "switch":
        return names + [f"--no-{name[2:]}" for name in names]
    return names


def parse_arguments(argv: Sequence[str]) -> dict[str, Any]:
    """Destination → value for every option, as `/server_info` lists them.

    Exits as argparse does: 2 with the usage and `sglang serve: error: …` on stderr, 0 for `--help`.
    """
    rows = _options()
    stems = tuple({word.split("=", 1)[0] for word in argv if word.startswith("-")} | {"--model-path"})
    wanted = [row for row in rows if any(name.startswith(stems) for name in _spellings(row))]
    small = _Quiet(prog="sglang serve", add_help=False)
    _add(small, wanted)
    try:
        given = vars(small.parse_args(argv))
    except _Refused:
        full = argparse.ArgumentParser(prog="sglang serve")
        _add(full, rows)
        given = vars(full.parse_args(argv))
    values = {_destination(row): row.get("default", False if row.get("kind") else None) for row in rows}
    return values | given


def _destination(row: dict[str, Any]) -> str:
    return str(row.get("dest") or row["options"][0].lstrip("-").replace("-", "_"))
