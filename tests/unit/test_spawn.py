"""What a server is started with: environment, arguments, GPUs, and what of it may be shown."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpuserve.model.gpu import Gpu
from pytest_gpuserve.model.launch import LaunchSpec
from pytest_gpuserve.serve.ports import BLOCK, blocks
from pytest_gpuserve.serve.readiness import without_secrets
from pytest_gpuserve.serve.spawn import environment, fill, recorded, redact, visible

GPU = Gpu(index=3, uuid="GPU-3", name="x", arch="sm120", memory_total=1)
SPEC = LaunchSpec(
    cell="c", argv=("/env/bin/python", "-m", "x"), env={}, folder="/f", sglang_version="0.5.23", model_path="org/model"
)
CALLER = {
    "PATH": "/usr/bin",
    "HOME": "/home/u",
    "HF_HOME": "/hf",
    "NCCL_ALGO": "Tree",
    "SGLANG_X": "1",
    "PYTHONPATH": "/mine",
    "COV_CORE_SOURCE": "x",
    "RUNNER_TRACKING_ID": "github_1",
    "CUDA_VISIBLE_DEVICES": "7",
    "WORLD_SIZE": "8",
    "GPUSERVE_LOCK_DIR": "/locks",
    "AWS_SECRET_ACCESS_KEY": "s3cret",
}


def env_of(spec: LaunchSpec, caller: dict[str, str] = CALLER) -> tuple[dict[str, str], list[str]]:
    return environment(spec, caller, gpus=[GPU], tmpdir="/tmp/t", marks={"GPUSERVE_LEASE": "l"})


def test_strays_are_dropped_and_reported() -> None:
    env, dropped = env_of(SPEC)
    assert dropped == ["COV_CORE_SOURCE", "NCCL_ALGO", "PYTHONPATH", "RUNNER_TRACKING_ID", "SGLANG_X", "WORLD_SIZE"]
    assert not set(dropped) & env.keys()
    assert "GPUSERVE_LOCK_DIR" not in env
    assert env["HF_HOME"] == "/hf"
    assert env["PATH"] == "/env/bin:/usr/bin"
    assert env["SPT_NOENV"] == "1"
    assert (env["CUDA_DEVICE_ORDER"], env["CUDA_VISIBLE_DEVICES"]) == ("PCI_BUS_ID", "3")
    assert env["TORCHINDUCTOR_CACHE_DIR"] == "/home/u/.cache/torchinductor"
    assert env["TMPDIR"] == "/tmp/t"
    assert env["GPUSERVE_LEASE"] == "l"


def test_what_is_let_through_or_set_wins() -> None:
    spec = replace(SPEC, pass_env={"PYTHONPATH": "/shim", "NCCL_ALGO": "Tree"}, env={"NCCL_ALGO": "Ring"})
    env, dropped = env_of(spec)
    assert env["PYTHONPATH"] == "/shim"
    assert env["NCCL_ALGO"] == "Ring"
    assert "PYTHONPATH" not in dropped
    assert "NCCL_ALGO" not in dropped


def test_a_local_model_is_never_looked_for_on_the_net(tmp_path: object) -> None:
    assert env_of(replace(SPEC, model_path=str(tmp_path)))[0]["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in env_of(SPEC)[0]


def test_a_cpu_server_sees_no_gpu() -> None:
    assert env_of(replace(SPEC, gpus_visible=False))[0]["CUDA_VISIBLE_DEVICES"] == ""


def test_caches_of_the_caller_stay_where_they_are() -> None:
    assert env_of(SPEC, {**CALLER, "TORCHINDUCTOR_CACHE_DIR": "/c"})[0]["TORCHINDUCTOR_CACHE_DIR"] == "/c"


def test_indices_for_gpus_and_uuids_for_mig() -> None:
    assert visible([GPU, replace(GPU, index=5)]) == "3,5"
    assert visible([replace(GPU, uuid="MIG-1", parent="GPU-3")]) == "MIG-1"


def test_records_show_what_matters_and_no_secret() -> None:
    passed = {"HF_TOKEN": "t", "NCCL_ALGO": "Tree", "MY_SITE": "x"}
    spec = replace(SPEC, env={"MY_SWITCH": "on", "MY_API_KEY": "k"}, pass_env=passed)
    env, _ = env_of(spec, CALLER | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    shown = recorded(env, spec)
    assert shown["NCCL_ALGO"] == "Tree"
    assert shown["MY_SITE"] == "x", "asked for with --gpu-server-env"
    assert (shown["HF_HOME"], shown["PYTORCH_CUDA_ALLOC_CONF"]) == ("/hf", "expandable_segments:True")
    assert shown["MY_SWITCH"] == "on"
    assert shown["CUDA_VISIBLE_DEVICES"] == "3"
    assert not {"HF_TOKEN", "MY_API_KEY", "AWS_SECRET_ACCESS_KEY", "GPUSERVE_LEASE", "HOME"} & shown.keys()


def test_placeholders_are_filled_wherever_they_stand() -> None:
    argv = ["--port", "{port}", "--x={host}:{nccl_port}", "{api_key}", '{"json": {}}']
    assert fill(argv, ports=(1, 2), api_key="{port}") == [
        "--port",
        "1",
        "--x=127.0.0.1:2",
        "{port}",
        '{"json": {}}',
    ]


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["--api-key", "k", "--port", "1"], ["--api-key", "<secret>", "--port", "1"]),
        (["--admin-api-key=k"], ["--admin-api-key=<secret>"]),
        (["--hf-token", "t"], ["--hf-token", "<secret>"]),
        (["--max-total-tokens", "9", "--tokenizer-path", "p"], ["--max-total-tokens", "9", "--tokenizer-path", "p"]),
        (["--ssl-keyfile-password", "p"], ["--ssl-keyfile-password", "<secret>"]),
    ],
)
def test_command_lines_are_shown_without_secrets(argv: list[str], shown: list[str]) -> None:
    assert redact(argv) == shown


def test_json_is_shown_without_secrets() -> None:
    data = {"api_key": "k", "admin_api_key": None, "a": [{"hf_token": "t", "max_total_tokens": 4}]}
    assert without_secrets(data) == {"admin_api_key": None, "a": [{"max_total_tokens": 4}]}


@given(st.integers(1, 65_535), st.integers(1, 65_535))
def test_port_blocks_are_valid_and_apart(low: int, high: int) -> None:
    bases = blocks((min(low, high), max(low, high)))
    assert bases
    assert all(10_000 <= base <= 65_536 - BLOCK for base in bases)
    assert all(b - a >= BLOCK for a, b in pairwise(bases))


def test_port_blocks_lie_below_the_ephemeral_range() -> None:
    assert all(base + BLOCK <= 32_768 for base in blocks((32_768, 60_999)))
    assert all(base >= 20_001 for base in blocks((1_024, 20_000)))
