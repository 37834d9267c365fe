"""Load profiles: how many requests at once, of which size."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from math import ceil
from typing import TYPE_CHECKING

from pytest_gpuserve.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpuserve.matrix.types import Load

__all__ = ["BUILT_IN", "WINDOWS", "LoadProfile", "profile_named"]

WINDOWS = 5
# Part of every recipe's hash: raise it when the client measures something else than before under the same profile.
_CLIENT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProfile:
    """A load. Closed loop: `concurrency` requests are always under way. With `rate` (requests a second): open loop,
    begun at Poisson times, and never more than `concurrency` at once.

    `input` and `output` are tokens a request; the output's length is fixed (`ignore_eos`). Prompts are random token
    ids, so that no prefix is cached, except the `prefix` leading ones: those are the same in every request of every
    profile of this name. `windows` samples are taken, each as long as `window_requests` requests take to end.
    `timeout` (s) bounds the time between two tokens.
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
        """How many go first and count for nothing: at least twice the concurrency, since they compile and capture."""
        return 2 * self.window_requests

    @property
    def window_requests(self) -> int:
        """Requests that end in one window: each stream's one, or what arrives in two seconds."""
        return max(self.concurrency, 1 if self.rate is None else ceil(2 * self.rate))

    @property
    def method(self) -> str:
        """Hash of the measuring recipe: only samples of the same recipe are compared with each other."""
        recipe = {name: value for name, value in asdict(self).items() if name not in ("name", "timeout")}
        return hashlib.sha256(repr((_CLIENT, sorted(recipe.items()))).encode()).hexdigest()[:12]


BUILT_IN = {
    profile.name: profile
    for profile in (
        LoadProfile(name="single-stream", concurrency=1),
        LoadProfile(name="batch", concurrency=64),
        LoadProfile(name="saturate", concurrency=512),
    )
}


def profile_named(name: str, loads: Mapping[str, Load]) -> LoadProfile:
    """The matrix' load of that name, or the built-in one. UsageError names those there are."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    load = loads.get(name)
    if load is None:
        raise UsageError(f"there is no load '{name}': built in are {', '.join(BUILT_IN)}; the matrix has {list(loads)}")
    return LoadProfile(
        name=name,
        concurrency=load.concurrency,
        input=load.input,
        output=load.output,
        prefix=load.prefix,
        rate=load.rate,
        windows=load.windows or WINDOWS,
    )
