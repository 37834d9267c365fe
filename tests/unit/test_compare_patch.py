"""The patch to known_bad.yaml: what follows from a comparison, and that git takes it."""

import shutil
import subprocess
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpuserve.compare import compare
from pytest_gpuserve.compare.edit import EMPTY, KnownBadText, Uneditable, scalar
from pytest_gpuserve.compare.entry import salient
from pytest_gpuserve.compare.patch import MOST_NEW, Patch, make_patch, unified
from pytest_gpuserve.matrix.known_bad import ISSUE_PLACEHOLDER, load_known_bad, read_known_bad
from pytest_gpuserve.matrix.source import parse_yaml
from pytest_gpuserve.model.failure import Failure, Kind
from pytest_gpuserve.model.phase import Phase

GOLDEN = Path(__file__).parent / "golden"
TEXT = (GOLDEN / "known_bad.yaml").read_text()
LIST = "matrices/known_bad.yaml"
ISSUE = "issue: https://github.com/sgl-project/sglang/issues/24633"

LAYOUTS = {
    "golden": TEXT,
    "flow entries, a comment at the end": f"""\
schema: 1
entries:
- {{id: KB-0007, when: {{arch: sm120}}, expect: {{kind: hang}}, {ISSUE}}}  # one line
- {{id: KB-0012, when: {{arch: sm90}}, expect: {{kind: oom}}, {ISSUE}}}
# the end
""",
    "block versions, another key behind, no newline at the end": f"""\
entries:
    # about the first
    - expect: {{kind: hang}}
      when:
        arch: sm120
      id: KB-0007
      versions:
        # since ever
        sglang: '>=0.5.10'   # quoted otherwise
        torch: ">=2"
      {ISSUE}

    -
      id: "KB-0012"
      when: {{arch: sm90}}
      expect: {{kind: oom}}
      {ISSUE}
schema: 1""",
    "windows": TEXT.replace("\n", "\r\n"),
    "mark at the start": "\ufeff" + TEXT,
}


def git(folder: Path, *args: str, stdin: str = "") -> str:
    words = ["git", "-c", "core.autocrlf=false", "-c", "user.name=x", "-c", "user.email=x@y", *args]
    done = subprocess.run(words, cwd=folder, input=stdin.encode(), capture_output=True)
    assert done.returncode == 0, done.stderr.decode() + stdin
    return done.stdout.decode()


def applied(folder: Path, patch: str, name: str = LIST, text: str | None = TEXT) -> str:
    """What git makes of the patch in a new repository."""
    shutil.rmtree(folder / "repo", ignore_errors=True)
    repository = folder / "repo"
    repository.mkdir()
    git(repository, "init", "-q")
    if text is not None:
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_bytes(text.encode())
        git(repository, "add", ".")
    git(repository, "apply", "--check", "-", stdin=patch)
    git(repository, "apply", "--index", "-", stdin=patch)
    return (repository / name).read_bytes().decode()


def without(text: str, entry: str) -> list[str]:
    """The lines of every other entry and comment, for 'nothing else changed'."""
    document = KnownBadText(text)
    document.remove(entry)
    return document.text.splitlines()


# -- editing text ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_edit_changes_its_entry_only_and_git_takes_it(layout: str, tmp_path: Path) -> None:
    text = LAYOUTS[layout]
    for edit in ("remove", "bound", "bound-new", "add"):
        document = KnownBadText(text)
        if edit == "remove":
            document.remove("KB-0007")
            assert document.ids == ("KB-0012",)
        elif edit == "bound":
            document.bound("KB-0007", "sglang", ">=0.5.10,<0.5.23")
            assert document.versions("KB-0007")["sglang"] == ">=0.5.10,<0.5.23"
        elif edit == "bound-new":
            document.bound("KB-0012", "sglang", "<0.5.23")
            assert document.versions("KB-0012") == {"sglang": "<0.5.23"}
        else:
            document.add([{"id": f"KB-{number}", "when": "{arch: sm90}", "expect": "{kind: oom}"} for number in (1, 2)])
            assert document.ids == ("KB-0007", "KB-0012", "KB-1", "KB-2")
        patch = unified(LIST, text, document.text)
        assert applied(tmp_path, patch, text=text) == document.text
        kept = set(document.text.splitlines())
        lost = [line for line in text.splitlines() if line not in kept]
        if edit == "add":
            assert lost in ([], [text.splitlines()[-1]])
        elif edit != "remove":
            assert len(lost) <= 1, "an insertion replaces at most one line"
        assert all(line in document.text for line in text.splitlines() if line.lstrip().startswith("# about"))


