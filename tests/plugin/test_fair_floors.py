"""Floors that compare with another cell compare what is comparable, and what cannot be judged is never hidden."""

from __future__ import annotations

LOADS = """
loads:
  small: {concurrency: 2, input: 16, output: 64, windows: 3}
floors:
"""
STEADY = "- {when: {}, then: {tokens-per-second: 400}}\n"
BOTH = """
  - when: {attention: flashinfer}
    load: small
    output_throughput: {at-least-ratio: 0.7, of: baseline}
  - when: {graphs: off}
    load: small
    output_throughput: {at-least-ratio: 0.7, of: baseline}
"""


def floors(project, text: str) -> None:
    file = project.path / "matrices" / "tiny.yaml"
    file.write_text(file.read_text() + LOADS + text)


def speed(cell: dict, test: str = "") -> dict:
    (row,) = [
        row for row in cell["measurements"] if row["metric"] == "output_throughput" and row["test"].endswith(test)
    ]
    return row


def test_a_slow_gpu_is_not_blamed_on_the_cell_that_ran_there(project) -> None:
    """Two equal cells, one of them on a GPU of half the speed: the baseline is started there too, and compared."""
    floors(project, BOTH)
    result = project.run("-n", "2", rules=f"{STEADY}- {{when: {{gpu: 1}}, then: {{slow: 2}}}}")
    assert result.code == 0, result.text
    baseline = result.cells["baseline"]
    deltas = [result.cells["attention.flashinfer"], result.cells["graphs.off"]]
    assert {speed(cell)["verdict"] for cell in deltas} == {"ok"}
    (elsewhere,) = [cell for cell in deltas if cell["gpus"] != baseline["gpus"]]
    assert speed(elsewhere)["median"] < 0.6 * speed(baseline)["median"]
    assert elsewhere["telemetry"]["small"]["beside"] == {"sm120-m-baseline": 1}
    assert "sm120-m-baseline ran on other GPUs" in speed(elsewhere)["note"]
    assert "and was started on these too" in speed(elsewhere)["note"]
    (log,) = (result.folder / elsewhere["folder"]).glob("sm120-m-baseline-*.log")
    assert "server_args=" in log.read_text()


EQUAL = """
  - when: {attention: flashinfer}
    load: small
    output_throughput: {at-least-ratio: 1.0, of: baseline}
"""


def test_a_lucky_start_of_the_reference_does_not_make_its_equal_slow(project) -> None:
    """Starts of one thing differ by 12 %: the baseline's first was the lucky one."""
    floors(project, EQUAL)
    # In turns: baseline; flashinfer; baseline, flashinfer; baseline, flashinfer.
    project.speeds(112, 100, 100.5, 101, 101.5, 100.8, noise=(1, 0.999, 1.001))
    result = project.run("-k", "baseline or flashinfer", rules=STEADY)
    assert result.code == 0, result.text
    cell = result.cells["attention.flashinfer"]
    row = speed(cell)
    assert (row["verdict"], row["starts"]) == ("inconclusive", [3, 3, 3])
    assert cell["telemetry"]["small"]["beside"] == {"sm120-m-baseline": 2}
    assert "(3 starts of sm120-m-baseline)" in row["note"]
    assert cell["server_starts"] == 3
    assert result.checks["attention.flashinfer", "clean-shutdown"] == "passed"
    assert result.cells["baseline"]["server_starts"] == 1


def test_a_reference_that_cannot_be_started_there_is_said(project) -> None:
    """On the other GPU the baseline crashes: nothing can be said of the cell that ran there, and it is not failed."""
    floors(project, BOTH)
    crash = "- {when: {gpu: 1, attention: triton, graphs: on}, then: {crash: {phase: weights, text: boom}}}"
    result = project.run("-n", "2", "-rs", rules=f"{STEADY}- {{when: {{gpu: 1}}, then: {{slow: 2}}}}\n{crash}")
    assert result.code == 0, result.text
    baseline = result.cells["baseline"]
    (elsewhere,) = [
        cell
        for cell in (result.cells["attention.flashinfer"], result.cells["graphs.off"])
        if cell["gpus"] != baseline["gpus"]
    ]
    row = speed(elsewhere)
    assert row["verdict"] == "inconclusive"
    assert "sm120-m-baseline could not be started on these GPUs: " in row["note"]
    assert "on 2 starts against 0 starts of sm120-m-baseline on these GPUs" in row["note"]
    assert result.checks[elsewhere["id"].removeprefix("sm120-m-"), "clean-shutdown"] == "passed"


FLOOR = """
  - when: {attention: triton, graphs: on}
    load: small
    output_throughput: {at-least: 100000, unit: tok/s}
"""


def test_a_users_load_of_the_same_name_does_not_hide_what_the_check_found(project) -> None:
    floors(project, FLOOR)
    project.file("test_mine.py", "def test_mine(load): assert load('small')['output_throughput'].median > 1")
    project.file("pytest.ini", "[pytest]\ntestpaths = .\n")
    result = project.run("-k", "baseline", rules=STEADY)
    cell = result.cells["baseline"]
    assert cell["failure"]["kind"] == "slow", result.text
    assert result.checks["baseline", "test_mine"] == "passed"
    assert speed(cell, "test_mine.py::test_mine")["verdict"] == "recorded"
    assert [row["verdict"] for row in cell["measurements"] if row["floor"]] == ["below-floor"]
    assert set(cell["telemetry"]) == {"small", "small (test_mine.py::test_mine)"}
    requests = cell["telemetry"]["small"]["requests"]
    assert requests["sent"] == requests["completed"] + requests["cancelled"] > 0


def test_every_reason_is_visible_and_none_hides_another(project) -> None:
    """Output that is not checked comes first, and is no reason to say nothing of the floor."""
    history = "  - {when: {}, load: small, output_throughput: {at-least-of-history: 0.8, last: 2}}\n"
    floors(project, history)
    file = project.path / "matrices" / "tiny.yaml"
    file.write_text(file.read_text().replace("triton: {flags: {", "triton: {flags: {load-format: dummy, "))
    result = project.run("-k", "baseline", rules=STEADY)
    reason = result.cells["baseline"]["reason"]
    assert "output not checked" in reason, result.text
    assert "inconclusive: small: output_throughput cannot be judged: no history" in reason
