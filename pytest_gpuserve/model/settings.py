"""Every option of a run, resolved once: flag > environment > ini > default (see `options.TABLE`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Settings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One field an option of the group `gpuserve`. Times in seconds, `budget` in minutes."""

    rootdir: Path
    matrix: tuple[str, ...] = ()
    plan: bool = False
    preflight: bool = False
    sim: str | None = None
    sim_scenario: Path | None = None
    strategy: str | None = None
    known_bad: tuple[Path, ...] = ()
    floors: str = "check"
    control: bool = True
    report: Path = field(kw_only=True)
    compare: Path | None = None
    budget: float | None = None
    server_python: str = ""
    server_env: tuple[str, ...] = ()
    lock_dir: Path = field(kw_only=True)
    lock_timeout: float = 3600.0
    stall: float | None = None
    start_timeout: float | None = None

    @property
    def active(self) -> bool:
        """True if `--gpu-matrix` was given in some way: without it the plugin does nothing."""
        return bool(self.matrix)
