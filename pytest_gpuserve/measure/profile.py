"""Load profiles: how many requests at once, of which size."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, replace
from math import ceil, isfinite
from typing import TYPE_CHECKING, Any

from pytest_gpuserve.errors import UsageError, Where
from pytest_gpuserve.matrix.floors import read_loads
from pytest_gpuserve.matrix.source import Node
from pytest_gpuserve.matrix.walk import Reader, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpuserve.matrix.types import Load

__all__ = ["BUILT_IN", "WINDOWS", "LoadProfile", "changed", "profile_named", "refuse_too_long"]

WINDOWS = 5
# Part of every recipe's hash: raise it when the client measures something else than before under the same profile.
_CLOSED_CLIENT = 1
_OPEN_CLIENT = 2
# Fewer requests than this say little about latencies, however slowly they arrive.
_LEAST_ARRIVALS = 8
# Tokens of the context that SGLang keeps free: beyond, it cuts the answer short without a word.
_KEPT_FREE = 2
_FIELDS = ("concurrency", "input", "output", "prefix", "rate", "windows", "timeout")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProfile:
    """A load. Closed loop: `concurrency` requests are always under way. With `rate` (requests a second): open loop,
    begun at Poisson times, and never more than `concurrency` at once.

    `input` and `output` are tokens a request; the output's length is fixed (`ignore_eos`). Prompts are random token
    ids, so that no prefix is cached, except the `prefix` leading ones: those are the same in every request of every
    profile of this name. `windows` samples are taken, each as long as `window_requests` requests take to end.
    `timeout` (s) is how long no token may come, where no queue explains it.
    """

    name: str
    concurrency: int = 1
    input: int = 128
    output: int = 512
    prefix: int = 0
    rate: float | None = None
    windows: int = WINDOWS
    timeout: float = 120.0

    @property
    def warmup_requests(self) -> int:
        """How many at least go first and count for nothing: twice the concurrency, since they compile and capture.

        In an open loop `concurrency` is a bound, and what is reached shows only in the run (`load._Load.warming`).
        """
        return 2 * self.window_requests

    @property
    def window_requests(self) -> int:
        """Requests that end in one window: each stream's one; in an open loop what arrives in 2 s, and 8 at least."""
        return self.concurrency if self.rate is None else max(_LEAST_ARRIVALS, ceil(2 * self.rate))

    @property
    def method(self) -> str:
        """Hash of the measuring recipe: only samples of the same recipe are compared with each other."""
        recipe = {name: value for name, value in asdict(self).items() if name not in ("name", "timeout")}
        client = _CLOSED_CLIENT
        if self.rate is not None:
            client, recipe["rate"] = _OPEN_CLIENT, float(self.rate)  # 4 and 4.0 are the same
        return hashlib.sha256(repr((client, sorted(recipe.items()))).encode()).hexdigest()[:12]


BUILT_IN = {
    profile.name: profile
    for profile in (
        LoadProfile(name="single-stream", concurrency=1),
        LoadProfile(name="batch", concurrency=64),
        LoadProfile(name="saturate", concurrency=512),
    )
}


def profile_named(name: str, loads: Mapping[str, Load]) -> LoadProfile:
    """The matrix' load of that name, or the built-in one. UsageError names the closest there is, or all."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    load = loads.get(name)
    if load is None:
        raise UsageError(f"there is no load '{name}'{did_you_mean(str(name), (*loads, *BUILT_IN))}")
    return LoadProfile(
        name=name,
        concurrency=load.concurrency,
        input=load.input,
        output=load.output,
        prefix=load.prefix,
        rate=load.rate,
        windows=load.windows or WINDOWS,
    )


def changed(profile: LoadProfile, changes: Mapping[str, Any]) -> LoadProfile:
    """The profile with other values, called `batch[windows=3]`. UsageError names every field that cannot be so.

    The rules are those of a matrix' `loads`, read by the same reader; `rate=None` closes an open loop.
    """
    if not changes:
        return profile
    reader = Reader()
    values = {name: getattr(profile, name) for name in _FIELDS} | dict(changes)
    if values["rate"] is None:
        del values["rate"]
    nodes = {name: _node(f"{profile.name}.{name}", value) for name, value in values.items()}
    for name in [name for name in nodes if name not in _FIELDS]:
        reader.add(nodes.pop(name), f"{profile.name} has no field '{name}'")
    reader.number(nodes.pop("timeout"))
    # Under a name of no built-in load, since a matrix may not define those anew.
    read_loads(reader, _node("", None, load=_node(profile.name, None, **nodes)))
    told = ", ".join(f"{name}={f'{v:g}' if isinstance(v, float) else v}" for name, v in sorted(changes.items()))
    if reader.problems:
        found = "; ".join(problem.what for problem in reader.problems)
        raise UsageError(f"load {profile.name}[{told}]: {found}. The fields of a load are {', '.join(_FIELDS)}")
    return replace(profile, **{"name": f"{profile.name}[{told}]", **changes})


def _node(path: str, value: Any, **fields: Node) -> Node:
    """A value, or a mapping of `fields`, as if a matrix file had it. There, nan and inf are mere words."""
    where = Where("load()")
    if fields:
        return Node(where, path, fields=fields, keys=dict.fromkeys(fields, where))
    if isinstance(value, float) and not isfinite(value):
        value = str(value)
    return Node(where, path, text=str(value), value=value)


def refuse_too_long(profile: LoadProfile, longest: int) -> None:
    """UsageError if a request with its answer does not fit into the `longest` tokens that the server takes."""
    wanted, room = profile.input + profile.output, longest - _KEPT_FREE
    if wanted > room:
        raise UsageError(
            f"load {profile.name}: input {profile.input} + output {profile.output} = {wanted} tokens, and the server "
            f"takes at most {room}: the model's context length (or its KV cache, if smaller) is {longest}. Give the "
            "load a shorter input or output, or the server another context-length or more memory"
        )
