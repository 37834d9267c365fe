"""Outcomes from failures and known-bad entries: the table of DESIGN section 2."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpuserve import verdict
from pytest_gpuserve.model.failure import Failure, Kind
from pytest_gpuserve.model.knownbad import Expectation, KnownBad, Mode
from pytest_gpuserve.model.outcome import Outcome
from pytest_gpuserve.model.phase import Phase
from pytest_gpuserve.model.predicate import ALWAYS
from pytest_gpuserve.model.record import CellRecord


def entry(kind: Kind = Kind.HANG, *, name: str = "KB-1", phases: tuple[Phase, ...] = (), **more) -> KnownBad:
    match = more.pop("match", None)
    return KnownBad(id=name, when=ALWAYS, expect=Expectation(kind=kind, phases=phases, match=match), **more)


def failure(kind: Kind, phase: Phase = Phase.GRAPH_CAPTURE, text: str = "boom") -> Failure:
    return Failure.of(kind, phase, text)


FAILURES = st.builds(failure, st.sampled_from(Kind), st.sampled_from(Phase), st.sampled_from(["boom", "bang"]))
ENTRIES = st.lists(
    st.builds(
        lambda kind, phases, match, mode, confirmed, strict: entry(
            kind, phases=tuple(phases), match=match, mode=mode, confirmed=confirmed, strict=strict
        ),
        st.sampled_from(Kind),
        st.lists(st.sampled_from(Phase), max_size=2),
        st.sampled_from([None, "boom"]),
        st.sampled_from(Mode),
        st.booleans(),
        st.booleans(),
    ),
    max_size=4,
)


@given(FAILURES, ENTRIES)
def test_infra_and_leak_are_never_swallowed(found: Failure, entries: list[KnownBad]) -> None:
    outcome = verdict.of_failure(found, entries).outcome
    if found.kind is Kind.INFRA:
        assert outcome is Outcome.INFRA
    elif found.kind is Kind.LEAK:
        assert outcome is Outcome.FAILED


@given(FAILURES, ENTRIES)
def test_a_failure_is_xfailed_exactly_if_an_entry_explains_it(found: Failure, entries: list[KnownBad]) -> None:
    expected = [one for one in entries if one.mode is Mode.XFAIL]
    result = verdict.of_failure(found, entries)
    explained = any(one.expect.explains(found) for one in expected)
    assert (result.outcome is Outcome.XFAILED) == explained
    if explained:
        assert result.entry is next(one for one in expected if one.expect.explains(found))
    elif found.kind not in (Kind.INFRA, Kind.LEAK):
        assert result.outcome is (Outcome.CHANGED if expected else Outcome.FAILED)


def test_the_most_specific_entry_that_matches_the_failure_explains_it() -> None:
    wrong_phase = entry(phases=(Phase.WEIGHTS,), name="KB-specific")
    general = entry(name="KB-general")
    assert verdict.of_failure(failure(Kind.HANG), [wrong_phase, general]).entry is general


def test_changed_says_what_was_expected_and_what_came() -> None:
    found = verdict.of_failure(failure(Kind.CRASH, Phase.WEIGHTS), [entry(phases=(Phase.GRAPH_CAPTURE,))])
    assert found.outcome is Outcome.CHANGED
    assert found.reason == "expected hang in graph-capture (KB-1), was crash in weights: boom"


def test_changed_names_the_text_where_only_that_differs_and_cites_the_entry_last() -> None:
    known = entry(Kind.CRASH, match="no kernel", issue="https://example.org/1", reason="a bug")
    found = verdict.of_failure(failure(Kind.CRASH, Phase.WEIGHTS, "boom\nbang"), [known])
    assert found.reason.splitlines() == [
        "expected crash in any phase with 'no kernel' (KB-1), was crash in weights: boom",
        "bang",
        "KB-1 https://example.org/1 (a bug)",
    ]


ALL = frozenset(verdict.SHOWS)


@pytest.mark.parametrize(
    ("expects", "passed", "outcome"),
    [
        (entry(Kind.HANG, phases=(Phase.GRAPH_CAPTURE,)), {"ready"}, Outcome.XPASSED),
        (entry(Kind.HANG), {"ready"}, None),  # it may hang while serving
        (entry(Kind.HANG), ALL, Outcome.XPASSED),
        (entry(Kind.REJECTED), {"ready"}, Outcome.XPASSED),
        (entry(Kind.WRONG_OUTPUT), {"ready"}, None),  # a server that is ready says nothing about its output
        (entry(Kind.WRONG_OUTPUT), ALL, Outcome.XPASSED),
        (entry(Kind.SLOW), ALL - {"throughput"}, None),  # nothing was measured
        (entry(Kind.HANG, mode=Mode.SKIP), ALL, None),
        (entry(Kind.HANG, phases=(Phase.WEIGHTS,)), set(), None),
    ],
)
def test_xpassed_needs_every_check_that_could_have_shown_it(expects, passed, outcome) -> None:
    found = verdict.of_passing(passed, [expects])
    assert (found.outcome if found else None) is outcome


@pytest.mark.parametrize("judged", [True, False])
def test_throughput_that_no_floor_judges_calls_no_slow_entry_fixed(judged: bool) -> None:
    shows = verdict.shown_by(preflight=False, judged=judged)
    assert bool(verdict.of_passing(ALL, [entry(Kind.SLOW)], shows)) is judged
    assert verdict.of_passing(ALL, [entry(Kind.HANG)], shows)


def test_a_confirmed_entry_speaks_before_a_reported_one() -> None:
    reported = entry(Kind.REJECTED, name="KB-reported", confirmed=False)
    confirmed = entry(Kind.REJECTED, name="KB-confirmed")
    assert verdict.of_passing(ALL, [reported, confirmed]).entry is confirmed
    assert verdict.of_passing(ALL, [reported]).entry is reported


@given(st.lists(st.sampled_from(Outcome)))
def test_a_cells_outcome_is_the_worst_and_blocked_only_if_nothing_else_happened(outcomes: list[Outcome]) -> None:
    result = verdict.cell_outcome(outcomes)
    order = list(Outcome)
    ran = [one for one in outcomes if one not in (Outcome.BLOCKED, Outcome.SKIPPED, Outcome.NOT_RUN)]
    if ran:
        assert result is min(ran, key=order.index)
    elif Outcome.BLOCKED in outcomes:
        assert result is Outcome.BLOCKED
    else:
        assert result is (min(outcomes, key=order.index) if outcomes else Outcome.NOT_RUN)


def test_a_launch_that_fails_as_expected_is_xfailed_although_its_other_checks_are_blocked() -> None:
    assert verdict.cell_outcome([Outcome.XFAILED, Outcome.BLOCKED, Outcome.BLOCKED]) is Outcome.XFAILED


@pytest.mark.parametrize(
    ("outcome", "kind", "control", "blocking"),
    [
        (Outcome.FAILED, Kind.CRASH, None, True),
        (Outcome.CHANGED, Kind.HANG, None, True),
        (Outcome.INFRA, Kind.INFRA, None, True),
        (Outcome.INFRA, Kind.INFRA, {"outcome": "passed"}, False),  # sick GPU; the baseline served on another
        (Outcome.FAILED, Kind.SLOW, None, False),
        (Outcome.FAILED, Kind.LEAK, None, False),
        (Outcome.FAILED, Kind.ASSERTION, None, False),
        (Outcome.XFAILED, Kind.CRASH, None, False),
        (Outcome.SKIPPED, None, None, False),
        (Outcome.PASSED, None, None, False),
        (Outcome.NOT_RUN, None, None, False),
    ],
)
def test_which_baselines_block_their_deltas(outcome, kind, control, blocking) -> None:
    record = CellRecord(id="c", arch="sm120", model="m", axes={}, outcome=outcome, control=control)
    record.failure = failure(kind) if kind else None
    assert verdict.blocks(record) is blocking


@pytest.mark.parametrize("kind", list(Kind))
def test_a_control_run_is_for_unexpected_hangs_crashes_and_ooms(kind: Kind) -> None:
    assert verdict.needs_control(failure(kind), []) is (kind in (Kind.HANG, Kind.CRASH, Kind.OOM))
    assert not verdict.needs_control(failure(kind), [entry(kind)])
