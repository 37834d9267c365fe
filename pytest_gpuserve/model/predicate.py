"""`when:` of matrices, known-bad entries, floors, scenarios and the `gpu_cells` marker: one predicate for all.

`{axis: level, flag.attention-backend: [a, b], gpus: ">1"}`: every term must hold. A term's value is one value, a list
of values (any of them), or a comparison as text. A fact that the cell does not have makes the term false.
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytest_gpuserve.model.arch import matches_arch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["ALWAYS", "Predicate", "Term"]

_COMPARISON = re.compile(r"\s*(<=|>=|==|!=|<|>)\s*(.+?)\s*")
_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


@dataclass(frozen=True, slots=True)
class Term:
    """One `name: wanted` of a predicate; `wanted` holds the alternatives as text."""

    name: str
    wanted: tuple[str, ...]
    # `wanted` sorted once into plain values and comparisons: a run asks 20,000 cells times 100 entries.
    _values: frozenset[str] = field(init=False, repr=False, compare=False)
    _comparisons: tuple[tuple[str, str], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        found = {wanted: _COMPARISON.fullmatch(wanted) for wanted in self.wanted}
        object.__setattr__(self, "_values", frozenset(wanted for wanted, match in found.items() if match is None))
        object.__setattr__(self, "_comparisons", tuple((m[1], m[2]) for m in found.values() if m is not None))

    @property
    def values(self) -> frozenset[str]:
        """The alternatives that are values, not comparisons."""
        return self._values

    def holds(self, facts: Mapping[str, object]) -> bool:
        """True if the fact exists and equals, or compares with, one of the alternatives."""
        if self.name not in facts:
            return False
        actual = facts[self.name]
        text = actual if isinstance(actual, str) else _text(actual)
        if text in self._values:
            return True
        if self.name == "arch" and any(matches_arch(wanted, text) for wanted in self._values):
            return True
        return any(_compares(text, sign, bound) for sign, bound in self._comparisons) if self._comparisons else False


def _compares(text: str, sign: str, bound: str) -> bool:
    try:
        return _OPERATORS[sign](float(text), float(bound))
    except ValueError:
        return (text == bound) is (sign == "==") if sign in ("==", "!=") else False


@dataclass(frozen=True, slots=True)
class Predicate:
    """All terms must hold; no terms hold always."""

    terms: tuple[Term, ...] = ()

    @classmethod
    def of(cls, when: Mapping[str, object]) -> Predicate:
        """From a plain mapping of names to a value or a list of values."""
        terms = []
        for name, wanted in when.items():
            values = wanted if isinstance(wanted, (list, tuple)) else (wanted,)
            terms.append(Term(name, tuple(_text(value) for value in values)))
        return cls(tuple(terms))

    def matches(self, facts: Mapping[str, object]) -> bool:
        """True if every term holds for `facts` (see `cell.facts_of`)."""
        for term in self.terms:  # noqa: SIM110 - twice as fast as all(), and asked 2 million times a run
            if not term.holds(facts):
                return False
        return True

    @property
    def names(self) -> tuple[str, ...]:
        """The facts it names, in the order written."""
        return tuple(term.name for term in self.terms)


ALWAYS = Predicate()
