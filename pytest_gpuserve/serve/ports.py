"""Ports for one server, from a block no other server of this tool uses.

A block lies below the ephemeral range, so that no client connection takes a port of it. It is held by a lock in the
lock directory and by a socket, since a machine may have several of these (each simulated one has its own). SGLang
derives further ports from `--port`: with data-parallel attention port + 233 to port + 240, so a block is wide enough
for these. Older versions picked the NCCL port at random, and two servers collided (sglang#7418).
"""

from __future__ import annotations

import errno
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpuserve.errors import MachineError
from pytest_gpuserve.gpu.lockdir import make_shared
from pytest_gpuserve.gpu.locks import take

if TYPE_CHECKING:
    from filelock import BaseFileLock

__all__ = ["BLOCK", "PortBlock", "acquire_block", "blocks", "taken"]

BLOCK = 256
_NCCL = 8
_LOWEST = 10_000
_PROBED = (0, _NCCL, *range(233, 241))
_HELD = BLOCK - 1


@dataclass(slots=True)
class PortBlock:
    """`BLOCK` ports from `base`, ours until `release`."""

    base: int
    _lock: BaseFileLock = field(repr=False)
    _socket: socket.socket = field(repr=False)

    @property
    def port(self) -> int:
        """Where the server listens."""
        return self.base

    @property
    def nccl_port(self) -> int:
        """For the rendezvous of its ranks."""
        return self.base + _NCCL

    def release(self) -> None:
        """Gives the block up."""
        self._socket.close()
        self._lock.release()


def ephemeral_range() -> tuple[int, int]:
    """The ports the kernel gives to clients."""
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()
        return int(low), int(high)
    except (OSError, ValueError):
        return 32768, 60999


def blocks(ephemeral: tuple[int, int]) -> list[int]:
    """The first ports of all blocks: below the ephemeral range, above it, or anywhere if it leaves no room."""
    low, high = ephemeral
    below = list(range(_LOWEST, low - BLOCK + 1, BLOCK))
    above = list(range(max(high + 1, _LOWEST), 65536 - BLOCK + 1, BLOCK))
    return below or above or list(range(_LOWEST, 65536 - BLOCK + 1, BLOCK))


def taken(port: int) -> bool:
    """Whether something listens at `port` on any local address, IPv4 or IPv6."""
    for family, host in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):  # noqa: S104
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                # As uvicorn does: a connection in TIME_WAIT is no obstacle, a listener is.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return True
            if family == socket.AF_INET:
                raise
    return False


def _hold(port: int) -> socket.socket | None:
    """Takes a port that no server uses; None if somebody has it. Nothing listens there, and the end of its holder, by
    whatever means, gives it back.
    """
    held = socket.socket()
    try:
        held.bind(("127.0.0.1", port))
    except OSError as error:
        held.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return held


def acquire_block(lock_dir: Path) -> PortBlock:
    """A block whose ports are free now. MachineError (infra) when there is none."""
    folder = lock_dir / "ports"
    make_shared(folder)
    bases = blocks(ephemeral_range())
    # Not always the first one: a port that was just given back may still be in a client's hands.
    start = int.from_bytes(os.urandom(4), "big") % len(bases)
    for base in bases[start:] + bases[:start]:
        lock = take(folder / f"{base}.lock", 0)
        if lock is None:
            continue
        held = _hold(base + _HELD)
        if held is not None:
            if not any(taken(base + offset) for offset in _PROBED):
                return PortBlock(base, lock, held)
            held.close()
        lock.release()
    raise MachineError(
        f"no free block of {BLOCK} ports: all {len(bases)} between {bases[0]} and {bases[-1] + BLOCK - 1} are locked "
        f"in {folder}, held by runs with other lock directories, or have listeners. "
        "`gpuserve status` lists the servers of this tool; `ss -ltnp` lists listeners."
    )
