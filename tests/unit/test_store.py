"""What a run leaves behind: whole files or none, a bounded history, records that can be read again, no secrets."""

import errno
import json
import math
import os
import re
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pytest_gpuserve import __version__
from pytest_gpuserve.errors import MachineError, UsageError
from pytest_gpuserve.model.failure import Failure, Kind
from pytest_gpuserve.model.outcome import Outcome
from pytest_gpuserve.model.phase import Phase
from pytest_gpuserve.model.record import SCHEMA, CellRecord, CheckRecord
from pytest_gpuserve.report import store
from pytest_gpuserve.report.scrub import scrub_argv, scrub_cell, scrub_env, scrub_text
from pytest_gpuserve.report.store import (
    Events,
    cell_folder,
    new_run_folder,
    read_cell,
    read_events,
    read_run,
    run_header,
    run_record,
    write_cell,
    write_json_atomic,
)
from pytest_gpuserve.report.upgrade import upgrade

GOLDEN = Path(__file__).parent / "golden"
NOON = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)


def header(**changes: object) -> dict:
    given: dict = {
        "simulated": False,
        "started": NOON,
        "command": ["pytest"],
        "versions": {"sglang": "0.5.23"},
        "taken_for": {},
        "driver": {},
        "host": "h",
        "gpus": [],
        "matrices": [],
    }
    return run_header(**{**given, **changes})


def cell(name: str = "baseline", outcome: Outcome = Outcome.PASSED, **more: object) -> CellRecord:
    return CellRecord(id=f"sm120-m-{name}", arch="sm120", model="m", axes={"a": name}, outcome=outcome, **more)


# -- run folders -------------------------------------------------------------------------------------------------------


def test_folders_are_named_by_time_and_latest_names_the_newest(tmp_path: Path) -> None:
    first, second = (new_run_folder(tmp_path, NOON.replace(hour=hour)) for hour in (9, 10))
    assert re.fullmatch(r"20261129T090000Z-[0-9a-f]{6}", first.name)
    assert (tmp_path / "runs" / "latest").resolve() == second
    assert os.readlink(tmp_path / "runs" / "latest") == second.name, "relative, so that the directory can be moved"
    assert [path.name for path in (tmp_path / "runs").iterdir() if path.name.startswith(".")] == []


def test_only_our_oldest_unused_folders_are_removed(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    folders = [new_run_folder(tmp_path, NOON.replace(minute=minute)) for minute in range(5)]
    in_use = Events(folders[0])
    lookalike = runs / "20200101T000000Z-abcdef"
    lookalike.mkdir()
    (lookalike / "thesis.txt").write_text("not a run")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (runs / "20200101T000001Z-abcdef").symlink_to(elsewhere)
    newest = new_run_folder(tmp_path, NOON.replace(minute=9), keep=2)
    left = {path for path in runs.iterdir() if path.name != "latest"}
    assert left == {folders[0], lookalike, runs / "20200101T000001Z-abcdef", folders[4], newest}
    assert elsewhere.is_dir()
    in_use.close()
    new_run_folder(tmp_path, NOON.replace(minute=10), keep=2)
    assert not folders[0].exists()


def test_a_killed_run_does_not_keep_its_folder_in_use(tmp_path: Path) -> None:
    folder = new_run_folder(tmp_path, NOON)
    code = (
        f"from pathlib import Path; from pytest_gpuserve.report.store import Events; e = Events(Path({str(folder)!r}))"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", f"{code}; print('open', flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(store.__file__).parents[2])},
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"open\n"
        new_run_folder(tmp_path, NOON.replace(minute=1), keep=1)
        assert folder.exists()
        child.send_signal(signal.SIGKILL)
    new_run_folder(tmp_path, NOON.replace(minute=2), keep=1)
    assert not folder.exists()


@pytest.mark.parametrize("obstacle", ["file", "folder"])
def test_what_stands_in_the_way(tmp_path: Path, obstacle: str) -> None:
    if obstacle == "file":
        (tmp_path / "runs").write_text("")
        with pytest.raises(UsageError, match=rf"{re.escape(str(tmp_path))} cannot be written: .*--gpu-report DIR"):
            new_run_folder(tmp_path)
        return
    (tmp_path / "runs" / "latest").mkdir(parents=True)
    (tmp_path / "runs" / "latest" / "mine").touch()
    assert new_run_folder(tmp_path).is_dir()
    assert (tmp_path / "runs" / "latest" / "mine").exists()


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    write_json_atomic(path, {"schema": 1})
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store.os, "fsync", full)
    with pytest.raises(MachineError, match=rf"cannot write {re.escape(str(path))}: No space left on device"):
        write_json_atomic(path, {"schema": 1, "cells": [{"id": "x"}]})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_directory_that_is_gone_is_said(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="No such file or directory"):
        write_json_atomic(tmp_path / "gone" / "run.json", {})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list) else value


