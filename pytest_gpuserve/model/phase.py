"""The phases of a server's life, in order."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["STARTUP", "Phase"]


class Phase(StrEnum):
    """Where a server is. `str(phase)` is the word used in files, logs and reports."""

    SPAWN = "spawn"
    IMPORT = "import"
    DIST_INIT = "dist-init"
    WEIGHTS = "weights"
    KV_CACHE = "kv-cache"
    GRAPH_CAPTURE = "graph-capture"
    WARMUP = "warmup"
    READY = "ready"
    SERVING = "serving"
    DRAINING = "draining"
    STOPPED = "stopped"

    @property
    def rank(self) -> int:
        """Position in the order above; a server never goes back except graph-capture ↔ weights (overlap loading)."""
        return _ORDER[self]


_ORDER = {phase: index for index, phase in enumerate(Phase)}
STARTUP = tuple(phase for phase in Phase if _ORDER[phase] < _ORDER[Phase.READY])
