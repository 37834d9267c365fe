"""A process that takes leases on command: one JSON object a line in and out. Run as `lease_peer.py SIM LOCKS [UID]`."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pytest_gpuserve.errors import GpuserveError
from pytest_gpuserve.gpu import sim
from pytest_gpuserve.gpu.lease import Lease, acquire, holders
from pytest_gpuserve.model.launch import LeaseRequest

SIM, LOCKS = Path(sys.argv[1]), Path(sys.argv[2])
PROBE = sim.SimProbe(SIM)
UUIDS = tuple(gpu.uuid for gpu in PROBE.gpus())
leases: list[Lease] = []


def say(event: str, **facts: Any) -> None:
    print(json.dumps({"event": event, **facts}), flush=True)


def request(locks: Path = LOCKS, **facts: Any) -> LeaseRequest:
    given = {
        "count": 1,
        "allowed": UUIDS,
        "probe": PROBE.spec(),
        "lock_dir": str(locks),
        "lock_timeout": 60.0,
        "admission_timeout": 60.0,
        "owners": (),
        "run_id": f"run-{os.getpid()}",
        "holder": "cell",
    }
    return LeaseRequest(**given | facts)


def take(**facts: Any) -> None:
    wanted = request(**facts)
    say("asking")
    began = time.monotonic()
    try:
        lease = acquire(wanted, PROBE, lambda seconds, who: say("waiting", seconds=seconds, holders=who))
    except GpuserveError as error:
        say("error", kind=type(error).__name__, message=str(error))
        return
    leases.append(lease)
    say("leased", gpus=[gpu.index for gpu in lease.gpus], lease=lease.id, seconds=time.monotonic() - began)


def release() -> None:
    leases.pop().release()
    say("released")


def note(**facts: Any) -> None:
    leases[-1].note(**facts)
    say("noted")


def fork() -> None:
    """A child of the simplest kind: every descriptor is inherited and nothing is executed."""
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    say("child", pid=child)


def spawn() -> None:
    """A server process: executed, without closing descriptors, with the mark of the lease."""
    child = subprocess.Popen(
        ["/bin/sh", "-c", "echo; exec sleep 600"],
        close_fds=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env={"PATH": os.environ["PATH"], "GPUSERVE_LEASE": leases[-1].id},
    )
    assert child.stdout
    child.stdout.readline()
    children.append(child)
    say("child", pid=child.pid)


def look() -> None:
    say("holders", texts=[str(holder) for holder in holders(LOCKS)])


def churn(*, widths: list[int], rounds: int, seed: int, hold: float = 0.004, stop: str = "") -> None:
    """Take and give up leases; a file made for every leased GPU proves that nobody else has it meanwhile."""
    rng = random.Random(seed)
    served = 0
    while served < rounds and not (stop and Path(stop).exists()):
        with acquire(request(count=rng.choice(widths)), PROBE, lambda *_: None) as lease:
            proofs = [SIM / f"owned-{gpu.index}" for gpu in lease.gpus]
            for proof in proofs:
                proof.open("x").close()
            time.sleep(rng.uniform(hold / 2, hold))
            for proof in proofs:
                proof.unlink()
        served += 1
    say("churned", served=served)


children: list[subprocess.Popen[bytes]] = []
COMMANDS = {
    "take": take,
    "release": release,
    "note": note,
    "fork": fork,
    "spawn": spawn,
    "look": look,
    "churn": churn,
}

if __name__ == "__main__":
    # Everything that is imported late is imported now: another user may not be able to read the interpreter's files.
    with tempfile.TemporaryDirectory() as folder:
        acquire(request(Path(folder) / "locks", count=1), PROBE, lambda *_: None).release()
    if len(sys.argv) > 3:
        os.setgroups([])
        os.setgid(int(sys.argv[3]))
        os.setuid(int(sys.argv[3]))
    say("ready", pid=os.getpid())
    for line in sys.stdin:
        command = json.loads(line)
        COMMANDS[command.pop("do")](**command)
