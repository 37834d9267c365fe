"""Loads that a test of the user's asks for and that cannot be: told at once, and blamed on nobody else."""

from __future__ import annotations

TESTS = """
import pytest

CHANGES = [{"windows": 0}, {"rate": -1}, {"cell": 3}, {"name": "x"}, {"output": 20_000}]

@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_it(load, changes):
    load("single-stream", **changes)

def test_typo(load):
    load("bach")
"""


def test_a_load_that_cannot_be_names_the_field_and_what_it_may_be(project) -> None:
    project.file("test_mine.py", TESTS)
    result = project.run("test_mine.py", "-k", "baseline")
    assert result.code == 1
    for told in (
        "single-stream.windows must be a whole number of at least 1, got 0",
        "single-stream.rate must be a number above zero, got -1",
        "single-stream has no field 'name'",
        "single-stream has no field 'cell'. The fields of a load are concurrency, input",
        "there is no load 'bach'; did you mean 'batch'?",
        "load single-stream[output=20000]: input 128 + output 20000 = 20128 tokens, and the server takes at most 16382",
    ):
        assert told in result.text
    assert "wrong-output" not in result.text
    assert "Traceback" not in result.text
    assert "During handling of" not in result.text
    assert ">       load(" not in result.text  # the message is all there is to see


def test_a_load_of_the_matrix_that_no_server_of_the_model_takes_is_not_blamed_on_the_server(project) -> None:
    matrix = project.path / "matrices" / "tiny.yaml"
    floor = "{when: {}, load: huge, output_throughput: {at-least: 1, unit: tok/s}}"
    matrix.write_text(
        f"{matrix.read_text()}loads: {{huge: {{concurrency: 1, input: 20000, output: 8}}}}\nfloors: [{floor}]\n"
    )
    result = project.run("-k", "baseline", rules="- {when: {}, then: {tokens-per-second: 400}}\n")
    assert result.checks["baseline", "throughput"] == "infra", result.text
    assert "load huge: input 20000 + output 8 = 20008 tokens" in result.cells["baseline"]["failure"]["message"]
    assert result.checks["baseline", "clean-shutdown"] == "passed"
