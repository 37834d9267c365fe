"""The server's output: lines whatever the bytes and their cuts, a file of limited size, no API key in either."""

from __future__ import annotations

import os
from itertools import pairwise
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpuserve.serve.tail import CappedFile, LogPump, Splitter

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

KEY = "0123456789abcdef"


def cut(data: bytes, places: list[int]) -> list[bytes]:
    bounds = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[a:b] for a, b in pairwise(bounds)]


@given(st.binary(max_size=400), st.lists(st.integers(0, 10_000), max_size=8))
def test_lines_do_not_depend_on_how_the_bytes_arrive(data: bytes, places: list[int]) -> None:
    whole, parts = Splitter(), Splitter()
    expected = whole.feed(data) + whole.flush()
    assert [line for part in cut(data, places) for line in parts.feed(part)] + parts.flush() == expected


def test_carriage_returns_end_lines_and_escapes_go() -> None:
    splitter = Splitter()
    lines = splitter.feed(b"\r 1/9\r 2/9\x1b[0m\n\x1b]0;title\x07\x1b[31mred\x1b[0m caf\xe9\n\n   \n tail")
    assert lines[:2] == [" 1/9", " 2/9"]
    assert "\x1b" not in "".join(lines)
    assert "red caf�" in lines[2]
    assert splitter.flush() == [" tail"]
    assert splitter.flush() == []


def test_a_line_that_never_ends_is_cut() -> None:
    splitter = Splitter()
    lines = splitter.feed(b"y" * 100_000)
    assert len(lines) == 1
    assert len(lines[0]) == 16 << 10


def test_a_burst_is_read_in_full_and_a_flood_at_its_ends() -> None:
    now = [0.0]
    splitter = Splitter(lambda: now[0])
    piece = b"".join(b"%d\n" % n for n in range(10_000))
    assert len(splitter.feed(piece)) == len(splitter.feed(piece)) == 10_000
    flood = splitter.feed(piece)
    assert (flood[0], flood[-1]) == ("0", "9999")
    assert len(flood) + splitter.skipped == 10_000
    now[0] = 60.0
    assert len(splitter.feed(piece)) == 10_000


@given(st.lists(st.binary(min_size=1, max_size=3000), max_size=40), st.integers(4096, 9000))
@settings(deadline=None)
def test_a_capped_file_keeps_head_and_tail(
    tmp_path_factory: pytest.TempPathFactory, data: list[bytes], cap: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "capped.log"
    file = CappedFile(str(path), cap)
    for part in data:
        file.write(part)
    file.close()
    written, kept = b"".join(data), path.read_bytes()
    if len(written) <= cap:
        assert kept == written
        return
    assert len(kept) <= cap + 80
    assert kept.startswith(written[: cap // 2])
    assert written.endswith(kept.rpartition(b" bytes of the log are left out here]\n")[2])
    count = int(kept.rpartition(b" bytes of the log")[0].rpartition(b" ")[2])
    assert len(kept.rpartition(b"out here]\n")[2]) + cap // 2 + count == len(written)


def test_a_full_disk_is_noted_and_nothing_else() -> None:
    file = CappedFile("/dev/full", 4096)
    file.write(b"lost")
    file.write(b"lost too")
    assert "No space left" in file.error
    assert file.dropped == 12
    file.close()


@given(st.lists(st.sampled_from([b"a", b"\n", KEY.encode(), KEY[:5].encode(), KEY[5:].encode(), b"0"]), max_size=30))
@settings(deadline=None, max_examples=60)
def test_the_key_is_never_written(tmp_path_factory: pytest.TempPathFactory, parts: list[bytes]) -> None:
    path = tmp_path_factory.getbasetemp() / "secret.log"
    read, write = os.pipe()
    pump = LogPump(read, CappedFile(str(path), 1 << 20), KEY)
    for part in parts:
        os.write(write, part)
        pump.read()
    os.close(write)
    pump.read()
    assert pump.ended
    pump.close()
    text = path.read_bytes()
    assert KEY.encode() not in text
    assert text == b"".join(parts).replace(KEY.encode(), b"<api-key>")
    assert not any(KEY in line for line in pump.recent)


def test_the_newest_megabyte_is_remembered(tmp_path: Path) -> None:
    read, write = os.pipe()
    pump = LogPump(read, CappedFile(str(tmp_path / "log"), 1 << 20), KEY)
    for n in range(60):
        os.write(write, (b"%02d" % n) + b"z" * 30_000 + b"\n")
        pump.read()
    os.close(write)
    pump.close()
    assert pump.recent[-1].startswith("59")
    assert sum(map(len, pump.recent)) <= 1 << 20
