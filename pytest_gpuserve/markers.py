"""The markers, once: `TABLE` registers them and says which keywords they take. An unknown keyword is an error."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_gpuserve.errors import Where
    from pytest_gpuserve.matrix.types import Floor

__all__ = ["TABLE", "Marker", "arguments", "gpus_wanted", "register", "throughput_floors"]


@dataclass(frozen=True, slots=True)
class Marker:
    """One marker. `keywords` None means: checked elsewhere (`gpu_cells` takes the names of axes).

    `positional` is how many arguments without a name it takes.
    """

    name: str
    signature: str
    help: str
    keywords: frozenset[str] | None = frozenset()
    positional: int = 0


TABLE: dict[str, Marker] = {
    marker.name: marker
    for marker in (
        Marker(
            "gpu_cells",
            'gpu_cells(attention="triton", …)',
            "run the test only in cells where all of these hold; names and values as in the matrix files' `when` "
            '(a list means any of them; gpus=">1" compares; dotted names as **{"model.attention": "mla"})',
            keywords=None,
        ),
        Marker(
            "throughput_floor",
            "throughput_floor(metric, at_least=…, at_most=…, ratio=…, of=…, load=…)",
            "what every `load(…)` of the test (or the one named) must reach: `at_least` or `at_most` in the metric's "
            'unit, or `ratio` times what the cell `of` ("baseline", or a dict of axes to levels) reached',
            keywords=frozenset({"at_least", "at_most", "ratio", "of", "load"}),
            positional=1,
        ),
        Marker("gpus", "gpus(n)", "how many GPUs the fixture `gpus` leases; default: the cell's", positional=1),
    )
}


def register(config: pytest.Config) -> None:
    """Make the markers known to `--markers` and `--strict-markers`."""
    for marker in TABLE.values():
        config.addinivalue_line("markers", f"{marker.signature}: {marker.help}")


def arguments(mark: pytest.Mark) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of one of our marks; fails the collection with what is wrong about them."""
    marker = TABLE[mark.name]
    if len(mark.args) > marker.positional:
        expected = f"{marker.positional} argument without a name" if marker.positional else "only named arguments"
        pytest.fail(f"@pytest.mark.{mark.name} takes {expected}: {marker.signature}", pytrace=False)
    if marker.keywords is not None:
        unknown = sorted(set(mark.kwargs) - marker.keywords)
        if unknown:
            pytest.fail(
                f"@pytest.mark.{mark.name} knows no keyword {', '.join(unknown)}: {marker.signature}", pytrace=False
            )
    return mark.args, dict(mark.kwargs)


def gpus_wanted(marks: Iterable[pytest.Mark], default: int) -> int:
    """How many GPUs `gpus` should lease: the closest `gpus(n)`, else `default`."""
    for mark in marks:
        args, _ = arguments(mark)
        if len(args) != 1 or not isinstance(args[0], int) or isinstance(args[0], bool) or args[0] < 1:
            pytest.fail(f"@pytest.mark.gpus takes one whole number of at least 1, not {args!r}", pytrace=False)
        return int(args[0])
    return default


def throughput_floors(node: pytest.Item, *, inherited: bool = True) -> tuple[Floor, ...]:
    """The floors that `throughput_floor` marks set for the test, those of its class and module too unless told not to.

    The load of one that holds for every load is "". Fails on a wrong mark.
    """
    return tuple(
        _floor(owner, mark)
        for owner, mark in node.iter_markers_with_node("throughput_floor")
        if inherited or owner is node
    )


def _floor(owner: Any, mark: pytest.Mark) -> Floor:
    # Only imported where a mark is used: this module is loaded by every pytest run.
    from math import isfinite

    from pytest_gpuserve.matrix.types import METRICS, Floor
    from pytest_gpuserve.model.predicate import ALWAYS

    def wrong(what: str) -> None:
        pytest.fail(f"@pytest.mark.throughput_floor {what}: {TABLE['throughput_floor'].signature}", pytrace=False)

    args, given = arguments(mark)
    metric = METRICS.get(args[0]) if args and isinstance(args[0], str) else None
    if metric is None:
        wrong(f"wants one of {', '.join(METRICS)} first, not {args!r}")
    assert metric is not None
    word = metric.bound.replace("-", "_")
    forms = [name for name in ("at_least", "at_most", "ratio") if name in given]
    if len(forms) != 1 or forms[0] not in (word, "ratio"):
        wrong(f"for {metric.name} takes exactly one of {word} and ratio")
    number = given[forms[0]]
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not isfinite(number) or number <= 0:
        wrong(f"wants a number above 0 for {forms[0]}, not {number!r}")
    of = given.get("of")
    relative = forms[0] == "ratio"
    if relative != (of is not None) or not (of is None or of == "baseline" or _names_levels(of)):
        wrong('takes of="baseline" or of={"axis": "level"} with ratio, and only with it')
    load = given.get("load", "")
    if not isinstance(load, str) or ("load" in given and not load):
        wrong(f"wants the name of a load, not {load!r}")
    return Floor(
        when=ALWAYS,
        load=load,
        metric=metric,
        limit=None if relative else float(number),
        ratio=float(number) if relative else None,
        of=of if isinstance(of, dict) else None,
        where=_where(owner, mark),
    )


def _names_levels(of: object) -> bool:
    return isinstance(of, dict) and bool(of) and all(isinstance(word, str) for pair in of.items() for word in pair)


def _where(owner: Any, mark: pytest.Mark) -> Where:
    """The mark's own line; that of its test, class or module where the source does not show it."""
    from pytest_gpuserve.errors import Where

    file, line, _ = owner.location if isinstance(owner, pytest.Item) else (owner.nodeid.partition("::")[0], 0, "")
    obj = getattr(owner, "obj", None)
    try:
        start, lines = _lines(getattr(obj, "__func__", obj), mark.name)
    except (OSError, SyntaxError, TypeError):  # the source is not to be had
        return Where(file, (line or 0) + 1)
    # Not among them: the mark of a parameter or a base class, or one that goes by another name.
    return Where(file, next((line for one, line in lines if one == mark), start))


@cache
def _lines(obj: Any, name: str) -> tuple[int, list[tuple[pytest.Mark, int]]]:
    """Where `obj` begins, and its own marks of that name, each with its line; none if the source shows others."""
    import ast
    import inspect
    from textwrap import dedent

    text, first = inspect.getsourcelines(inspect.unwrap(obj))
    tree = ast.parse(dedent("".join(text)))
    scope: Any = tree if inspect.ismodule(obj) else tree.body[0]
    body = [] if inspect.isfunction(obj) else scope.body
    lists = [one.value for one in body if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "pytestmark"]
    # Decorators apply from the bottom up.
    shown = [
        *(mark for one in lists for mark in getattr(one, "elts", [one])),
        *getattr(scope, "decorator_list", ())[::-1],
    ]
    calls = [one for one in shown if isinstance(one, ast.Call) and ast.unparse(one.func).endswith(f"mark.{name}")]
    # A module's source begins at line 0.
    shift = max(first, 1) - 1
    own = vars(obj).get("pytestmark", [])
    marks: list[Any] = [getattr(one, "mark", one) for one in (own if isinstance(own, (list, tuple)) else [own])]
    mine = [mark for mark in marks if mark.name == name]
    lines = [call.lineno + shift for call in calls]
    return getattr(scope, "lineno", 1) + shift, list(zip(mine, lines, strict=True)) if len(mine) == len(lines) else []
