"""Exclusive use of GPUs, across workers, pytest runs, users and containers that share the lock directory.

`acquire` waits in the queue, takes the locks, passes the admission gate; the `Lease` is kept until the GPUs are proven
free again. When its process dies in any way, the kernel frees the locks, and the note tells the next lease what to
look for.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pytest_gpuserve.errors import MachineError
from pytest_gpuserve.gpu import process
from pytest_gpuserve.gpu.admission import Gate, State, name_of, remains
from pytest_gpuserve.gpu.lockdir import default_lock_dir, prepare, stem
from pytest_gpuserve.gpu.locks import is_held, take
from pytest_gpuserve.gpu.notes import (
    Holder,
    Note,
    holders,
    note_path,
    quarantine_path,
    quarantined,
    read_note,
    write_json,
    write_note,
)
from pytest_gpuserve.gpu.turnstile import Place, Ticket, grant
from pytest_gpuserve.model.words import number

if TYPE_CHECKING:
    from collections.abc import Callable

    from filelock import BaseFileLock

    from pytest_gpuserve.model.gpu import Gpu, GpuProcess, Probe
    from pytest_gpuserve.model.launch import LeaseRequest

__all__ = ["Holder", "Lease", "acquire", "default_lock_dir", "holders", "quarantined"]


class Lease:
    """GPUs held by this process; made by `acquire`, ended by `release` or the end of a `with`.

    `id` is what its servers carry as GPUSERVE_LEASE; `gpus` in index order; `idle`: UUID → idle reading in bytes, or
    None; `unchecked`: what the admission could not check, as text.
    """

    def __init__(self, *, lease: str, gpus: tuple[Gpu, ...], lock_dir: Path, gate: Gate) -> None:
        self.id = lease
        self.gpus = gpus
        self.idle: dict[str, int | None] = {gpu.uuid: None for gpu in gpus}
        self.unchecked: list[str] = []
        self._lock_dir = lock_dir
        self._gate = gate
        self._locks: list[BaseFileLock] = []
        self._notes: dict[str, Note] = {}
        self._dead: list[Note] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def note(self, **facts: Any) -> None:
        """Update what others read of this lease: `phase`, `cell`, and `pids`, the server's processes.

        A note informs only: if it cannot be written (disk full), the lease stands all the same.
        """
        if unknown := facts.keys() - {"phase", "cell", "pids"}:
            message = f"a lease's note has no {', '.join(sorted(unknown))}"
            raise TypeError(message)
        if "pids" in facts:
            started = {int(pid): process.start_of(int(pid)) for pid in facts["pids"]}
            facts["pids"] = tuple((pid, start) for pid, start in started.items() if start is not None)
        for name, note in self._notes.items():
            self._notes[name] = replace(note, **facts)
            with suppress(OSError):
                write_note(self._lock_dir, self._notes[name])

    def busy(self) -> list[str]:
        """What still holds these GPUs, one text each: `pid 4242 (python, alice) 76.1 GiB on GPU 3`."""
        return [text for gpu in self.gpus for text in self._gate.look(gpu).occupants]

    def occupancy(self, foreign: Callable[[GpuProcess], bool]) -> tuple[list[str], list[str]]:
        """As `busy`, in two lists: what may be our server's, and the processes that `foreign` says are not."""
        states = [self._gate.look(gpu, foreign) for gpu in self.gpus]
        return (
            [text for state in states for text in state.occupants],
            [text for state in states for text in state.foreign],
        )

    def identified(self) -> bool:
        """False if a process on these GPUs is known by a number alone, which may mean another process here."""
        return not any(self._gate.look(gpu).unidentified for gpu in self.gpus)

    def unreadable(self) -> bool:
        """True if these GPUs cannot be called free only because some of them cannot be read."""
        occupied = [state for gpu in self.gpus if (state := self._gate.look(gpu)).occupants]
        return bool(occupied) and all(state.unreadable for state in occupied)

    def free(self) -> bool:
        """True if nothing holds these GPUs, as far as this machine can tell (see `unchecked`)."""
        return not self.busy()

    def quarantine(self, uuid: str, reason: str) -> None:
        """Note for everybody that this GPU was left in use. The note lasts until an admission finds the GPU free."""
        gpu = next(gpu for gpu in self.gpus if gpu.uuid == uuid)
        facts = {
            "uuid": uuid,
            "reason": reason,
            "evidence": "; ".join(self._gate.look(gpu).occupants) or f"nothing seen on {name_of(gpu)}",
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
            "lease": self.id,
        }
        with suppress(OSError):
            write_json(quarantine_path(self._lock_dir, uuid), facts)

    def release(self) -> None:
        """Give the GPUs up: the notes go, then the locks. What is known of dead leases stays. Again: does nothing."""
        for note in self._notes.values():
            if not note.orphans:
                with suppress(OSError):
                    note_path(self._lock_dir, note.uuid).unlink(missing_ok=True)
        self._notes.clear()
        while self._locks:
            self._locks.pop().release()

    def take(self, request: LeaseRequest) -> bool:
        """For `acquire`: lock every GPU and sign its note; False, with nothing held, if somebody else has one."""
        for gpu in self.gpus:
            # A peer that looks at a lock has it for an instant, so the first refusal is not final.
            lock = take(self._lock_dir / f"{stem(gpu.uuid)}.lock", timeout=0.05)
            if lock is None:
                self.release()
                return False
            self._locks.append(lock)
        for gpu in self.gpus:
            last = read_note(self._lock_dir, gpu.uuid)
            self._dead += [last] if last else []
            self._notes[gpu.uuid] = Note.of_this_process(
                uuid=gpu.uuid,
                index=gpu.index,
                lease=self.id,
                run_id=request.run_id,
                cell=request.holder,
                phase="admission",
                orphans=(last.lease, *last.orphans) if last else (),
                pids=last.pids if last and last.namespace == process.pid_namespace() else (),
            )
            write_note(self._lock_dir, self._notes[gpu.uuid])
        return True

    def admit(self) -> list[str]:
        """For `acquire`: what stands against using the GPUs now; if nothing does, the lease is complete."""
        looks = [(gpu, self._gate.look(gpu)) for gpu in self.gpus]
        against = [*remains(self._dead), *(text for _, state in looks for text in state.occupants)]
        if not against:
            for gpu, state in looks:
                self._admit(gpu, state)
            self._dead.clear()
        return against

    def _admit(self, gpu: Gpu, state: State) -> None:
        self._gate.record(gpu, state.idle)
        self.idle[gpu.uuid] = state.idle
        self.unchecked += state.unchecked
        quarantine_path(self._lock_dir, gpu.uuid).unlink(missing_ok=True)
        self._notes[gpu.uuid] = replace(self._notes[gpu.uuid], phase="leased", orphans=(), pids=())
        write_note(self._lock_dir, self._notes[gpu.uuid])


