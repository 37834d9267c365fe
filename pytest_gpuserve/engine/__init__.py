"""SGLang: what this project knows of the engine under test. Another engine would bring these same names.

Everything here is pure: text and numbers in, values out. `flags` knows the names of flags and how many GPUs they take,
`command` writes the command line, `log` reads the log,
`http` knows the endpoints, the metrics and what `/server_info` says. All of it is tolerant of versions: the texts were
read in the wheels 0.5.6, 0.5.10.post1, 0.5.17 and 0.5.20 to 0.5.23.
"""

from __future__ import annotations

from pytest_gpuserve.engine.command import argv, draft_model, hides_phases, launcher
from pytest_gpuserve.engine.flags import canonical, canonical_fact, refusal, size_problem
from pytest_gpuserve.engine.http import Endpoints, ServerLoad, endpoints, load_of, resolved_of
from pytest_gpuserve.engine.log import Fallback, Patterns, fallback_lines, patterns

__all__ = [
    "Endpoints",
    "Fallback",
    "Patterns",
    "ServerLoad",
    "argv",
    "canonical",
    "canonical_fact",
    "draft_model",
    "endpoints",
    "fallback_lines",
    "hides_phases",
    "launcher",
    "load_of",
    "patterns",
    "refusal",
    "resolved_of",
    "size_problem",
]
