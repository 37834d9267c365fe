"""Reads `loads`, `limits` and `floors`: what is measured, and what it must reach."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpuserve.matrix.settings import read_name
from pytest_gpuserve.matrix.types import BUILTIN_LOADS, METRICS, Floor, Load, Metric
from pytest_gpuserve.matrix.walk import did_you_mean
from pytest_gpuserve.matrix.when import Vocabulary, read_when
from pytest_gpuserve.model.phase import Phase

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from pytest_gpuserve.matrix.source import Node
    from pytest_gpuserve.matrix.types import Level
    from pytest_gpuserve.matrix.walk import Reader
    from pytest_gpuserve.model.predicate import Predicate

__all__ = ["read_floors", "read_levels_named", "read_limits", "read_loads"]

_LOAD_KEYS = ("concurrency", "input", "output", "rate", "windows", "prefix")


def read_loads(reader: Reader, node: Node | None) -> dict[str, Load]:
    """The matrix' own load profiles. A built-in name is refused: histories compare by name."""
    loads: dict[str, Load] = {}
    if node is None:
        return loads
    for name, value in reader.mapping(node).items():
        if name in BUILTIN_LOADS:
            reader.add(node.keys[name], f"the load '{name}' is built in: give yours another name")
            continue
        named = read_name(reader, node, name, "a load")
        fields = reader.fields(value, _LOAD_KEYS, required=("concurrency", "input", "output"))
        counts = {key: reader.whole(fields.get(key), least=1) for key in ("concurrency", "input", "output", "windows")}
        prefix = reader.whole(fields.get("prefix")) or 0
        rate = reader.number(fields.get("rate"))
        concurrency, input_, output = counts["concurrency"], counts["input"], counts["output"]
        if not named or concurrency is None or input_ is None or output is None:
            continue
        if prefix >= input_:
            reader.add(fields["prefix"], f"{value.path}.prefix must be shorter than input ({input_})")
        loads[name] = Load(
            name=name,
            concurrency=concurrency,
            input=input_,
            output=output,
            rate=rate,
            windows=counts["windows"],
            prefix=prefix,
            where=value.where,
        )
    return loads


def read_limits(reader: Reader, node: Node | None) -> dict[str, dict[str, float]]:
    """`{graph-capture: {stall: 120}}`: seconds by phase."""
    limits: dict[str, dict[str, float]] = {}
    if node is None:
        return limits
    phases = [str(phase) for phase in Phase]
    for name, value in reader.mapping(node).items():
        if name not in phases:
            reader.add(node.keys[name], f"unknown phase '{name}' in {node.path}{did_you_mean(name, phases)}")
            continue
        fields = reader.fields(value, ("stall", "total"))
        if value.fields == {}:
            reader.wrong(value, "a mapping with stall or total, in seconds")
        given = {key: number for key, seconds in fields.items() if (number := reader.number(seconds)) is not None}
        if "stall" in given and "total" in given and given["stall"] > given["total"]:
            reader.add(fields["stall"], f"{value.path}.stall must not be longer than total ({given['total']:g} s)")
        limits[name] = given
    return limits


def read_levels_named(
    reader: Reader, node: Node, axes: Mapping[str, Mapping[str, Level]], *, beside: str | None = None
) -> dict[str, str]:
    """`{nccl: tuned}`: axes and their levels, both known. A key `beside` them is somebody else's."""
    named: dict[str, str] = {}
    for axis, value in reader.mapping(node).items():
        if axis == beside:
            continue
        if axis not in axes:
            reader.add(node.keys[axis], f"unknown axis '{axis}' in {node.path}{did_you_mean(axis, axes)}")
            continue
        level = reader.text(value, wanted=f"the name of a level of axis {axis}")
        if level is None:
            continue
        if level in axes[axis]:
            named[axis] = level
        else:
            close = did_you_mean(level, axes[axis])
            reader.add(value, f"{value.path}: axis {axis} has no level '{level}'{close}")
    return named


def read_floors(
    reader: Reader,
    node: Node | None,
    *,
    vocabulary: Vocabulary,
    axes: Mapping[str, Mapping[str, Level]],
    loads: Collection[str],
) -> tuple[Floor, ...]:
    """One Floor for each metric of each entry."""
    floors: list[Floor] = []
    for entry in reader.items(node) if node is not None else ():
        fields = reader.fields(entry, ("when", "load", *METRICS), required=("load",))
        when = read_when(reader, fields.get("when"), vocabulary)
        load = reader.one_of(fields.get("load"), (*BUILTIN_LOADS, *loads))
        metrics = [METRICS[key] for key in fields if key in METRICS]
        if not metrics and entry.fields is not None:
            reader.add(entry, f"{entry.path} names no metric; known: {', '.join(METRICS)}")
        for metric in metrics:
            floor = _floor(reader, fields[metric.name], metric, when=when, load=load or "", axes=axes)
            if floor is not None:
                floors.append(floor)
    return tuple(floors)


def _floor(
    reader: Reader,
    node: Node,
    metric: Metric,
    *,
    when: Predicate,
    load: str,
    axes: Mapping[str, Mapping[str, Level]],
) -> Floor | None:
    """`{at-least: N, unit}`, `{at-least-ratio: R, of}` or `{at-least-of-history: R, last}`; latencies: `at-most`."""
    bound = metric.bound
    forms = {bound: ("unit",), f"{bound}-ratio": ("of",), f"{bound}-of-history": ("last",)}
    given = [key for key in reader.mapping(node) if key in forms]
    other = "at-most" if metric.higher else "at-least"
    wrong_way = [key for key in reader.mapping(node) if key.startswith(other)]
    for key in wrong_way:
        better = "more" if metric.higher else "less"
        reader.add(
            node.keys[key], f"{node.path}: {better} {metric.name} is better, so write '{key.replace(other, bound)}'"
        )
    if node.fields is not None and not wrong_way and len(given) != 1:
        reader.add(node, f"{node.path} must have exactly one of {', '.join(forms)}")
    if len(given) != 1 or wrong_way:
        return None
    form = given[0]
    fields = reader.fields(node, (form, *forms[form]), required=(form, *forms[form]))
    number = reader.number(fields.get(form))
    of: dict[str, str] | None = None
    last = 0
    if form == bound:
        unit = reader.text(fields.get("unit"))
        if unit is not None and unit != metric.unit:
            reader.add(fields["unit"], f"{node.path}.unit: {metric.name} is in {metric.unit}, not '{unit}'")
    elif form == f"{bound}-ratio":
        of = _reference(reader, fields.get("of"), axes)
    else:
        last = reader.whole(fields.get("last"), least=1) or 0
    if number is None:
        return None
    return Floor(
        when=when,
        load=load,
        metric=metric,
        limit=number if form == bound else None,
        ratio=number if form == f"{bound}-ratio" else None,
        of=of,
        history_ratio=number if last else None,
        history_last=last,
        where=node.where,
    )


def _reference(reader: Reader, node: Node | None, axes: Mapping[str, Mapping[str, Level]]) -> dict[str, str] | None:
    """`baseline` (None), or levels that differ from the cell's own."""
    if node is None or node.text == "baseline":
        return None
    if node.fields:
        return read_levels_named(reader, node, axes)
    reader.wrong(node, "'baseline', or a mapping of axes to levels")
    return None
