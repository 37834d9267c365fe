"""Loads that a test of the user's asks for and that cannot be: told at once, and blamed on nobody else."""

from __future__ import annotations

TESTS = """
import pytest

@pytest.mark.parametrize("changes", [{"windows": 0}, {"rate": -1}, {"cell": 3}, {"output": 20_000}], ids=str)
def test_it(load, changes):
    load("single-stream", **changes)
"""


def test_a_load_that_cannot_be_names_the_field_and_what_it_may_be(project) -> None:
    project.file("test_mine.py", TESTS)
    result = project.run("test_mine.py", "-k", "baseline")
    assert result.code == 1
    for told in (
        "single-stream.windows must be a whole number of at least 1, got 0",
        "single-stream.rate must be a number above zero, got -1",
        "single-stream has no field 'cell'. The fields of a load are concurrency, input",
        "load single-stream[output=20000]: input 128 + output 20000 = 20128 tokens, and the server takes at most 16382",
    ):
        assert told in result.text
    assert "wrong-output" not in result.text
