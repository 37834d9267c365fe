"""A server's two processes that hang in graph capture: the scheduler writes a byte every half second, main waits."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path


def say(line: str) -> None:
    """In one piece: print() writes the line and its end apart where output is unbuffered, and there are two of us."""
    os.write(1, f"{line}\n".encode())


def capture_one_batch_size() -> None:
    out = os.open("/dev/null", os.O_WRONLY)
    while True:
        os.write(out, b".")
        time.sleep(0.5)


if os.fork() == 0:
    Path("/proc/self/comm").write_text("sglang::schedul")
    say("up")
    capture_one_batch_size()
if "--listen" in sys.argv:
    server = socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("--listen") + 1])))
    say(str(server.getsockname()[1]))
signal.pause()
