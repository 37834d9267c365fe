"""A small server for the supervisor's own tests: true processes and sockets, faults by flag. Standard library only.

python fake_server.py --port P --api-key K [--fault NAME[=VALUE]]...
"""

import argparse
import ctypes
import json
import mmap
import os
import signal
import socket
import sys
import threading
import time


def title(name: str) -> None:
    ctypes.CDLL(None).prctl(15, name.encode(), 0, 0, 0)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def child(name: str, *, session: bool = False, deaf: bool = False, delay: float = 0.0) -> int:
    """A process that lives until it is killed, named as SGLang names its own; `delay`: it is still "importing"."""
    pid = os.fork()
    if pid:
        return pid
    if session:
        os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN if deaf else signal.SIG_DFL)
    time.sleep(delay)
    title(name)
    while True:
        time.sleep(60)


class Http:
    """Enough of SGLang's API. `state` is what a test may switch over the wire: POST /fault/NAME."""

    def __init__(self, port: int, key: str, faults: dict[str, str]) -> None:
        self.key, self.faults, self.tokens = key, faults, 0
        self.ready_at = time.monotonic() + float(faults.get("late", 0))
        self.listener = socket.socket()
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.listener.bind(("127.0.0.1", port))
        self.listener.listen(64)

    def serve(self) -> None:
        while True:
            connection, _ = self.listener.accept()
            threading.Thread(target=self.answer, args=(connection,), daemon=True).start()

    def answer(self, connection: socket.socket) -> None:
        with connection:
            head = b""
            while b"\r\n\r\n" not in head:
                data = connection.recv(65536)
                if not data:
                    return
                head += data
            path = head.split(b" ", 2)[1].decode()
            authorised = f"Bearer {self.key}".encode() in head
            status, body = self.route(path, authorised)
            payload = body if isinstance(body, str) else json.dumps(body)
            connection.sendall(
                f"HTTP/1.1 {status} X\r\nContent-Length: {len(payload)}\r\nConnection: close\r\n\r\n{payload}".encode()
            )

    def is_ready(self) -> bool:
        return "never-ready" not in self.faults and time.monotonic() >= self.ready_at

    def route(self, path: str, authorised: bool) -> tuple[int, object]:
        if path.startswith("/fault/"):
            self.faults[path.removeprefix("/fault/")] = ""
            return 200, {}
        if path in ("/ready", "/health"):
            if path == "/ready" and "no-ready-endpoint" in self.faults:
                return 404, {}
            return (200 if self.is_ready() else 503), {}
        if path == "/metrics":
            if "no-metrics" in self.faults:
                return 404, ""
            return 200, f"sglang:generation_tokens_total{{}} {self.tokens}\nsglang:num_running_reqs{{}} 1\n"
        if not authorised:
            return 401, {"error": "Unauthorized"}
        if path == "/server_info":
            late = {"ready_at": self.ready_at} if "late" in self.faults else {}
            return 200, {"attention_backend": "triton", "api_key": self.key, "max_total_num_tokens": 5, **late}
        if path == "/model_info":
            return 200, {"model_path": "fake"}
        if path == "/generate":
            if "generate-500" in self.faults:
                return 500, {"error": {"message": "kernel image is invalid"}}
            while "generate-hangs" in self.faults:
                time.sleep(1)
            self.tokens += 1
            return 200, {"text": " Paris", "output_ids": [1]}
        return 404, {}


def flood(size: int) -> None:
    block = (b"x" * 99 + b"\n") * 10000
    for _ in range(size // len(block)):
        os.write(1, block)
    say("the flood is over")


def repeat() -> None:
    while True:
        say("the same line for ever")
        time.sleep(0.05)


def zombies(count: int) -> None:
    for _ in range(count):
        if os.fork() == 0:
            os._exit(0)


def progress_bar() -> None:
    for n in range(50):
        os.write(1, b"\rCapturing batches %d/50" % n)


def keep_shm(name: str) -> None:
    """A mapped file whose name says nothing, one with our pid in its name, and one nobody maps."""
    fd = os.open(f"/dev/shm/{name}-mapped", os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(fd, 4096)
    globals()["kept"] = mmap.mmap(fd, 4096)
    os.close(fd)
    for path in (f"/dev/shm/{name}.{os.getpid()}.sem", f"/dev/shm/{name}-stranger"):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))


def second_model() -> None:
    """The draft model is loaded when the target's graphs are captured."""
    say("Load weight begin. avail mem=1 GB")
    say("Load weight end.")
    say("Capture target decode CUDA graph begin. backend=full")
    say("Capture target decode CUDA graph end. bs=[1]")
    say("Load weight begin. avail mem=1 GB")
    time.sleep(3600)


# In this order, so that they can be combined.
AT_START = {
    "stderr": lambda text: sys.stderr.write(text + "\n"),
    "exit": lambda status: sys.exit(int(status)),
    "binary": lambda _: os.write(1, b"\xff\xfe\x00 \x1b[2J\x1b[31m red \x1b[0m caf\xe9\n"),
    "carriage-returns": lambda _: progress_bar(),
    "flood": lambda size: flood(int(size)),
    "endless": lambda _: repeat(),
    "silent": lambda _: time.sleep(3600),
    "draft": lambda _: second_model(),
    "zombies": lambda count: zombies(int(count)),
    "shm": keep_shm,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--api-key", required=True)
    parser.add_argument("--fault", action="append", default=[])
    options = parser.parse_args()
    faults = dict(fault.partition("=")[::2] for fault in options.fault)
    say(f"server_args=ServerArgs(api_key='{options.api_key}', port={options.port})")
    if "deaf" in faults:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "importing" in faults:
        # As SGLang at the start: main dies of SIGTERM, the scheduler under way knows nothing of it.
        child("sglang::scheduler", delay=float(faults["importing"]))
        say("scheduler started")
        time.sleep(3600)
    for name, fault in AT_START.items():
        if name in faults:
            fault(faults[name])
    if "escape" in faults:
        child("escapee", session=True, deaf=True)
    if "scheduler" in faults:
        child("sglang::scheduler", deaf="deaf" in faults)
    say("Load weight begin. avail mem=1 GB")
    say("Load weight end.")
    if "stuck" in faults:
        say("Capture cuda graph begin. This can take up to several minutes.")
        time.sleep(3600)
    if "die" in faults:
        sys.stderr.write("Traceback (most recent call last):\nRuntimeError: no kernel image is available\n")
        os.kill(os.getpid(), int(faults["die"]))
    if "errno98" in faults:
        say(f"ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', {options.port})")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(3600)
    http = Http(options.port, options.api_key, faults)
    threading.Thread(target=http.serve, daemon=True).start()
    if http.is_ready():
        say("The server is fired up and ready to roll!")
    while True:
        time.sleep(3600)


main()