def test_comments_above_an_entry_and_text_that_looks_like_one() -> None:
    document = KnownBadText(TEXT)
    document.remove("KB-0012")
    assert "# Seen on eight RTX PRO 6000." in document.text, "a comment may be about what follows"
    assert "this is text, not a comment" not in document.text
    assert document.text.endswith("# The end.\n")


def test_the_last_entry_leaves_an_empty_list_that_can_be_filled_again() -> None:
    document = KnownBadText(TEXT)
    for entry in document.ids:
        document.remove(entry)
    assert "entries: []\n" in document.text
    document.add([{"id": "KB-1", "when": "{arch: sm90}"}])
    assert document.ids == ("KB-1",)
    assert "entries:\n  - id: KB-1\n" in document.text


@pytest.mark.parametrize(
    "text",
    [
        f"schema: 1\nentries: [{{id: KB-0007, {ISSUE}}}, {{id: KB-0012}}]\n",
        "schema: 1\n",
        "schema: 1\nentries: &x []\n",
        "schema: 1\rentries: []\r",
        "a: [",
        "schema: 1\nentries:\n  - id: KB-0007\n    reason: a\u2028b\n",
    ],
)
def test_what_cannot_be_edited_by_line_is_refused(text: str) -> None:
    def edit() -> None:
        document = KnownBadText(text, "list.yaml")
        document.remove("KB-0007") if document.ids else document.add([{"id": "KB-1"}])

    with pytest.raises(Uneditable, match=r"list\.yaml"):
        edit()


@settings(max_examples=200, deadline=None)
@given(st.text() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False))
def test_a_scalar_reads_back(tmp_path_factory: pytest.TempPathFactory, value: object) -> None:
    path = tmp_path_factory.getbasetemp() / "scalar.yaml"
    if isinstance(value, str) and any(0xD800 <= ord(character) < 0xE000 for character in value):
        return
    path.write_bytes(f"value: {scalar(value)}\n".encode())
    source = parse_yaml(path)
    assert source.root is not None, source.problems
    assert source.root.fields is not None
    read = source.root.fields["value"]
    assert read.value == value or read.text == str(value)


# -- what follows from a comparison ------------------------------------------------------------------------------------


def failing(line: str, **more: Any) -> dict:
    return Failure.of(Kind.CRASH, Phase.WARMUP, line, line=line, **more).to_json()


CRASH = failing("RuntimeError: Unsupported architecture")


def cell(level: str, outcome: str, known: str = "", model: str = "m", **more: Any) -> dict:
    bad = outcome in ("failed", "xfailed", "changed")
    return {
        "id": f"sm120-{model}-{level}",
        "arch": "sm120",
        "model": model,
        "axes": {"attention": level},
        "baseline": {"attention": "triton"},
        "outcome": outcome,
        "failure": CRASH if bad else None,
        "known_bad": {"id": known} if known else None,
        "flags": {"attention-backend": level},
        "env": {},
        **more,
    }


def run(*cells: dict, sglang: str = "0.5.10.post1", **versions: str) -> dict:
    return {
        "schema": 1,
        "simulated": False,
        "complete": True,
        "started": f"2026-11-{28 + (sglang == '0.5.23')}T03:00:00Z",
        "finished": None,
        "versions": {"sglang": sglang, **versions},
        "driver": {},
        "gpus": [],
        "cells": list(cells),
        "checks": [],
    }