@settings(deadline=None)
@given(
    st.dictionaries(st.text(), JSON | st.lists(st.dictionaries(st.text(), JSON, max_size=3), max_size=3), max_size=4)
)
def test_what_is_written_is_strict_json_and_reads_back(tmp_path_factory: pytest.TempPathFactory, data: dict) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    write_json_atomic(path, data)

    def refuse(word: str) -> None:
        pytest.fail(f"{word} is not JSON")

    assert json.loads(path.read_bytes(), parse_constant=refuse) == finite(data)


def test_any_value_and_any_byte_of_a_log_can_be_written(tmp_path: Path) -> None:
    torn = b"caf\xe9 \xff".decode("utf-8", "surrogateescape")
    write_json_atomic(tmp_path / "x.json", {"kind": Kind.OOM, "path": tmp_path, "names": {"b", "a"}, "text": torn})
    data = json.loads((tmp_path / "x.json").read_bytes())
    assert data == {"kind": "oom", "path": str(tmp_path), "names": ["a", "b"], "text": torn}


# -- events ------------------------------------------------------------------------------------------------------------


def test_events_are_there_at_once_and_a_torn_line_costs_only_itself(tmp_path: Path) -> None:
    events = Events(tmp_path)
    events.write("run", schema=SCHEMA)
    assert [event["event"] for event in read_events(events.path)] == ["run"]
    with events.path.open("ab") as file:
        file.write(b'{"t": "2026", "event": "check", "ce')
    assert [event["event"] for event in read_events(events.path)] == ["run"]
    events.close()


def test_a_disk_that_fills_up_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = Events(tmp_path)
    real, room = os.write, 10

    def almost_full(descriptor: int, data: bytes) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = real(descriptor, data[:room])
        room -= written
        return written

    monkeypatch.setattr(store.os, "write", almost_full)
    events.write("check", n=1)
    assert events.problem == f"cannot write {events.path}: No space left on device"
    monkeypatch.setattr(store.os, "write", real)
    events.write("check", n=2)
    assert [event["n"] for event in read_events(events.path)] == [2]
    # Cut short for another reason, an event is written to its end.
    monkeypatch.setattr(store.os, "write", lambda descriptor, data: real(descriptor, data[:10]))
    events.write("check", n=3)
    assert [event["n"] for event in read_events(events.path)] == [2, 3]
    events.close()


# -- cells and runs ----------------------------------------------------------------------------------------------------


def test_a_cell_reads_back(tmp_path: Path) -> None:
    failure = Failure.of(Kind.CRASH, Phase.WARMUP, "it died", line="RuntimeError: x", evidence=("server.log",))
    record = cell("b", Outcome.FAILED, failure=failure, flags={"tp-size": 2}, env={"NCCL_ALGO": "Tree"})
    folder = cell_folder(tmp_path, record.id)
    assert read_cell(folder) is None
    write_cell(folder, record)
    assert read_cell(folder) == record


@settings(deadline=None)
@example(".", "..")
@given(st.text(min_size=1, max_size=300), st.text(min_size=1, max_size=300))
def test_every_cell_has_a_folder_of_its_own(one: str, other: str) -> None:
    folders = [cell_folder(Path("/run"), name) for name in (one, other)]
    assert all(folder.parent == Path("/run/cells") and len(folder.name.encode()) <= 255 for folder in folders)
    assert (folders[0] == folders[1]) == (one == other)


def test_run_json_has_the_documented_fields_in_order(tmp_path: Path) -> None:
    cells = [cell(outcome=Outcome.PASSED, server_starts=1), cell("b", Outcome.INFRA, server_starts=2)]
    checks = [CheckRecord(name="ready", cell=one.id, outcome=one.outcome) for one in cells]
    record = run_record(header(), cells=cells, checks=checks, finished=NOON)
    assert list(record) == [
        *("schema", "simulated", "complete", "started", "finished", "command", "versions", "taken_for", "driver"),
        *("host", "gpus", "matrices", "server_starts", "outcomes", "cells", "checks"),
    ]
    assert record["outcomes"] == {"infra": 1, "passed": 1}
    assert record["server_starts"] == 3
    assert record["started"] == "2026-11-29T12:00:00.000Z"
    docs = (Path(__file__).parents[2] / "docs" / "record.md").read_text()
    for name in [*record, *record["cells"][0], *record["checks"][0]]:
        assert f"`{name}`" in docs, f"docs/record.md does not say what {name} is"
    write_json_atomic(tmp_path / "run.json", record)
    assert read_run(tmp_path) == read_run(tmp_path / "run.json") == json.loads(json.dumps(record))


