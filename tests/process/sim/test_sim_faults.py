"""Every fault a scenario can script, by what it looks like from outside."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from pytest_gpuserve.engine.log import fallback_lines
from pytest_gpuserve.gpu.sim import SimProbe

GIB = 1 << 30
STARTUP = ("import", "dist-init", "weights", "kv-cache", "graph-capture")


def io_of(pid: int) -> dict[str, int]:
    text = Path(f"/proc/{pid}/io").read_text()
    return {name: int(value) for name, value in (line.split(": ") for line in text.splitlines())}


def test_reject_is_a_value_error_of_the_arguments(launch):
    text = "TRTLLM MLA backend is only supported on Blackwell GPUs (SM100/SM12x). Please use a different backend."
    server = launch({"reject": text, "crash": {"phase": "weights"}})
    assert server.exit() == 1
    assert server.log.splitlines()[-1] == f"ValueError: {text}"
    assert "server_args=" not in server.log


def test_reject_in_argparses_words_is_argparses(launch):
    server = launch({"reject": "argument --kv-cache-dtype: invalid choice: 'x'"})
    assert server.exit() == 2
    assert server.log.splitlines()[-1] == "sglang serve: error: argument --kv-cache-dtype: invalid choice: 'x'"


@pytest.mark.parametrize("phase", [*STARTUP, "warmup"])
def test_crash_in_a_phase(launch, machine, phase):
    server = launch({"crash": {"phase": phase, "text": "ValueError: no kernel image"}}, machine=machine)
    assert server.exit() == -signal.SIGKILL
    server.gone()
    server.keeps(0)
    log = server.log
    trace = log.index("Scheduler hit an exception: Traceback (most recent call last):\n")
    cause = log.index("\nValueError: no kernel image")
    echo = (
        "Received sigquit from a child process." if phase != "warmup" else "SIGQUIT received. signum=None, frame=None."
    )
    assert trace < cause < log.index(echo) < log.index("kill_process_tree called: parent_pid=")
    begun = {"weights": "Load weight begin", "graph-capture": "Capture target decode CUDA graph begin"}.get(phase)
    if begun:
        assert begun in log
        assert begun.replace("begin", "end") not in log
    if phase == "graph-capture":
        assert "Exception: Capture cuda graph failed: ValueError: no kernel image\nPossible solutions:" in log


def test_crash_text_without_a_type_stands_at_a_lines_beginning_first(launch):
    server = launch({"crash": {"phase": "dist-init", "text": "Error : no algorithm/protocol available"}})
    server.exit()
    assert "\nError : no algorithm/protocol available\n" in server.log
    assert "\nRuntimeError: Error : no algorithm/protocol available\n" in server.log


def test_the_first_cause_is_one_ranks_and_the_others_echo(launch):
    server = launch({"crash": {"phase": "weights", "text": "OSError: bad shard"}}, "--tp-size", "4")
    server.exit()
    assert " TP1] Scheduler hit an exception" in server.log
    assert server.log.index("OSError: bad shard") < server.log.index(
        "remote process exited or there was a network error"
    )


@pytest.mark.parametrize(("code", "seen"), [(1, 1), (137, -9), (139, -11)])
def test_crash_with_an_exit_code(launch, code, seen):
    server = launch({"crash": {"phase": "kv-cache", "text": "boom", "exit": code}})
    assert server.exit() == seen
    server.gone()


def test_crash_before_the_arguments(launch):
    server = launch({"crash": {"phase": "spawn", "text": "ImportError: libcudart.so.13"}})
    assert server.exit() == 1
    assert server.log.splitlines()[-1] == "ImportError: libcudart.so.13"


def test_crash_while_serving_strikes_the_second_request(launch):
    server = launch(
        {"crash": {"phase": "serving", "text": "torch.AcceleratorError: CUDA error: illegal access"}}
    ).ready()
    assert len(server.generate()["output_ids"]) == 4
    with suppress(OSError):
        server.generate()
    assert server.exit() == -signal.SIGKILL
    assert "torch.AcceleratorError: CUDA error: illegal access" in server.log


def test_crash_while_draining(launch, terminate):
    server = launch({"crash": {"phase": "draining", "text": "RuntimeError: at exit"}}).ready()
    terminate(server)
    assert server.exit() == -signal.SIGKILL
    assert "RuntimeError: at exit" in server.log


@pytest.mark.parametrize("phase", ["spawn", *STARTUP, "warmup"])
def test_hang_in_a_phase_is_alive_and_never_ready(launch, machine, phase):
    before = {
        "spawn": "SIMULATED",
        "import": "server_args=",
        "dist-init": "Init parallel begin",
        "weights": "Load weight begin",
        "kv-cache": "Load weight end",
        "graph-capture": "Capture target decode CUDA graph begin",
        "warmup": "Uvicorn running on",
    }[phase]
    server = launch({"hang": phase}, machine=machine).wait(before)
    size = server.log_path.stat().st_size
    if phase != "warmup":
        with pytest.raises(ConnectionError):
            server.request("GET", "/health")
    time.sleep(0.3)
    assert server.process.poll() is None
    assert server.log_path.stat().st_size - size < 700  # at most what was under way
    assert "fired up" not in server.log


def test_a_hang_in_graph_capture_writes_one_byte_a_second_on_an_idle_gpu(launch, machine, wait_until):
    server = launch({"hang": "graph-capture", "memory-gib": 5}, machine=machine).wait("decode CUDA graph begin")
    pid = server.named("sglang::scheduler").pid
    first = io_of(pid)
    wait_until(lambda: io_of(pid)["syscw"] > first["syscw"], "a write")
    began = time.monotonic()
    a, cpu = io_of(pid), psutil.Process(pid).cpu_times()
    time.sleep(2.1)
    b, later = io_of(pid), psutil.Process(pid).cpu_times()
    seconds = time.monotonic() - began
    assert 1 <= b["syscw"] - a["syscw"] <= seconds + 1
    assert b["wchar"] - a["wchar"] == b["syscw"] - a["syscw"]
    assert later.user + later.system - cpu.user - cpu.system < 0.1 * seconds
    assert server.memory() == 5 * GIB


def test_a_hang_in_the_warm_up_spins_the_gpu(launch, machine, wait_until):
    launch({"hang": "warmup"}, machine=machine)
    probe = SimProbe(machine)
    wait_until(lambda: probe.read(probe.gpus()[0].uuid).utilization == 100, "a spinning GPU")


def test_hang_while_serving_keeps_health_and_counters_and_gives_no_token(launch):
    server = launch({"hang": "serving"}, "--enable-metrics").ready()
    assert server.generate(tokens=3)["meta_info"]["completion_tokens"] == 3
    with pytest.raises(TimeoutError):
        stuck(server)
    assert server.request("GET", "/health")[0] == 200
    assert server.request("GET", "/ready")[0] == 200
    metrics = server.request("GET", "/metrics")[1].decode()
    assert sum(float(line.split()[-1]) for line in metrics.splitlines() if "generation_tokens_total{" in line) == 3


def stuck(server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=0.5)
    try:
        connection.request("POST", "/generate", '{"input_ids": [5], "sampling_params": {"max_new_tokens": 2}}')
        connection.getresponse()
    finally:
        connection.close()


def test_hang_when_ready_answers_no_request_at_all(launch):
    server = launch({"hang": "ready"}).ready()
    with pytest.raises(TimeoutError):
        stuck(server)


def test_hang_while_draining(launch, terminate):
    server = launch({"hang": "draining"}).ready()
    terminate(server)
    server.wait("Gracefully exiting...")
    time.sleep(0.3)
    assert server.process.poll() is None


@pytest.mark.parametrize("phase", ["weights", "graph-capture", "warmup", "serving"])
def test_compile_burns_cpu_in_a_compilers_process_and_says_nothing(launch, phase, wait_until):
    server = launch({"compile": {"phase": phase, "seconds": 3}}, "--attention-backend", "triton")
    client = None
    if phase == "serving":
        server.ready().generate()
        client = threading.Thread(target=server.generate)
        client.start()
    compiler = server.named("cicc")
    assert Path(f"/proc/{compiler.pid}/comm").read_text() == "cicc\n"
    nvcc = compiler.parent()
    scheduler = nvcc.parent()
    assert [" ".join(one.cmdline()).partition(" ")[0] for one in (nvcc, scheduler)] == ["nvcc", "sglang::scheduler"]
    size = server.log_path.stat().st_size
    wait_until(lambda: sum(compiler.cpu_times()[:2]) > 0.3, "CPU time in the compiler")
    assert server.log_path.stat().st_size == size
    if client is not None:
        client.join(20)
        assert not client.is_alive()
    server.ready()
    assert not [title for title in server.titles() if title.startswith(("cicc", "nvcc"))]


def test_killed_while_compiling_leaves_no_compiler(launch):
    server = launch({"compile": {"phase": "weights", "seconds": 60}})
    server.named("cicc")
    server.process.kill()
    server.exit()
    server.gone()


def test_exit_zero(launch):
    server = launch({"exit-zero": True})
    assert server.exit() == 0
    assert "Load weight" not in server.log
    server.gone()


def test_ignore_sigterm(launch):
    server = launch({"ignore-sigterm": True}).ready()
    os.killpg(server.process.pid, signal.SIGTERM)
    assert server.generate()["output_ids"]
    assert len(server.titles()) == 4
    os.killpg(server.process.pid, signal.SIGKILL)
    server.exit()
    server.gone()


def test_escape_session(launch, machine, wait_until):
    server = launch({"escape-session": True, "memory-gib": 4}, machine=machine).ready()
    worker = server.named("sglang::worker")
    assert os.getsid(worker.pid) == worker.pid
    os.killpg(server.process.pid, signal.SIGKILL)
    server.exit()
    wait_until(lambda: server.titles() == ["sglang::worker"], "only the escaped one", show=lambda: str(server.titles()))
    server.keeps(GIB // 2)
    worker.kill()
    server.keeps(0)


def test_zombies(launch, wait_until):
    server = launch({"zombies": 3}).ready()

    def zombies() -> int:
        return sum(child.status() == psutil.STATUS_ZOMBIE for child in server.main.children())

    wait_until(lambda: zombies() == 3, "zombies", show=lambda: str(server.main.children()))


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_memory_stays_after_the_end_for_seconds(launch, machine, end):
    server = launch({"hold-memory": 1, "memory-gib": 6}, machine=machine).ready()
    assert server.memory() == 6 * GIB
    began = time.monotonic()
    os.killpg(server.process.pid, end)
    server.exit()
    server.gone()
    server.keeps(0)
    assert time.monotonic() - began >= 1


def test_memory_stays_for_ever(launch, machine):
    server = launch({"hold-memory": "forever", "memory-gib": 6}, machine=machine).ready()
    server.kill()
    time.sleep(0.3)
    assert server.memory() == 6 * GIB


def test_port_taken_runs_the_whole_start_then_hangs_deaf(launch, machine):
    server = launch({"port-taken": True, "memory-gib": 2}, machine=machine)
    server.wait(f"[Errno 98] error while attempting to bind on address ('127.0.0.1', {server.port}): address already")
    assert server.log.index("max_total_num_tokens=") < server.log.index("[Errno 98]")
    server.process.terminate()
    time.sleep(0.3)
    assert server.process.poll() is None
    assert server.memory() == 2 * GIB
    with pytest.raises(ConnectionError):
        server.request("GET", "/ready")


def test_port_taken_once_in_a_machine(launch, machine):
    launch({"port-taken": "once"}, machine=machine).wait("[Errno 98]").kill()
    launch({"port-taken": "once"}, machine=machine).ready()


@pytest.mark.slow
def test_log_flood_is_a_gigabyte_with_the_phases_in_it(launch):
    server = launch({"log": "flood"}).ready()
    assert server.log_path.stat().st_size > 700 << 20
    for text in ("Init parallel begin.", "Load weight end.", "The server is fired up and ready to roll!"):
        assert subprocess.run(["grep", "-c", text, server.log_path], capture_output=True).returncode == 0


def test_a_hang_with_a_flood_repeats_one_line(launch, wait_until):
    server = launch({"log": "flood", "hang": "import"})
    wait_until(lambda: server.log.count("Waiting for peers, retrying...\n") > 3, "the same line")


def test_log_without_newlines(launch):
    server = launch({"log": "no-newline"}).ready()
    assert server.log_path.read_bytes().count(b"\n") == 1  # the line that says SIMULATED
    assert b"Load weight begin. avail mem=0.00 GB\r" in server.log_path.read_bytes()


def test_binary_log(launch):
    data = launch({"log": "binary"}).ready().log_path.read_bytes()
    with pytest.raises(UnicodeDecodeError):
        data.decode()
    assert b"\x1b[2J" in data
    assert any(line.endswith(b"Memory pool end. avail mem=0.00 GB") for line in data.splitlines())


def test_silent_log(launch, wait_until):
    server = launch({"log": "silent"})

    def up() -> bool:
        with suppress(ConnectionError):
            return server.request("GET", "/ready")[0] == 200
        return False

    wait_until(up, "ready")
    assert len(server.log.splitlines()) == 1


def test_fallback_is_reported_and_announced(launch):
    server = launch({"fallback": "triton"}, "--attention-backend", "flashinfer").ready()
    assert server.get("/server_info")["attention_backend"] == "triton"
    found = fallback_lines(server.log.splitlines())
    assert [(one.subject, one.what) for one in found if one.subject == "attention-backend"] == [
        ("attention-backend", "attention backend replaced by triton")
    ]


def test_slow_divides_the_rate(launch):
    began = time.monotonic()
    launch({"slow": 8, "tokens-per-second": 400}).ready().generate(tokens=20)
    assert time.monotonic() - began > 20 / 50


def test_output_garbage_differs_every_time_and_in_its_logprobs(launch):
    sound, broken = launch({}).ready(), launch({"output": "garbage"}).ready()
    more = {"return_logprob": True, "logprob_start_len": 0}
    answers = [broken.generate(tokens=16, **more) for _ in range(2)]
    assert answers[0]["output_ids"] != answers[1]["output_ids"]
    assert not answers[0]["text"].isascii()
    right = sound.generate(tokens=16, **more)["meta_info"]["output_token_logprobs"]
    wrong = answers[0]["meta_info"]["output_token_logprobs"]
    assert max(entry[0] for entry in wrong) < min(entry[0] for entry in right)


def test_output_nan_is_null_in_json(launch):
    meta = launch({"output": "nan"}).ready().generate(return_logprob=True, logprob_start_len=0)["meta_info"]
    assert [entry[0] for entry in meta["output_token_logprobs"]] == [None] * 4
    assert [entry[0] for entry in meta["input_token_logprobs"]] == [None] * 3


def test_output_repeat(launch):
    answer = launch({"output": "repeat"}).ready().generate(tokens=5)
    assert answer["text"] == "!!!!!"
    assert answer["output_ids"] == [0] * 5


def test_output_empty(launch):
    answer = launch({"output": "empty"}).ready().generate(tokens=5)
    assert answer["text"] == ""
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}


def test_output_short_ignores_ignore_eos(launch):
    answer = launch({"output": "short"}).ready().generate(tokens=10)
    assert len(answer["output_ids"]) == answer["meta_info"]["completion_tokens"] == 5
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"
