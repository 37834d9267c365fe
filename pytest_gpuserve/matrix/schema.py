"""Matrix files: read with every problem at once, each with its place and what was probably meant."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpuserve.matrix.consistency import check
from pytest_gpuserve.matrix.floors import read_floors, read_levels_named, read_limits, read_loads
from pytest_gpuserve.matrix.modelspecs import Shapes, property_names, read_models, shipped_shapes
from pytest_gpuserve.matrix.settings import read_name, read_settings
from pytest_gpuserve.matrix.types import STRATEGIES, Exclude, Floor, Include, Level, Load, Matrix
from pytest_gpuserve.matrix.walk import Reader, did_you_mean
from pytest_gpuserve.matrix.when import FIXED_FACTS, Vocabulary, read_arch, read_ranges, read_when

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from pathlib import Path

    from pytest_gpuserve.errors import Problem
    from pytest_gpuserve.matrix.source import Node
    from pytest_gpuserve.model.cell import ModelSpec

__all__ = ["Floor", "Level", "Load", "Matrix", "load_matrix", "read_matrix", "vocabulary_of"]

_KEYS = (
    "schema",
    "arch",
    "title",
    "defaults",
    "models",
    "axes",
    "baseline",
    "strategy",
    "include",
    "exclude",
    "loads",
    "limits",
    "floors",
)
_LEVEL_KEYS = ("flags", "env", "when", "requires", "note")
# Facts that are no axes: an axis of that name could not be told from them in a `when`. `gpu` is a scenario's.
_RESERVED = frozenset({*FIXED_FACTS, "gpu", "when", "reason", "load"})

_Axes = dict[str, dict[str, Level]]


def load_matrix(path: Path, *, shapes: Shapes | None = None) -> Matrix:
    """The matrix of a file. FileProblems with every problem in it.

    `shapes` are the model shapes it may name, by default the shipped ones.
    """
    reader = Reader()
    matrix = _read(reader, path, shapes or shipped_shapes())
    reader.finish()
    assert matrix is not None  # finish() raised otherwise
    return matrix


def read_matrix(path: Path, *, shapes: Shapes | None = None) -> tuple[Matrix | None, tuple[Problem, ...]]:
    """As `load_matrix`, with the problems handed back: the matrix only if there are none (warnings aside)."""
    reader = Reader()
    matrix = _read(reader, path, shapes or shipped_shapes())
    sound = all(problem.warning for problem in reader.problems)
    return (matrix if sound else None), tuple(sorted(set(reader.problems)))


def _read(reader: Reader, path: Path, shapes: Shapes) -> Matrix | None:
    root = reader.open(path)
    if root is None:
        return None
    fields = reader.fields(root, _KEYS, required=("arch", "models"))
    defaults = reader.fields(fields["defaults"], ("flags", "env")) if "defaults" in fields else {}
    settings = read_settings(reader, defaults, first=True)
    # What null takes away was reported: nothing stands before the defaults.
    flags = {name: value for name, value in settings.flags.items() if value is not None}
    env = {name: value for name, value in settings.env.items() if value is not None}
    models = read_models(reader, fields.get("models"), shapes)
    axes, whens = _read_axes(reader, fields.get("axes"))
    vocabulary = _vocabulary(models, axes, flags=flags, env=env, properties=property_names(shapes))
    axes = _with_whens(reader, axes, whens, vocabulary)
    loads = read_loads(reader, fields.get("loads"))
    matrix = Matrix(
        name=path.stem,
        path=path,
        archs=_read_archs(reader, fields.get("arch")),
        title=reader.text(fields.get("title")) or "",
        flags=flags,
        env=env,
        models=models,
        axes=axes,
        baseline=_read_baseline(reader, root, fields.get("baseline"), axes),
        strategy=reader.one_of(fields.get("strategy"), STRATEGIES) or STRATEGIES[0],
        include=tuple(_read_includes(reader, fields.get("include"), models, axes)),
        exclude=tuple(_read_excludes(reader, fields.get("exclude"), vocabulary)),
        loads=loads,
        limits=read_limits(reader, fields.get("limits")),
        floors=read_floors(reader, fields.get("floors"), vocabulary=vocabulary, axes=axes, loads=loads),
        places=settings.places,
    )
    check(reader, matrix)
    return matrix


def vocabulary_of(matrix: Matrix) -> Vocabulary:
    """What a `when` about this matrix may name, for `scenario.load_scenario`."""
    properties = {name: None for model in matrix.models.values() for name in model.properties}
    properties |= dict.fromkeys(property_names(shipped_shapes()))
    return _vocabulary(matrix.models, matrix.axes, flags=matrix.flags, env=matrix.env, properties=properties)


def _vocabulary(
    models: Mapping[str, ModelSpec],
    axes: Mapping[str, Mapping[str, Level]],
    *,
    flags: Iterable[str],
    env: Iterable[str],
    properties: Iterable[str],
) -> Vocabulary:
    """What a `when` of this matrix may name: a flag or variable that nothing here sets could never hold."""
    levels = [level for named in axes.values() for level in named.values()]
    owners: list[ModelSpec | Level] = [*models.values(), *levels]
    all_flags = [*flags, *(name for owner in owners for name in owner.flags)]
    all_env = [*env, *(name for owner in owners for name in owner.env)]
    values: dict[str, Collection[str] | None] = {axis: tuple(named) for axis, named in axes.items()}
    values |= {"arch": None, "gpus": None, "model": tuple(models)}
    values |= {f"model.{name}": None for name in properties}
    values |= {f"flag.{name}": None for name in all_flags}
    values |= {f"env.{name}": None for name in all_env}
    return Vocabulary(values)


def _read_archs(reader: Reader, node: Node | None) -> tuple[str, ...]:
    archs = []
    for item in reader.one_or_more(node) if node is not None else ():
        text = reader.text(item, wanted="an arch or a list of them")
        if text is not None and read_arch(reader, item, text):
            if text in archs:
                reader.add(item, f"{item.path}: {text} is given twice")
            archs.append(text)
    return tuple(archs)


def _read_axes(reader: Reader, node: Node | None) -> tuple[_Axes, dict[tuple[str, str], Node]]:
    """The axes, and the `when` of each level that has one, to be read once everything it may name is known."""
    axes: _Axes = {}
    whens: dict[tuple[str, str], Node] = {}
    for axis, levels in reader.mapping(node).items() if node is not None else ():
        assert node is not None
        if axis in _RESERVED:
            reader.add(node.keys[axis], f"'{axis}' cannot be the name of an axis: it already means something in `when`")
            continue
        if not read_name(reader, node, axis, "an axis", dots=False):
            continue
        if levels.fields == {}:
            reader.wrong(levels, "a mapping with at least one level")
        axes[axis] = {}
        for name, value in reader.mapping(levels).items():
            if not read_name(reader, levels, name, f"a level of axis {axis}"):
                continue
            if value.is_scalar and value.value is None:
                reader.add(value, f"{value.path} is empty: write {{}} for a level that sets nothing")
                continue
            fields = reader.fields(value, _LEVEL_KEYS)
            settings = read_settings(reader, fields)
            axes[axis][name] = Level(
                axis=axis,
                name=name,
                flags=settings.flags,
                env=settings.env,
                places=settings.places,
                requires=read_ranges(reader, fields.get("requires")),
                note=reader.text(fields.get("note")),
                where=levels.keys[name],
            )
            if "when" in fields:
                whens[axis, name] = fields["when"]
    return axes, whens


def _with_whens(reader: Reader, axes: _Axes, whens: Mapping[tuple[str, str], Node], vocabulary: Vocabulary) -> _Axes:
    for (axis, name), node in whens.items():
        axes[axis][name] = replace(axes[axis][name], when=read_when(reader, node, vocabulary))
    return axes


def _read_baseline(reader: Reader, root: Node, node: Node | None, axes: _Axes) -> dict[str, str]:
    if node is None:
        if axes:
            reader.add(root, "the file lacks the key 'baseline': it names the known-good level of every axis")
        return {}
    named = read_levels_named(reader, node, axes)
    for axis, levels in axes.items():
        if axis not in (node.fields or {}) and node.fields is not None:
            reader.add(node, f"baseline names no level of axis {axis}; it has {', '.join(levels) or 'none'}")
    return named


def _read_includes(
    reader: Reader, node: Node | None, models: Mapping[str, ModelSpec], axes: _Axes
) -> Iterable[Include]:
    for entry in reader.items(node) if node is not None else ():
        fields = dict(reader.mapping(entry))
        model_node = fields.pop("model", None)
        chosen = []
        for item in reader.one_or_more(model_node) if model_node is not None else ():
            name = reader.text(item, wanted="the name of a model")
            if name is not None and name not in models:
                reader.add(item, f"{item.path}: unknown model '{name}'{did_you_mean(name, models)}")
            elif name is not None:
                chosen.append(name)
        if not fields and entry.fields is not None:
            reader.add(entry, f"{entry.path} names no axis: the baseline is a cell already")
        named = read_levels_named(reader, entry, axes, beside="model") if entry.fields is not None else {}
        yield Include(
            models=tuple(chosen) if model_node is not None else tuple(models),
            axes=named,
            named=model_node is not None,
            where=entry.where,
        )


def _read_excludes(reader: Reader, node: Node | None, vocabulary: Vocabulary) -> Iterable[Exclude]:
    for entry in reader.items(node) if node is not None else ():
        fields = reader.fields(entry, ("when", "reason"), required=("when", "reason"))
        when = read_when(reader, fields.get("when"), vocabulary)
        reason = reader.text(fields.get("reason"))
        if "when" in fields and fields["when"].fields == {}:
            reader.add(fields["when"], f"{entry.path}.when is empty: that would exclude every cell")
        yield Exclude(when=when, reason=reason or "", where=entry.where)