def test_a_killed_run_is_read_from_what_it_left(tmp_path: Path) -> None:
    folder = new_run_folder(tmp_path, NOON)
    events = Events(folder)
    planned = [cell(name, Outcome.NOT_RUN) for name in ("done", "begun", "half", "never")]
    events.write("run", **header(), planned=[one.to_json() for one in planned])
    for check in ("ready", "answers"):
        events.write("check", **CheckRecord(name=check, cell="sm120-m-done", outcome=Outcome.PASSED).to_json())
    write_cell(cell_folder(folder, "sm120-m-done"), cell("done", server_starts=1))
    hang = Failure.of(Kind.HANG, Phase.WARMUP, "the server hangs")
    events.write(
        "check", **CheckRecord(name="ready", cell="sm120-m-begun", outcome=Outcome.FAILED, failure=hang).to_json()
    )
    for check in ("ready", "answers"):
        events.write("check", **CheckRecord(name=check, cell="sm120-m-half", outcome=Outcome.PASSED).to_json())
    events.close()
    record = read_run(tmp_path)
    assert record == read_run(folder)
    assert not record["complete"]
    assert [(one["id"], one["outcome"]) for one in record["cells"]] == [
        ("sm120-m-done", "passed"),
        ("sm120-m-begun", "failed"),
        ("sm120-m-half", "not-run"),
        ("sm120-m-never", "not-run"),
    ]
    assert record["cells"][1]["failure"] == hang.to_json()
    assert record["cells"][2]["reason"] == "the run was killed during it: only ready, answers had ended"
    assert record["cells"][3]["reason"] == "the run was killed before it"
    assert (len(record["checks"]), record["server_starts"]) == (5, 1)
    assert {"t", "event", "planned"}.isdisjoint(record)


# -- what cannot be read -----------------------------------------------------------------------------------------------


def test_a_newer_record_is_refused_with_what_to_do() -> None:
    newer = {"schema": SCHEMA + 1, "cells": []}
    with pytest.raises(
        UsageError, match=rf"x\.json: written with schema 2, and pytest-gpuserve {__version__} reads up"
    ):
        upgrade(newer, "x.json")


def test_the_least_record_is_filled_up() -> None:
    record = read_run(GOLDEN / "record_v0.json")
    assert (record["schema"], record["complete"], record["outcomes"]) == (SCHEMA, True, {"passed": 1, "failed": 1})
    baseline, delta = (CellRecord.from_json(one) for one in record["cells"])
    assert delta.baseline == baseline.axes == {"attention": "fa3"}
    assert delta.failure is not None
    assert delta.failure.kind is Kind.CRASH
    assert delta.failure.signature.startswith("RuntimeError: no kernel image #")
    assert set(record) == set(run_record(header(), cells=[], checks=[]))


def test_each_step_is_taken_once_and_a_missing_one_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pytest_gpuserve.report.upgrade.SCHEMA", 3)
    steps = {number: lambda old, number=number: old | {"schema": number + 1, f"s{number}": 1} for number in (1, 2)}
    assert upgrade({"schema": 1, "cells": []}, "x", steps) == {"schema": 3, "cells": [], "s1": 1, "s2": 1}
    with pytest.raises(UsageError, match="x: schema 0 is not one that any"):
        upgrade({"schema": 0, "cells": []}, "x", steps)


def broken(**part: object) -> str:
    whole = {"id": "a", "arch": "sm90", "model": "m", "axes": {}, "outcome": "failed"}
    return json.dumps({"schema": 1, "cells": [whole | part]})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not a record: Expecting value"),
        ('{"schema": 1, "cells": [{"id"', "Was it cut off"),
        ("[]", "it holds list"),
        ("{}", "no number under 'schema'"),
        ('{"schema": true}', "no number under 'schema'"),
        ('{"schema": 1}', "'cells' is not a list"),
        ('{"schema": 1, "cells": [{"id": "a"}]}', r"cells\[0\] lacks arch, model, axes, outcome"),
        ('{"schema": 1, "cells": [3]}', r"cells\[0\] lacks id"),
        (
            '{"schema": 1, "cells": [{"id": "a", "arch": "sm90", "model": "m", "axes": {}, "outcome": "good"}]}',
            r"cells\[0\] \(a\): 'outcome' must be an outcome",
        ),
        ('{"schema": 1, "cells": []}', "'simulated' is missing"),
        (broken(failure={"kind": "crash"}), r"\(a\): failure: 'phase' is missing"),
        (broken(measurements=[{"load": "x"}]), r"measurements\[0\]: 'metric' is missing"),
        (broken(baseline=[]), "'baseline' must be a mapping of axes to levels"),
        ("[" * 100_000, "not a record"),
    ],
)
def test_what_is_not_a_record(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(UsageError, match=said) as caught:
        read_run(tmp_path / "run.json")
    assert str(tmp_path / "run.json") in str(caught.value)


def test_no_file_and_no_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"gone\.json: no such file"):
        read_run(tmp_path / "gone.json")
    with pytest.raises(UsageError, match="no run in this folder"):
        read_run(tmp_path)
    new_run_folder(tmp_path)
    with pytest.raises(UsageError, match="ended before it planned a cell"):
        read_run(tmp_path)


