"""Log lines as SGLang writes them, and the ways in which a scenario spoils the log."""

from __future__ import annotations

import os
import time

__all__ = ["FLOOD_BYTES", "Log"]

FLOOD_BYTES = 1 << 30
_JUNK = bytes(range(256)) + b"\x1b[2J\x1b[1;31m\x1b]0;owned\x07\xff\xfe\xc3\x28\x00\r"


class Log:
    """Writes to stderr without a buffer: a line is in the file before the next thing happens, a kill loses none.

    `mode` is a scenario's `log`: `flood` adds a gigabyte during start-up, `no-newline` ends lines in a carriage
    return only, `binary` puts invalid UTF-8 and terminal escapes between them, `silent` writes none. The first line,
    which says SIMULATED, is always written. A full disk never ends a server: SGLang's logging swallows it, too.
    """

    def __init__(self, mode: str | None = None, rank: str = "", fd: int = 2) -> None:
        self._mode = mode
        self.rank = rank
        self._fd = fd

    def of_rank(self, rank: str) -> Log:
        """The same log with a rank in the prefix, such as ` TP0`; empty where SGLang shows none."""
        return Log(self._mode, rank, self._fd)

    def banner(self, text: str) -> None:
        """The line that says what this is."""
        self._write(f"[{self._now()}] {text}\n".encode())

    def line(self, text: str) -> None:
        """One message; a message of several lines keeps them together, as a traceback does."""
        self.raw(f"[{self._now()}{self.rank}] {text}\n")

    def raw(self, text: str) -> None:
        """Text without a prefix: warnings, argparse, progress bars."""
        if self._mode == "silent":
            return
        if self._mode == "no-newline":
            text = text.replace("\n", "\r")
        data = text.encode(errors="surrogateescape")
        self._write(_JUNK + b"\n" + data if self._mode == "binary" else data)

    def uvicorn(self, text: str, level: str = "INFO") -> None:
        """A line of the HTTP server, padded as uvicorn pads it."""
        self.line(f"{level + ':':<9} {text}" if level == "INFO" else f"{level}:    {text}")

    def progress(self, text: str) -> None:
        """A progress bar's redraw: carriage return in front, no newline."""
        self.raw(f"\r{text}")

    def flood(self, size: int) -> None:
        """About `size` bytes of one line, again and again; nothing unless the mode is `flood`."""
        if self._mode != "flood":
            return
        line = f"[{self._now()}{self.rank}] Using default MoE config. Performance might be sub-optimal!\n".encode()
        block = line * (65536 // len(line))
        for _ in range(0, size, len(block)):
            self._write(block)

    def repeat(self) -> None:
        """The one line that a hung and talkative server writes for ever."""
        if self._mode == "flood":
            self.line("Waiting for peers, retrying...")

    def _write(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except OSError:
                return

    @staticmethod
    def _now() -> str:
        return time.strftime("%Y-%m-%d %H:%M:%S")