def patched(before: dict, after: dict, text: str | None = TEXT) -> Patch:
    return make_patch(compare(before, after), after, {LIST: text}, LIST)


def actions(patch: Patch) -> list[tuple[str, str]]:
    return [(edit.action, edit.entry) for edit in patch.edits]


def test_a_fixed_entry_is_bounded_below_the_new_version(tmp_path: Path) -> None:
    patch = patched(run(cell("a", "xfailed", "KB-0007")), run(cell("a", "xpassed", "KB-0007"), sglang="0.5.23"))
    assert actions(patch) == [("bound", "KB-0007")]
    text = applied(tmp_path, patch.text)
    assert 'versions: {sglang: ">=0.5.10,<0.5.23"}     # when the backend came' in text
    path = tmp_path / "list.yaml"
    path.write_text(text)
    assert {entry.id: entry.versions for entry in load_known_bad([path])}["KB-0007"] == {"sglang": ">=0.5.10,<0.5.23"}


def test_without_ranges_it_is_the_version_of_what_moved() -> None:
    old, new = cell("a", "xfailed", "KB-0012"), cell("a", "xpassed", "KB-0012")
    assert '+    versions: {sglang: "<0.5.23"}' in patched(run(old), run(new, sglang="0.5.23", torch="2")).text
    only_torch = patched(run(old, torch="2.11.0+cu130"), run(new, torch="2.13.0+cu130"))
    assert '+    versions: {torch: "<2.13.0"}' in only_torch.text
    two = patched(run(old, torch="2.11.0", triton="3.5"), run(new, torch="2.13.0", triton="3.6"))
    assert actions(two) == [("remove", "KB-0012")], "which of two it was cannot be told"
    assert actions(patched(run(old), run(new))) == [("remove", "KB-0012")], "nothing moved"


DEV_A, DEV_B = "0.0.0.dev1+gdce8b0606", "0.0.0.dev1+g1a2b3c4d5"


@pytest.mark.parametrize(("before", "after"), [(DEV_A, DEV_B), ("0.5.22", DEV_B), (DEV_A, "0.5.23"), (DEV_B, DEV_B)])
@pytest.mark.parametrize("known", ["KB-0007", "KB-0012"])
@pytest.mark.parametrize("outcome", ["xfailed", "xpassed"])
def test_where_the_order_is_unknown_nothing_is_removed_or_bounded(
    before: str, after: str, known: str, outcome: str
) -> None:
    """Whoever still runs a release with the bug would lose a true entry, by a version that says nothing."""
    comparison = compare(
        run(cell("a", outcome, known), sglang=before), new := run(cell("a", "xpassed", known), sglang=after)
    )
    patch = make_patch(comparison, new, {LIST: TEXT}, LIST)
    assert (patch.text, actions(patch)) == ("", [("none", known)])
    (edit,) = patch.edits
    assert "bound it by hand" in edit.why
    assert "orders with no release" in edit.why
    assert [(one.before, one.after) for one in comparison.moved] == ([] if before == after else [(before, after)])


def test_a_build_that_is_taken_for_a_version_bounds_by_it() -> None:
    old = run(cell("a", "xfailed", "KB-0007"), sglang="0.5.22")
    new = run(cell("a", "xpassed", "KB-0007"), sglang=DEV_B)
    new["taken_for"] = {"sglang": {"version": "0.5.24.dev0", "reason": "--gpu-version", "commit": "1a2b3c4d5"}}
    assert '+    versions: {sglang: ">=0.5.10,<0.5.24.dev0"}' in patched(old, new).text


def test_another_distribution_that_the_entry_names_still_bounds_it() -> None:
    text = TEXT.replace('versions: {sglang: ">=0.5.10"}', 'versions: {torch: ">=2"}')
    old = run(cell("a", "xfailed", "KB-0007"), sglang=DEV_A, torch="2.11.0")
    new = run(cell("a", "xpassed", "KB-0007"), sglang=DEV_B, torch="2.13.0")
    assert '+    versions: {torch: ">=2,<2.13.0"}' in patched(old, new, text).text


