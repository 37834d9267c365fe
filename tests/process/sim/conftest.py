from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil
import pytest

from pytest_gpuserve.gpu import sim as gpus
from pytest_gpuserve.serve.ports import acquire_block

if TYPE_CHECKING:
    from pathlib import Path

STARTED = 30.0


class Server:
    """One simulated server as a subprocess in a session of its own, its log in a file."""

    def __init__(self, folder: Path, machine: Path | None, behaviour: dict, flags: tuple[str, ...], env: dict) -> None:
        self.folder = folder
        self.machine = machine
        # Nobody else's on this machine, from now until the server is gone.
        self.block = acquire_block(folder / "locks")
        self.port = self.block.port
        self.mark = uuid.uuid4().hex
        self.log_path = folder / f"{self.mark}.log"
        script = folder / f"{self.mark}.json"
        script.write_text(json.dumps(behaviour))
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("CUDA_", "GPUSERVE_"))}
        environment |= {"GPUSERVE_SIM_BEHAVIOUR": str(script), "GPUSERVE_LEASE": self.mark}
        if machine is not None:
            environment |= {"GPUSERVE_SIM_DIR": str(machine)}
        flags = ("--model-path", "tiny", "--host", "127.0.0.1", "--port", str(self.port), *flags)
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pytest_gpuserve.sim.server", *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=environment | env,
            )
        self.main = psutil.Process(self.process.pid)

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait(self, text: str) -> Server:
        until(lambda: text in self.log, f"{text!r} in the log of {self.process.args}", show=lambda: self.log[-3000:])
        return self

    def ready(self) -> Server:
        return self.wait("The server is fired up and ready to roll!")

    def exit(self) -> int:
        return self.process.wait(STARTED)

    def request(self, method: str, path: str, body: object = None, **headers: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=STARTED)
        try:
            data = body if isinstance(body, bytes | None) else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json", **headers})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def get(self, path: str) -> object:
        status, body = self.request("GET", path)
        assert status == 200, (path, status, body)
        return json.loads(body)

    def post(self, path: str, body: object) -> object:
        status, data = self.request("POST", path, body)
        assert status == 200, (path, status, data)
        return json.loads(data)

    def generate(self, prompt: object = (11, 12, 13), tokens: int = 4, **more: object) -> dict:
        key = "text" if isinstance(prompt, str) else "input_ids"
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        prompt = list(prompt) if isinstance(prompt, tuple) else prompt
        return self.post("/generate", {key: prompt, "sampling_params": sampling, **more})

    def stream(self, path: str, body: dict) -> list:
        status, data = self.request("POST", path, body | {"stream": True})
        assert status == 200, data
        lines = [line for line in data.decode().split("\n\n") if line]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def marked(self) -> list[psutil.Process]:
        """Every living process of this server, wherever it went."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("GPUSERVE_LEASE") == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def named(self, title: str) -> psutil.Process:
        """The one process whose command line begins with `title`."""

        found: list[psutil.Process] = []

        def find() -> bool:
            found[:] = [process for process in self.marked() if title_of(process).startswith(title)]
            return len(found) == 1

        until(find, f"one process named {title}", show=lambda: str(self.titles()))
        return found[0]

    def titles(self) -> list[str]:
        return [title_of(process) for process in self.marked()]

    def gone(self) -> None:
        until(lambda: not self.marked(), "no process left", show=lambda: str(self.titles()))

    def memory(self, index: int = 0) -> int:
        """Bytes used on a GPU of the simulated machine, beyond its idle reading."""
        probe = gpus.SimProbe(self.machine)
        gpu = probe.gpus()[index]
        return probe.read(gpu.uuid).memory_used - gpus.MODELS[gpu.arch].idle

    def keeps(self, memory: int, index: int = 0) -> None:
        """Wait until that many bytes are left: a dying process loses its environment, by which it is found, first."""
        until(
            lambda: self.memory(index) == memory, f"{memory} bytes on GPU {index}", show=lambda: str(self.memory(index))
        )

    def kill(self) -> None:
        for process in self.marked():
            with suppress(psutil.Error):
                process.kill()
        self.process.wait(STARTED)
        self.gone()
        self.block.release()


def title_of(process: psutil.Process) -> str:
    """The command line; an overwritten one is followed by zeros, as setproctitle leaves it."""
    with suppress(psutil.Error):
        return " ".join(process.cmdline()).strip()
    return ""


def until(condition, what: str, *, show=lambda: "", timeout: float = STARTED) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}\n{show()}"
        time.sleep(0.01)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    folder = tmp_path / "machine"
    gpus.create(folder, "2xsm120")
    return folder


@pytest.fixture
def launch(tmp_path: Path):
    """launch(behaviour, *flags, machine=None, **environment): started servers, killed by their mark at the end."""
    servers: list[Server] = []

    def start(behaviour: dict | None = None, *flags: str, machine: Path | None = None, **env: str) -> Server:
        servers.append(Server(tmp_path, machine, behaviour or {}, flags, env))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


@pytest.fixture
def wait_until():
    return until


@pytest.fixture
def terminate():
    def send(server: Server, number: int = signal.SIGTERM) -> None:
        os.kill(server.process.pid, number)

    return send
