"""The load client against simulated servers of exactly known rates, over real sockets."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import pytest
from aiohttp import web

from pytest_gpuserve.measure import load
from pytest_gpuserve.measure.canary import body_of
from pytest_gpuserve.measure.load import LoadFailed, run_load
from pytest_gpuserve.measure.post import post_all
from pytest_gpuserve.measure.profile import LoadProfile
from pytest_gpuserve.serve.ports import acquire_block

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pytest_gpuserve.measure.load import LoadResult


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
    started, blocks = [], []

    def start(*flags: str, **behaviour: object) -> Simulated:
        script = tmp_path / "behaviour.json"
        script.write_text(json.dumps({name.replace("_", "-"): value for name, value in behaviour.items()}))
        block = acquire_block(tmp_path / "locks")
        blocks.append(block)
        words = ["--model-path", "tiny", "--host", "127.0.0.1", "--port", str(block.port), *flags]
        log = tmp_path / "server.log"
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("CUDA_", "GPUSERVE_"))}
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest_gpuserve.sim.server", *words],
                stdout=out,
                stderr=out,
                start_new_session=True,
                env=environment | {"GPUSERVE_SIM_BEHAVIOUR": str(script)},
            )
        server = Simulated(process, log, f"http://127.0.0.1:{block.port}")
        started.append(server)
        deadline = time.monotonic() + 60
        while "fired up and ready" not in log.read_text(errors="replace"):
            assert process.poll() is None, log.read_text(errors="replace")
            assert time.monotonic() < deadline, log.read_text(errors="replace")
            time.sleep(0.02)
        return server

    yield start
    for server, block in zip(started, blocks, strict=True):
        server.end()
        block.release()


@pytest.fixture
def scripted():
    """A server whose answers to `/generate` a coroutine writes: `answer(number, write)`. It may raise an HTTP error."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    runners = []

    def start(answer) -> str:
        numbers = itertools.count()

        async def handle(request: web.Request) -> web.StreamResponse:
            await request.read()
            response = web.StreamResponse()

            async def write(document: object) -> None:
                if not response.prepared:
                    await response.prepare(request)
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


def measured(run: Callable[[], LoadResult], expected: dict[str, object]) -> LoadResult:
    """A load whose medians are as `expected`: a busy machine spoils one of three now and then, a wrong client all."""
    for _ in range(3):
        found = run()
        medians = {metric: median(found.samples(metric)) for metric in expected}
        if medians == expected:
            break
    assert medians == expected
    return found


@pytest.mark.parametrize(("streams", "rate"), [(1, 400), (16, 100), (64, 50)])
def test_the_rate_of_the_server_is_found(simulate, streams: int, rate: int) -> None:
    """Within 4 % on a machine that runs other tests too; benchmarks/bench_load.py shows the client's own error."""
    server = simulate(tokens_per_second=rate)
    found = measured(
        lambda: run_load(server.url, profile(concurrency=streams), vocabulary=1000, alive=server.exit),
        {
            "output_throughput": pytest.approx(streams * rate, rel=0.04),
            "median_itl_ms": pytest.approx(1000 / rate, rel=0.2),
        },
    )
    assert len(found.windows) == 3
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
    open_loop = profile(rate=40.0, concurrency=64, output=20, windows=2)
    found = measured(
        lambda: run_load(server.url, open_loop, vocabulary=1000, seed=1),
        {
            "request_throughput": pytest.approx(40, rel=0.3),
            "median_e2e_latency_ms": pytest.approx(200, rel=0.4),
        },
    )
    assert found.invalid is None


def test_prompts_are_never_cached_except_a_named_prefix(simulate) -> None:
    # In pages: two prompts now and then begin with the same token, which alone is then not cached.
    server = simulate("--page-size", "8", tokens_per_second=5000)
    for _ in range(2):
        run_load(server.url, profile(windows=1), vocabulary=1000)
    cached = re.compile(r"#new-token: (\d+), #cached-token: (\d+)")
    plain = cached.findall(server.log.read_text())
    assert {hit for _, hit in plain} == {"0"}
    run_load(server.url, profile(name="shared", windows=1, prefix=24), vocabulary=1000)
    run_load(server.url, profile(name="shared", windows=1, prefix=24), vocabulary=1000)
    hits = [hit for _, hit in cached.findall(server.log.read_text())[len(plain) :]]
    assert hits[0] == "0"
    assert set(hits[1:]) == {"24"}


