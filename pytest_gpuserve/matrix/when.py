"""Reads `when:` and version ranges, which matrices, known-bad lists and scenarios share."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name

from pytest_gpuserve.engine.flags import canonical_fact
from pytest_gpuserve.matrix.walk import did_you_mean
from pytest_gpuserve.model.arch import is_arch
from pytest_gpuserve.model.predicate import Predicate, Term
from pytest_gpuserve.model.versions import is_version

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from pytest_gpuserve.matrix.source import Node
    from pytest_gpuserve.matrix.walk import Reader

__all__ = [
    "FIXED_FACTS",
    "PREFIXES",
    "Vocabulary",
    "describe",
    "read_arch",
    "read_ranges",
    "read_when",
    "version_of",
]

FIXED_FACTS = ("arch", "gpus", "model")
PREFIXES = ("model.", "flag.", "env.")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")
_DISTRIBUTION = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_FAMILY = re.compile(r"sm\d{1,2}x")
_COMPARISON = re.compile(r"\s*(<=|>=|==|!=|<|>)\s*(.*?)\s*")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The facts that a `when` may name. `values` lists a fact's possible values, None where any value may occur.

    Without `closed`, any axis, flag or variable may be named (a list for matrices it does not know).
    """

    values: Mapping[str, Collection[str] | None] = field(default_factory=dict)
    closed: bool = True


OPEN = Vocabulary(closed=False)


def read_when(reader: Reader, node: Node | None, vocabulary: Vocabulary = OPEN) -> Predicate:
    """The predicate of a `when:` mapping; what it cannot mean is reported."""
    if node is None:
        return Predicate()
    terms = []
    spellings: dict[str, str] = {}
    for written, value in reader.mapping(node).items():
        # A flag has one name here, whichever of its spellings the file has.
        name = canonical_fact(written)
        if not _known(reader, node, written, name, vocabulary):
            continue
        if (first := spellings.setdefault(name, written)) != written:
            line = node.keys[first].line
            reader.add(node.keys[written], f"{node.path}: '{written}' and '{first}' (line {line}) are one flag: {name}")
            continue
        known = vocabulary.values.get(name)
        wanted = tuple(
            text for item in reader.one_or_more(value) if (text := _value(reader, name, item, known)) is not None
        )
        if wanted:
            terms.append(Term(name, wanted))
    return Predicate(tuple(terms))


def _known(reader: Reader, node: Node, written: str, name: str, vocabulary: Vocabulary) -> bool:
    where = node.keys[written]
    if name in vocabulary.values or name in FIXED_FACTS:
        return True
    if name.startswith("flag.-"):
        reader.add(where, f"unknown fact '{name}' in {node.path}: write flags without dashes in front")
        return False
    if vocabulary.closed:
        close = did_you_mean(name, [*vocabulary.values, *FIXED_FACTS])
        reader.add(where, f"unknown fact '{name}' in {node.path}{close}")
        return False
    prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), "")
    if "." in name and (not prefix or name == prefix):
        close = did_you_mean(name.partition(".")[0] + ".", PREFIXES)
        reader.add(
            where, f"unknown fact '{name}' in {node.path}: an axis, arch, gpus, model, or model.*, flag.*, env.*{close}"
        )
        return False
    if not prefix and not _NAME.fullmatch(name):
        reader.add(where, f"'{name}' in {node.path} cannot be an axis' name")
        return False
    return True


def _value(reader: Reader, name: str, node: Node, known: Collection[str] | None) -> str | None:
    """One wanted value as the predicate's text: numbers of flags in one spelling, everything else as written."""
    if node.style == ">":
        reader.add(node, f'{node.path}: a comparison must be quoted, as in ">1"')
        return None
    text = reader.text(node, wanted="a value or a list of values")
    if text is None:
        return None
    if isinstance(node.value, bool):
        text = text.lower()
    elif isinstance(node.value, (int, float)) and (name == "gpus" or name.startswith("flag.")):
        text = str(node.value)
    comparison = _COMPARISON.fullmatch(text)
    sign, bound = comparison.groups() if comparison else ("", text)
    if comparison and (not bound or (sign in ("<", "<=", ">", ">=") and not _is_number(bound))):
        reader.add(node, f"{node.path}: '{text}' compares with no number")
    elif name == "gpus" and not _is_number(bound):
        reader.add(node, f"{node.path} must be a number or a comparison with one, got '{text}'")
    elif name == "arch":
        return text if read_arch(reader, node, bound) else None
    elif known is not None and sign in ("", "==", "!=") and bound not in known:
        reader.add(node, f"{node.path}: unknown value '{bound}'{did_you_mean(bound, known)}")
    else:
        return text
    return None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def read_arch(reader: Reader, node: Node, text: str) -> str | None:
    """An arch or a family of them; `blackwell` and the like are told apart from it."""
    if is_arch(text) or _FAMILY.fullmatch(text):
        return text
    hint = ": write sm and the compute capability (sm90, sm100, sm120), a family (sm10x, sm12x), or cpu"
    if text.lower() in ("blackwell", "hopper", "ada", "ampere"):
        hint = f": {text} is a marketing name for several different archs{hint.replace(':', ';', 1)}"
    reader.add(node, f"{node.path}: '{text}' is not an arch{hint}")
    return None


def describe(predicate: Predicate) -> str:
    """As it would be written: `gpus: >1, model.attention: mla or gqa`."""
    return ", ".join(f"{term.name}: {' or '.join(term.wanted)}" for term in predicate.terms) or "always"


def read_ranges(reader: Reader, node: Node | None) -> dict[str, str]:
    """`{sglang: ">=0.5.10"}`: distributions by canonical name (and driver, cuda, nccl), with PEP 440 ranges."""
    ranges: dict[str, str] = {}
    if node is None:
        return ranges
    for name, value in reader.mapping(node).items():
        if not _DISTRIBUTION.fullmatch(name):
            reader.add(node.keys[name], f"'{name}' in {node.path} cannot be a distribution's name")
            continue
        if value.style == ">":
            reader.add(value, f'{value.path}: a range must be quoted, as in ">=0.5.10"')
            continue
        text = reader.text(value, wanted="a quoted version range, such as '>=0.5.10'")
        if text is None:
            continue
        try:
            SpecifierSet(text)
        except InvalidSpecifier:
            hint = f"; did you mean '=={text}'?" if is_version(text) else ": write one such as '>=0.5.10,<0.6'"
            reader.add(value, f"{value.path}: '{text}' is not a version range{hint}")
            continue
        canonical = str(canonicalize_name(name))
        if canonical in ranges:
            reader.add(node.keys[name], f"{node.path} gives {canonical} twice")
        ranges[canonical] = text
    return ranges


def version_of(name: str, versions: Mapping[str, str]) -> str | None:
    """The installed version of `name`, by its canonical name; None if it is not known."""
    return versions.get(name) or versions.get(str(canonicalize_name(name))) or None
