"""A bug report from a record: its sections, and that nothing in it names a machine or a person."""

from collections.abc import Callable
from pathlib import Path

from pytest_gpuserve.report.bug_report import bug_report
from pytest_gpuserve.report.store import read_run

RUN = read_run(Path(__file__).parent / "golden" / "run_after.json")
FAILED = next(cell for cell in RUN["cells"] if cell["outcome"] == "failed")


def test_golden(golden: Callable[[str, str], None]) -> None:
    golden("bug_report.md", bug_report(RUN, FAILED, "the last line\n"))


def test_it_has_the_sections_of_the_form() -> None:
    text = bug_report(RUN, FAILED)
    assert [line for line in text.splitlines() if line.startswith("### ")] == [
        "### Describe the bug",
        "### Reproduction",
        "### Environment",
    ]


def test_nothing_in_it_names_a_machine_or_a_person() -> None:
    run = {**RUN, "host": "gpu17.corp"}
    failure = {
        **FAILED["failure"],
        "message": "gpu17.corp: /home/alice/models/x: connect to 10.1.2.3:80 failed, 127.0.0.1 too",
        "text": "Authorization: Bearer abcdefgh12345678",
    }
    argv = ["/home/alice/env/bin/python", "-m", "sglang.launch_server", "--model-path", "/home/alice/models/x"]
    argv += ["--host", "127.0.0.1", "--port", "30000", "--nccl-port", "1", "--api-key", "***", "--tp-size", "2"]
    env = {"NCCL_ALGO": "Tree", "GPUSERVE_RUN": "x", "PYTHONPATH": "***"}
    text = bug_report(run, {**FAILED, "failure": failure, "argv": argv, "env": env}, "log of gpu17.corp\n")
    for word in ("gpu17", "alice", "10.1.2.3", "abcdefgh12345678", "GPUSERVE", "--api-key", "--port"):
        assert word not in text, word
    assert "NCCL_ALGO=Tree python -m sglang.launch_server --model-path ~/models/x --tp-size 2" in text
    assert "127.0.0.1 too" in text


def test_a_fence_in_a_log_ends_no_block() -> None:
    text = bug_report(RUN, FAILED, "a\n````\n### Environment\nfake\n")
    assert "`````\n" in text