def test_a_new_entry_of_a_build_without_a_version_asks_for_the_release() -> None:
    """Not the range of what else moved: that would be blamed for it."""
    old = run(cell("a", "passed"), sglang="0.5.22", torch="2.11.0")
    patch = patched(old, run(cell("a", "failed"), sglang=DEV_B, torch="2.13.0"))
    assert "versions" not in patch.text
    assert actions(patch) == [("add", "KB-0013")]
    assert patch.edits[0].why.endswith(f"fill in its issue, and the first release that has the bug (sglang {DEV_B})")


def test_what_was_simulated_takes_no_entry_from_the_list_and_marks_what_it_adds() -> None:
    old, new = (
        run(cell("a", *a), cell("b", *b), sglang=s) | {"simulated": True}
        for a, b, s in (
            (("xfailed", "KB-0007"), ("passed",), "0.5.22"),
            (("xpassed", "KB-0007"), ("failed",), "0.5.23"),
        )
    )
    patch = patched(old, new)
    assert actions(patch) == [("none", "KB-0007"), ("add", "KB-0013")]
    assert 'source: "SIMULATED, gpuserve compare, ' in patch.text


def test_a_simulation_and_a_real_run_make_no_entry() -> None:
    old = run(cell("a", "passed"), sglang="0.5.22") | {"simulated": True}
    patch = patched(old, run(cell("a", "failed"), sglang="0.5.23"))
    assert (patch.text, actions(patch)) == ("", [("none", "what broke")])


def test_a_record_that_has_a_flag_by_another_spelling_was_launched_alike() -> None:
    old = run(cell("a", "passed", flags={"tp": 2}))
    new = run(cell("a", "passed", flags={"tp-size": 2}))
    assert not [text for text in compare(old, new).warnings if "launched with other flags" in text]
    other = compare(old, run(cell("a", "passed", flags={"tp-size": 4}))).warnings
    assert [text for text in other if "--tp-size 2 → 4" in text]


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("AssertionError: the answer is empty: assert 0 > 0", "the answer is empty: assert"),
        ("AssertionError: assert 'Paris' in 'Garbage'", "'Paris' in 'Garbage'"),
        ("AssertionError: assert 3 == 4", ""),
        ("AssertionError: ", ""),
        ("KeyError: 'meta_info'", "'meta_info'"),
    ],
)
def test_an_assertion_is_expected_by_its_text_or_not_at_all(text: str, pattern: str) -> None:
    failure = Failure.of(Kind.ASSERTION, Phase.SERVING, text).to_json()
    assert salient(failure) == pattern
    patch = patched(run(cell("a", "passed")), run(cell("a", "failed", failure=failure), sglang="0.5.23"))
    if pattern:
        assert f'kind: assertion, phase: serving, match: "{pattern}"' in patch.text
        assert "confidence: reported" in patch.text
    else:
        assert patch.text == ""
        assert [edit.why for edit in patch.edits if "its text says too little" in edit.why]


def test_a_step_back_bounds_from_below() -> None:
    patch = patched(run(cell("a", "xfailed", "KB-0012"), sglang="0.5.23"), run(cell("a", "xpassed", "KB-0012")))
    assert '+    versions: {sglang: ">0.5.10.post1"}' in patch.text


