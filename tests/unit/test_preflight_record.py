"""What a preflight record says to a person, to a test and to the command's caller."""

import argparse
import json
import resource
from pathlib import Path

import pytest

from pytest_gpuserve.errors import UsageError
from pytest_gpuserve.model.cell import Cell, ModelSpec
from pytest_gpuserve.model.failure import Kind
from pytest_gpuserve.model.knownbad import Expectation, KnownBad
from pytest_gpuserve.model.phase import Phase
from pytest_gpuserve.model.predicate import ALWAYS
from pytest_gpuserve.preflight import command
from pytest_gpuserve.preflight.command import Request, preflight_main, write_records
from pytest_gpuserve.preflight.record import check_schema, failure_of, settings_of, summary

USAGE = "sglang serve: error: argument --attention-backend: invalid choice: 'x' (choose from {})"


def result(outcome: str = "accepted", **more: object) -> dict:
    return {
        "id": "sm120-m-baseline",
        "arch": "sm120",
        "outcome": outcome,
        "reason": "",
        "rejection": None,
        "rewritten": {},
        "settings": {},
        "gate": {},
        "env": {},
        "argv": ["--attention-backend", "x"],
        **more,
    }


def rejected(text: str, exception: str = "SystemExit", code: int = 2) -> dict:
    return result("rejected", rejection={"text": text, "exception": exception, "exit": code, "where": "argparse"})


def record(*cells: dict, status: str = "ok", arch: str = "sm120") -> dict:
    reason = "" if status == "ok" else "preflight unavailable: SGLang 9.9: ImportError: no"
    return {
        "schema": 1,
        "kind": "preflight",
        "arch": arch,
        "status": status,
        "reason": reason,
        "versions": {"sglang": "9.9"},
        "cells": list(cells),
    }


def test_a_rejection_is_the_same_failure_whatever_the_other_choices_are() -> None:
    old, new = (failure_of(rejected(USAGE.format(choices))) for choices in ("'a', 'b'", "'c'"))
    assert old is not None
    assert new is not None
    assert (old.kind, old.phase, old.signature) == (Kind.REJECTED, Phase.IMPORT, new.signature)
    assert "choose from" not in old.signature
    entry = Expectation(kind=Kind.REJECTED, phases=(Phase.IMPORT,), match="invalid choice: 'x'")
    assert entry.explains(old)


def test_two_rejections_of_one_option_are_two_failures() -> None:
    one = failure_of(rejected(USAGE.format("'a'")))
    two = failure_of(rejected(USAGE.format("'a'").replace("'x'", "'y'")))
    assert one is not None
    assert two is not None
    assert one.signature != two.signature


def test_an_exception_carries_its_type_as_a_servers_traceback_does() -> None:
    failure = failure_of(rejected("only on Blackwell", "ValueError", 1))
    assert failure is not None
    assert failure.text == "ValueError: only on Blackwell"
    assert "would exit 1" in failure.message
    assert "--attention-backend x" in failure.message


def test_settings_fall_back_to_the_common_attention_backend() -> None:
    resolved = {
        "attention_backend": "triton",
        "prefill_attention_backend": None,
        "decode_attention_backend": "fa3",
        "nsa_prefill_backend": "tilelang",
        "mem_fraction_static": 0.5,
    }
    settings = settings_of(resolved)
    assert (settings["prefill_attention_backend"], settings["decode_attention_backend"]) == ("triton", "fa3")
    assert settings["dsa_prefill_backend"] == "tilelang"
    assert "mem_fraction_static" not in settings


def test_the_summary_says_accepted_and_never_supported() -> None:
    change = {"page_size": {"asked": 16, "resolved": 64}}
    lines = summary(
        record(
            result(),
            result("rewritten", rewritten=change, gate={"fa3": "rejected: no"}),
            rejected(USAGE.format("'a'")),
        )
    )
    assert lines[0].endswith("(accepted is not supported)")
    assert "page_size: 16 → 64" in lines[2]
    assert "gate fa3: rejected: no" in lines[2]
    assert "choose from" not in lines[3]
    assert lines[-1] == "1 accepted, 1 rejected, 1 rewritten"
    assert summary(record(status="unavailable")) == [
        "sm120, SGLang 9.9: preflight unavailable: SGLang 9.9: ImportError: no"
    ]


def test_a_record_of_another_kind_or_of_the_future_is_refused() -> None:
    check_schema(record(), "a.json")
    with pytest.raises(UsageError, match=r"a\.json: not a preflight record"):
        check_schema({"schema": 1, "cells": []}, "a.json")
    with pytest.raises(UsageError, match="schema 7"):
        check_schema({**record(), "schema": 7}, "a.json")


def test_records_are_written_whole(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "one.json"
    write_records(target, [record()])
    assert json.loads(target.read_text()) == record()
    write_records(target, [record(), record(arch="sm90")])
    assert [one["arch"] for one in json.loads(target.read_text())["runs"]] == ["sm120", "sm90"]
    assert [path.name for path in target.parent.iterdir()] == ["one.json"]
    with pytest.raises(UsageError, match="name another file with -o"):
        write_records(target / "under-a-file.json", [record()])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(UsageError, match="File too large"):
            write_records(target, [])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(target.parent.iterdir()) == [target]


def entry(match: str) -> KnownBad:
    return KnownBad(id="KB-1", when=ALWAYS, expect=Expectation(kind=Kind.REJECTED, match=match))


@pytest.mark.parametrize(
    ("answer", "entries", "code"),
    [
        (record(result()), [], 0),
        (record(rejected("no such thing")), [], 1),
        (record(rejected("no such thing")), [entry("no such")], 0),
        (record(rejected("no such thing")), [entry("other")], 1),
        (record(result("unavailable", reason="died")), [entry("")], 1),
        (record(result("unavailable", reason="x"), status="unavailable"), [entry("")], 2),
    ],
)
def test_the_commands_exit_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answer: dict,
    entries: list[KnownBad],
    code: int,
) -> None:
    monkeypatch.setattr(command, "preflight", lambda *args, **options: answer)
    cell = Cell(id="sm120-m-baseline", arch="sm120", model=ModelSpec(name="m"), axes={})

    def prepare(options: argparse.Namespace) -> Request:
        assert options.matrix == "sm120"
        return Request(
            cells=[cell], python="python", env={}, versions={}, model_dirs={}, entries={cell.id: tuple(entries)}
        )

    assert preflight_main(["--matrix", "sm120"], prepare) == code
    assert ("not explained" in capsys.readouterr().out) == (code == 1)


def test_the_command_cannot_ask_about_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    empty = Request(cells=[], python="python", env={}, versions={}, model_dirs={})
    assert preflight_main(["--matrix", "sm120"], lambda options: empty) == 2
    assert "no cell is left" in capsys.readouterr().err
