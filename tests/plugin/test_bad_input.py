"""What a user can get wrong: one clear message, exit 4 (5 for an empty selection), nothing left behind."""

from __future__ import annotations

import os
import sys

import pytest


def refused(project, *args, match: str, code: int = 4, **more) -> None:
    before = {path.name for path in project.path.iterdir()}
    result = project.run(*args, inprocess=True, **more)
    said = result.text + result.errors
    assert result.code == code, said
    assert "Traceback" not in said
    result.run.stderr.fnmatch_lines([f"*{match}*"])
    assert not (project.path / ".gpuserve").exists()
    assert {path.name for path in project.path.iterdir()} - before <= {"scenario.yaml"}


def test_an_arch_that_is_not_here(project, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    refused(
        project,
        sim=None,
        match="the matrix tiny is for sm120; here: *--gpu-plan*--gpu-preflight*--gpu-sim 8xsm120*",
    )


def test_another_simulated_arch(project) -> None:
    refused(project, sim="2xsm90", match="the matrix tiny is for sm120, and --gpu-sim 2xsm90 simulates sm90*")


def test_an_unknown_simulated_arch(project) -> None:
    refused(project, sim="2xsm119", match="*sm120*")


def test_an_unknown_matrix(project) -> None:
    refused(project, matrix="tny", match="there is no matrix 'tny'; did you mean 'tiny'*")


def test_every_problem_of_every_file_at_once(project) -> None:
    project.file("matrices/a.yaml", "schema: 1\narch: [sm120]\nmodel: {}\n")
    project.file("matrices/b.yaml", "schema: 1\narch: [sm120]\nmodels: {m: {shape: nope}}\naxes: {}\n")
    result = project.run(matrix="a,b", inprocess=True)
    assert result.code == 4
    assert "a.yaml:3:1: " in result.errors
    assert "b.yaml:3:" in result.errors
    assert "'nope'" in result.errors


def test_problems_of_all_kinds_of_files_at_once(project) -> None:
    project.file("matrices/a.yaml", "schema: 1\narch: [sm120]\nmodel: {}\n")
    project.file("matrices/known_bad.yaml", "schema: 1\nentries:\n- {id: X}\n")
    bad = project.file("bad.yaml", "schema: 1\nrules:\n- {when: {nonsense: 1}, then: {hagn: weights}}\n")
    result = project.run("--gpu-sim-scenario", str(bad), matrix="a,tiny", inprocess=True)
    assert result.code == 4
    for place in ("a.yaml:3:1: ", "known_bad.yaml:3:3: ", "bad.yaml:3:"):
        assert place in result.errors
    # What a rule may name is not known while a matrix cannot be read.
    assert "nonsense" not in result.errors


@pytest.mark.parametrize(
    ("when", "message"),
    [
        ("{atention: triton}", "*scenario.yaml:4:13: unknown fact 'atention' in *; did you mean 'attention'*"),
        ("{attention: tritn}", "*scenario.yaml:4:24: *unknown value 'tritn'; did you mean 'triton'*"),
        ("{flag.attention-backnd: fa3}", "*scenario.yaml:4:13: *did you mean 'flag.attention-backend'*"),
    ],
)
def test_a_rule_of_a_scenario_that_could_never_apply(project, when: str, message: str) -> None:
    rules = f"- {{when: {when}, then: {{hang: warmup}}}}"
    refused(project, rules=rules, match=message)


def test_a_rule_may_name_what_any_of_the_runs_matrices_has(project) -> None:
    axes = "axes: {nccl: {default: {}}}\nbaseline: {nccl: default}\n"
    project.file("matrices/other.yaml", f"schema: 1\narch: [sm120]\nmodels: {{o: {{shape: tiny-llama}}}}\n{axes}")
    rules = "- {when: {nccl: default, gpu: 0}, then: {hang: warmup}}"
    assert project.run("--gpu-plan", rules=rules, matrix="tiny,other", inprocess=True).code == 0
    assert project.run("--gpu-plan", rules=rules, matrix="tiny", inprocess=True).code == 4


@pytest.mark.parametrize(
    "content",
    [
        "a: &x [1]\nb: *x\n",
        "a: !!python/object/apply:os.system ['true']\n",
        "x: " + "[" * 2000,
        "\x00\x01",
        "- just a list\n",
    ],
    ids=["anchors", "tags", "deep", "binary", "no mapping"],
)
def test_hostile_yaml(project, content: str) -> None:
    project.file("matrices/evil.yaml", content)
    refused(project, matrix="evil", match="*evil.yaml*")


def test_a_huge_file(project) -> None:
    with (project.path / "matrices/huge.yaml").open("w") as file:
        file.truncate(100 << 20)
    refused(project, matrix="huge", match="*huge.yaml*")


def test_a_bad_scenario_and_a_bad_known_bad_list(project) -> None:
    bad = project.file("bad.yaml", "schema: 1\nrules:\n- {then: {hagn: weights}}\n")
    refused(project, "--gpu-sim-scenario", str(bad), match="*bad.yaml:3:*hagn*hang*")
    bad.write_text("schema: 1\nentries:\n- {id: X}\n")
    refused(project, "--gpu-known-bad", str(bad), match="*bad.yaml:3:*")


@pytest.mark.parametrize("content", ["not JSON", "[]", "{}", '{"schema": 99}', "\xff"])
@pytest.mark.parametrize("args", [(), ("-n", "2"), ("--gpu-plan",)], ids=["one process", "xdist", "plan"])
def test_a_record_to_compare_with_that_is_none(project, args, content: str) -> None:
    bad = project.path / "bad.json"
    bad.write_bytes(content.encode("latin-1"))
    refused(project, *args, "--gpu-compare=bad.json", match=f"ERROR: --gpu-compare: {bad}: *")


def test_a_report_directory_to_compare_with_that_has_no_run(project) -> None:
    refused(project, "--gpu-compare=matrices", match="ERROR: --gpu-compare: */matrices: no run in this folder*")


def test_the_interpreter(project) -> None:
    refused(project, "--gpu-server-python=/nonexistent/python", match="*/nonexistent/python*")
    refused(project, f"--gpu-server-python={sys.executable}", match="*sglang*")


def test_a_report_directory_that_cannot_be_written(project) -> None:
    project.file("taken", "a file")
    before = (project.path / "taken").read_text()
    result = project.run("--gpu-report", "taken/below", inprocess=True)
    assert result.code == 4
    assert "--gpu-report" in result.errors
    assert (project.path / "taken").read_text() == before


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("file", "is not a directory."),
        ("file/below", "cannot be read: Not a directory (ENOTDIR)."),
        ("sticky", "is sticky (mode 1777)"),
        ("locked", "is not writable for uid * (EACCES). Its owner can open it: chmod 0777"),
    ],
)
@pytest.mark.parametrize("args", [(), ("-n", "2")], ids=["one process", "xdist"])
def test_a_lock_directory_that_can_hold_no_locks(project, monkeypatch, args, place: str, said: str) -> None:
    project.file("file", "")
    (project.path / "locked").mkdir()
    (project.path / "sticky").mkdir()
    (project.path / "sticky").chmod(0o1777)
    # root may write anywhere, so what the kernel answers is stood in for.
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, *a, **k: not str(path).endswith("/locked") and access(path, *a, **k))
    lock_dir = project.path / place
    monkeypatch.setenv("GPUSERVE_LOCK_DIR", str(lock_dir))
    refused(project, *args, match=f"ERROR: the lock directory {lock_dir} *{said}*--gpu-lock-dir (GPUSERVE_LOCK_DIR)*")
    # Nothing is leased, so nothing is asked of it.
    for idle in ("--gpu-plan", "--collect-only"):
        assert project.run(idle, inprocess=True).code == 0


