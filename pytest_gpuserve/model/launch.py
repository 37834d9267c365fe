"""What goes between a worker and its supervisor: requests down, events up, one JSON object a line.

A supervisor takes one lease, runs servers one after another under it (the cell's own, then perhaps a control run of
the baseline), and gives the lease up. Commands: `lease`, `launch`, `watch`, `stop`, `release`, `quit`. `quit` and
end-of-file on stdin mean stop, release and end, whatever is under way. Every event has `event` and `t` (seconds since
the supervisor began, monotonic).

| event | further fields |
|---|---|
| `hello` | `pid` |
| `waiting` | `seconds`, `holders`: list of text (who holds the GPUs) |
| `leased` | `lease` (its id), `gpus`: list of Gpu.to_json(), `seconds`, `unchecked`: list of text |
| `spawned` | `pid`, `port`, `nccl_port`, `url`, `api_key` (never to be recorded), `lease`, `argv` (secrets replaced), |
|           | `env` (allow-listed), `dropped_env` (names), `log`, `tmpdir` |
| `phase` | `phase`, `line` |
| `tick` | `phase`, `seconds` (in this phase), `quiet` (without progress), `compiling`; once a second until `ready`, |
|        | and while the server is being stopped |
| `stranger` | `text`: a process that is not the server's was seen on the leased GPUs, once for each |
| `ready` | `url`, `seconds`, `phases`: {phase: seconds}, `info` and `model_info`: what the server reports of itself, |
|         | `first_answer`: {text, output_ids, seconds} |
| `failed` | `failure`: Failure.to_json(), `phases`; the server may still run: send `stop` (a hang of |
|          | a server that was ready kills it at once: the check is blocked in a request and cannot ask for it) |
| `stopped` | `teardown`: {rungs: [{rung, seconds, alive}], exit, exit_before (null: it lived until `stop`), zombies |
|           | (reaped), leftovers: [], removed: [], memory_release_seconds (null: not released), foreign: [] (others' |
|           | processes on the GPUs), log_error}, `failure`: a `leak`, an `infra` (a GPU cannot be read; or, |
|           | `retryable`, others use it), or null |
| `released` | `quarantined`: list of uuids |
| `error` | `failure`: an `infra` Failure: the lease could not be had, or the supervisor itself failed |

`watch` carries `on` and `certain` (the caller knows that requests are under way).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from pytest_gpuserve.model.phase import STARTUP, Phase

__all__ = ["DEFAULT_LIMITS", "LaunchSpec", "LeaseRequest", "Limits", "limits_from"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Seconds. `stall` is how long a phase may show no progress at all; `total` bounds the phase, None for no bound."""

    stall: float
    total: float | None = None


# Why these: graph capture of a real model prints nothing for a minute per batch size on slow cards; weights of a big
# model come from a network disk; the warm-up request compiles kernels without one log line (77 s seen on an H200),
# but its compilers are seen by their CPU time. Drain: SGLang polls every 5 s and has no deadline (sglang#1838).
DEFAULT_LIMITS: dict[Phase, Limits] = {
    Phase.SPAWN: Limits(stall=60),
    Phase.IMPORT: Limits(stall=180),
    Phase.DIST_INIT: Limits(stall=120),
    Phase.WEIGHTS: Limits(stall=180),
    Phase.KV_CACHE: Limits(stall=120),
    Phase.GRAPH_CAPTURE: Limits(stall=180),
    Phase.WARMUP: Limits(stall=180),
    Phase.READY: Limits(stall=60),
    Phase.SERVING: Limits(stall=60),
    Phase.DRAINING: Limits(stall=20, total=30),
}


def limits_from(overrides: dict[str, dict[str, float]], stall: float | None) -> dict[Phase, Limits]:
    """The table above; a matrix' `limits` override it by phase; `--gpu-stall` sets every start-up phase's stall."""
    table = dict(DEFAULT_LIMITS)
    if stall is not None:
        table |= {
            phase: Limits(stall=stall, total=table[phase].total) for phase in (*STARTUP, Phase.READY, Phase.SERVING)
        }
    for name, given in overrides.items():
        phase = Phase(name)
        table[phase] = Limits(
            stall=given.get("stall", table[phase].stall), total=given.get("total", table[phase].total)
        )
    return table


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequest:
    """Which GPUs. `allowed` are the UUIDs that may be taken (bound, arch, not quarantined), in order of preference.

    `count` of them are taken together. `probe` is `Probe.spec()`. `owners` are pids that, once gone, end everything.
    """

    count: int
    allowed: tuple[str, ...]
    probe: dict[str, Any]
    lock_dir: str
    lock_timeout: float
    owners: tuple[int, ...]
    run_id: str
    holder: str
    admission_timeout: float = 60.0
    release_timeout: float = 120.0

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> LeaseRequest:
        """Inverse of `to_json`."""
        return cls(**{**data, "allowed": tuple(data["allowed"]), "owners": tuple(data["owners"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """One server. `argv` begins with the interpreter; `{port}`, `{nccl_port}`, `{host}` and `{api_key}` are filled in.

    `env` is what the cell sets; `pass_env` are the caller's names that are let through or set although the spawn rules
    would drop them. `folder` is the cell's folder: the log is written to `folder/log_name`, evidence beside it.
    `gpus_visible` is False for the CPU engine. `patterns` names the SGLang version whose log lines are expected.
    `limits` is {phase: {stall, total}}; `log_cap` bytes are kept of the log. `draft_path` is the draft model's, empty
    without one; `blind` the flag that hides the lines which tell the phases, such as `--log-level warning`, or empty.
    """

    cell: str
    argv: tuple[str, ...]
    env: dict[str, str]
    folder: str
    sglang_version: str
    model_path: str
    draft_path: str = ""
    blind: str = ""
    pass_env: dict[str, str] = field(default_factory=dict)
    log_name: str = "server.log"
    limits: dict[str, dict[str, float | None]] = field(default_factory=dict)
    start_timeout: float | None = None
    log_cap: int = 64 << 20
    gpus_visible: bool = True
    port: int | None = None
    simulated: bool = False

    @property
    def limit_table(self) -> dict[Phase, Limits]:
        """The default limits, and those given here for what they set."""
        given = {
            phase: {name: value for name, value in limits.items() if value is not None}
            for phase, limits in self.limits.items()
        }
        return limits_from(given, None)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> LaunchSpec:
        """Inverse of `to_json`."""
        return cls(**{**data, "argv": tuple(data["argv"])})
