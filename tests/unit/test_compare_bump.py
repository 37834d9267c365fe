"""Two preflights compared: options, refusals and settings, with no GPU."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuserve.compare import bump_render
from pytest_gpuserve.compare.bump import Bump, BumpReport, compare_preflights
from pytest_gpuserve.errors import UsageError
from pytest_gpuserve.preflight.record import records_of

GOLDEN = Path(__file__).parent / "golden"
ERROR = "launch_server.py: error: argument --attention-backend: invalid choice: '{}' (choose from {})"


def option(**more: Any) -> dict:
    return {"dest": "x", "choices": None, "default": None, "nargs": None, "type": None, "deprecated": False} | more


def cell(level: str, outcome: str = "accepted", model: str = "llama", arch: str = "sm100", **more: Any) -> dict:
    return {
        "id": f"{arch}-{model}-{level}",
        "arch": arch,
        "model": model,
        "axes": {"attention": level},
        "flags": {},
        "env": {},
        "argv": ["--attention-backend", level],
        "outcome": outcome,
        "reason": "",
        "rejection": None,
        "rewritten": {},
        "settings": {},
        "resolved": {},
        "env_set": {},
        "gate": {},
        **more,
    }


def rejected(level: str, text: str, **more: Any) -> dict:
    where = {"text": text, "exception": "SystemExit", "exit": 2, "where": "argparse"}
    return cell(level, "rejected", rejection=where, **more)


def record(*cells: dict, arch: str = "sm100", sglang: str = "0.5.10.post1", **more: Any) -> dict:
    return {
        "schema": 1,
        "kind": "preflight",
        "arch": arch,
        "status": "ok",
        "reason": "",
        "versions": {"sglang": sglang, "torch": "2.13.0"},
        "python": "3.11.7",
        "pretended": {"gpu": {"name": "NVIDIA B200", "count": 8}, "modules": {"flashinfer": "0.6"}},
        "options": {},
        "cells": list(cells),
        **more,
    }


def newer(*cells: dict, **more: Any) -> dict:
    return record(*cells, sglang="0.5.23", **more)


def report(a: dict, b: dict) -> BumpReport:
    return compare_preflights([a], [b])


def test_golden(golden: Callable[[str, str], None]) -> None:
    a = record(
        cell("cutlass_mla", settings={"page_size": 128}),
        cell("fa4", settings={"page_size": 1, "attention_backend": "fa4"}),
        cell("nsa", settings=dict.fromkeys(("attention_backend", "prefill_attention_backend"), "nsa")),
        rejected("trtllm_mha", "ValueError: TRTLLM MHA backend is only supported on Blackwell GPUs (SM100)."),
        cell("fa3", gate={"fa3": "rejected: AssertionError: FlashAttention v3 Backend requires SM>=80 and SM<=90."}),
        cell("triton", resolved={"hicache_mem_layout": "layer_first", "moe": "auto", "random_seed": 1}),
        options={
            "--nsa-decode-backend": option(),
            "--nsa-prefill-backend": option(),
            "--attention-backend": option(choices=["triton", "cutlass_mla", "fa4"]),
            "--hicache-mem-layout": option(dest="hicache_mem_layout", default="layer_first"),
            "--random-seed": option(dest="random_seed", default=1),
            "--disable-cuda-graph": option(default=False),
        },
    )
    b = newer(
        rejected("cutlass_mla", ERROR.format("cutlass_mla", "'triton', 'dsa', 'fa4'")),
        cell("fa4", settings={"page_size": 128, "attention_backend": "fa4"}),
        cell("nsa", settings=dict.fromkeys(("attention_backend", "prefill_attention_backend"), "dsa")),
        cell("trtllm_mha", settings={"page_size": 64}),
        cell("fa3", gate={"fa3": "rejected: AssertionError: FlashAttention v3 Backend requires SM>=80 and SM<=90."}),
        cell("triton", resolved={"hicache_mem_layout": "page_first", "moe": "triton", "random_seed": 2}),
        cell("dsa"),
        options={
            "--dsa-decode-backend": option(),
            "--attention-backend": option(choices=["triton", "dsa", "fa4"]),
            "--hicache-mem-layout": option(dest="hicache_mem_layout", default="page_first"),
            "--random-seed": option(dest="random_seed", default=2),
            "--disable-cuda-graph": option(default=False, deprecated=True),
        },
        pretended={"gpu": {"name": "NVIDIA B200", "count": 8}, "modules": {"flashinfer": "0.7", "flash_mla": "1"}},
    )
    found = report(a, b)
    golden("bump.txt", bump_render.text(found))
    golden("bump.md", bump_render.markdown(found))
    golden("bump.json", bump_render.as_json(found))


@pytest.mark.parametrize(
    ("old", "new", "change", "code"),
    [
        (cell("a"), cell("a"), Bump.SAME, 0),
        (cell("a"), rejected("a", "no"), Bump.REJECTED, 1),
        (rejected("a", "no"), cell("a"), Bump.ACCEPTED, 0),
        (rejected("a", "no"), rejected("a", "no"), Bump.STILL_REJECTED, 0),
        (rejected("a", ERROR.format("a", "'b'")), rejected("a", ERROR.format("a", "'c'")), Bump.STILL_REJECTED, 0),
        (rejected("a", "no"), rejected("a", "never"), Bump.REJECTED_OTHERWISE, 1),
        (cell("a"), cell("a", gate={"a": "rejected: no"}), Bump.REJECTED, 1),
        (cell("a", gate={"a": "passes"}), cell("a", gate={"a": "not asked: x"}), Bump.SAME, 0),
        (cell("a", settings={"page_size": 1}), cell("a", settings={"page_size": 64}), Bump.RESOLVED, 1),
        (cell("a", settings={"page_size": 1}), cell("a", settings={}), Bump.SAME, 0),
        (
            cell("a"),
            cell("a", "rewritten", rewritten={"attention_backend": {"asked": "a", "resolved": "b"}}),
            Bump.REWRITTEN,
            1,
        ),
        (cell("a"), cell("a", "unavailable", reason="no torch"), Bump.UNAVAILABLE, 2),
        (cell("a", "unavailable", reason="no torch"), rejected("a", "no"), Bump.UNAVAILABLE, 2),
        (cell("a", "skipped", reason="requires"), cell("a"), Bump.UNAVAILABLE, 2),
        (cell("a"), cell("b"), Bump.GONE, 2),
    ],
)
def test_classes(old: dict, new: dict, change: Bump, code: int) -> None:
    found = report(record(old), newer(new))
    assert found.rows[0].change is change
    assert found.exit_code == code


def test_cells_pair_by_identity() -> None:
    a = record(*(cell(level) for level in "abc"))
    b = newer(*(cell(level, id=f"renamed-{level}") for level in "cba"))
    assert {row.change for row in report(a, b).rows} == {Bump.SAME}


def test_options_that_differ_on_one_arch_say_so() -> None:
    table = dict.fromkeys(("--kept", "--x", "--y"), option())
    old = [record(cell("a"), arch=arch, options=table) for arch in ("sm90", "sm100")]
    new = [
        newer(cell("a"), arch="sm90", options={"--kept": option(), "--x": option()}),
        newer(cell("a"), arch="sm100", options={"--kept": option()}),
    ]
    assert [(one.flag, one.archs) for one in compare_preflights(old, new).options] == [("--x", ("sm100",)), ("--y", ())]
    assert "--x (on sm100)" in bump_render.text(compare_preflights(old, new))


def test_archs_in_one_record_only() -> None:
    found = compare_preflights(
        [record(cell("a")), record(cell("a", arch="sm90"), arch="sm90")],
        [newer(cell("a")), newer(cell("a", arch="sm120"), arch="sm120")],
    )
    assert [(row.id, row.change) for row in found.rows] == [
        ("sm90-llama-a", Bump.GONE),
        ("sm120-llama-a", Bump.NEW),
        ("sm100-llama-a", Bump.SAME),
    ]
    assert found.warnings == ("sm120 is in one record only", "sm90 is in one record only")


def test_an_environment_that_could_not_be_asked() -> None:
    unavailable = newer(
        cell("a", "unavailable", reason="preflight unavailable: ImportError: x"),
        status="unavailable",
        reason="preflight unavailable: ImportError: x",
    )
    found = report(record(cell("a"), options={"--x": option()}), unavailable)
    assert found.exit_code == 2
    assert found.options == (), "no table is not an empty table"
    told = bump_render.text(found)
    assert "WARNING: the second record has no answer for sm100: preflight unavailable: ImportError: x" in told
    assert "nothing could be compared: 1 NOT ASKED" in told


def test_files_of_one_and_of_several_archs() -> None:
    one = record(cell("a"))
    assert records_of(one, "x") == [one]
    assert records_of({"schema": 1, "kind": "preflight", "runs": [one, one]}, "x") == [one, one]
    with pytest.raises(UsageError, match="x: preflight record of schema 2"):
        records_of(one | {"schema": 2}, "x")
    with pytest.raises(UsageError, match="x: not a preflight record"):
        records_of({"schema": 1, "kind": "preflight"}, "x")


def test_json_reads_back() -> None:
    data = json.loads(bump_render.as_json(report(record(cell("a")), newer(rejected("a", "no")))))
    assert (data["kind"], data["findings"]) == ("bump-report", 1)
    assert data["rows"][0]["change"] == "NEWLY REJECTED"