def test_an_empty_selection(project) -> None:
    result = project.run("-k", "nothing_like_it", inprocess=True)
    assert result.code == 5
    assert "no cell is selected, of 3 in the matrix" in result.text
    result = project.run("-k", "nothing_like_it", "-n", "1")
    assert result.code == 5
    assert "no cell is selected" in result.text
    result = project.run("-k", "nothing_like_it", "--gpu-plan", inprocess=True)
    assert result.code == 5


def test_flags_without_a_matrix(pytester: pytest.Pytester, plugin_args) -> None:
    result = pytester.runpytest_inprocess(*plugin_args, "--gpu-plan")
    assert result.ret == 4
    result.stderr.fnmatch_lines(["*--gpu-plan: nothing to do without --gpu-matrix*"])


@pytest.mark.parametrize(
    ("test", "message"),
    [
        (
            "@pytest.mark.gpu_cells(atention='triton')\ndef test_x(gpu_cell): pass",
            "*knows no atention here; it knows attention, graphs, arch*",
        ),
        (
            "@pytest.mark.gpu_cells(attention=['triton', 'tritn'])\ndef test_x(gpu_cell): pass",
            "*gpu_cells: no matrix has a level 'tritn' of attention; did you mean 'triton'*",
        ),
        (
            "@pytest.mark.gpu_cells(nccl='tund')\ndef test_x(gpu_cell): pass",
            "*gpu_cells: no matrix has a level 'tund' of nccl; did you mean 'tuned'*",
        ),
        ("@pytest.mark.gpu_cells('triton')\ndef test_x(gpu_cell): pass", "*gpu_cells takes only named arguments*"),
        ("@pytest.mark.gpus('two')\ndef test_x(gpus): pass", "*gpus takes one whole number*"),
        ("@pytest.mark.gpus(2, n=1)\ndef test_x(gpus): pass", "*gpus knows no keyword n*"),
        (
            "@pytest.fixture(scope='module')\ndef wide(sglang_server): pass\ndef test_x(wide): pass",
            "*ScopeMismatch*function scoped fixture*",
        ),
        ("def test_x(request): request.getfixturevalue('gpu_cell')", "*no cell is selected*"),
    ],
)
def test_markers_and_fixtures_used_wrongly(project, test: str, message: str) -> None:
    project.file("test_mine.py", f"import pytest\n{test}\n")
    result = project.run("test_mine.py", "-k", "baseline or test_x", inprocess=True)
    assert result.code in (1, 2, 5)
    assert "INTERNALERROR" not in result.text
    result.run.stdout.fnmatch_lines([message])


def test_markers_choose_cells(project) -> None:
    project.file(
        "test_mine.py",
        """
        import pytest
        @pytest.mark.gpu_cells(attention=["triton", "fa3"], graphs="off")
        def test_some(gpu_cell): assert gpu_cell.id == "sm120-m-graphs.off"
        @pytest.mark.gpu_cells(gpus=">1")
        def test_none(gpu_cell): raise AssertionError
        @pytest.mark.gpu_cells(nccl="tuned")
        def test_for_another_matrix(gpu_cell): raise AssertionError
        @pytest.mark.gpu_cells(**{"flag.attention-backend": "flashinfer"})
        def test_flag(gpu_cell): assert gpu_cell.axes["attention"] == "flashinfer"
        """,
    )
    result = project.run("test_mine.py", inprocess=True)
    assert result.code == 0, result.text
    result.run.assert_outcomes(passed=2, deselected=2)


def test_no_environment_variable_is_left(project) -> None:
    before = dict(os.environ)
    project.run("-k", "nothing", inprocess=True)
    assert {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"} == {
        k: v for k, v in before.items() if k != "PYTEST_CURRENT_TEST"
    }