def acquire(request: LeaseRequest, probe: Probe, on_wait: Callable[[float, list[str]], None]) -> Lease:
    """Take `request.count` of the allowed GPUs together, and wait until they are free.

    Waits at most `lock_timeout` s for the locks, then `admission_timeout` s for memory and processes. `on_wait(seconds
    since the call, who holds what)` is called about once a second; what it raises ends the wait, and nothing is left
    held. A quarantined GPU may be among the allowed: it is taken once it is free. MachineError (outcome `infra`) names
    the holders; UsageError if the lock directory cannot hold locks.
    """
    acquisition = _Acquisition(request, probe, on_wait)
    try:
        lease = acquisition.locked()
        try:
            acquisition.admitted(lease)
        except BaseException:
            lease.release()
            raise
    except OSError as error:
        message = f"the lock directory {request.lock_dir} failed: {error}. Choose another with --gpu-lock-dir"
        raise MachineError(message) from error
    return lease


class _Acquisition:
    """One call of `acquire`."""

    def __init__(self, request: LeaseRequest, probe: Probe, on_wait: Callable[[float, list[str]], None]) -> None:
        self._request = request
        self._lock_dir = prepare(Path(request.lock_dir))
        self._gate = Gate(probe, self._lock_dir)
        self._machine = {gpu.uuid: gpu for gpu in probe.gpus()}
        self._allowed = tuple(name for name in request.allowed if name in self._machine)
        self._on_wait = on_wait
        self._began = self._told = time.monotonic()
        self._in_use: dict[str, list[str]] = {}
        self._ahead = 0
        self._looked = False
        if not 0 < request.count <= len(self._allowed):
            gone = [name for name in request.allowed if name not in self._machine]
            allowed = f"may use {len(self._allowed)} of this machine's"
            message = f"{request.holder} needs {number(request.count, 'GPU')} and {allowed}"
            raise MachineError(f"{message}; not there any more: {', '.join(gone)}" if gone else message)

    def locked(self) -> Lease:
        """Locks and notes, in the order of the queue."""
        ticket = Ticket(self._request.count, self._allowed)
        place = Place(self._lock_dir, ticket)
        deadline = self._began + self._request.lock_timeout
        try:
            while True:
                self._look_around()
                with place.turn() as earlier:
                    self._ahead = len(earlier)
                    gpus = grant(earlier, ticket, self._free(), self._in_use, self._machine)
                    lease = self._sign(gpus) if gpus else None
                if lease is not None:
                    return lease
                if time.monotonic() >= deadline:
                    raise MachineError(self._locked_out())
                place.stay()
                # Those in front look often, those behind them seldom, and readings of GPUs are dearer than locks.
                self._pause(max(min(0.02 * (1 + self._ahead), 0.5), 0.25 * self._looked), self._who)
        finally:
            place.leave()

    def admitted(self, lease: Lease) -> None:
        """The gate: memory at the idle reading, nobody's compute process, nothing left of a dead lease."""
        began = time.monotonic()
        while against := lease.admit():
            if time.monotonic() - began >= self._request.admission_timeout:
                raise MachineError(self._not_free(lease, against))
            self._pause(0.1, lambda: against)

    def _sign(self, gpus: tuple[Gpu, ...]) -> Lease | None:
        lease_id = f"{self._request.run_id}-{os.urandom(6).hex()}"
        lease = Lease(lease=lease_id, gpus=gpus, lock_dir=self._lock_dir, gate=self._gate)
        try:
            return lease if lease.take(self._request) else None
        except BaseException:
            lease.release()
            raise

    def _free(self) -> set[str]:
        return {name for name in self._machine if not is_held(self._lock_dir / f"{stem(name)}.lock")}

    def _look_around(self) -> None:
        """Which GPUs are in use although their lock is free, and by whom.

        Looked at only when enough locks are free: a reading takes milliseconds.
        """
        self._in_use = {}
        free = self._free().intersection(self._allowed)
        self._looked = len(free) >= self._request.count
        for name in free if self._looked else ():
            note = read_note(self._lock_dir, name)
            texts = [*self._gate.look(self._machine[name]).occupants, *remains([note] if note else [])]
            if texts:
                self._in_use[name] = texts

    def _pause(self, seconds: float, who: Callable[[], list[str]]) -> None:
        time.sleep(seconds * (0.8 + os.urandom(1)[0] / 640))  # waiters must not come all at once
        now = time.monotonic()
        if now - self._told >= 1:
            self._told = now
            self._on_wait(now - self._began, who())

    def _who(self) -> list[str]:
        texts = [str(holder) for holder in holders(self._lock_dir) if holder.held and holder.uuid in self._allowed]
        texts += [f"{text}, without a lease" for found in self._in_use.values() for text in found]
        return [*texts, f"{number(self._ahead, 'request')} came earlier"] if self._ahead else texts

    def _locked_out(self) -> str:
        request = self._request
        head = (
            f"{request.holder} waited {request.lock_timeout:.0f} s for {request.count} of "
            f"{number(len(self._allowed), 'GPU')} (locks in {self._lock_dir}):"
        )
        who = self._who() or ["nobody now: another request was faster"]
        next_step = "Wait longer with --gpu-lock-timeout; `gpuserve reap` ends what dead runs left"
        return "\n  ".join((head, *who, next_step))

    def _not_free(self, lease: Lease, against: list[str]) -> str:
        reasons = quarantined(self._lock_dir)
        head = (
            f"{', '.join(map(name_of, lease.gpus))} still in use {self._request.admission_timeout:.0f} s after the "
            "lock was had, by somebody who holds no lease:"
        )
        known = [f"{name_of(gpu)} is quarantined: {reasons[gpu.uuid]}" for gpu in lease.gpus if gpu.uuid in reasons]
        end_it = "End it, or `gpuserve reap` if a dead run left it."
        if not lease.identified():
            end_it = (
                "Who that is cannot be told from here: end nothing by its number in this container, look at "
                "`nvidia-smi` and `ps` on the host. `gpuserve reap` ends what a dead run left."
            )
        next_step = (
            f"{end_it} If so much memory is always in use on this machine, "
            f"remove the recorded idle readings ({', '.join(str(self._gate.path(gpu)) for gpu in lease.gpus)})"
        )
        return "\n  ".join((head, *against, *known, next_step))
