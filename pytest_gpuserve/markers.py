"""The markers, once: `TABLE` registers them and says which keywords they take. An unknown keyword is an error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable

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


def throughput_floors(node: pytest.Item, load: str) -> tuple[Floor, ...]:
    """The floors that the test's `throughput_floor` marks set for the load of that name; fails on a wrong mark."""
    floors = []
    for mark in node.iter_markers("throughput_floor"):
        args, given = arguments(mark)
        file, line, _ = node.location
        floor = _floor(args, given, load, file=file, line=(line or 0) + 1)
        if given.get("load", load) == load:
            floors.append(floor)
    return tuple(floors)


def _floor(args: tuple[Any, ...], given: dict[str, Any], load: str, *, file: str, line: int) -> Floor:
    # Only imported where a mark is used: this module is loaded by every pytest run.
    from pytest_gpuserve.errors import Where
    from pytest_gpuserve.matrix.types import METRICS, Floor
    from pytest_gpuserve.model.predicate import ALWAYS

    def wrong(what: str) -> None:
        pytest.fail(f"@pytest.mark.throughput_floor {what}: {TABLE['throughput_floor'].signature}", pytrace=False)

    metric = METRICS.get(args[0]) if args and isinstance(args[0], str) else None
    if metric is None:
        wrong(f"wants one of {', '.join(METRICS)} first, not {args!r}")
    assert metric is not None
    word = metric.bound.replace("-", "_")
    forms = [name for name in ("at_least", "at_most", "ratio") if name in given]
    if len(forms) != 1 or forms[0] not in (word, "ratio"):
        wrong(f"for {metric.name} takes exactly one of {word} and ratio")
    number = given[forms[0]]
    if isinstance(number, bool) or not isinstance(number, (int, float)) or number <= 0:
        wrong(f"wants a number above 0 for {forms[0]}, not {number!r}")
    of = given.get("of")
    if (forms[0] == "ratio") != (of is not None) or not (of is None or of == "baseline" or isinstance(of, dict)):
        wrong('takes of="baseline" or of={axis: level} with ratio, and only with it')
    relative = forms[0] == "ratio"
    return Floor(
        when=ALWAYS,
        load=load,
        metric=metric,
        limit=None if relative else float(number),
        ratio=float(number) if relative else None,
        of=of if isinstance(of, dict) else None,
        where=Where(file, line),
    )
