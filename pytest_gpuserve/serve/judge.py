"""From "this server has failed" to a `Failure`: patience, evidence, classification."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from pytest_gpuserve.model.failure import Failure, Kind
from pytest_gpuserve.serve.kernel import oom_kills

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest_gpuserve.model.gpu import Probe
    from pytest_gpuserve.model.launch import LaunchSpec
    from pytest_gpuserve.model.phase import Phase
    from pytest_gpuserve.serve.deaths import Deaths
    from pytest_gpuserve.serve.loop import Loop
    from pytest_gpuserve.serve.procs import Proc
    from pytest_gpuserve.serve.strangers import Strangers
    from pytest_gpuserve.serve.watch import Stall

__all__ = ["AFTER_DEATH", "AFTER_DEATH_SERVING", "AFTER_EXIT", "AFTER_FATAL", "Circumstances", "Judge", "judge"]

# After a line that says the start cannot succeed, after main's end, and after the death of another process: how long
# the log may still tell the reason. SGLang notices a dead scheduler within 6 s and then ends itself.
AFTER_FATAL = 0.5
AFTER_EXIT = 0.1
AFTER_DEATH = 8.0
AFTER_DEATH_SERVING = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """What the supervisor knows at the verdict. `began` in seconds since the epoch, `oom_kills` the
    count at that time; `health` is the last word of the
    readiness endpoint; `tree` looks at the processes now; `draft`: a draft model's weights are being loaded;
    `strangers` were seen on the GPUs since the launch.
    """

    spec: LaunchSpec
    phase: Phase
    lines: Sequence[str]
    stall: Stall | None
    deaths: Deaths
    port: int
    health: str
    uuids: Sequence[str]
    tree: Callable[[], Sequence[Proc]]
    log: Path
    began: float
    oom_kills: int
    strangers: Strangers
    draft: bool = False


class Judge:
    """Decides once. `facts` tells what is known at that time, `ended_at` when main's end was noticed (infinity before).

    `on_verdict` gets the failure in the loop's thread; the evidence is gathered beside it.
    """

    def __init__(
        self,
        loop: Loop,
        probe: Probe,
        facts: Callable[[], Circumstances],
        ended_at: Callable[[], float],
        on_verdict: Callable[[Failure], object],
    ) -> None:
        self.at_work = False
        self._loop, self._probe, self._facts, self._ended_at = loop, probe, facts, ended_at
        self._on_verdict = on_verdict

    def condemn(self, patience: float, *, failure: Failure | None = None) -> None:
        """The server has failed. What it is is judged after `patience` seconds, or soon after main's end; a `failure`
        that is known already is passed on. Further calls change nothing.
        """
        if self.at_work:
            return
        self.at_work = True
        if failure:
            self._loop.soon(self._on_verdict, failure)
            return
        deadline = monotonic() + patience

        def attempt() -> None:
            if monotonic() >= min(deadline, self._ended_at() + AFTER_EXIT):
                timer.cancel()
                facts = self._facts()
                self._loop.background(lambda: judge(facts, self._probe), self._on_verdict)

        timer = self._loop.every(0.05, attempt, first=0.0)


def judge(facts: Circumstances, probe: Probe) -> Failure:
    """Gathers evidence into the cell's folder (at most 15 s) and says what went wrong. Never raises."""
    try:
        # 40 ms of imports that a server which does not fail never needs.
        from pytest_gpuserve.serve.classify import Ending, classify
        from pytest_gpuserve.serve.evidence import gather

        evidence = gather(
            Path(facts.spec.folder),
            tree=facts.tree,
            probe=probe,
            uuids=facts.uuids,
            log=facts.log,
            stall=facts.stall,
            port=facts.port,
            python=facts.spec.argv[0],
            phase=facts.phase,
            health=facts.health,
            began=facts.began,
            draft=facts.draft,
            blind=facts.spec.blind,
        )
        # Looked at once more before anything of ours is ended: the watch's last reading may be half a second old.
        seconds = time.time() - facts.began
        facts.strangers.see(evidence.readings, seconds, facts.phase)
        return classify(
            Ending(
                phase=facts.phase,
                lines=facts.lines,
                exit=facts.deaths.exit,
                stall=facts.stall,
                conclusion=evidence.sentence,
                evidence=evidence.files,
                kernel=evidence.kernel,
                oom_kills=oom_kills() - facts.oom_kills,
                first_dead=facts.deaths.first,
                model_path=facts.spec.model_path,
                draft_path=facts.spec.draft_path,
                draft=facts.draft,
                blind=facts.spec.blind,
                strangers=facts.strangers.found(seconds, facts.phase),
                unchecked=facts.strangers.unchecked(),
            )
        )
    except Exception as error:  # noqa: BLE001 (a verdict must come whatever happens; this one blames us)
        text = f"the failure in phase {facts.phase} could not be examined: {type(error).__name__}: {error}"
        return Failure.of(Kind.INFRA, facts.phase, text, text="\n".join(facts.lines[-50:]) or text)
