"""What a shape is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Shape"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One shipped model. `layers` is the default number of layers; `attention` is what `model.attention` reads.

    `quantizations` are those its weights can be made in ("none" is bf16); the first one is the default, as the model
    is served. `cut` says what a mini changes.
    """

    name: str
    title: str
    source: str
    attention: str
    layers: int
    config: Mapping[str, Any]
    moe: bool = False
    cut: tuple[str, ...] = ()
    quantizations: tuple[str, ...] = ("none",)
    extra: Mapping[str, str] = field(default_factory=dict)
