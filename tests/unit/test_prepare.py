"""From settings to a plan, on a machine that is only told of."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_gpuserve.errors import UsageError
from pytest_gpuserve.manager import prepare as preparing
from pytest_gpuserve.manager.machine import Machine
from pytest_gpuserve.manager.prepare import SIMULATED_VERSIONS, prepare, require_locks
from pytest_gpuserve.manager.weights import draft_path
from pytest_gpuserve.model.gpu import Gpu
from pytest_gpuserve.model.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

MATRIX = """schema: 1
arch: [sm120]
models: {m: {shape: tiny-llama}}
axes:
  a: {old: {}, new: {flags: {x: 1}, requires: {driver: ">=580", cuda: ">=13"}}}
baseline: {a: old}
"""
KNOWN_BAD = """schema: 1
entries:
  - id: MINE
    when: {flag.x: 1}
    versions: {driver: ">=580"}
    expect: {kind: hang}
    issue: https://github.com/sgl-project/sglang/issues/1
"""


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`planned(driver, …)`: the plan of a small matrix on a machine with these versions of its driver's."""
    (tmp_path / "matrices").mkdir()
    (tmp_path / "matrices/tiny.yaml").write_text(MATRIX)
    (tmp_path / "matrices/known_bad.yaml").write_text(KNOWN_BAD)
    gpu = Gpu(index=0, uuid="GPU-1", name="a GPU", arch="sm120", memory_total=None)

    def planned(driver: dict[str, str], *, pretended: dict[str, str] | None = None, **asked):
        monkeypatch.setattr(preparing.machines, "machine_of", lambda _: Machine(gpus=(gpu,), driver=driver))
        monkeypatch.setattr(preparing, "_versions", lambda _: SIMULATED_VERSIONS)
        settings = Settings(rootdir=tmp_path, report=tmp_path / "report", matrix=("tiny",), **asked)
        return prepare(settings, **({} if pretended is None else {"pretended": pretended}))

    return planned


NEW = "sm120-m-a.new"


@pytest.mark.parametrize(
    ("driver", "reason"),
    [
        ("580.95.05", None),
        ("570.1", "level a.new needs driver>=580, installed is 570.1"),
        (None, "level a.new needs driver>=580: the version of driver is not known"),
        ("SIMULATED", "level a.new needs driver>=580: its version here, 'SIMULATED', cannot be compared"),
    ],
)
def test_a_level_may_require_a_driver(planned, driver: str | None, reason: str | None) -> None:
    """The CUDA that the environment brings counts before the driver's."""
    plan = planned({"cuda": "12.4"} | ({"driver": driver} if driver else {}))
    assert {cell.id: cell.not_applicable for cell in plan.cells} == {"sm120-m-baseline": None, NEW: reason}
    assert (NEW in plan.entries) is (reason is None)


def test_a_preflight_goes_by_the_driver_that_it_pretends(planned) -> None:
    """Its answer is the same on every machine; the record still says what this one has."""
    for driver in ({}, {"driver": "570.1"}):
        plan = planned(driver, preflight=True)
        assert plan.by_id[NEW].not_applicable is None
        assert NEW in plan.entries
        assert dict(plan.driver) == driver
    plan = planned({"driver": "580.95.05"}, preflight=True, pretended={"driver": "570.1"})
    assert plan.by_id[NEW].not_applicable == "level a.new needs driver>=580, installed is 570.1"


def test_a_plan_skips_what_this_machine_cannot_hold_unless_it_has_no_such_gpu(planned, tmp_path, monkeypatch) -> None:
    (tmp_path / "matrices/tiny.yaml").write_text(
        "schema: 1\narch: [sm120]\nmodels: {m: {shape: tiny-llama, gpus: 2}}\n"
    )
    (cell,) = planned({}, plan=True).cells
    assert cell.not_applicable == "needs 2 sm120 GPUs, 1 here"
    settings = Settings(rootdir=tmp_path, report=tmp_path / "report", matrix=("tiny",), plan=True)
    monkeypatch.setattr(preparing.machines, "machine_of", lambda _: Machine(without="no GPU"))
    (cell,) = prepare(settings).cells
    assert cell.not_applicable is None


def test_a_plan_without_an_sglang_says_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_) -> None:
        raise UsageError("python has no SGLang")

    monkeypatch.setattr("pytest_gpuserve.serve.environment.read_versions", none)
    settings = Settings(rootdir=tmp_path, report=tmp_path / "report", matrix=("cpu",), plan=True)
    with pytest.raises(UsageError, match=r"has no SGLang; a plan for the versions of the simulation: add --gpu-sim"):
        prepare(settings)


