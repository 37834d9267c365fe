"""The phases of a server's life, in order."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["STARTUP", "Phase", "hides_phases"]


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
        """Position in the order above; a server never goes back, except to `weights`: of a draft model, which is loaded
        when the target's graphs are captured, and with overlapped loading.
        """
        return _ORDER[self]


_ORDER = {phase: index for index, phase in enumerate(Phase)}
STARTUP = tuple(phase for phase in Phase if _ORDER[phase] < _ORDER[Phase.READY])

# SGLang tells its phases in lines of level INFO.
_TELLING = frozenset({"notset", "trace", "debug", "info"})


def hides_phases(log_level: object) -> bool:
    """True if a server that is started with this `log-level` logs no line that tells its phase."""
    return isinstance(log_level, str) and log_level.strip().lower() not in _TELLING
