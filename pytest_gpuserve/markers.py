"""The markers, once: `TABLE` registers them and says which keywords they take. An unknown keyword is an error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["TABLE", "Marker", "arguments", "gpus_wanted", "register"]


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
