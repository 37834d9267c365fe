"""The command `gpuserve`: what it says and how it exits."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from pytest_gpuserve import cli


def test_plan_is_pytests_own_plan(project, monkeypatch, capfd) -> None:
    monkeypatch.chdir(project.path)
    assert cli.main(["plan", "--matrix", "tiny", "--gpu-sim", "2xsm120", "-k", "graphs"]) == 0
    assert "sm120-m-graphs.off" in capfd.readouterr().out
    assert cli.main(["plan", "--matrix", "nope"]) == 2
    assert "there is no matrix 'nope'" in capfd.readouterr().err
    assert not (project.path / ".gpuserve").exists()


IDLE = """\
schema: 1
entries:
  - id: MINE
    when: {arch: sm120, attention: triton, flag.attention-backend: fa3}
    expect: {kind: crash, phase: weights, match: "no kernel"}
    confidence: reported
    grade: R
    source: one run
    issue: https://github.com/sgl-project/sglang/issues/1
    reason: it never was
    added: 2026-11-29
    review-by: 2099-01-01
"""


def test_validate(project, monkeypatch, capsys) -> None:
    monkeypatch.chdir(project.path)
    # Neither a matrix alone nor one in a shipped one's place makes the shipped list's entries idle.
    project.file("matrices/sm120.yaml", (project.path / "matrices/tiny.yaml").read_text())
    for name in ("tiny", "sm120"):
        assert cli.main(["validate", name]) == 0
        assert "1 matrix, 1 known-bad list: 0 problems" in capsys.readouterr().out
    project.file("matrices/known_bad.yaml", IDLE)
    assert cli.main(["validate", "tiny"]) == 1
    assert "known_bad.yaml:3:5: MINE matches no cell of any matrix" in capsys.readouterr().out
    (project.path / "matrices/known_bad.yaml").unlink()
    project.file("matrices/bad.yaml", "schema: 1\narch: [sm120]\nmodels: {m: {shape: nope}}\n")
    assert cli.main(["validate", "bad"]) == 1
    assert "bad.yaml:3:" in capsys.readouterr().out
    assert cli.main(["validate", "no-such-matrix"]) == 2
    assert "there is no matrix" in capsys.readouterr().err


def test_status_and_reap_where_nothing_is(tmp_path, capsys, monkeypatch) -> None:
    # Other runs on this machine are none of this test's business.
    monkeypatch.setattr("pytest_gpuserve.serve.reap._processes", list)
    monkeypatch.setattr("pytest_gpuserve.serve.reap._folders", list)
    assert cli.main(["status", "--lock-dir", str(tmp_path)]) == 0
    assert "no GPU is held, and nothing was left over" in capsys.readouterr().out
    assert cli.main(["reap", "--lock-dir", str(tmp_path)]) == 0
    assert "nothing was left over" in capsys.readouterr().out
    # Where pytest's own option comes from the environment, the command looks there too.
    monkeypatch.setenv("GPUSERVE_LOCK_DIR", str(tmp_path / "ours"))
    assert cli.main(["status"]) == 0
    assert str(tmp_path / "ours") in capsys.readouterr().out
    (tmp_path / "file").write_text("")
    for command in ("status", "reap"):
        assert cli.main([command, "--lock-dir", str(tmp_path / "file")]) == 2
        assert f"the lock directory {tmp_path / 'file'} is not a directory" in capsys.readouterr().err


def test_status_names_who_holds_a_gpu(project, capsys) -> None:
    project.file(
        "test_mine.py",
        """
        from pytest_gpuserve import cli
        def test_status(sglang_server, gpuserve_manager, capsys):
            assert cli.main(["status", "--lock-dir", str(gpuserve_manager.plan.lock_dir)]) in (0, 1)
            said = capsys.readouterr().out
            assert f"GPU {sglang_server.gpus[0].index}: held by " in said, said
            assert sglang_server.cell.id in said and "phase serving" in said, said
        """,
    )
    result = project.run("test_mine.py", "-k", "baseline")
    assert result.code == 0, result.text


def test_compare_of_a_run_with_itself(project, monkeypatch, capsys) -> None:
    result = project.run("-k", "baseline and ready")
    capsys.readouterr()
    monkeypatch.chdir(project.path)
    assert cli.main(["compare", str(result.folder), str(result.folder / "run.json"), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["counts"] == {"SAME": 1}
    again = project.run("-k", "baseline and ready", f"--gpu-compare={result.folder / 'run.json'}")
    assert again.code == 0
    assert "Compared: tiny" in again.text
    assert "Compared: tiny" in (again.folder / "summary.md").read_text()


def test_a_run_compares_with_the_latest_before_it(project) -> None:
    """A report directory stands for its latest run, and once this run has begun that is this run."""
    project.run("-k", "flashinfer and ready")
    after = project.run("-k", "flashinfer and ready", "--gpu-compare=.gpuserve", rules=BROKEN)
    assert "1 BROKE" in after.text


BROKEN = "- {when: {attention: flashinfer}, then: {crash: {phase: weights, text: 'RuntimeError: no kernel'}}}"


def test_a_run_that_compares_itself_says_what_the_command_says(project, monkeypatch, capsys) -> None:
    """The same text, the patch with it; and the patch is a file that git takes."""
    subprocess.run(["git", "init", "-q", project.path], check=True)
    before = project.run("-k", "flashinfer and ready").folder
    after = project.run("-k", "flashinfer and ready", "--gpu-compare", str(before), rules=BROKEN)
    assert after.code == 1
    monkeypatch.chdir(project.path)
    capsys.readouterr()
    assert cli.main(["compare", str(before), str(after.folder)]) == 1
    said = capsys.readouterr().out
    assert "+++ b/matrices/known_bad.yaml" in said
    assert said in after.text
    assert cli.main(["compare", str(before), str(after.folder), "--format", "markdown"]) == 1
    assert capsys.readouterr().out.strip() in (after.folder / "summary.md").read_text()
    command = after.text.partition("Apply it with: ")[2].splitlines()[0]
    subprocess.run(command.split(), check=True)
    assert "no kernel" in (project.path / "matrices/known_bad.yaml").read_text()


def test_unknown_commands_and_help(capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["bogus"])
    assert caught.value.code == 2
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    said = capsys.readouterr().out
    assert all(name in said for name in cli.COMMANDS)


def test_github_gets_a_summary_and_an_annotation(project, monkeypatch) -> None:
    summary = project.path / "step.md"
    project.file(
        "matrices/known_bad.yaml",
        """
        schema: 1
        entries:
          - id: KB-7
            when: {flag.attention-backend: flashinfer}
            expect: {kind: rejected, match: no such flag}
            mode: xfail
            strict: true
            confidence: confirmed
            source: test
            grade: S
            issue: "https://github.com/sgl-project/sglang/issues/7"
            reason: refused
            added: 2026-11-01
            review-by: 2036-11-01
        """,
    )
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_WORKSPACE", os.fspath(project.path))
    result = project.run("-k", "flashinfer")
    assert result.code == 1
    assert "KB-7" in summary.read_text()
    result.run.stdout.fnmatch_lines(["::error file=matrices/known_bad.yaml,line=4,*KB-7*"])
