"""The small HTTP client of the supervisor, against real sockets and cut answers."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpuserve.serve.http import Answer, Exchange, whole_answer
from pytest_gpuserve.serve.loop import Loop

LENGTH = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"
CHUNKS = b"HTTP/1.1 503 X\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2;x=y\r\nlo\r\n0\r\n\r\n"


@pytest.mark.parametrize(("answer", "status"), [(LENGTH, 200), (CHUNKS, 503)])
def test_an_answer_is_whole_only_with_its_last_byte(answer: bytes, status: int) -> None:
    complete = [length for length in range(len(answer) + 1) if whole_answer(answer[:length], ended=False)]
    assert whole_answer(answer, ended=False) == (status, b"hello")
    assert complete[0] >= len(answer) - 2  # the blank line after the last chunk may be missing
    assert complete == list(range(complete[0], len(answer) + 1))


def test_an_answer_without_a_length_ends_with_the_stream() -> None:
    answer = b"HTTP/1.0 200 OK\r\n\r\nhello"
    assert whole_answer(answer, ended=False) is None
    assert whole_answer(answer, ended=True) == (200, b"hello")


@given(st.binary(max_size=80), st.booleans())
def test_no_bytes_break_it(noise: bytes, ended: bool) -> None:
    for prefix in (b"", b"HTTP/1.1 200\r\n\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"):
        whole_answer(prefix + noise, ended=ended)


def ask(serve: object, **options: object) -> list[Answer]:
    """The answers (one at most) to a request to a listener that `serve` handles in a thread."""
    loop, answers = Loop(), []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        Exchange(loop, listener.getsockname()[1], "/x", answers.append, key="k", **options)
        loop.wait(lambda: bool(answers), 30)
        thread.join(30)
    return answers


def test_a_slow_answer_in_pieces() -> None:
    heard = []

    def serve(listener: socket.socket) -> None:
        with listener.accept()[0] as connection:
            heard.append(connection.recv(9999))
            with suppress(ConnectionError):  # the last bytes are not waited for
                for byte in CHUNKS:
                    connection.send(bytes([byte]))
                    time.sleep(0.001)

    answers = ask(serve, body={"a": 1})
    assert (answers[0].status, answers[0].body) == (503, b"hello")
    assert heard[0].startswith(b"POST /x HTTP/1.1\r\n")
    assert b"Authorization: Bearer k\r\n" in heard[0]
    assert heard[0].endswith(b'{"a": 1}')


def test_a_server_that_never_answers() -> None:
    def serve(listener: socket.socket) -> None:
        with listener.accept()[0] as connection:
            connection.recv(9999)
            connection.recv(9999)

    answer = ask(serve, timeout=0.2)[0]
    assert answer == Answer(0, error="timeout", seconds=answer.seconds)
    assert 0.2 <= answer.seconds < 10


def test_a_connection_that_is_cut() -> None:
    def serve(listener: socket.socket) -> None:
        with listener.accept()[0] as connection:
            connection.recv(9999)
            connection.sendall(LENGTH[:-2])

    answers = ask(serve)
    assert answers[0].status == 0
    assert "closed" in answers[0].error


def test_nobody_listens() -> None:
    loop, answers = Loop(), []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    Exchange(loop, port, "/", answers.append, key="k")
    assert answers == []
    assert loop.wait(lambda: bool(answers), 30)
    assert answers[0].refused
