"""Load profiles: what they may be, and which are the same measurement."""

from __future__ import annotations

from math import inf, nan

import pytest

from pytest_gpuserve.errors import UsageError
from pytest_gpuserve.matrix.types import BUILTIN_LOADS
from pytest_gpuserve.measure.profile import BUILT_IN, LoadProfile, changed, refuse_too_long

SMALL = LoadProfile(name="small", concurrency=2, input=16, output=32, windows=3)


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("windows", 0, "a whole number of at least 1, got 0"),
        ("windows", "3", "a whole number of at least 1, got '3'"),
        ("windows", 2.5, "a whole number of at least 1, got 2.5"),
        ("windows", None, "a whole number of at least 1, got nothing"),
        ("concurrency", 0, "a whole number of at least 1, got 0"),
        ("concurrency", True, "a whole number of at least 1, got True"),
        ("concurrency", [2], "a whole number of at least 1, got [2]"),
        ("input", -1, "a whole number of at least 1, got -1"),
        ("output", 0, "a whole number of at least 1, got 0"),
        ("prefix", -1, "a whole number of at least 0, got -1"),
        ("prefix", 99, "shorter than input (16)"),
        ("rate", 0, "a number above zero, got 0"),
        ("rate", -1, "a number above zero, got -1"),
        ("rate", inf, "a number above zero, got 'inf'"),
        ("rate", nan, "a number above zero, got 'nan'"),
        ("rate", True, "a number above zero, got True"),
        ("timeout", 0, "a number above zero, got 0"),
        ("timeout", "10", "a number above zero, got '10'"),
    ],
    ids=str,
)
def test_what_a_load_cannot_be_is_told_with_its_range(field: str, value: object, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        changed(SMALL, {field: value})
    assert f"small.{field} must be {told}" in str(caught.value)
    assert "concurrency, input, output, prefix, rate, windows, timeout" in str(caught.value)


@pytest.mark.parametrize("name", ["nosuch", "name", "cell", "method"])
def test_a_field_there_is_not(name: str) -> None:
    with pytest.raises(UsageError, match=rf"small has no field '{name}'.*fields of a load are concurrency, input"):
        changed(SMALL, {name: 3})


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(
        UsageError, match=r"windows must be.*; small\.rate must be|rate must be.*; small\.windows must be"
    ):
        changed(SMALL, {"rate": 0, "windows": 0})


def test_what_a_load_can_be() -> None:
    found = changed(SMALL, {"windows": 1, "rate": 2.5, "timeout": 5, "prefix": 15})
    assert found.name == "small[prefix=15,rate=2.5,timeout=5,windows=1]".replace(",", ", ")
    assert (found.windows, found.rate, found.timeout, found.prefix, found.concurrency) == (1, 2.5, 5, 15, 2)
    assert changed(found, {"rate": None}).rate is None
    assert changed(SMALL, {}) is SMALL
    assert changed(BUILT_IN["batch"], {"windows": 3}).name == "batch[windows=3]"
    assert tuple(BUILT_IN) == BUILTIN_LOADS


def test_the_same_rate_is_the_same_method_however_it_is_written() -> None:
    assert changed(SMALL, {"rate": 4}).method == changed(SMALL, {"rate": 4.0}).method != SMALL.method
    assert changed(SMALL, {"rate": 4}).name == changed(SMALL, {"rate": 4.0}).name == "small[rate=4]"


def test_a_method_without_a_rate_is_what_it_was() -> None:
    """Histories hold it."""
    assert BUILT_IN["single-stream"].method == "02976724890c"


def test_a_window_of_an_open_loop_is_what_arrives_in_two_seconds() -> None:
    assert [LoadProfile(name="o", concurrency=64, rate=rate).window_requests for rate in (100, 4.2, 1)] == [200, 9, 8]
    assert LoadProfile(name="c", concurrency=64).window_requests == 64


def test_what_is_longer_than_the_context_is_refused() -> None:
    """SGLang's own bound: its scheduler keeps two tokens, and would cut the answer short."""
    refuse_too_long(SMALL, 50)
    with pytest.raises(
        UsageError, match=r"load small: input 16 \+ output 32 = 48 tokens, .* 47.* is 49\..*shorter input"
    ):
        refuse_too_long(SMALL, 49)
