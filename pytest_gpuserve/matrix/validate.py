"""`gpuserve validate`: what no single file can know of itself, over all matrices and known-bad lists at once."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime
from itertools import combinations
from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet

from pytest_gpuserve.engine.flags import canonical_fact
from pytest_gpuserve.matrix.consistency import concrete_archs
from pytest_gpuserve.matrix.expand import levels_for
from pytest_gpuserve.matrix.judged import check_floors
from pytest_gpuserve.matrix.known_bad import read_known_bad
from pytest_gpuserve.matrix.modelspecs import Shapes, property_names, shipped_shapes
from pytest_gpuserve.matrix.sample import sample_of
from pytest_gpuserve.matrix.satisfy import find_cell, sets
from pytest_gpuserve.matrix.schema import read_matrix
from pytest_gpuserve.matrix.walk import Reader, did_you_mean
from pytest_gpuserve.matrix.when import FIXED_FACTS, describe
from pytest_gpuserve.model.predicate import Predicate
from pytest_gpuserve.model.versions import admits

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from pytest_gpuserve.errors import Problem
    from pytest_gpuserve.matrix.source import Node
    from pytest_gpuserve.matrix.types import Matrix
    from pytest_gpuserve.model.knownbad import Expectation, KnownBad

__all__ = ["validate"]

_SIGN = re.compile(r"\s*(<=|>=|==|!=|<|>)\s*(.*?)\s*")


def validate(
    matrix_paths: Iterable[Path],
    known_bad_paths: Sequence[Path],
    *,
    beside: Iterable[Path] = (),
    today: date | None = None,
    shapes: Shapes | None = None,
) -> list[Problem]:
    """Every problem of these files and between them, in file order; warnings are marked as such.

    Beside what loading refuses: entries that name unknown axes, levels, models or properties; entries that match no
    cell of any matrix, whatever its strategy; levels that fit no model (warning); floors that are never judged (a
    warning where another strategy makes the cells); entries past `review-by` at `today` (warning) or that overlap
    (warning). What needs all matrices is not asked while one of them cannot be read.

    `beside` are matrices that the entries may be about too, and that are not asked about themselves.
    """
    shapes = shapes or shipped_shapes()
    reader = Reader()
    matrices = []
    sound = True
    others = [read_matrix(path, shapes=shapes)[0] for path in beside]
    for path in matrix_paths:
        matrix, problems = read_matrix(path, shapes=shapes)
        reader.problems += problems
        sound &= matrix is not None
        if matrix is not None:
            matrices.append(matrix)
            _check_matrix(reader, matrix)
            check_floors(reader, matrix)
    entries, problems = read_known_bad(known_bad_paths)
    reader.problems += problems
    day = today or datetime.now(UTC).date()
    for entry, node in entries:
        if entry.review_by and date.fromisoformat(entry.review_by) < day:
            what = f"{entry.id} was to be reviewed by {entry.review_by}: see whether it still fails, then move the date"
            reader.add(node.fields["review-by"] if node.fields else node, what, warning=True)
        if sound and matrices and None not in others:
            every = [*matrices, *(other for other in others if other is not None)]
            _check_entry(reader, entry, node, every, property_names(shapes))
    for (one, _), (other, node) in combinations(entries, 2):
        _check_overlap(reader, one, other, node, matrices)
    return sorted(set(reader.problems))


def _check_matrix(reader: Reader, matrix: Matrix) -> None:
    fitting = set()
    for arch in concrete_archs(matrix):
        for model in matrix.models.values():
            fitting |= {str(level) for levels in levels_for(matrix, model, arch).values() for level in levels}
    for levels in matrix.axes.values():
        for level in levels.values():
            if str(level) not in fitting:
                what = f"level {level} fits no model of this matrix: it needs {describe(level.when)}"
                reader.add(level.where, what, warning=True)


def _check_entry(
    reader: Reader, entry: KnownBad, node: Node, matrices: Sequence[Matrix], properties: Sequence[str]
) -> None:
    assert node.fields is not None
    when = node.fields["when"]
    before = len(reader.problems)
    axes: dict[str, set[str]] = {}
    for matrix in matrices:
        for axis, levels in matrix.axes.items():
            axes.setdefault(axis, set()).update(levels)
    models = {name for matrix in matrices for name in matrix.models}
    places = {canonical_fact(written): where for written, where in when.keys.items()}
    for term in entry.when.terms:
        place = places[term.name]
        known: Iterable[str] = ()
        if term.name == "model":
            known = models
        elif term.name in axes:
            known = axes[term.name]
        elif term.name.startswith("model."):
            names = [f"model.{name}" for name in properties]
            if term.name not in names:
                reader.add(place, f"{entry.id}: no model has '{term.name}'{did_you_mean(term.name, names)}")
        elif "." not in term.name and term.name not in FIXED_FACTS:
            reader.add(place, f"{entry.id}: no matrix has an axis '{term.name}'{did_you_mean(term.name, sorted(axes))}")
        for wanted in term.wanted:
            sign = _SIGN.fullmatch(wanted)
            name = sign.group(2) if sign else wanted
            if known and name not in known and (sign is None or sign.group(1) in ("==", "!=")):
                what = "no matrix has a model" if term.name == "model" else f"no axis '{term.name}' has a level"
                reader.add(place, f"{entry.id}: {what} '{name}'{did_you_mean(name, sorted(known))}")
    if len(reader.problems) == before and not any(find_cell(matrix, entry.when) for matrix in matrices):
        unset = [
            name
            for name in entry.when.names
            if name.startswith(("flag.", "env.")) and not any(sets(matrix, name) for matrix in matrices)
        ]
        why = f": nothing sets {', '.join(unset)}" if unset else f": nothing has {describe(entry.when)}"
        reader.add(node, f"{entry.id} matches no cell of any matrix{why}")


def _check_overlap(reader: Reader, one: KnownBad, other: KnownBad, node: Node, matrices: Sequence[Matrix]) -> None:
    """Warns where one failure of one cell would be as both entries say."""
    if not _may_be_same(one.expect, other.expect) or not _versions_meet(one, other):
        return
    both = Predicate(one.when.terms + other.when.terms)
    cell = next((found for matrix in matrices if (found := find_cell(matrix, both)) is not None), None)
    if cell is not None:
        first = max((one, other), key=lambda entry: entry.specificity)
        what = f"{other.id} and {one.id} ({one.where}) expect the same failure of {cell}; {first.id} would explain it"
        reader.add(node, what, warning=True)


def _may_be_same(one: Expectation, other: Expectation) -> bool:
    if one.kind is not other.kind or (one.phases and other.phases and not set(one.phases) & set(other.phases)):
        return False
    return _fits(one, other) or _fits(other, one)


def _fits(one: Expectation, other: Expectation) -> bool:
    """True if the shortest text that `one` expects is also as `other` expects."""
    text = one.match if one.match is not None else sample_of(one.match_re) if one.match_re is not None else None
    if text is None:
        return one.match_re is None or one.match_re == other.match_re
    if other.match is not None:
        return other.match in text
    return other.match_re is None or re.search(other.match_re, text, re.MULTILINE) is not None


def _versions_meet(one: KnownBad, other: KnownBad) -> bool:
    """True unless a distribution that both bound has no version in both ranges."""
    return all(
        any(
            admits(range_, version) and admits(other.versions[name], version)
            for version in _around(range_, other.versions[name])
        )
        for name, range_ in one.versions.items()
        if name in other.versions
    )


def _around(*ranges: str) -> Iterable[str]:
    """Versions at, just above and just below each bound: if two ranges meet at all, they meet at one of these."""
    yield from ("0.dev0", "999999")
    for range_ in ranges:
        for specifier in SpecifierSet(range_):
            version = specifier.version.removesuffix(".*")
            yield from (version, f"{version}.0.1")
            if re.fullmatch(r"[\d.]+", version):
                yield from (f"{version}.dev0", f"{version}.post1")
                head, _, last = version.rpartition(".")
                if int(last) > 0:
                    yield f"{head}.{int(last) - 1}.999" if head else f"{int(last) - 1}.999"
