"""The built-in checks, collected by the plugin itself when no paths are given on the command line.

Each runs once a cell against the cell's server. `verdict.SHOWS` says which failures a check is able to show.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_gpuserve.failing import ServerFailed, check
from pytest_gpuserve.manager import measuring, quality
from pytest_gpuserve.model.failure import Kind
from pytest_gpuserve.model.phase import Phase

if TYPE_CHECKING:
    from pytest_gpuserve.manager import Manager
    from pytest_gpuserve.manager.handle import ServerHandle

__all__ = [
    "LAST",
    "test_answers",
    "test_backend",
    "test_clean_shutdown",
    "test_concurrency",
    "test_long_context",
    "test_output",
    "test_ready",
    "test_throughput",
]

# This one stops the server, so it comes after every other check of its cell.
LAST = "test_clean_shutdown"
_PROMPT = "The capital of France is"
_TOKENS = 16


def test_ready(sglang_server: ServerHandle) -> None:
    """The server started, and has answered a real request: a health page alone can be a lie (sglang#33719)."""
    check(
        bool(sglang_server.first_answer),
        Kind.WRONG_OUTPUT,
        "the server says it is ready, and its first answer was empty",
    )


def _conclude(finding: measuring.Finding) -> None:
    __tracebackhide__ = True
    if finding.failure is not None:
        raise ServerFailed(finding.failure)
    if finding.skipped:
        pytest.skip(finding.skipped)


def test_backend(sglang_server: ServerHandle, gpuserve_manager: Manager) -> None:
    """The server uses what the cell's flags asked for, by its own report and its log."""
    _conclude(quality.backend(gpuserve_manager, sglang_server.cell))


def test_answers(sglang_server: ServerHandle) -> None:
    """Two identical greedy requests agree, with the number of tokens that was asked for.

    Text is not judged here: with seeded random weights it is nonsense, and loops, in a sound server too.
    """
    first, second = (sglang_server.generate(_PROMPT, max_new_tokens=_TOKENS, ignore_eos=True) for _ in range(2))
    for answer in (first, second):
        check(
            answer.completion_tokens == _TOKENS,
            Kind.WRONG_OUTPUT,
            f"asked for {_TOKENS} tokens, got {answer.completion_tokens}: {answer.text[:200]!r}",
        )
    check(
        first.text == second.text,
        Kind.WRONG_OUTPUT,
        f"two identical greedy requests differ: first {first.text!r}, then {second.text!r}",
    )


def test_output(sglang_server: ServerHandle, gpuserve_manager: Manager) -> None:
    """The logprobs of a set of prompts agree with the baseline's: prefill, cached prefix and decode."""
    _conclude(quality.output(gpuserve_manager, sglang_server.cell))


def test_concurrency(sglang_server: ServerHandle, gpuserve_manager: Manager) -> None:
    """64 requests of many sizes at once are all answered, and as they were alone."""
    _conclude(quality.concurrency(gpuserve_manager, sglang_server.cell))


def test_long_context(sglang_server: ServerHandle, gpuserve_manager: Manager) -> None:
    """A prompt near the longest that the server takes is answered."""
    _conclude(quality.long_context(gpuserve_manager, sglang_server.cell))


def test_throughput(sglang_server: ServerHandle, gpuserve_manager: Manager) -> None:
    """The cell's loads reach the floors of its matrix. Only there in cells that have something to measure."""
    _conclude(measuring.throughput(gpuserve_manager, sglang_server.cell))


def test_clean_shutdown(sglang_server: ServerHandle, gpuserve_manager: Manager) -> None:
    """The server ends on SIGTERM, nothing of it is left, and its GPU memory comes back."""
    teardown, leak = gpuserve_manager.stop_server(sglang_server.cell)
    if leak is not None:
        raise ServerFailed(leak)
    forced = [rung["rung"] for rung in teardown.get("rungs", ()) if "kill" in str(rung["rung"]).lower()]
    check(
        not forced,
        Kind.HANG,
        f"the server did not end on SIGTERM: {', '.join(map(str, forced))} was needed",
        Phase.DRAINING,
    )
