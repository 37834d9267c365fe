"""The simulated server's start, process tree and end, as the supervisor and a person with `ps` see them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from pytest_gpuserve.gpu.sim import SimProbe

GIB = 1 << 30


def test_a_start_has_sglangs_tree_lines_and_memory(launch, machine):
    server = launch({"memory-gib": 10}, "--tp-size", "2", machine=machine).ready()
    # The others had their names before the first answer came round; nothing waits for this one.
    server.named("python -B -c from multiprocessing.resource_tracker")
    titles = server.titles()
    assert len(titles) == 5
    assert sum(title == "sglang::detokenizer" for title in titles) == 1
    assert sorted(title for title in titles if "scheduler" in title) == [
        "sglang::scheduler_TP0",
        "sglang::scheduler_TP1",
    ]
    assert any(title.startswith("python -B -c from multiprocessing.resource_tracker") for title in titles)
    pid = server.named("sglang::scheduler_TP1").pid
    assert Path(f"/proc/{pid}/comm").read_text() == "sglang::schedul\n"
    assert {os.getsid(process.pid) for process in server.marked()} == {server.process.pid}
    assert [server.memory(0), server.memory(1)] == [10 * GIB, 10 * GIB]
    lines = server.log.splitlines()
    assert "SIMULATED" in lines[0]
    order = (
        "server_args=",
        "TP0] Init parallel begin.",
        "TP0] Load weight begin. avail mem=",
        "TP0] Load weight end.",
        "TP0] KV Cache is allocated.",
        "TP0] Memory pool end.",
        "TP0] Capture target decode CUDA graph begin.",
        "TP0] max_total_num_tokens=",
        "INFO:     Uvicorn running on http://127.0.0.1:",
        "The server is fired up and ready to roll!",
    )
    found = [next(number for number, line in enumerate(lines) if text in line) for text in order]
    assert found == sorted(found)
    assert any("TP1] Load weight end." in line for line in lines)


def test_visible_devices_choose_the_gpu(launch, machine):
    server = launch({"memory-gib": 3}, machine=machine, CUDA_VISIBLE_DEVICES="1").ready()
    assert (server.memory(0), server.memory(1)) == (0, 3 * GIB)


def test_gpus_named_by_uuid_switch_custom_all_reduce_off(launch, machine):
    uuids = ",".join(gpu.uuid for gpu in SimProbe(machine).gpus())
    server = launch({}, "--tp-size", "2", machine=machine, CUDA_VISIBLE_DEVICES=uuids).ready()
    assert "Setup Custom allreduce failed with invalid literal for int() with base 10: 'GPU-SIM" in server.log


def test_more_ranks_than_gpus_is_an_invalid_ordinal(launch, machine):
    server = launch({}, "--tp-size", "3", machine=machine)
    assert server.exit() == -signal.SIGKILL
    assert "CUDA error: invalid device ordinal" in server.log


def test_more_memory_than_the_gpu_has_is_cudas_out_of_memory(launch, machine):
    server = launch({"memory-gib": 200}, machine=machine)
    assert server.exit() == -signal.SIGKILL
    assert (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 119.50 GiB. GPU 0 has a total capac"
        in server.log
    )


def test_graphs_off_has_no_capture(launch, machine):
    server = launch({}, "--disable-cuda-graph", machine=machine).ready()
    assert "CUDA graph begin" not in server.log
    assert "Disable prefill CUDA graph because" in server.log
    info = server.get("/server_info")
    assert info["cuda_graph_config"]["decode"]["backend"] == "disabled"


def test_skip_server_warmup(launch):
    server = launch({"hang": "warmup"}, "--skip-server-warmup").ready()
    assert "GET /model_info" not in server.log


def test_phase_seconds_are_spent_in_every_phase(launch, machine):
    began = time.monotonic()
    launch({"phase-seconds": 0.2}, machine=machine).ready()
    assert 7 * 0.2 <= time.monotonic() - began < 7 * 0.2 + 20


def test_the_port_opens_before_the_warm_up_and_health_is_503_until_its_end(launch):
    server = launch({"hang": "warmup"}).wait("Uvicorn running on")
    assert server.request("GET", "/health")[0] == 503
    assert server.request("GET", "/ready")[0] == 503
    assert server.get("/model_info")["is_generation"] is True
    assert "fired up" not in server.log


def test_sigterm_finishes_what_runs_and_leaves_nothing(launch, machine, terminate):
    # Three seconds of tokens: long enough for what is asked of the server meanwhile.
    server = launch({"tokens-per-second": 20}, "--tp-size", "2", machine=machine).ready()
    answers: list[dict] = []
    client = threading.Thread(target=lambda: answers.append(server.generate(tokens=60)))
    client.start()
    server.wait("Prefill batch, #new-seq: 1, #new-token: 3")
    terminate(server)
    server.wait("Gracefully exiting... Remaining number of requests 1")
    assert server.request("GET", "/health")[0] == 503
    client.join()
    assert answers[0]["meta_info"]["completion_tokens"] == 60
    assert server.exit() == 0
    server.gone()
    server.keeps(0)
    server.keeps(0, index=1)


def test_sigterm_to_the_session_kills_the_schedulers_and_so_main(launch):
    server = launch({}).ready()
    os.killpg(server.process.pid, signal.SIGTERM)
    assert server.exit() == -signal.SIGKILL
    server.gone()
    assert "crashed with exit code -15. Triggering SIGQUIT for cleanup..." in server.log


def test_sigterm_while_starting_ends_main_at_once(launch):
    server = launch({"hang": "weights"}).wait("Load weight begin")
    server.process.terminate()
    assert server.exit() == -signal.SIGTERM
    server.gone()


def test_killed_main_takes_the_children_with_it(launch, machine):
    server = launch({}, "--tp-size", "2", machine=machine).ready()
    server.process.kill()
    server.exit()
    server.gone()
    server.keeps(0)


def test_main_killed_during_imports_leaves_an_orphan_that_takes_the_gpu(launch, machine, wait_until):
    server = launch({"phase-seconds": 1.0, "memory-gib": 7}, machine=machine).wait("Using default HuggingFace")
    wait_until(lambda: len(server.marked()) == 4, "the tree")
    server.process.kill()
    server.exit()
    wait_until(lambda: server.memory(0) > 4 * GIB, "the orphan's memory")
    assert server.titles()
    server.gone()
    assert "BrokenPipeError" in server.log
    server.keeps(0)


def test_killed_scheduler_is_named_and_ends_the_server(launch):
    server = launch({}, "--tp-size", "2").ready()
    victim = server.named("sglang::scheduler_TP1")
    victim.kill()
    assert server.exit() == -signal.SIGKILL
    assert f"Subprocess scheduler_1 (pid={victim.pid}) crashed with exit code -9. Triggering SIGQUIT" in server.log
    assert "SIGQUIT received. signum=None, frame=None. It usually means one child failed." in server.log
    server.gone()


def test_scheduler_killed_while_starting(launch):
    server = launch({"hang": "kv-cache"}).wait("Load weight end")
    server.named("sglang::scheduler").kill()
    assert server.exit() == 1
    assert "Rank 0 scheduler died during initialization (exit code: -9)." in server.log
    server.gone()


def test_stopped_scheduler_stops_the_tokens_and_the_health(launch, wait_until):
    server = launch({"tokens-per-second": 20}, "--enable-metrics", SGLANG_HEALTH_CHECK_TIMEOUT="1").ready()
    client = threading.Thread(target=lambda: server.generate(tokens=60), daemon=True)
    client.start()

    def generated() -> float:
        text = server.request("GET", "/metrics")[1].decode()
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("sglang:generation_tokens"))

    wait_until(lambda: generated() > 0, "tokens")
    scheduler = server.named("sglang::scheduler")
    scheduler.suspend()
    assert server.request("GET", "/health")[0] == 503
    wait_until(lambda: "Health check failed" in server.log, "SGLang's line")
    seen = [generated()]

    def frozen() -> bool:
        time.sleep(0.3)
        seen.append(generated())
        return seen[-1] == seen[-2]

    wait_until(frozen, "the counter to stand still")
    assert seen[-1] < 60
    scheduler.resume()
    client.join(30)
    assert not client.is_alive()
    assert generated() == 60


def test_a_really_taken_port_is_found_at_the_end_and_then_the_server_is_deaf(launch):
    server = launch({"phase-seconds": 0.2})
    # As servers bind it: a connection to the port's last user, in TIME_WAIT, is no obstacle.
    with socket.create_server(("127.0.0.1", server.port)):
        server.wait(f"ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', {server.port})")
        server.process.terminate()
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert server.process.poll() is None
        assert server.named("sglang::scheduler")
        os.killpg(server.process.pid, signal.SIGTERM)
        assert server.exit() == -signal.SIGKILL


def test_a_taken_nccl_port_is_a_crash_in_dist_init(launch):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        server = launch({}, "--nccl-port", str(other.getsockname()[1]))
        assert server.exit() == -signal.SIGKILL
    assert "DistNetworkError: The server socket has failed to listen on any local network address" in server.log


def test_gpus_are_busy_while_requests_run(launch, machine, wait_until):
    server = launch({"tokens-per-second": 50}, "--tp-size", "2", machine=machine).ready()
    probe = SimProbe(machine)

    def use() -> list[int]:
        return [probe.read(gpu.uuid).utilization for gpu in probe.gpus()]

    assert use() == [0, 0]
    client = threading.Thread(target=server.generate, kwargs={"tokens": 150})
    client.start()
    wait_until(lambda: use() == [95, 95], "busy GPUs")
    client.join()
    wait_until(lambda: use() == [0, 0], "idle GPUs")


def refused(launch, *flags: str):
    server = launch({}, *flags)
    return server, server.exit()


def test_unknown_flag_is_argparses_exit_2(launch):
    server, code = refused(launch, "--no-such-flag")
    assert code == 2
    assert server.log.splitlines()[-1] == "sglang serve: error: unrecognized arguments: --no-such-flag"
    assert "usage: sglang serve [-h] --model-path MODEL_PATH" in server.log


def test_removed_and_ambiguous_flags_are_refused_as_by_0_5_23(launch):
    server, code = refused(launch, "--nsa-decode-backend", "trtllm")
    assert code == 2
    assert "unrecognized arguments: --nsa-decode-backend trtllm" in server.log
    server, code = refused(launch, "--cuda-graph-max-bs", "8")
    assert code == 2
    assert "--cuda-graph-max-bs could match --cuda-graph-max-bs-decode, --cuda-graph-max-bs-prefill" in server.log


def test_unknown_backend_is_refused_with_the_choices(launch):
    server, code = refused(launch, "--attention-backend", "cutlass_mla")
    assert code == 2
    assert "sglang serve: error: argument --attention-backend: invalid choice: 'cutlass_mla' (choose from" in server.log


def test_missing_model_is_transformers_error(launch):
    server, code = refused(launch, "--model-path", "/nope/missing")
    assert code == 1
    assert server.log.splitlines()[-1].startswith("OSError: Repo id must be in the form 'repo_name' or 'namespace/repo")


def test_abbreviations_are_understood(launch):
    server = launch({}, "--tp", "2").ready()
    assert server.get("/server_info")["tp_size"] == 2


def test_a_wrong_behaviour_file_is_named(tmp_path):
    path = tmp_path / "behaviour.json"
    path.write_text('{"hangs": "weights"}')
    run = subprocess.run(
        [sys.executable, "-m", "pytest_gpuserve.sim.server", "--model-path", "m"],
        env=os.environ | {"GPUSERVE_SIM_BEHAVIOUR": str(path)},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert run.returncode == 1
    assert f"GPUSERVE_SIM_BEHAVIOUR={path}: unknown keys ['hangs']; known are" in run.stderr


def test_start_and_stop_are_fast(launch, machine, terminate, record_property):
    best = bare = float("inf")
    for _ in range(5):
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", "import asyncio"], check=True)
        bare = min(bare, time.monotonic() - began)
        began = time.monotonic()
        server = launch({}, machine=machine)
        while True:
            try:
                if server.request("GET", "/ready")[0] == 200:
                    break
            except ConnectionError:
                time.sleep(0.005)
        started = time.monotonic() - began
        terminate(server)
        assert server.exit() == 0
        total = time.monotonic() - began
        best = min(best, total)
        print(f"start {started:.3f} s, start and stop {total:.3f} s; an interpreter with asyncio {bare:.3f} s")
    record_property("start_and_stop_seconds", round(best, 3))
    # 0.2 s on two idle cores; the supervisor's share of the promised second is the rest. Where an interpreter alone is
    # slow, so may this be: it takes as long as three to seven of them.
    assert best < max(0.8, 10 * bare)
