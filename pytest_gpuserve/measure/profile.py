"""Load profiles: how many requests at once, of which size."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BUILT_IN", "LoadProfile"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProfile:
    """A load. Closed loop: `concurrency` requests are always under way. With `rate` (requests a second): open loop,
    begun at Poisson times, at most `concurrency` at once if that is above 0.

    `input` and `output` are tokens a request; the output's length is fixed (`ignore_eos`). Prompts are random token
    ids, so that no prefix is cached, except `prefix` leading tokens that all share (a cache test).
    `windows` samples are taken, each as long as `concurrency` requests take to end; `warmup` requests go first,
    at least twice the concurrency, and never count. `timeout` (s) bounds the time between two tokens.
    """

    name: str
    concurrency: int = 1
    input: int = 128
    output: int = 512
    prefix: int = 0
    rate: float | None = None
    windows: int = 5
    warmup: int = 0
    timeout: float = 120.0

    @property
    def warmup_requests(self) -> int:
        """At least twice the concurrency: the first requests compile, capture and fill caches."""
        return max(self.warmup, 2 * self.window_requests)

    @property
    def window_requests(self) -> int:
        """Requests that end in one window."""
        return max(self.concurrency, 1) if self.rate is None else max(self.concurrency, int(self.rate * 2), 1)


BUILT_IN = {
    "single-stream": LoadProfile(name="single-stream", concurrency=1, input=128, output=512),
    "batch": LoadProfile(name="batch", concurrency=64, input=128, output=512),
    "saturate": LoadProfile(name="saturate", concurrency=512, input=128, output=512),
}
