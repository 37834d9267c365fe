"""A merged record, taken apart by the stack that its cells ran on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["archs_of", "by_stack", "of_arch"]

_OF_A_PART = ("versions", "driver", "host", "gpus", "matrices", "started", "finished")


def by_stack(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The record as plain ones, one for each stack in it: every cell beside the versions that it ran with.

    A record that was not merged, or whose parts all ran on one stack, is itself the only one.
    """
    parts = record.get("parts") or []
    used = {cell.get("part") for cell in record["cells"]}
    groups: dict[str, list[int]] = {}
    for index, part in enumerate(parts):
        if index in used:
            groups.setdefault(_stack(part), []).append(index)
    if len(groups) < 2:
        return [record]
    found = []
    for indices in groups.values():
        cells = [cell for cell in record["cells"] if cell.get("part") in indices]
        names = {cell["id"] for cell in cells}
        first = parts[indices[0]]
        found.append(
            record
            | {name: first[name] for name in _OF_A_PART if name in first}
            | {
                "complete": all(parts[index].get("complete", True) for index in indices),
                "parts": parts,
                "gpus": [gpu for index in indices for gpu in parts[index].get("gpus") or ()],
                "cells": cells,
                "checks": [check for check in record.get("checks") or () if check["cell"] in names],
            }
        )
    return found


def of_arch(record: dict[str, Any], arch: str) -> dict[str, Any]:
    """What the record says of one arch: its cells, and the machines that they ran on."""
    cells = [cell for cell in record["cells"] if cell["arch"] == arch]
    parts = record.get("parts") or []
    mine = [parts[index] for index in sorted({cell["part"] for cell in cells})] if parts else []
    about = {
        "host": ", ".join(dict.fromkeys(str(part.get("host") or "") for part in mine)),
        "matrices": list({str(item): item for part in mine for item in part.get("matrices") or ()}.values()),
        "gpus": [gpu for part in mine for gpu in part.get("gpus") or ()],
    }
    return record | (about if mine else {}) | {"cells": cells}


def archs_of(record: Mapping[str, Any]) -> set[str]:
    """The archs of its cells."""
    return {str(cell["arch"]) for cell in record["cells"]}


def _stack(part: Mapping[str, Any]) -> str:
    return str(sorted({**(part.get("driver") or {}), **(part.get("versions") or {})}.items()))
