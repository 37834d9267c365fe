"""CUDA_VISIBLE_DEVICES of the caller, read as the driver reads it. Pure.

The tool treats the caller's value as a bound that it never overrides. Every project that parsed it with `int()` broke
on UUIDs and MIG (vllm#41848, vllm#13815, pytorch#92315).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_gpuserve.model.gpu import Gpu

__all__ = ["bound"]

# The driver reads an index like strtoul: "1gpu" is 1, "+2" is 2, "-1" and "x" are invalid.
_INDEX = re.compile(r"\s*\+?(\d+)")


def bound(visible: str | None, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """The GPUs of `gpus` that the value lets a process see, in the value's order.

    None (not set) is no bound. As the driver does: entries are all indices or all UUIDs (the first decides), a UUID may
    be cut to a unique prefix, the first invalid entry ends the list, an entry given twice empties it, and so an empty
    value or `-1` means no GPU. Indices are `Gpu.index`, PCI bus order. The index or UUID of a GPU in MIG mode means
    its first instance.
    """
    if visible is None:
        return tuple(gpus)
    names = visible.split(",")
    by_name = names[0].strip().startswith(("GPU-", "MIG-"))
    found: list[Gpu] = []
    for gpu in _by_uuid(names, gpus) if by_name else _by_index(names, gpus):
        if gpu in found:
            return ()
        found.append(gpu)
    return tuple(found)


def _by_index(names: Sequence[str], gpus: Sequence[Gpu]) -> Iterator[Gpu]:
    first_of: dict[int, Gpu] = {}
    for gpu in gpus:
        first_of.setdefault(gpu.index, gpu)
    for name in names:
        match = _INDEX.match(name)
        gpu_here = first_of.get(int(match[1])) if match else None
        if gpu_here is None:
            return
        yield gpu_here


def _by_uuid(names: Sequence[str], gpus: Sequence[Gpu]) -> Iterator[Gpu]:
    first_of: dict[str, Gpu] = {}
    for gpu in gpus:
        first_of.setdefault(gpu.uuid, gpu)
        if gpu.parent is not None:
            first_of.setdefault(gpu.parent, gpu)
    for name in names:
        name = name.strip()
        matches = [uuid for uuid in first_of if uuid == name] or [uuid for uuid in first_of if uuid.startswith(name)]
        if not name.startswith(("GPU-", "MIG-")) or len(matches) != 1:
            return
        yield first_of[matches[0]]
