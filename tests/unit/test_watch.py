"""What is progress and what is a hang: the log's news, the machine's signals, the verdict."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpuserve.engine import ServerLoad
from pytest_gpuserve.model.launch import DEFAULT_LIMITS, Limits
from pytest_gpuserve.model.phase import Phase
from pytest_gpuserve.serve.news import LogNews
from pytest_gpuserve.serve.procs import Proc
from pytest_gpuserve.serve.progress import is_compiler, name_of
from pytest_gpuserve.serve.watch import Look, Status, Watch

MIB = 1 << 20


def proc(pid: int, comm: str = "python", **change: object) -> Proc:
    base = Proc(
        pid=pid,
        ppid=1,
        sid=1,
        state="S",
        comm=comm,
        cmdline=comm,
        started=float(pid),
        cpu=1.0,
        children_cpu=0.0,
        rss=100 * MIB,
        read_bytes=0,
        rchar=0,
        write_bytes=0,
        wchar=0,
        syscw=0,
        wchan="",
    )
    return replace(base, **change)  # type: ignore[arg-type]


class Bench:
    """A watch driven once a second."""

    def __init__(self, phase: Phase, *, stall: float = 20.0, **more: object) -> None:
        self.now = 0.0
        self.watch = Watch({phase: Limits(stall=stall)}, now=0.0, phase=phase, **more)  # type: ignore[arg-type]

    def look(self, *procs: Proc, line: str | None = None, **look: object) -> Status:
        self.now += 1.0
        if line is not None:
            self.watch.line(line)
        return self.watch.look(Look(now=self.now, procs=procs or (proc(1),), **look))  # type: ignore[arg-type]

    def stalls_at(self, seconds: int, *procs: Proc) -> float | None:
        for _ in range(seconds):
            if self.look(*procs).stall:
                return self.now
        return None


# ---- the log's news ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "still waiting",
        "[2026-11-29 16:33:{n:02}] waiting {n} s",
        'INFO:     127.0.0.1:{n} - "GET /health HTTP/1.1" 503 Service Unavailable',
        "tensor at 0x7f{n:04x}a rid={n:032x}",
        "Prefill batch, #new-seq: 1, #token: {n}, token usage: 0.{n}",
        "\r",
        "   ",
    ],
)
def test_a_line_that_differs_by_a_number_is_news_at_most_a_few_times(line: str) -> None:
    news = LogNews()
    fresh = [news.fresh(line.format(n=n)) for n in range(300)]
    assert sum(fresh) <= 3
    assert not any(fresh[150:])


@pytest.mark.parametrize(
    "line",
    [
        "Capturing batches (bs={n} avail_mem=12.87 GB):  50%|#####     | {n}/300 [00:10<00:10, 2.3s/it]",
        "Loading safetensors checkpoint shards:  50% Completed | {n}/300 [00:01<00:03,  1.1s/it]",
        "DeepGEMM warmup: {n}it [00:09, 11.0it/s]",
    ],
)
def test_a_progress_bar_is_news_while_it_moves(line: str) -> None:
    news = LogNews()
    assert all(news.fresh(line.format(n=n)) for n in range(200))
    again = line.format(n=199)
    assert not any(news.fresh(again.replace("00:", f"0{n}:")) for n in range(1, 9))
    assert not news.fresh(line.format(n=150))


def test_the_next_bar_of_the_same_length_is_news_again() -> None:
    news = LogNews()
    bar = "Capturing batches: {n}/24 [00:10<00:10, 2.3s/it]"
    assert all(news.fresh(bar.format(n=n)) for n in range(25))
    assert all(news.fresh(bar.format(n=n)) for n in range(25))


def test_each_rank_has_its_own_news() -> None:
    news = LogNews()
    assert news.fresh("[2026-11-29 16:33:24 TP0] Load weight end. elapsed=3.0 s")
    assert news.fresh("[2026-11-29 16:35:24 TP1] Load weight end. elapsed=123.0 s")
    assert not news.fresh("[2026-11-29 16:35:25 TP1] Load weight end. elapsed=124.0 s")


def test_the_echo_is_the_line_that_came_most() -> None:
    news = LogNews()
    for n in range(40):
        news.fresh(f"waiting for peer, {n} s")
        if n % 4 == 0:
            news.fresh("heartbeat")
    echo = news.echo()
    assert echo is not None
    assert (echo.line, echo.times) == ("waiting for peer, 39 s", 39)
    news.quieten()
    assert news.echo() is None


def test_questions_to_the_server_are_no_echo() -> None:
    news = LogNews()
    for n in range(20):
        news.fresh(f'INFO:     127.0.0.1:{40000 + n} - "GET /health HTTP/1.1" 503 Service Unavailable')
    assert news.echo() is None


@given(st.lists(st.text(max_size=60), max_size=60))
def test_nothing_is_news_twice(lines: list[str]) -> None:
    news = LogNews()
    for line in lines:
        news.fresh(line)
    assert not any(news.fresh(line) for line in lines if "/" not in line)


def test_a_hundred_thousand_lines_a_second() -> None:
    lines = [
        f"[2026-11-29 16:33:24 TP{n % 8}] Decode batch, #running-req: {n}, token usage: 0.{n}" for n in range(20_000)
    ]
    watched, plain = [], []
    for _ in range(3):
        watch = Watch(DEFAULT_LIMITS, now=0.0)
        began = time.process_time()
        for line in lines:
            watch.line(line)
        watched.append(time.process_time() - began)
        began = time.process_time()
        for line in lines:
            re.sub(r"\d+", "0", line)
        plain.append(time.process_time() - began)
    # Held against what this machine can do just now: 1.6 times a substitution, and 6 times is the hundred thousand.
    assert min(watched) < 6 * min(plain)


def test_noise_is_not_remembered_without_bound() -> None:
    news = LogNews()
    letters = "ghijklmnop"
    words = (f"{a}{b}{c}{d}{e}" for a in letters for b in letters for c in letters for d in letters for e in letters)
    fresh = sum(news.fresh(word) for word in words)
    assert fresh == 50_000


# ---- signals of the machine --------------------------------------------------------------------------------------

PROGRESS = {
    "disk reads": lambda n: {"read_bytes": n * MIB},
    "resident memory at a new height": lambda n: {"rss": 100 * MIB + n * 2 * MIB},
    "reaped compilers": lambda n: {"children_cpu": n * 0.1},
    "files read from a warm cache": lambda n: {"rchar": n * 200_000},
}
SPIN = {
    "nothing": lambda n: {},
    "CPU": lambda n: {"cpu": float(n), "state": "R"},
    "one byte written a second": lambda n: {"wchar": n, "syscw": n},
    "a log written for ever": lambda n: {"wchar": n * 10_000, "syscw": n * 100},
    "small reads, as of /proc": lambda n: {"rchar": n * 8_000},
    "memory that comes and goes": lambda n: {"rss": 100 * MIB + (n % 3) * 20 * MIB},
}


@pytest.mark.parametrize("name", PROGRESS)
def test_progress_of_an_import(name: str) -> None:
    bench = Bench(Phase.IMPORT)
    assert all(bench.look(proc(1, **PROGRESS[name](n))).stall is None for n in range(100))


@pytest.mark.parametrize("name", SPIN)
@pytest.mark.parametrize("phase", [Phase.IMPORT, Phase.WEIGHTS, Phase.GRAPH_CAPTURE, Phase.WARMUP, Phase.READY])
def test_a_spin_is_a_hang(phase: Phase, name: str) -> None:
    bench = Bench(phase)
    stalled = next((bench.now for n in range(60) if bench.look(proc(1, **SPIN[name](n))).stall), None)
    assert stalled is not None
    assert 20.0 <= stalled <= 25.0


def test_a_changing_gpu_memory_is_progress_a_swinging_one_is_not() -> None:
    bench = Bench(Phase.WEIGHTS)
    for n in range(60):
        assert bench.look(gpu_memory={"GPU-a": n * 100 * MIB, "GPU-b": None}).stall is None
    for n in range(18):
        assert bench.look(gpu_memory={"GPU-a": (59 - n % 2) * 100 * MIB}).stall is None
    assert bench.stalls_at(5) is not None


def test_gpu_utilisation_is_no_progress_but_is_remembered() -> None:
    bench = Bench(Phase.GRAPH_CAPTURE)
    status = bench.look()
    while status.stall is None:
        status = bench.look(gpu_utilization={"GPU-a": 100, "GPU-b": None})
        assert bench.now < 25
    assert status.stall.utilization == 100


def test_processes_that_come_and_go_are_news_once() -> None:
    bench = Bench(Phase.DIST_INIT)
    main = proc(1)
    for _ in range(15):
        bench.look(main)
    assert bench.look(main, proc(2, "helper")).quiet == 0.0
    quiet = [bench.look(main, *([proc(3 + n, "helper")] if n % 2 else [])).quiet for n in range(30)]
    assert quiet[-1] > 25.0


def test_a_zombie_is_a_process_that_went() -> None:
    bench = Bench(Phase.WEIGHTS)
    for _ in range(10):
        bench.look(proc(1), proc(2, "sglang::schedul"))
    assert bench.look(proc(1), proc(2, "sglang::schedul", state="Z")).last == "processes came or went"


# ---- compiling ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["nvcc", "cicc", "ptxas", "cudafe++", "gcc-13", "g++", "x86_64-linux-gnu-g++-12", "clang-18"]
)
def test_compilers_are_known_by_name(name: str) -> None:
    assert is_compiler(proc(1, name))


@pytest.mark.parametrize("name", ["python", "sglang::schedul", "nvidia-smi", "asm-server", "ldconfig", "make-model"])
def test_others_are_no_compilers(name: str) -> None:
    assert not is_compiler(proc(1, name))


def test_eleven_minutes_of_a_compile_are_no_hang() -> None:
    bench = Bench(Phase.GRAPH_CAPTURE)
    for n in range(660):
        status = bench.look(proc(1), proc(2, "cicc", cpu=float(n)))
        assert status.stall is None
    assert status.compiling
    assert status.last == "cicc is compiling"


def test_a_compiler_that_stands_still_is_one() -> None:
    bench = Bench(Phase.GRAPH_CAPTURE)
    assert bench.stalls_at(40, proc(1), proc(2, "cicc", state="T")) is not None
    assert not bench.look(proc(1), proc(2, "cicc", state="T")).compiling


def test_waiting_for_a_compile_of_somebody_else() -> None:
    held = ["ninja (pid 77), which compiles under x.lock"]
    asked = []

    def lock() -> str | None:
        asked.append(bench.now)
        return held[0] if held else None

    bench = Bench(Phase.WARMUP, compile_lock=lock)
    assert bench.stalls_at(100) is None
    status = bench.look()
    assert len(asked) <= 12
    while not status.compiling:
        status = bench.look()
    assert status.last == f"it waits for {held[0]}"
    held.clear()
    ended = bench.now
    while bench.look().stall is None:
        assert bench.now < ended + 30
    assert bench.now >= ended + 15


# ---- verdicts ----------------------------------------------------------------------------------------------------


def test_each_phase_has_its_own_limit_and_starts_afresh() -> None:
    watch = Watch({Phase.IMPORT: Limits(stall=50), Phase.WEIGHTS: Limits(stall=5)}, now=0.0, phase=Phase.IMPORT)
    assert watch.look(Look(now=49.0)).stall is None
    watch.line("the same line")
    watch.enter(Phase.WEIGHTS, 49.5)
    watch.line("the same line")
    assert watch.look(Look(now=50.0)).last == "a new log line"
    assert watch.look(Look(now=54.0)).stall is None
    stall = watch.look(Look(now=55.0)).stall
    assert stall is not None
    assert (stall.phase, stall.why, stall.quiet, stall.limit) == (Phase.WEIGHTS, "stall", 5.0, 5)


def test_a_total_limit_ends_a_phase_that_still_moves() -> None:
    watch = Watch({Phase.WEIGHTS: Limits(stall=20, total=30)}, now=0.0, phase=Phase.WEIGHTS)
    for second in range(1, 31):
        watch.line("x" * second)
        assert watch.look(Look(now=float(second))).stall is None
    watch.line("y")
    stall = watch.look(Look(now=31.0)).stall
    assert stall is not None
    assert stall.why == "total"


def test_the_start_timeout_spans_phases_and_ends_with_readiness() -> None:
    watch = Watch(DEFAULT_LIMITS, now=0.0, start_timeout=60.0)
    watch.enter(Phase.WEIGHTS, 50.0)
    assert watch.look(Look(now=60.0)).stall is None
    stall = watch.look(Look(now=61.0)).stall
    assert stall is not None
    assert stall.why == "start-timeout"
    watch.enter(Phase.READY, 61.5)
    assert watch.look(Look(now=62.0)).stall is None


def test_what_was_done_while_nothing_moved() -> None:
    bench = Bench(Phase.GRAPH_CAPTURE)
    status = bench.look()
    n = 0
    while status.stall is None:
        n += 1
        status = bench.look(
            proc(1, cmdline="python -m sglang.launch_server --model-path m"),
            proc(2, cmdline="sglang::scheduler_TP1", cpu=n * 0.99, wchar=n, syscw=n, state="R", wchan="0"),
            line=f"heartbeat {n}",
        )
    busy = status.stall.processes[1]
    assert (busy.pid, busy.name, busy.state) == (2, "scheduler TP1", "R")
    assert busy.cpu == pytest.approx(0.99, abs=0.1)
    assert busy.writes == pytest.approx(1.0, abs=0.1)
    assert busy.written == pytest.approx(1.0, abs=0.1)
    assert status.stall.processes[0].name == "main"
    assert status.stall.echo.startswith("heartbeat")
    assert status.stall.echoes >= 15
    assert status.stall.to_json()["processes"][1]["pid"] == 2


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"cmdline": "sglang::scheduler_TP0_DP1"}, "scheduler TP0 DP1"),
        ({"cmdline": "sglang::detokenizer"}, "detokenizer"),
        ({"cmdline": "", "comm": "sglang::schedul"}, "scheduler"),
        ({"cmdline": "python -c from multiprocessing.resource_tracker import main;main(24)"}, "resource tracker"),
        ({"cmdline": "python -c from multiprocessing.spawn import spawn_main --multiprocessing-fork"}, "worker"),
        ({"cmdline": "ninja -v", "comm": "ninja"}, "ninja"),
    ],
)
def test_names_a_person_would_use(change: dict[str, str], name: str) -> None:
    assert name_of(proc(1, **change)) == name


# ---- serving -----------------------------------------------------------------------------------------------------


def serving(*, certain: bool = False) -> Bench:
    bench = Bench(Phase.SERVING)
    bench.watch.arm(0.0, certain=certain)
    return bench


def test_tokens_that_stand_still_over_running_requests_are_a_hang_whatever_else_moves() -> None:
    bench = serving()
    status = bench.look(load=ServerLoad(tokens=10, running=3))
    n = 0
    while status.stall is None:
        n += 1
        status = bench.look(
            proc(1, read_bytes=n * MIB, rss=n * 10 * MIB),
            load=ServerLoad(tokens=10, running=3),
            line="x" * n,
        )
        assert n < 25
    assert (status.stall.phase, status.stall.in_flight) == (Phase.SERVING, 3)


def test_tokens_that_move_are_progress() -> None:
    bench = serving()
    assert all(bench.look(load=ServerLoad(tokens=n // 10, running=1)).stall is None for n in range(200))


def test_compiling_while_serving_is_progress() -> None:
    bench = serving()
    for n in range(100):
        assert bench.look(proc(1), proc(2, "nvcc", cpu=float(n)), load=ServerLoad(tokens=1, running=1)).stall is None


@pytest.mark.parametrize(("certain", "stalls"), [(False, False), (True, True)])
def test_no_request_reported_is_idle_unless_the_caller_knows_better(certain: bool, stalls: bool) -> None:
    bench = serving(certain=certain)
    found = any(bench.look(load=ServerLoad(tokens=5, running=0, queued=0, posts=0)).stall for _ in range(60))
    assert found is stalls


def test_metrics_that_stop_answering_are_a_hang_while_requests_are_expected() -> None:
    bench = serving()
    bench.look(load=ServerLoad(tokens=5, running=1))
    assert bench.stalls_at(40) is not None


def test_an_unarmed_server_may_idle_for_ever() -> None:
    bench = Bench(Phase.SERVING)
    assert bench.stalls_at(300) is None
    bench.watch.arm(bench.now, certain=True)
    assert bench.stalls_at(19) is None
    bench.watch.disarm()
    assert bench.stalls_at(100) is None
