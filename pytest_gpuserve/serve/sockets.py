"""Which TCP ports a tree of processes listens on, from `/proc`."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Socket", "sockets_of"]

_STATES = {
    "01": "established",
    "02": "syn-sent",
    "03": "syn-received",
    "04": "fin-wait-1",
    "05": "fin-wait-2",
    "06": "time-wait",
    "07": "close",
    "08": "close-wait",
    "09": "last-ack",
    "0A": "listen",
    "0B": "closing",
}


@dataclass(frozen=True, slots=True)
class Socket:
    """One end of a connection. `waiting` are bytes that were received and not read (for `listen`: connections)."""

    pid: int
    state: str
    host: str
    port: int
    peer: str
    waiting: int


def sockets_of(pids: Iterable[int]) -> list[Socket]:
    """All TCP sockets these processes have open; a socket that several share is listed for each."""
    owners: dict[str, list[int]] = {}
    spaces: dict[str, int] = {}
    for pid in pids:
        spaces.setdefault(_namespace(pid), pid)
        for inode in _inodes(pid):
            owners.setdefault(inode, []).append(pid)
    found: list[Socket] = []
    for pid in spaces.values():
        for table in ("tcp", "tcp6"):
            for row in _rows(f"/proc/{pid}/net/{table}"):
                found += [_socket(owner, row) for owner in owners.get(row[9], ())]
    return sorted(found, key=lambda found: (found.state != "listen", found.pid, found.port))


def _socket(pid: int, row: list[str]) -> Socket:
    host, port = _address(row[1])
    peer, peer_port = _address(row[2])
    return Socket(
        pid, _STATES.get(row[3], row[3]), host, port, f"{peer}:{peer_port}", int(row[4].rpartition(":")[2], 16)
    )


def _address(text: str) -> tuple[str, int]:
    """`0100007F:7D00` → 127.0.0.1, 32000: the address is written in the machine's byte order, by 32 bits."""
    digits, _, port = text.rpartition(":")
    words = (bytes.fromhex(digits[at : at + 8])[::-1] for at in range(0, len(digits), 8))
    return str(ipaddress.ip_address(b"".join(words))), int(port, 16)


def _rows(path: str) -> list[list[str]]:
    try:
        with open(path, encoding="ascii") as file:  # noqa: PTH123 (as procs does)
            return [row for line in file if len(row := line.split()) > 9 and row[9].isdigit()]
    except OSError:
        return []


def _namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")  # noqa: PTH115
    except OSError:
        return ""


def _inodes(pid: int) -> set[str]:
    found: set[str] = set()
    try:
        with os.scandir(f"/proc/{pid}/fd") as entries:
            for entry in entries:
                try:
                    target = os.readlink(entry.path)  # noqa: PTH115
                except OSError:
                    continue
                if target.startswith("socket:["):
                    found.add(target[8:-1])
    except OSError:
        return found
    return found
