"""Which of the free GPUs to take together: one NVLink group, else one NUMA node. Pure."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpuserve.model.gpu import Gpu

__all__ = ["choose", "nvlink_groups"]


def choose(free: Sequence[Gpu], count: int) -> tuple[Gpu, ...]:
    """`count` GPUs of `free` (given in order of preference), in index order; empty if there are not so many.

    The smallest NVLink group that is large enough, within it the smallest NUMA node that is: large groups stay whole
    for wide requests. If none is, the smallest NUMA node; else as few groups as will do. Ties go by preference.
    """
    if not 0 < count <= len(free):
        return ()
    on_node = Counter(gpu.numa for gpu in free)
    for groups in (nvlink_groups(free), _numa_nodes(free)):
        fitting = [group for group in groups if len(group) >= count]
        if fitting:
            smallest = min(len(group) for group in fitting)
            best = [group for group in fitting if len(group) == smallest]
            nodes = [node for group in best for node in _numa_nodes(group) if len(node) >= count]
            chosen = min(nodes, key=lambda node: on_node[node[0].numa])[:count] if nodes else best[0][:count]
            break
    else:
        widest_first = sorted(_numa_nodes(free), key=len, reverse=True)
        chosen = [gpu for group in widest_first for gpu in group][:count]
    return tuple(sorted(chosen, key=lambda gpu: (gpu.index, gpu.uuid)))


def nvlink_groups(gpus: Sequence[Gpu]) -> list[list[Gpu]]:
    """Connected sets of `gpus`, each and all in the given order; a GPU without links is a set of its own."""
    by_uuid = {gpu.uuid: gpu for gpu in gpus}
    neighbours = {uuid: {link for link in gpu.links if link in by_uuid} for uuid, gpu in by_uuid.items()}
    for uuid, links in list(neighbours.items()):
        for link in links:
            neighbours[link].add(uuid)
    group_of: dict[str, str] = {}
    for gpu in gpus:
        reached = [] if gpu.uuid in group_of else [gpu.uuid]
        while reached:
            uuid = reached.pop()
            if uuid not in group_of:
                group_of[uuid] = gpu.uuid
                reached.extend(neighbours[uuid])
    return _grouped(gpus, [group_of[gpu.uuid] for gpu in gpus])


def _numa_nodes(gpus: Sequence[Gpu]) -> list[list[Gpu]]:
    return _grouped(gpus, [gpu.numa for gpu in gpus])


def _grouped(gpus: Sequence[Gpu], keys: Sequence[object]) -> list[list[Gpu]]:
    groups: dict[object, list[Gpu]] = {}
    for gpu, key in zip(gpus, keys, strict=True):
        groups.setdefault(key, []).append(gpu)
    return list(groups.values())
