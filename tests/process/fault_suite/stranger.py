"""Processes that are nobody's business, beside the runs of a fault."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from . import proc

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Stranger"]

_BYSTANDER = str(Path(__file__).with_name("bystander.py"))


class Stranger:
    """A process of somebody else's. It notes every signal; its name and its variables are like a server's."""

    def __init__(self, folder: Path, name: str, env: Mapping[str, str]) -> None:
        self._log = folder / f"stranger-{secrets.token_hex(3)}.log"
        code = f"import sys; sys.argv[1:] = [{str(self._log)!r}]; exec(open({_BYSTANDER!r}).read())"
        self.process = subprocess.Popen(
            [name, "-I", "-S", "-c", code],
            executable=sys.executable,
            env={"PATH": os.environ.get("PATH", ""), **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            cwd=folder,
            start_new_session=True,
        )
        assert self.process.stdout
        self.process.stdout.readline()
        self.pid = self.process.pid

    def hits(self) -> list[str]:
        """The signals it got, and its death."""
        found = [f"stranger {self.pid} got {line}" for line in self._log.read_text().splitlines()]
        if self.process.poll() is not None:
            found.append(f"stranger {self.pid} ended with {self.process.returncode}")
        elif (seen := proc.look(self.pid)) and seen.state == "T":
            found.append(f"stranger {self.pid} is stopped")
        return found

    def end(self) -> None:
        """It is ours after all."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout
        self.process.stdout.close()