def test_an_entry_that_passed_before_too_is_removed(tmp_path: Path) -> None:
    both = [run(cell("a", "xpassed", "KB-0007"), sglang=version) for version in ("0.5.10.post1", "0.5.23")]
    patch = patched(*both)
    assert actions(patch) == [("remove", "KB-0007")]
    assert applied(tmp_path, patch.text).splitlines() == without(TEXT, "KB-0007")


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (("passed", ""), ("xfailed", "KB-0007"), "but it still fails in sm120-m-b: narrow its 'when'"),
        (("xfailed", "KB-0007"), ("infra", ""), "but sm120-m-b failed before and was not run now"),
        (("xfailed", "KB-0007"), ("changed", "KB-0007"), "but it still fails in sm120-m-b"),
    ],
)
def test_an_entry_is_kept_while_one_of_its_cells_needs_it(before: tuple, after: tuple, said: str) -> None:
    patch = patched(
        run(cell("a", "xfailed", "KB-0007"), cell("b", *before)),
        run(cell("a", "xpassed", "KB-0007"), cell("b", *after), sglang="0.5.23"),
    )
    kept = next(edit for edit in patch.edits if edit.entry == "KB-0007")
    assert kept.action == "none"
    assert said in kept.why
    assert "KB-0007" not in patch.text


def test_what_broke_gets_an_entry_that_only_lacks_its_issue(tmp_path: Path) -> None:
    good = [cell("triton", "passed"), cell("fa3", "passed")]
    models = [cell("fa3", "failed", model=model) for model in ("x", "y")]
    before = run(*good, *(cell("fa3", "passed", model=model) for model in ("x", "y")))
    after = run(cell("triton", "passed"), cell("fa3", "failed"), *models, sglang="0.5.23")
    patch = patched(before, after)
    assert actions(patch) == [("add", "KB-0013"), ("add", "KB-0014")]
    path = tmp_path / "list.yaml"
    path.write_text(applied(tmp_path, patch.text))
    _, problems = read_known_bad([path])
    assert all("is a placeholder" in problem.what for problem in problems), problems
    assert len(problems) == 2
    path.write_text(path.read_text().replace(ISSUE_PLACEHOLDER, "https://github.com/sgl-project/sglang/issues/1"))
    *_, first, second = load_known_bad([path])
    assert first.when.names == ("arch", "model", "flag.attention-backend")
    assert second.when.terms[1].wanted == ("x", "y"), "one failure of one difference is one entry"
    assert (first.versions, first.added) == ({"sglang": ">=0.5.23"}, "2026-11-29")
    assert date.fromisoformat(first.review_by) > date.fromisoformat(first.added)
    assert first.expect.explains(Failure.from_json(CRASH))
    facts = {"arch": "sm120", "model": "m", "flag.attention-backend": "fa3"}
    assert first.when.matches(facts)
    assert not first.when.matches(facts | {"flag.attention-backend": "triton"})


def test_a_new_entry_does_not_name_the_gpu_that_was_free() -> None:
    """A record's environment holds what this tool set for the start too; no cell of a matrix has that."""
    first, second = ({"CUDA_VISIBLE_DEVICES": gpu, "TMPDIR": "***", "NCCL_ALGO": "Ring"} for gpu in "01")
    good = [cell(level, "passed", env=first) for level in ("triton", "fa3")]
    bad = [cell("fa3", "failed", env=second), cell("fa4", "failed", env=second | {"NCCL_ALGO": "Tree"})]
    text = patched(run(*good, cell("fa4", "passed")), run(good[0], *bad)).text
    assert "when: {arch: sm120, model: m, flag.attention-backend: fa3}" in text
    assert "NCCL_ALGO: Tree" in text
    assert "CUDA_VISIBLE_DEVICES" not in text


def test_a_cell_of_levels_without_flags_is_named_by_them() -> None:
    off = cell("triton", "failed") | {"axes": {"attention": "triton", "graphs": "off"}, "id": "off"}
    base = {"baseline": {"attention": "triton", "graphs": "on"}}
    on = cell("triton", "passed") | {"axes": {"attention": "triton", "graphs": "on"}} | base
    before = run(on, off | base | {"outcome": "passed", "failure": None})
    assert "when: {arch: sm120, model: m, graphs: off}" in patched(before, run(on, off | base)).text.replace('"', "")
    hidden = off | base | {"env": {"MY_KEY": "***"}}
    assert "graphs: off" in patched(before, run(on, hidden)).text.replace('"', "")
    flag = off | base | {"flags": {"attention-backend": "triton", "disable-cuda-graph": True}}
    assert "flag.disable-cuda-graph: true" in patched(before, run(on, flag)).text


