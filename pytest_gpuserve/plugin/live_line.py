"""The live line on a terminal: which cell, in which phase, for how long, and how long without progress."""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

__all__ = ["LiveLine", "StatusFile", "describe"]

_STALE = 5.0
_PERIOD = 1.0


def describe(cell: str, event: dict[str, Any]) -> str | None:
    """`sm120-m-baseline: weights 12 s, 3 s without progress`; None for an event that changes nothing to look at."""
    kind = event["event"]
    if kind == "waiting":
        holders = "; ".join(event.get("holders") or ["other runs"])
        return f"{cell}: waiting for GPUs {event['seconds']:.0f} s ({holders})"
    if kind == "phase":
        return f"{cell}: {event['phase']}"
    if kind != "tick":
        return None
    text = f"{cell}: {event['phase']} {event['seconds']:.0f} s"
    if event.get("compiling"):
        return f"{text}, compiling"
    return f"{text}, {event['quiet']:.0f} s without progress" if event.get("quiet", 0) >= 1 else text


class LiveLine:
    """One line at the end of the terminal's output, rewritten in place; nothing where there is no terminal."""

    def __init__(self, config: pytest.Config) -> None:
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        usable = reporter is not None and reporter.isatty and config.option.verbose >= 0
        self._reporter = reporter if usable and os.environ.get("TERM") != "dumb" else None
        self._shown = False
        self._done = threading.Event()
        self._follower: threading.Thread | None = None

    def event(self, cell: str, event: dict[str, Any]) -> None:
        """One event of a supervisor."""
        if self._reporter is None:
            return
        text = describe(cell, event)
        if text is not None:
            self.show(text)
        elif event["event"] in ("ready", "failed", "stopped", "error"):
            self.clear()

    def show(self, text: str) -> None:
        """Replace the line."""
        if self._reporter is not None:
            if not self._shown:
                self._reporter.ensure_newline()
            width = self._reporter._tw.fullwidth - 1
            self._reporter.rewrite(text[:width], erase=True)
            self._shown = True

    def clear(self) -> None:
        """Take the line away, for pytest's own output."""
        if self._shown and self._reporter is not None:
            self._reporter.rewrite("", erase=True)
            self._shown = False

    def close(self) -> None:
        """No more lines."""
        self._done.set()
        if self._follower is not None:
            self._follower.join()  # it may be about to show one more
        self.clear()

    def follow(self, folder: Path) -> None:
        """Show what the workers say in their status files, until closed."""
        if self._reporter is not None:
            self._follower = threading.Thread(
                target=self._follow, args=(folder,), daemon=True, name="gpuserve-live-line"
            )
            self._follower.start()

    def _follow(self, folder: Path) -> None:
        while not self._done.wait(_PERIOD):
            texts = [text for path in sorted(folder.glob("status-*.json")) if (text := _read(path))]
            if texts:
                self.show(" | ".join(texts))


def _read(path: Path) -> str | None:
    with suppress(OSError, ValueError, KeyError):
        status = json.loads(path.read_text())
        if time.time() - status["t"] < _STALE:
            return f"{status['worker']} {status['text']}"
    return None


class StatusFile:
    """A worker has no terminal: it writes its line into the run's folder, where the controller finds it."""

    def __init__(self, folder: Path, worker: str) -> None:
        self._path = folder / f"status-{worker}.json"
        self._worker = worker

    def event(self, cell: str, event: dict[str, Any]) -> None:
        """One event of a supervisor. A line that cannot be written is missing, nothing more."""
        text = describe(cell, event)
        if text is not None:
            draft = self._path.with_suffix(".tmp")
            with suppress(OSError):
                draft.write_text(json.dumps({"t": time.time(), "worker": self._worker, "text": text}))
                draft.replace(self._path)
