"""The load client against simulated servers of exactly known rates, over real sockets."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import pytest
from aiohttp import web

from pytest_gpuserve.measure.canary import body_of
from pytest_gpuserve.measure.load import LoadFailed, post_all, run_load
from pytest_gpuserve.measure.profile import LoadProfile

if TYPE_CHECKING:
    from pathlib import Path


@dataclass
class Simulated:
    """`url` of a running simulated server; `end` kills its whole session."""

    process: subprocess.Popen
    log: Path
    url: str

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def exit(self) -> str | None:
        return None if self.process.poll() is None else f"exit {self.process.returncode}"


@pytest.fixture
def simulate(tmp_path):
    started = []

    def start(*flags: str, **behaviour: object) -> Simulated:
        script = tmp_path / "behaviour.json"
        script.write_text(json.dumps({name.replace("_", "-"): value for name, value in behaviour.items()}))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        words = ["--model-path", "tiny", "--host", "127.0.0.1", "--port", str(port), *flags]
        log = tmp_path / "server.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest_gpuserve.sim.server", *words],
                stdout=out,
                stderr=out,
                start_new_session=True,
                env=os.environ | {"GPUSERVE_SIM_BEHAVIOUR": str(script)},
            )
        server = Simulated(process, log, f"http://127.0.0.1:{port}")
        started.append(server)
        deadline = time.monotonic() + 60
        while "fired up and ready" not in log.read_text(errors="replace"):
            assert process.poll() is None, log.read_text(errors="replace")
            assert time.monotonic() < deadline, log.read_text(errors="replace")
            time.sleep(0.02)
        return server

    yield start
    for server in started:
        server.end()


@pytest.fixture
def scripted():
    """A server whose answers to `/generate` a coroutine writes: `answer(number, write)`."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    runners = []

    def start(answer) -> str:
        numbers = itertools.count()

        async def handle(request: web.Request) -> web.StreamResponse:
            await request.read()
            response = web.StreamResponse()
            await response.prepare(request)

            async def write(document: object) -> None:
                await response.write(b"data: " + json.dumps(document).encode() + b"\n\n")

            await answer(next(numbers), write)
            return response

        async def run() -> int:
            app = web.Application()
            app.router.add_post("/generate", handle)
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            runners.append(runner)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            return runner.addresses[0][1]

        return f"http://127.0.0.1:{asyncio.run_coroutine_threadsafe(run(), loop).result(20)}"

    yield start
    for runner in runners:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(20)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(20)
    loop.close()


def profile(**fields: object) -> LoadProfile:
    return LoadProfile(**{"name": "test", "input": 32, "output": 64, "windows": 3} | fields)


@pytest.mark.parametrize(("streams", "rate"), [(1, 400), (16, 100), (64, 50)])
def test_the_rate_of_the_server_is_found(simulate, streams: int, rate: int) -> None:
    """Within 4 % on a machine that runs other tests too; benchmarks/bench_load.py shows the client's own error."""
    server = simulate(tokens_per_second=rate)
    found = run_load(server.url, profile(concurrency=streams), vocabulary=1000, alive=server.exit)
    speeds = found.samples("output_throughput")
    assert len(speeds) == 3
    assert median(speeds) == pytest.approx(streams * rate, rel=0.04)
    assert median(found.samples("median_itl_ms")) == pytest.approx(1000 / rate, rel=0.2)
    assert found.sent == found.completed + found.cancelled
    assert found.completed >= (2 + 3) * streams
    assert found.cancelled <= streams


def test_nothing_of_the_warm_up_is_in_the_result(simulate) -> None:
    """Its second request compiles for a second and a half."""
    server = simulate(tokens_per_second=2000, compile={"phase": "serving", "seconds": 1.5})
    found = run_load(server.url, profile(concurrency=4), vocabulary=1000)
    assert max(found.samples("p99_ttft_ms")) < 1000
    assert max(found.samples("p99_e2e_latency_ms")) < 1000


def test_an_open_loop_sends_at_its_rate_whatever_the_server_does(simulate) -> None:
    server = simulate(tokens_per_second=100)
    found = run_load(server.url, profile(rate=40.0, concurrency=64, output=20, windows=2), vocabulary=1000, seed=1)
    assert median(found.samples("request_throughput")) == pytest.approx(40, rel=0.3)
    assert median(found.samples("median_e2e_latency_ms")) == pytest.approx(200, rel=0.4)


