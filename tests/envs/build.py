"""`python build.py FOLDER REQUIREMENTS`: an environment with exactly the pinned distributions, made once.

`--no-deps` throughout: SGLang's own requirements pull CUDA packages of several GB that a CPU machine cannot load. Where
the package index serves torch as a CUDA build, point pip at PyTorch's CPU index (PIP_EXTRA_INDEX_URL) first.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import venv
from pathlib import Path


def build(folder: Path, requirements: Path) -> Path:
    """The interpreter of the environment; rebuilt when the pins or this Python changed."""
    wanted = hashlib.sha256(requirements.read_bytes() + sys.version.encode()).hexdigest()
    stamp, python = folder / "pins.sha256", folder / "bin" / "python"
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "-r", requirements]
    subprocess.run(pip, check=True)
    stamp.write_text(wanted)
    return python


if __name__ == "__main__":
    print(build(Path(sys.argv[1]).absolute(), Path(sys.argv[2])))
