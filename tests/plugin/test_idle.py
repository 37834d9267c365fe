"""Without `--gpu-matrix`, and with it but nothing launched."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def test_tests_that_ask_for_a_server_are_skipped_with_the_reason(pytester: pytest.Pytester, plugin_args) -> None:
    pytester.makepyfile(
        """
        import pytest
        def test_server(sglang_server): raise AssertionError
        def test_cell(gpu_cell): raise AssertionError
        @pytest.mark.gpus(2)
        def test_gpus(gpus): raise AssertionError
        @pytest.mark.gpu_cells(anything="goes")
        def test_other(): pass
        """
    )
    result = pytester.runpytest_inprocess(*plugin_args, "-rs", "--strict-markers")
    result.assert_outcomes(passed=1, skipped=3)
    result.stdout.fnmatch_lines(["SKIPPED*needs a GPU matrix: run pytest with --gpu-matrix NAME (or auto)"])


def test_idle_the_plugin_imports_nothing_heavy(pytester: pytest.Pytester, plugin_args) -> None:
    pytester.makepyfile(
        """
        import sys
        def test_modules():
            heavy = {"yaml", "aiohttp", "pynvml", "torch", "psutil", "filelock", "sglang", "packaging.specifiers"}
            assert not heavy & set(sys.modules)
            assert "pytest_gpuserve.manager" not in sys.modules
        """
    )
    # A process of its own: this one has imported everything.
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *plugin_args]
    done = subprocess.run([*words, "-p", "no:hypothesispytest"], cwd=pytester.path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_markers_and_help_are_there(pytester: pytest.Pytester, plugin_args) -> None:
    result = pytester.runpytest_inprocess(*plugin_args, "--markers")
    result.stdout.fnmatch_lines(["@pytest.mark.gpu_cells(attention=*", "@pytest.mark.gpus(n)*"])
    result = pytester.runpytest_inprocess(*plugin_args, "--help")
    result.stdout.fnmatch_lines(["*--gpu-matrix=NAME*", "*--gpu-lock-dir=DIR*", "*gpu_lock_dir*"])


def test_the_plan_says_what_is_expected_and_launches_nothing(project) -> None:
    project.file(
        "matrices/known_bad.yaml",
        """
        schema: 1
        entries:
          - {id: KB-7, when: {flag.attention-backend: flashinfer}, expect: {kind: hang, phase: [graph-capture]},
             mode: xfail, strict: false, confidence: confirmed, source: test, grade: S, reason: spins,
             issue: "https://github.com/sgl-project/sglang/issues/7", added: 2026-11-01, review-by: 2036-11-01}
        """,
    )
    for args in ((), ("-n", "2")):
        result = project.run("--gpu-plan", *args, inprocess=True)
        assert result.code == 0, result.text
        result.run.stdout.fnmatch_lines(
            [
                "*SIMULATED plan*",
                "sm120-m-baseline * 1 GPU *pass",
                "sm120-m-attention.flashinfer * 1 GPU *xfailed: hang in graph-capture, KB-7 *issues/7",
                "3 cells, 3 server starts, about *",
            ]
        )
        assert result.folder is None


def test_with_xdist_too_collect_only_lists_the_checks(project) -> None:
    """xdist starts no workers for it, and leaves the collection to this process."""
    result = project.run("--collect-only", "-q", "-n", "2", "-k", "ready", inprocess=True)
    assert result.code == 0, result.text
    assert [line for line in result.text.splitlines() if "::" in line] == [
        "gpuserve/suite.py::test_ready[sm120-m-baseline]",
        "gpuserve/suite.py::test_ready[sm120-m-attention.flashinfer]",
        "gpuserve/suite.py::test_ready[sm120-m-graphs.off]",
    ]


def test_a_plan_needs_no_gpu_and_says_what_does_not_apply(project) -> None:
    project.file(
        "matrices/two.yaml",
        """
        schema: 1
        arch: [sm90, sm120]
        models: {m: {shape: llama-3, gpus: 2}}
        axes:
          a:
            base: {}
            new: {flags: {x: y}, requires: {sglang: ">=99"}}
            out: {flags: {x: z}}
        baseline: {a: base}
        exclude: [{when: {a: out}, reason: "too slow here"}]
        """,
    )
    result = project.run("--gpu-plan", sim="2xsm90", matrix="two", inprocess=True)
    assert result.code == 0, result.text + result.errors
    result.run.stdout.fnmatch_lines(
        [
            "sm90-m-a.new *2 GPUs*skipped: level a.new needs sglang>=99*",
            "left out: sm90-m-a.out: too slow here*",
            "2 cells, 1 server start, about *",
        ]
    )


def test_one_of_everything_is_one(project) -> None:
    project.file("matrices/one.yaml", "schema: 1\narch: [sm120]\nmodels: {m: {shape: tiny-llama}}\n")
    shown = [
        project.run(*args, matrix="one", sim="1xsm120", inprocess=bool(args)).text for args in ((), ("--gpu-plan",))
    ]
    assert "gpuserve: SIMULATED 1 cell of one" in shown[0]
    assert "SIMULATED: 1 cell: 1 passed; 1 server start\n" in shown[0]
    assert "1 cell, 1 server start, about " in shown[1]
    assert not [text for text in shown if re.search(r"\b1 (cells|GPUs|server starts)", text)]


def test_collect_only_writes_nothing(project) -> None:
    result = project.run("--collect-only", "-q", inprocess=True)
    assert result.code == 0
    result.run.stdout.fnmatch_lines(["gpuserve/suite.py::test_ready?sm120-m-baseline?"])
    assert result.folder is None


def test_the_order_starts_each_server_once_with_users_tests_before_the_shutdown(project) -> None:
    project.file("pytest.ini", "[pytest]\ntestpaths = mine\npython_files = check_*.py\npython_functions = check_*\n")
    project.file(
        "mine/check_a.py",
        """
        def check_b(sglang_server): pass
        def check_a(sglang_server): pass
        def check_c(gpus): pass
        def check_no(): pass
        """,
    )
    result = project.run("--collect-only", "-q", inprocess=True)
    lines = [line for line in result.text.splitlines() if "[sm120" in line]
    names = [line.partition("[")[0].rpartition("::")[2] for line in lines]
    size = len(names) // 3
    one = names[:size]
    assert names == one * 3
    assert one[0] == "test_ready"
    assert one[-4:] == ["check_b", "check_a", "test_clean_shutdown", "check_c"]
    assert [line.partition("[")[2] for line in lines[::size]] == [
        "sm120-m-baseline]",
        "sm120-m-attention.flashinfer]",
        "sm120-m-graphs.off]",
    ]


def test_a_built_in_check_can_be_asked_for_by_its_node_id(project) -> None:
    ids = ["gpuserve/suite.py::test_ready[sm120-m-graphs.off]", "gpuserve/suite.py::test_answers"]
    result = project.run("--collect-only", "-q", *ids, inprocess=True)
    assert [line for line in result.text.splitlines() if line.startswith("gpuserve/")] == [
        "gpuserve/suite.py::test_answers[sm120-m-baseline]",
        "gpuserve/suite.py::test_answers[sm120-m-attention.flashinfer]",
        "gpuserve/suite.py::test_ready[sm120-m-graphs.off]",
        "gpuserve/suite.py::test_answers[sm120-m-graphs.off]",
    ]


def test_options_come_from_the_ini_file_too(project) -> None:
    project.file("pytest.ini", "[pytest]\ngpu_strategy = full\n")
    result = project.run("--collect-only", "-q", inprocess=True)
    assert len([line for line in result.text.splitlines() if "test_ready[" in line]) == 4
