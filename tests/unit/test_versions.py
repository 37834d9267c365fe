"""Versions: every one lies on exactly one side of a bound, and a build without one orders with nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from pytest_gpuserve.engine.version import release
from pytest_gpuserve.model.versions import TakenFor, admits, commit_of, counted, orderable, unversioned
from pytest_gpuserve.report.describe import bounded, retirements

NUMBERS = st.integers(0, 12).map(str)
VERSIONS = st.builds(
    lambda head, suffix: ".".join(head) + suffix,
    st.lists(NUMBERS, min_size=2, max_size=4).filter(lambda head: any(part not in "01" for part in head)),
    st.sampled_from(["", "rc1", "rc2", "a1", ".dev0", ".dev7+g1a2b3c", ".post1", ".post2.dev1", "+cu130"]),
)


@given(VERSIONS, VERSIONS)
def test_every_version_is_on_exactly_one_side_of_a_bound(bound: str, version: str) -> None:
    bound = Version(bound).public
    assert admits(f"<{bound}", version) is not admits(f">={bound}", version)
    assert admits(f"<={bound}", version) is not admits(f">{bound}", version)
    assert admits(f"=={bound}", version) is not admits(f"!={bound}", version)
    assert admits(f"<{bound}", version) is (Version(Version(version).public) < Version(bound))


@pytest.mark.parametrize(
    ("range_", "version", "holds"),
    [
        ("<0.5.23", "0.5.23rc1", True),
        (">=0.5.23", "0.5.23rc1", False),
        (">=0.5.10,<0.5.23", "0.5.23rc1", True),
        ("<0.5.23", "0.5.23.dev120+g1a2b3c4", True),
        (">0.5.10", "0.5.10.post1", True),
        ("<=0.5.10", "0.5.10.post1", False),
        (">0.5.10", "0.5.10+cu130", False),
        ("<=0.5.10", "0.5.10+cu130", True),
        ("==0.5.*", "0.5.23rc1", True),
        ("~=0.5.10", "0.5.23", True),
        ("~=0.5.10", "0.6", False),
        # Newer than every release, whatever its number.
        (">=0.5.9", "0.0.0.dev1+gdce8b0606", True),
        ("<0.5.9", "0.0.0.dev1+gdce8b0606", False),
        (">=0.5.9", "0.1.dev7+gdce8b0606.d20261201", True),
        ("==0.5.*", "0.1.dev7", False),
        (">=0.5.9", "a-branch", False),
        ("<0.5.9", "a-branch", False),
    ],
)
def test_ranges(range_: str, version: str, holds: bool) -> None:
    assert admits(range_, version) is holds


@pytest.mark.parametrize(
    ("version", "commit"),
    [
        ("0.0.0.dev1+gdce8b0606", "dce8b0606"),
        ("0.0.0.dev0", ""),
        ("0.0.0", ""),
        ("0+unknown", ""),
        ("0.1.dev7+g1a2b3c4", "1a2b3c4"),
        ("0.1.dev1+cu130.g1a2b3c4.d20261201", "1a2b3c4"),
    ],
)
def test_builds_without_a_version(version: str, commit: str) -> None:
    assert unversioned(version)
    assert commit_of(version) == commit
    assert release(version) > (9, 9, 9)


@pytest.mark.parametrize(
    "version", ["0.5.23", "0.5.24.dev3+g1a2b3c4", "0.1.0", "0.1.1.dev3", "0.0.1", "0.10.dev1", "0.1"]
)
def test_small_versions_are_versions(version: str) -> None:
    assert not unversioned(version)


def test_what_a_build_is_taken_for_counts() -> None:
    versions = {"sglang": "0.0.0.dev1+g1a2b3c4", "torch": "2.13.0"}
    taken = {"sglang": TakenFor(version="0.5.24.dev0", reason="--gpu-version")}
    assert counted(versions, taken) == {"sglang": "0.5.24.dev0", "torch": "2.13.0"}
    assert counted(versions, {"sglang": TakenFor(version=None, reason="r")}) == versions
    record = {"versions": versions, "driver": {"driver": "580.95"}}
    assert orderable(record) == {"torch": "2.13.0", "driver": "580.95"}
    record["taken_for"] = {name: one.to_json() for name, one in taken.items()}
    assert orderable(record) == {"sglang": "0.5.24.dev0", "torch": "2.13.0", "driver": "580.95"}


def test_a_bound_of_compare_leaves_no_gap_for_a_release_candidate() -> None:
    spec = bounded(">=0.5.10", "0.5.23", "0.5.22")
    assert spec == ">=0.5.10,<0.5.23"
    assert admits(spec, "0.5.23rc1") is not admits(">=0.5.23", "0.5.23rc1")


@pytest.mark.parametrize(
    ("taken", "edit"),
    [
        (None, "bound it by hand, with the first release that has the fix: sglang 0.0.0.dev1+g1a2b3c4 orders with no"),
        ("0.5.24.dev0", 'versions: {sglang: ">=0.5.10,<0.5.24.dev0"}'),
    ],
)
def test_the_edit_that_retires_an_entry_is_no_bound_by_a_build_without_a_version(taken: str | None, edit: str) -> None:
    known = {"id": "KB-1", "versions": {"sglang": ">=0.5.10"}}
    run = {
        "versions": {"sglang": "0.0.0.dev1+g1a2b3c4"},
        "taken_for": {"sglang": {"version": taken, "reason": "r", "commit": "1a2b3c4"}},
        "cells": [{"id": "c", "outcome": "xpassed", "known_bad": known}],
    }
    (retirement,) = retirements(run)
    assert retirement.edit.startswith(edit)
