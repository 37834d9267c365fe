"""Somebody else's process that takes memory of a simulated GPU while a server starts on it. Run as a script.

python intruder.py MACHINE UUID GIB FOLDER WORDS PHASE: waits until a server's log under FOLDER holds WORDS, has the
memory until a lease of that GPU is in PHASE (`admission`: somebody waits for the GPU to be free), and goes.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from pytest_gpuserve.gpu import sim


def main(machine: str, uuid: str, gib: str, folder: str, words: str, phase: str) -> None:
    """What the script does."""
    while not any(words in path.read_text(errors="replace") for path in Path(folder).rglob("server.log")):
        time.sleep(0.01)
    sim.charge(Path(machine), uuid, os.getpid(), int(gib) << 30)
    while not any(f'"{phase}"' in path.read_text() for path in Path(machine, "locks").glob("*.json")):
        time.sleep(0.05)


if __name__ == "__main__":
    main(*sys.argv[1:])
