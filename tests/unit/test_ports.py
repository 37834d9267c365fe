"""Blocks of ports: one server's, whoever else looks for one."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from pytest_gpuserve.errors import MachineError
from pytest_gpuserve.serve import ports
from pytest_gpuserve.serve.ports import acquire_block, taken

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("other", ["same", "another"])
def test_a_block_is_nobody_elses_until_it_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    """Two simulated machines have lock directories of their own, and the same ports: both found the block free."""
    block = acquire_block(tmp_path / "same")
    monkeypatch.setattr(ports, "blocks", lambda _: [block.base])
    with pytest.raises(MachineError, match="no free block of 256 ports"):
        acquire_block(tmp_path / other)
    assert not taken(block.port)
    block.release()
    acquire_block(tmp_path / other).release()


def test_a_block_with_a_listener_in_it_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = acquire_block(tmp_path)
    block.release()
    monkeypatch.setattr(ports, "blocks", lambda _: [block.base])
    with socket.create_server(("127.0.0.1", block.nccl_port)), pytest.raises(MachineError):
        acquire_block(tmp_path)
    # What was taken of it was given back.
    acquire_block(tmp_path).release()