# -- secrets -----------------------------------------------------------------------------------------------------------


def test_environment_values_are_an_allow_list() -> None:
    env = {"NCCL_ALGO": "Tree", "AWS_PROFILE": "prod", "SGLANG_API_KEY": "k", "HF_TOKEN": "t", "MY_SECRET": "s"}
    assert scrub_env(env) == {
        "NCCL_ALGO": "Tree",
        **dict.fromkeys(("AWS_PROFILE", "SGLANG_API_KEY", "HF_TOKEN", "MY_SECRET"), "***"),
    }


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        ("serve --api-key K --port 1", "serve --api-key *** --port 1"),
        ("serve --api-key=K", "serve --api-key=***"),
        ("pytest --gpu-server-env HF_TOKEN=K --gpu-server-env HF_TOKEN", None),
        ("pytest --gpu-server-env=PYTHONPATH=/x", "pytest --gpu-server-env=PYTHONPATH=***"),
        ("pytest --gpu-server-env NCCL_ALGO=Tree", "pytest --gpu-server-env NCCL_ALGO=Tree"),
        ("env WANDB_API_KEY=K serve --max-total-tokens 4096", "env WANDB_API_KEY=*** serve --max-total-tokens 4096"),
        ("serve --tokenizer-path /m --skip-tokenizer-init", "serve --tokenizer-path /m --skip-tokenizer-init"),
    ],
)
def test_command_lines(argv: str, shown: str | None) -> None:
    expected = shown or "pytest --gpu-server-env HF_TOKEN=*** --gpu-server-env HF_TOKEN"
    assert scrub_argv(argv.split()) == expected.split()
    assert scrub_argv(scrub_argv(argv.split())) == expected.split()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("server_args=ServerArgs(api_key='k3y', port=30000)", "server_args=ServerArgs(api_key='***', port=30000)"),
        ("ServerArgs(api_key=None, max_total_tokens=4096)", "ServerArgs(api_key=None, max_total_tokens=4096)"),
        ("Authorization: Bearer abcdef123456", "Authorization: Bearer ***"),
        ("HF_TOKEN=abc in the environment", "HF_TOKEN=*** in the environment"),
        ("token hf_abcdefghijklmnopqrstuvwx", "token ***"),
        ("eos_token='</s>', 12 tokens", "eos_token='</s>', 12 tokens"),
    ],
)
def test_texts(text: str, shown: str) -> None:
    assert scrub_text(text) == scrub_text(shown) == shown


def test_no_secret_of_a_cell_reaches_a_file(tmp_path: Path) -> None:
    failure = Failure.of(Kind.CRASH, Phase.IMPORT, "died with api_key='TOPSECRET'", text="--api-key TOPSECRET")
    record = cell(
        outcome=Outcome.FAILED,
        failure=failure,
        argv=["serve", "--api-key", "TOPSECRET"],
        env={"MY_KEY": "TOPSECRET", "OMP_NUM_THREADS": "4"},
        resolved={"api_key": "TOPSECRET", "nested": [{"admin_api_key": "TOPSECRET"}]},
        reason="Bearer TOPSECRET-123",
    )
    write_cell(tmp_path, record)
    checks = [CheckRecord(name="ready", cell=record.id, outcome=Outcome.FAILED, failure=failure)]
    top = header(command=["pytest", "--gpu-server-env", "X_TOKEN=TOPSECRET"])
    write_json_atomic(tmp_path / "run.json", run_record(top, cells=[record], checks=checks))
    events = Events(tmp_path)
    events.write("run", **top, planned=[record.to_json()])
    events.write("check", **checks[0].to_json())
    events.write("cell", **record.to_json())
    events.close()
    assert [event["event"] for event in read_events(tmp_path / "events.jsonl")] == ["run", "check", "cell"]
    for path in tmp_path.iterdir():
        assert "TOPSECRET" not in path.read_text()
    once = scrub_cell(record.to_json())
    assert scrub_cell(once) == once
    assert once["env"]["OMP_NUM_THREADS"] == "4"
