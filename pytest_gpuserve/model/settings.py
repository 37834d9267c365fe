"""Every option of a run, resolved once: flag > environment > ini > default (see `options.TABLE`)."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Settings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One field an option of the group `gpuserve`. Times in seconds, `budget` in minutes.

    `server_python` is None for the interpreter that runs pytest, `lock_dir` None for the machine's own directory
    (in the simulation: beside the simulated GPUs), `start_timeout` None for no bound beside the lack of progress.
    `version` has (distribution, version) for builds that have no version of their own.
    """

    rootdir: Path
    matrix: tuple[str, ...] = ()
    plan: bool = False
    preflight: bool = False
    sim: str | None = None
    sim_scenario: Path | None = None
    strategy: str | None = None
    known_bad: tuple[Path, ...] = ()
    floors: str = "check"
    no_control: bool = False
    report: Path = field(kw_only=True)
    compare: Path | None = None
    shard: tuple[int, int] | None = None
    history: Path | None = None
    budget: float | None = None
    server_python: str | None = None
    server_env: tuple[str, ...] = ()
    version: tuple[tuple[str, str], ...] = ()
    lock_dir: Path | None = None
    lock_timeout: float = 3600.0
    stall: float | None = None
    start_timeout: float | None = None

    @property
    def active(self) -> bool:
        """True if `--gpu-matrix` was given in some way: without it the plugin does nothing."""
        return bool(self.matrix)

    @property
    def python(self) -> str:
        """The interpreter of the environment under test."""
        return self.server_python or sys.executable

    @property
    def launches(self) -> bool:
        """True if servers are started: neither a plan nor a preflight."""
        return not (self.plan or self.preflight)