def test_prompts_are_never_cached_except_a_named_prefix(simulate) -> None:
    server = simulate(tokens_per_second=5000)
    # Among the ids of a small vocabulary two prompts now and then begin with the same one, which is then cached.
    many = 128_000
    for _ in range(2):
        run_load(server.url, profile(windows=1), vocabulary=many)
    cached = re.compile(r"#new-token: (\d+), #cached-token: (\d+)")
    plain = cached.findall(server.log.read_text())
    assert {hit for _, hit in plain} == {"0"}
    run_load(server.url, profile(name="shared", windows=1, prefix=24), vocabulary=many)
    run_load(server.url, profile(name="shared", windows=1, prefix=24), vocabulary=many)
    hits = [hit for _, hit in cached.findall(server.log.read_text())[len(plain) :]]
    assert hits[0] == "0"
    assert set(hits[1:]) == {"24"}


@pytest.mark.parametrize(
    ("behaviour", "told"),
    [
        ({"output": "short"}, "32 of 64 tokens"),
        ({"output": "empty"}, "1 of 64 tokens"),
        ({"hang": "serving"}, "stalled: no token for 1 s after 0 tokens"),
        ({"crash": {"phase": "serving", "text": "boom"}}, "connection|the server ended"),
    ],
    ids=["half the tokens", "empty", "hang", "crash"],
)
def test_answers_that_are_missing_are_a_failure_and_not_speed(simulate, behaviour, told: str) -> None:
    server = simulate(tokens_per_second=5000, **behaviour)
    with pytest.raises(LoadFailed, match=told):
        run_load(server.url, profile(concurrency=4, timeout=1.0), vocabulary=1000, alive=server.exit)


def test_one_silent_stream_among_many_is_a_failure(scripted) -> None:
    """The others keep the windows going, so that no time limit sees it: it is found when they have closed."""

    async def answer(number: int, write) -> None:
        for count in range(1, 9):
            await asyncio.sleep(0.05)
            await write({"text": "x", "meta_info": {"completion_tokens": count}})
            if number == 9:
                await asyncio.sleep(3600)

    with pytest.raises(LoadFailed, match=r"1 of \d+ requests failed: stalled: no token for \d+\.\d s"):
        run_load(scripted(answer), profile(concurrency=4, output=8, windows=4), vocabulary=1000)


def test_a_refused_request_says_why(simulate) -> None:
    server = simulate(tokens_per_second=5000)
    with pytest.raises(LoadFailed, match="Requested token count exceeds") as caught:
        run_load(server.url, profile(output=10**6), vocabulary=1000)
    assert 3 <= len(caught.value.failures) <= 4


def test_a_server_that_is_gone_is_told_at_once(simulate) -> None:
    server = simulate(tokens_per_second=5)
    began = time.monotonic()
    asked = []

    def alive() -> str | None:
        asked.append(time.monotonic())
        return "crash in serving" if len(asked) == 2 else None

    with pytest.raises(LoadFailed, match="the server ended after 1 requests were sent: crash in serving") as caught:
        run_load(server.url, profile(), vocabulary=1000, alive=alive)
    assert caught.value.died == "crash in serving"
    assert time.monotonic() - began < 10


def test_many_at_once_are_all_answered_or_told(simulate) -> None:
    server = simulate(tokens_per_second=1000)
    bodies = [body_of([7] * (1 + number), 1 + number % 5) for number in range(64)]
    answers = post_all(f"{server.url}/generate", bodies, alive=server.exit)
    assert [answer["meta_info"]["completion_tokens"] for answer in answers] == [1 + number % 5 for number in range(64)]
    bodies[3] = body_of([10**9], 4)
    answers = post_all(f"{server.url}/generate", bodies)
    assert answers[3].startswith("HTTP 400: ")
    assert sum(isinstance(answer, str) for answer in answers) == 1
    slow = [body_of([7], 20_000)] * 4
    answers = post_all(f"{server.url}/generate", slow, alive=lambda: "hang in serving")
    assert answers == ["no answer: hang in serving"] * 4