def test_only_what_leases_gpus_needs_a_lock_directory(planned, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for asked in ({"plan": True}, {"preflight": True}):
        require_locks(planned({}, lock_dir=tmp_path / "file", **asked))
        require_locks(planned({}, lock_dir=tmp_path / "made", **asked))
    assert not (tmp_path / "made").exists()
    with pytest.raises(UsageError, match="is not a directory"):
        require_locks(planned({}, lock_dir=tmp_path / "file"))
    require_locks(planned({}, lock_dir=tmp_path / "made"))
    assert (tmp_path / "made").is_dir()


DRAFTS = """schema: 1
arch: [sm120]
models: {m: {path: {target}, optional: true}}
axes:
  spec: {off: {}, eagle: {flags: {speculative-algorithm: EAGLE3, speculative-draft-model-path: {draft}}}}
baseline: {spec: off}
"""


def test_a_draft_model_of_an_optional_model_is_as_optional(planned, tmp_path: Path) -> None:
    target, draft = tmp_path / "target", tmp_path / "draft"
    target.mkdir()
    matrix = DRAFTS.replace("{target}", str(target)).replace("{draft}", str(draft))
    (tmp_path / "matrices/tiny.yaml").write_text(matrix)
    (tmp_path / "matrices/known_bad.yaml").unlink()
    found = {cell.id: cell.not_applicable for cell in planned({}).cells}
    reason = f"the draft model {draft} of the optional model m is not on this machine (nothing is downloaded)"
    assert found == {"sm120-m-baseline": None, "sm120-m-spec.eagle": reason}
    draft.mkdir()
    assert {cell.not_applicable for cell in planned({}).cells} == {None}


def test_a_draft_model_that_is_asked_for_and_missing_is_named(planned, tmp_path: Path) -> None:
    matrix = (
        DRAFTS.replace("{target}", str(tmp_path)).replace("{draft}", "/nowhere/draft").replace(", optional: true", "")
    )
    (tmp_path / "matrices/tiny.yaml").write_text(matrix)
    (tmp_path / "matrices/known_bad.yaml").unlink()
    cell = planned({}).by_id["sm120-m-spec.eagle"]
    assert cell.not_applicable is None
    with pytest.raises(UsageError, match=r"the draft model /nowhere/draft .* is not on this machine"):
        draft_path(cell, simulated=False)
    assert draft_path(cell, simulated=True) == "/nowhere/draft"


# -- builds without a version ------------------------------------------------------------------------------------------

DEV = "0.0.0.dev1+gdce8b0606"
RANGES = """schema: 1
arch: [sm120]
models: {m: {shape: tiny-llama}}
axes:
  a:
    old: {}
    new: {flags: {x: 1}, requires: {sglang: ">=0.5.9"}}
    gone: {flags: {y: 1}, requires: {sglang: "<0.5.20"}}
baseline: {a: old}
"""


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planned):
    """`built(sglang, …)`: the plan of a matrix with ranges, for an environment whose SGLang calls itself that."""
    monkeypatch.setattr(preparing.builds, "origin_of", lambda *_: None)
    (tmp_path / "matrices/tiny.yaml").write_text(RANGES)
    (tmp_path / "matrices/known_bad.yaml").write_text(KNOWN_BAD.replace('driver: ">=580"', 'sglang: ">=0.5.10"'))

    def built(sglang: str, *version: tuple[str, str]):
        planned({})
        monkeypatch.setattr(preparing, "_versions", lambda _: SIMULATED_VERSIONS | {"sglang": sglang})
        return prepare(Settings(rootdir=tmp_path, report=tmp_path / "report", matrix=("tiny",), version=version))

    return built


def skipped(plan) -> list[str]:
    return [cell.id.removeprefix("sm120-m-") for cell in plan.cells if cell.not_applicable]


def test_a_build_without_a_version_is_newer_than_every_release_and_named(built) -> None:
    """Compared as a version it would be older than all of them: half of a matrix would be skipped, in silence."""
    plan = built(DEV)
    assert skipped(plan) == ["a.gone"]
    assert NEW in plan.entries, "a range without an upper end holds"
    assert plan.versions["sglang"] == plan.version("sglang") == DEV
    (remark,) = plan.remarks
    assert remark == (
        f"sglang {DEV} is a build without a version, commit dce8b0606: it is taken for newer than every release "
        "(--gpu-version sglang=VERSION says otherwise)"
    )


def test_a_build_without_a_version_is_taken_for_what_is_said(built) -> None:
    plan = built(DEV, ("sglang", "0.5.9"))
    assert skipped(plan) == []
    assert NEW not in plan.entries
    assert (plan.versions["sglang"], plan.version("sglang")) == (DEV, "0.5.9")
    assert plan.remarks == (
        f"sglang {DEV} is a build without a version, commit dce8b0606: it is taken for 0.5.9 (--gpu-version)",
    )


def test_a_build_of_a_checkout_is_taken_for_its_newest_tag(built, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(preparing.builds, "origin_of", lambda *_: tmp_path)
    monkeypatch.setattr(preparing.builds, "newest_tag", lambda _: ("0.5.19", "abcdef123"))
    plan = built("0.0.0")
    assert skipped(plan) == []
    (remark,) = plan.remarks
    assert remark == (
        "sglang 0.0.0 is a build without a version, commit abcdef123: it is taken for 0.5.19 "
        f"(the newest tag of its checkout {tmp_path})"
    )
    assert built(DEV, ("sglang", "0.5.21")).version("sglang") == "0.5.21"


def test_what_is_said_of_a_build_that_has_a_version_is_not_used(built) -> None:
    """As where one environment variable is set for the development build and for a release beside it."""
    plan = built("0.5.23", ("sglang", "0.5.9"))
    assert plan.version("sglang") == "0.5.23"
    assert plan.remarks == ("--gpu-version sglang=0.5.9 is not used: sglang 0.5.23 has a version of its own",)


def test_a_version_for_what_is_not_there(built) -> None:
    with pytest.raises(UsageError, match=r"--gpu-version sglnag=1: .* has no sglnag; did you mean 'sglang'"):
        built(DEV, ("sglnag", "1"))
    with pytest.raises(UsageError, match="says sglang=1 and sglang=2: give one of them"):
        built(DEV, ("sglang", "1"), ("sglang", "2"))


def test_a_plan_says_that_most_cells_are_skipped_for_one_reason(built, tmp_path: Path) -> None:
    assert skipped(built("0.5.6")) == ["a.new"]
    assert built("0.5.6").remarks == ()
    (tmp_path / "matrices/tiny.yaml").write_text(RANGES.replace('"<0.5.20"', '">=0.5.20"'))
    assert built("0.5.6").remarks == ("2 of 3 cells are skipped for one reason: they need another sglang than 0.5.6",)
