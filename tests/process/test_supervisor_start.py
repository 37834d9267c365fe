"""Start-up: phases, readiness, and every way in which a start can fail. Real processes, a fake server."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from pytest_gpuserve.serve import procs

from .supervised import QUICK, Bench, eventually


def test_a_server_becomes_ready_and_is_stopped(bench: Bench) -> None:
    supervisor = bench.leased()
    ready = supervisor.launch(bench.spec("scheduler"))
    assert ready["event"] == "ready"
    assert ready["first_answer"]["text"] == " Paris"
    assert ready["info"] == {"attention_backend": "triton", "max_total_num_tokens": 5}
    assert list(ready["phases"]) == ["spawn", "import", "weights", "kv-cache", "ready", "serving"]
    spawned = bench.of("spawned")
    assert spawned["env"]["CUDA_VISIBLE_DEVICES"] == "0"
    assert spawned["api_key"] not in str(spawned["argv"])
    request = Request(f"{ready['url']}/server_info", headers={"Authorization": f"Bearer {spawned['api_key']}"})
    with urlopen(request) as answer:
        assert answer.status == 200
    stopped = supervisor.stop()
    assert stopped["failure"] is None
    assert stopped["teardown"]["exit_before"] is None
    assert not any("pid" in text for text in stopped["teardown"]["leftovers"])
    assert not Path(spawned["tmpdir"]).exists()
    assert supervisor.release()["quarantined"] == []


def test_the_api_key_is_not_in_the_log(bench: Bench) -> None:
    supervisor = bench.leased()
    supervisor.launch(bench.spec())
    supervisor.stop()
    log = Path(bench.of("spawned")["log"]).read_text()
    assert "api_key='<api-key>'" in log
    assert bench.of("spawned")["api_key"] not in log


def test_several_servers_under_one_lease(bench: Bench) -> None:
    supervisor = bench.leased()
    ports = set()
    for _ in range(3):
        event = supervisor.launch(bench.spec())
        assert event["event"] == "ready", event
        ports.add(bench.of("spawned")["port"])
        assert supervisor.stop()["failure"] is None
        assert len(bench.held()) == 1
    assert all(10_000 <= port < 65_536 for port in ports)


@pytest.mark.parametrize("fault", ["no-ready-endpoint", "no-metrics"])
def test_servers_with_fewer_endpoints(bench: Bench, fault: str) -> None:
    assert bench.leased().launch(bench.spec(fault))["event"] == "ready"


def test_ready_needs_a_generation(bench: Bench) -> None:
    event = bench.leased().launch(bench.spec("generate-500"))
    assert event["failure"]["kind"] == "crash"
    assert "kernel image is invalid" in event["failure"]["message"]


def test_a_generation_that_never_comes_is_a_hang(bench: Bench) -> None:
    supervisor = bench.leased()
    event = supervisor.launch(bench.spec("generate-hangs", limits={"ready": QUICK}))
    assert (event["failure"]["kind"], event["failure"]["phase"]) == ("hang", "ready")
    assert supervisor.stop()["failure"] is None


def test_ready_is_noticed_at_once(bench: Bench) -> None:
    """Without a word in the log: a quarter of a second is promised, a loaded machine may take longer now and then."""
    supervisor = bench.leased()
    seen: list[float] = []
    while len(seen) < 5 and min(seen, default=1.0) >= 0.75:
        ready = supervisor.launch(bench.spec("late=0.5"))
        assert ready["event"] == "ready"
        # The server's own word, and the same clock: how long it took to come so far is no matter.
        seen.append(time.monotonic() - ready["info"]["ready_at"])
        supervisor.stop()
    print(f"noticed after {seen} s")
    assert 0 < min(seen) < 0.75


@pytest.mark.parametrize(("fault", "code"), [("exit=0", 0), ("exit=2", 2), ("exit=1", 1), ("die=11", -11)])
def test_a_server_that_ends_at_its_start(bench: Bench, fault: str, code: int) -> None:
    supervisor = bench.leased()
    event = supervisor.launch(bench.spec("stderr=error: unrecognized arguments: --nonsense", fault))
    assert event["event"] == "failed"
    assert event["failure"]["kind"] in ("crash", "rejected")
    stopped = supervisor.stop()
    assert stopped["teardown"]["exit_before"] == code


def test_an_interpreter_that_is_not_there(bench: Bench) -> None:
    event = bench.leased().launch(bench.spec(argv=("/nowhere/python", "-c", "pass")))
    assert event["failure"]["kind"] == "infra"
    assert "/nowhere/python: No such file" in event["failure"]["message"]


@pytest.mark.parametrize("fault", ["stuck", "silent", "endless"])
def test_no_progress_is_a_hang_within_the_limit(bench: Bench, fault: str) -> None:
    supervisor = bench.leased()
    began = time.monotonic()
    # In that phase only: on a busy machine what comes before may be quiet for a second, too.
    phase = "graph-capture" if fault == "stuck" else "import"
    event = supervisor.launch(bench.spec(fault, limits={phase: QUICK}))
    assert (event["failure"]["kind"], event["failure"]["phase"]) == ("hang", phase)
    assert time.monotonic() - began < 30.0  # any other limit is a minute or more
    assert bench.of("tick")["phase"] == event["failure"]["phase"]
    supervisor.stop()


def test_a_hang_while_a_draft_model_is_loaded_is_called_so(bench: Bench) -> None:
    supervisor = bench.leased()
    event = supervisor.launch(bench.spec("draft", limits={"weights": QUICK}))
    failure = event["failure"]
    assert (failure["kind"], failure["phase"]) == ("hang", "weights")
    assert "in phase weights, of the draft model" in failure["message"]
    assert "stuck while loading the draft model's weights" in failure["message"]
    supervisor.stop()


def test_a_hang_of_a_server_that_logs_no_phases_names_none(bench: Bench) -> None:
    supervisor = bench.leased()
    event = supervisor.launch(bench.spec("silent", blind="--log-level warning", limits={"import": QUICK}))
    failure = event["failure"]
    assert (failure["kind"], failure["phase"]) == ("hang", "import")
    assert failure["message"].count("--log-level warning hides the lines that tell the phase") == 1
    assert "importing" not in failure["message"]
    supervisor.stop()


def test_a_taken_port_is_infra_and_worth_another_try(bench: Bench) -> None:
    supervisor = bench.leased()
    event = supervisor.launch(bench.spec("errno98"))
    assert event["failure"]["kind"] == "infra"
    assert event["failure"]["retryable"]
    taken = bench.of("spawned")["port"]
    stopped = supervisor.stop()
    assert [rung["rung"] for rung in stopped["teardown"]["rungs"]] == ["term", "kill", "memory"]
    # Whoever had it has it still: that block of ports is not chosen again, not even by chance.
    with socket.create_server(("127.0.0.1", taken)):
        assert supervisor.launch(bench.spec())["event"] == "ready"
    assert bench.of("spawned")["port"] != taken


def test_a_stranger_at_the_port_is_not_our_server(bench: Bench) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        supervisor = bench.leased()
        serve = (
            "import socket, sys\ns = socket.socket(fileno=int(sys.argv[1]))\n"
            "while True:\n c, _ = s.accept(); c.recv(9999)\n"
            ' c.sendall(b\'HTTP/1.1 200 OK\\r\\nContent-Length: 12\\r\\n\\r\\n{"text": ""}\'); c.close()'
        )
        with subprocess.Popen(
            [sys.executable, "-c", serve, str(stranger.fileno())], pass_fds=(stranger.fileno(),)
        ) as other:
            event = supervisor.launch(bench.spec("silent", port=port, limits={"import": QUICK}))
            other.kill()
    assert event["event"] == "failed"
    assert event["failure"]["kind"] == "hang"


def test_binary_output_and_carriage_returns(bench: Bench) -> None:
    supervisor = bench.leased()
    assert supervisor.launch(bench.spec("binary", "carriage-returns"))["event"] == "ready"
    supervisor.stop()
    log = Path(bench.of("spawned")["log"]).read_bytes()
    assert b"\xff\xfe\x00" in log
    assert b"\rCapturing batches 49/50" in log
    assert any(event.get("phase") == "graph-capture" for event in bench.events)


def test_a_flood_is_drained_and_capped(bench: Bench) -> None:
    supervisor = bench.leased()
    ready = supervisor.launch(bench.spec("flood=200000000", log_cap=1 << 20))
    assert ready["event"] == "ready"
    supervisor.stop()
    log = Path(bench.of("spawned")["log"]).read_bytes()
    assert len(log) < (1 << 20) + 200
    assert log.startswith(b"server_args=")
    assert log.rstrip().endswith(b"ready to roll!")
    assert b"bytes of the log are left out here" in log


def test_a_log_that_cannot_be_written_is_infra(bench: Bench) -> None:
    event = bench.leased().launch(bench.spec("flood=10000000", log_name="/dev/full"))
    assert event["failure"]["kind"] == "infra"
    assert "No space left" in event["failure"]["message"]


def test_stop_during_start_up(bench: Bench) -> None:
    supervisor = bench.supervisor()
    supervisor.lease(bench.request())
    supervisor._send({"cmd": "launch", "spec": bench.spec("silent").to_json()})
    eventually(lambda: list(supervisor.events(0.1)) and any(e["event"] == "spawned" for e in bench.events))
    stopped = supervisor.stop()
    assert stopped["event"] == "stopped"
    assert stopped["teardown"]["exit"] == -15


def test_a_scheduler_still_importing_does_not_outlive_main(bench: Bench) -> None:
    """sglang#31645: main killed during imports, the orphan went on and took the GPU half a minute later."""
    supervisor = bench.supervisor()
    supervisor.lease(bench.request())
    supervisor._send({"cmd": "launch", "spec": bench.spec("importing=300").to_json()})
    eventually(lambda: list(supervisor.events(0.1)) and any(e["event"] == "phase" for e in bench.events))
    main = bench.of("spawned")["pid"]
    eventually(lambda: any(stat.ppid == main for stat in map(procs.read_stat, procs.all_pids()) if stat))
    procs.send_signal(procs.read_stat(main), 9)
    failed = supervisor.verdict(30.0)
    assert failed["failure"]["kind"] == "crash"
    assert supervisor.stop()["teardown"]["exit_before"] == -9
