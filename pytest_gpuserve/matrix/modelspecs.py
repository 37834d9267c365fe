"""Reads a matrix' `models`: shipped shapes, or models at a local path."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from pytest_gpuserve.matrix.settings import read_name, read_settings
from pytest_gpuserve.matrix.walk import did_you_mean
from pytest_gpuserve.matrix.when import read_ranges
from pytest_gpuserve.model.cell import ModelSpec

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from pytest_gpuserve.matrix.source import Node
    from pytest_gpuserve.matrix.walk import Reader

__all__ = ["Shapes", "property_names", "read_models", "shipped_shapes"]

_KEYS = ("shape", "layers", "path", "gpus", "min-memory-gib", "optional", "requires", "flags", "env")
_PROPERTIES = ("attention", "quantization")


class Shapes(Protocol):
    """The shipped shapes, as `models.shapes` has them."""

    def names(self) -> tuple[str, ...]:
        """All of them."""
        ...

    def properties(self, shape: str) -> Mapping[str, str]:
        """What predicates see as `model.NAME`."""
        ...


def shipped_shapes() -> Shapes:
    """The shapes of this package."""
    from pytest_gpuserve.models import shapes

    return shapes


def property_names(shapes: Shapes) -> tuple[str, ...]:
    """Every `model.NAME` there can be: attention, quantization, and what the shipped shapes have beside."""
    return tuple(dict.fromkeys([*_PROPERTIES, *(key for name in shapes.names() for key in shapes.properties(name))]))


def read_models(reader: Reader, node: Node | None, shapes: Shapes) -> dict[str, ModelSpec]:
    """The models by name. A model at a path may state any property that shapes have (`attention`, `moe`, …)."""
    models: dict[str, ModelSpec] = {}
    if node is None:
        return models
    properties = property_names(shapes)
    if not reader.mapping(node) and node.fields is not None:
        reader.wrong(node, "a mapping with at least one model")
    for name, value in reader.mapping(node).items():
        named = read_name(reader, node, name, "a model")
        spec = replace(_read_model(reader, name, value, shapes, properties), where=node.keys[name])
        if named:
            models[name] = spec
    return models


def _read_model(reader: Reader, name: str, node: Node, shapes: Shapes, properties: Collection[str]) -> ModelSpec:
    fields = reader.fields(node, (*_KEYS, *properties))
    shape = reader.text(fields.get("shape"))
    path = reader.text(fields.get("path"))
    if node.fields is not None and ("shape" in fields) == ("path" in fields):
        reader.add(node, f"{node.path} must have exactly one of shape, path")
    if shape is not None and shape not in shapes.names():
        reader.add(fields["shape"], f"{node.path}.shape: unknown shape '{shape}'{did_you_mean(shape, shapes.names())}")
        shape = None
    if path is not None:
        for key in ("layers",):
            if key in fields:
                reader.add(
                    node.keys[key], f"{node.path}.{key} is for models with a shape: those at a path are as they are"
                )
    elif "optional" in fields:
        reader.add(node.keys["optional"], f"{node.path}.optional is for models with a path: a shape can always be made")
    settings = read_settings(reader, fields)
    return ModelSpec(
        name=name,
        shape=shape,
        path=path,
        layers=reader.whole(fields.get("layers"), least=1),
        gpus=reader.whole(fields.get("gpus"), least=1) or 1,
        min_memory_gib=reader.number(fields.get("min-memory-gib"), positive=False) or 0.0,
        optional=reader.boolean(fields.get("optional")),
        flags=settings.flags,
        env=settings.env,
        places=settings.places,
        requires=read_ranges(reader, fields.get("requires")),
        properties=_properties(reader, fields, shapes.properties(shape) if shape else {}, properties),
    )


def _properties(
    reader: Reader, fields: Mapping[str, Node], of_shape: Mapping[str, str], known: Collection[str]
) -> dict[str, str]:
    """The shape's own, and what the file states. Only a quantization may be stated anew: weights can be made in it."""
    properties = dict(of_shape)
    for key in known:
        text = reader.text(fields.get(key))
        if text is None:
            continue
        if isinstance(fields[key].value, bool):
            text = text.lower()
        if key != "quantization" and properties.get(key, text) != text:
            reader.add(fields[key], f"{fields[key].path}: the shape has {key} '{properties[key]}', not '{text}'")
            continue
        properties[key] = text
    return properties
