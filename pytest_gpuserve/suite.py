"""The built-in checks, collected by the plugin itself when no paths are given on the command line.

Each runs once a cell against the cell's server. `verdict.SHOWS` says which failures a check is able to show.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpuserve.failing import ServerFailed, check
from pytest_gpuserve.model.failure import Kind
from pytest_gpuserve.model.phase import Phase

if TYPE_CHECKING:
    from pytest_gpuserve.manager import Manager
    from pytest_gpuserve.manager.handle import ServerHandle

__all__ = ["LAST", "test_answers", "test_clean_shutdown", "test_ready"]

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
        f"two identical greedy requests differ:\n  first:  {first.text!r}\n  second: {second.text!r}",
    )


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