@pytest.mark.parametrize(
    ("behaviour", "told"),
    [
        ({"output": "short"}, "32 of 64 tokens"),
        ({"output": "empty"}, "1 of 64 tokens"),
        ({"hang": "serving"}, r"stalled: no token for \d s after 0 tokens"),
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

    with pytest.raises(LoadFailed, match=r"1 of \d+ requests failed .*: stalled: no token for \d+ s after 1 tokens"):
        run_load(scripted(answer), profile(concurrency=4, output=8, windows=4), vocabulary=1000)


async def stream(write, tokens: int = 8, seconds: float = 0.01) -> None:
    for count in range(1, tokens + 1):
        await asyncio.sleep(seconds)
        await write({"text": "x", "meta_info": {"completion_tokens": count}})


async def by_the_clock(write, seconds: float, tokens: int = 1) -> None:
    """Answers at whole multiples of `seconds`: what machine and client need in between does not lower the rate."""
    await asyncio.sleep(seconds - time.monotonic() % seconds)
    await stream(write, tokens)


HICCUP = "HTTP 503: hiccup"


# Two go first, and one more makes a window.
@pytest.mark.parametrize("failing", [0, 1, 2, 4], ids=["first", "end of warm-up", "first window", "last window"])
def test_one_request_that_fails_ends_the_load_wherever_it_is(scripted, failing: int) -> None:
    seen = []

    async def answer(number: int, write) -> None:
        seen.append(number)
        if number == failing:
            raise web.HTTPServiceUnavailable(text="hiccup")
        await stream(write)

    with pytest.raises(LoadFailed, match=rf"1 of {failing + 1} requests failed \(0 had not ended\): {HICCUP}"):
        run_load(
            scripted(answer),
            profile(output=8),
            vocabulary=1000,
            alive=lambda: "it goes on" if len(seen) > 100 else None,
        )
    assert len(seen) == failing + 1


def test_those_under_way_when_one_fails_are_counted_too(scripted) -> None:
    first = asyncio.Event()

    async def answer(number: int, _write) -> None:
        if number:
            await first.wait()
        first.set()
        raise web.HTTPServiceUnavailable(text="hiccup")

    with pytest.raises(LoadFailed, match=rf"4 of 4 requests failed \(0 had not ended\): {HICCUP}\."):
        run_load(scripted(answer), profile(concurrency=4), vocabulary=1000)


def test_those_that_never_end_are_not_waited_for_when_one_failed(scripted, monkeypatch) -> None:
    monkeypatch.setattr(load, "_GRACE", 0.1)

    async def answer(number: int, _write) -> None:
        if number:
            await asyncio.sleep(3600)
        raise web.HTTPServiceUnavailable(text="hiccup")

    with pytest.raises(LoadFailed, match=rf"1 of 4 requests failed \(3 had not ended\): {HICCUP}"):
        run_load(scripted(answer), profile(concurrency=4), vocabulary=1000)


def test_waiting_in_a_queue_is_no_stall(scripted) -> None:
    """The server runs one at a time: the last of twelve waits for 0.9 s."""
    turns = asyncio.Semaphore(1)

    async def answer(_number: int, write) -> None:
        async with turns:
            await stream(write)

    found = run_load(scripted(answer), profile(concurrency=12, output=8, windows=1, timeout=0.6), vocabulary=1000)
    assert min(found.samples("median_ttft_ms")) > 600


def test_a_stream_that_the_server_sets_aside_and_goes_on_with_is_no_stall(scripted) -> None:
    """As SGLang does with one that it retracts while KV memory is short."""

    async def answer(number: int, write) -> None:
        if number == 9:
            await write({"text": "x", "meta_info": {"completion_tokens": 1}})
            await asyncio.sleep(1.2)
        await stream(write, seconds=0.1)

    found = run_load(scripted(answer), profile(concurrency=4, output=8, windows=2, timeout=0.6), vocabulary=1000)
    assert max(found.samples("p99_itl_ms")) > 600


@pytest.mark.parametrize("tokens", [0, 3])
def test_a_stream_that_others_overtake_ends_the_load(scripted, tokens: int) -> None:
    """In the warm-up, whose end would be waited for without end."""

    async def answer(number: int, write) -> None:
        await stream(write, tokens if number == 1 else 8)
        if number == 1:
            await asyncio.sleep(3600)

    told = rf"1 of \d+ requests failed .*: stalled: no token for \d s after {tokens} tokens"
    with pytest.raises(LoadFailed, match=told):
        run_load(scripted(answer), profile(concurrency=4, output=8, timeout=0.6), vocabulary=1000)


def test_bytes_without_tokens_are_silence(scripted) -> None:
    events = itertools.count()

    async def answer(_number: int, write) -> None:
        while True:
            next(events)
            await write({"text": "", "meta_info": {"completion_tokens": 0}})
            await asyncio.sleep(0.02)

    with pytest.raises(LoadFailed, match=r"4 of 4 requests failed .*: stalled: no token for \d s after 0 tokens"):
        run_load(
            scripted(answer),
            profile(concurrency=4, timeout=0.6),
            vocabulary=1000,
            alive=lambda: "it goes on" if next(events) > 2000 else None,
        )


def test_an_open_loop_that_does_not_reach_its_rate_says_so(scripted) -> None:
    """Two at once, an eighth of a second each: 16 a second."""

    async def answer(_number: int, write) -> None:
        await by_the_clock(write, 0.125)

    found = run_load(scripted(answer), profile(rate=20, concurrency=2, output=1, windows=1), vocabulary=1000, seed=1)
    told = re.fullmatch(r"the rate was not reached: (\S+) of 20 requests a second .* all 2 streams .*", found.invalid)
    assert told
    assert float(told[1]) < 17


@pytest.mark.parametrize("streams", [2, 16])
def test_a_rate_far_out_of_reach_is_given_up_early(scripted, streams: int) -> None:
    """A batch takes a fifth of a second, so its streams end together. 14,000 requests were to be sent, in minutes."""

    async def answer(_number: int, write) -> None:
        await by_the_clock(write, 0.2, tokens=2)

    began = time.monotonic()
    found = run_load(scripted(answer), profile(rate=1000, concurrency=streams, output=2, windows=2), vocabulary=1000)
    assert time.monotonic() - began < 20
    assert found.sent < 1500
    told = re.match(r"the rate was not reached: (\S+) of 1000 requests a second .*given up after \d+ s", found.invalid)
    assert told
    assert float(told[1]) == pytest.approx(5 * streams, rel=0.3)
    assert len(found.samples("output_throughput")) == 1
    assert found.begin < found.end


def test_a_rate_that_is_just_missed_keeps_its_whole_windows(scripted) -> None:
    async def answer(_number: int, write) -> None:
        await by_the_clock(write, 0.125)

    found = run_load(scripted(answer), profile(rate=20, concurrency=2, output=1, windows=2), vocabulary=1000, seed=1)
    assert "given up" in found.invalid
    assert [round(one) for one in found.samples("request_throughput")] == [pytest.approx(16, abs=2)]


def test_an_open_loop_that_hangs_is_a_stall_and_no_missed_rate(scripted) -> None:
    async def answer(number: int, write) -> None:
        if number >= 40:
            await asyncio.sleep(60)
        await stream(write, tokens=1)

    with pytest.raises(LoadFailed, match="stalled"):
        run_load(scripted(answer), profile(rate=8, concurrency=2, output=1, windows=1, timeout=5.0), vocabulary=1000)


def test_the_warm_up_of_an_open_loop_is_twice_what_it_reaches(scripted) -> None:
    """Four a second and room for 64: twelve come together, since the first three seconds are a compile."""
    waiting = []
    compiled = asyncio.Event()

    async def answer(number: int, write) -> None:
        waiting.append(number)
        if len(waiting) == 12:
            compiled.set()
        await compiled.wait()
        await stream(write, tokens=2)

    found = run_load(scripted(answer), profile(rate=4, concurrency=64, output=2, windows=1), vocabulary=1000, seed=1)
    assert 2 * 12 + 8 <= found.sent < 2 * 12 + 8 + 12
    assert max(found.samples("p99_ttft_ms")) < 1000
    assert found.invalid is None


def test_a_refused_request_says_why(simulate) -> None:
    server = simulate(tokens_per_second=5000)
    with pytest.raises(LoadFailed, match="Requested token count exceeds") as caught:
        run_load(server.url, profile(output=10**6), vocabulary=1000)
    assert len(caught.value.failures) == 1


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
