"""`when:` of matrices, known-bad entries, floors, scenarios and the `gpu_cells` marker: one predicate for all.

`{axis: level, flag.attention-backend: [a, b], gpus: ">1"}`: every term must hold. A term's value is one value, a list
of values (any of them), or a comparison as text. A fact that the cell does not have makes the term false.
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
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

    def holds(self, facts: Mapping[str, object]) -> bool:
        """True if the fact exists and equals, or compares with, one of the alternatives."""
        if self.name not in facts:
            return False
        actual = facts[self.name]
        return any(self._one(wanted, actual) for wanted in self.wanted)

    def _one(self, wanted: str, actual: object) -> bool:
        comparison = _COMPARISON.fullmatch(wanted)
        if comparison:
            sign, bound = comparison.groups()
            try:
                return _OPERATORS[sign](float(_text(actual)), float(bound))
            except ValueError:
                equal = _text(actual) == bound
                return equal if sign == "==" else not equal if sign == "!=" else False
        if self.name == "arch":
            return matches_arch(wanted, _text(actual))
        return _text(actual) == wanted


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
        return all(term.holds(facts) for term in self.terms)

    @property
    def names(self) -> tuple[str, ...]:
        """The facts it names, in the order written."""
        return tuple(term.name for term in self.terms)


ALWAYS = Predicate()