@pytest.mark.parametrize(("kind", "entries"), [("infra", 0), ("leak", 0), ("hang", 1), ("wrong-output", 1)])
def test_what_is_never_expected_gets_no_entry_and_what_has_no_text_no_pattern(kind: str, entries: int) -> None:
    failure = CRASH | {"kind": kind}
    after = run(cell("a", "failed", failure=failure), sglang="0.5.23")
    patch = patched(run(cell("a", "passed")), after)
    assert len(patch.edits) == entries
    assert "match:" not in patch.text


def test_a_list_that_is_not_there_is_made(tmp_path: Path) -> None:
    patch = patched(run(cell("a", "passed")), run(cell("a", "failed"), sglang="0.5.23"), text=None)
    text = applied(tmp_path, patch.text, text=None)
    assert text.startswith("schema: 1\nentries:\n  - id: KB-0001\n")
    assert text.startswith(EMPTY.removesuffix(" []\n"))


def test_names_with_spaces(tmp_path: Path) -> None:
    document = KnownBadText(TEXT)
    document.remove("KB-0007")
    name = "my matrices/known bad.yaml"
    assert applied(tmp_path, unified(name, TEXT, document.text), name) == document.text


def test_a_bump_that_breaks_everything_is_not_a_list() -> None:
    cells = [cell(f"level{number}", "passed") for number in range(MOST_NEW + 10)]
    broken = [one | {"outcome": "failed", "failure": CRASH} for one in cells]
    patch = patched(run(*cells), run(*broken, sglang="0.5.23"))
    assert [edit.action for edit in patch.edits] == ["add"] * MOST_NEW + ["none"]
    assert str(patch.edits[-1]) == f"10 more failures left alone in {LIST}: too many for a list: find their cause first"


def test_nothing_follows_from_nothing() -> None:
    same = run(cell("a", "passed"))
    assert patched(same, same) == Patch("", ())


def test_an_entry_of_another_list_and_a_list_of_odd_layout() -> None:
    after = run(cell("a", "xpassed", "KB-0900"), sglang="0.5.23")
    (edit,) = patched(run(cell("a", "xfailed", "KB-0900")), after).edits
    assert (edit.action, edit.why) == (
        "none",
        "it passes in sm120-m-a; give the list that holds it with --known-bad",
    )
    flow = "schema: 1\nentries: [{id: KB-0900}]\n"
    assert actions(patched(run(cell("a", "xfailed", "KB-0900")), after, flow)) == [("bound", "KB-0900")]
    (edit,) = patched(run(cell("a", "xpassed", "KB-0900")), after, flow).edits
    assert edit.action == "none"
    assert "edit it by hand" in edit.why


@pytest.mark.parametrize(
    ("line", "text", "pattern"),
    [
        ("RuntimeError: Unsupported architecture", "", "RuntimeError: Unsupported architecture"),
        (
            "[2026-11-29 04:12:09 TP3] Scheduler hit an exception: CUDA error at 0x7f12 of pid 4242",
            "",
            "Scheduler hit an exception: CUDA error at",
        ),
        ("ValueError: page 64", "ValueError: page 64\nfurther lines of the log, much longer ones", "ValueError: page"),
        ("FileNotFoundError: /home/me/.cache/x/y.so is not there", "", "FileNotFoundError:"),
        ("12 34", "", ""),
        ("x" * 300, "", "x" * 100),
    ],
)
def test_a_pattern_is_the_part_that_recurs(line: str, text: str, pattern: str) -> None:
    failure = failing(line, **({"text": text} if text else {}))
    assert salient(failure) == pattern


@settings(deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=200))
def test_a_pattern_is_always_found_in_the_failure(line: str) -> None:
    failure = Failure.of(Kind.CRASH, Phase.WARMUP, line, line=line)
    assert salient(failure.to_json()) in f"{failure.text}\n{failure.message}"
