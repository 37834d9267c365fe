"""A server is ready when its health and a real generation say so, whichever comes first."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pytest_gpuserve.engine import endpoints
from pytest_gpuserve.serve.loop import Loop
from pytest_gpuserve.serve.readiness import Readiness


class _Server(BaseHTTPRequestHandler):
    """`/health` waits until `healthy` is set, as SGLang's generates and takes a second; the rest answers at once."""

    healthy: threading.Event

    def do_GET(self):
        if self.path == "/health":
            self.healthy.wait(60)
        self._answer({"version": "0.5.17"})

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer({"text": " Paris", "output_ids": [1]})

    def _answer(self, data):
        body = json.dumps(data).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args):
        pass


@pytest.fixture
def served():
    handler = type("Handler", (_Server,), {"healthy": threading.Event()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address[1], handler.healthy
    handler.healthy.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("health_first", [True, False])
def test_ready_once_both_are_known_whichever_came_first(served, health_first):
    port, healthy = served
    loop, ready = Loop(), []
    readiness = Readiness(
        loop,
        port,
        "key",
        endpoints("0.5.17"),
        ours=lambda: True,
        on_healthy=lambda: None,
        on_ready=lambda *told: ready.append(told),
        on_refusal=lambda answer: pytest.fail(str(answer)),
    )
    if health_first:
        healthy.set()
    readiness.listening = True
    readiness.told()
    if not health_first:
        # The generation and both informations are back, health is not (seen on an H200 with 0.5.17).
        assert loop.wait(lambda: readiness._first is not None and len(readiness._info) == 2, 30)
        assert not ready
        healthy.set()
    assert loop.wait(lambda: bool(ready), 30)
    readiness.close()
    assert ready == [({"version": "0.5.17"}, {"version": "0.5.17"}, ready[0][2])]
    assert ready[0][2]["text"] == " Paris"
