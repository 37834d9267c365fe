"""What a preflight gets of the caller's environment: what a server would get."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from pytest_gpuserve.manager import prepare as preparing
from pytest_gpuserve.manager.asking import request_of
from pytest_gpuserve.manager.prepare import SIMULATED_VERSIONS, prepare
from pytest_gpuserve.model.launch import LaunchSpec
from pytest_gpuserve.model.settings import Settings
from pytest_gpuserve.serve.spawn import environment

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

STRAYS = {
    "NCCL_ALGO": "Tree",
    "SGLANG_X": "1",
    "PYTHONPATH": "/mine",
    "COV_CORE_SOURCE": "x",
    "WORLD_SIZE": "8",
    "GPUSERVE_LOCK_DIR": "/locks",
    "CUDA_VISIBLE_DEVICES": "7",
    "HF_HOME": "/hf",
}


def test_a_preflight_and_a_server_get_the_same_of_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.yaml").write_text("schema: 1\narch: [sm120]\nmodels: {m: {shape: tiny-llama}}\n")
    monkeypatch.setattr(preparing, "_versions", lambda _: SIMULATED_VERSIONS)
    for name, value in {**STRAYS, "XDG_CACHE_HOME": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    settings = Settings(
        rootdir=tmp_path,
        report=tmp_path / "report",
        matrix=(str(tmp_path / "m.yaml"),),
        preflight=True,
        server_env=("SGLANG_X", "NCCL_DEBUG=INFO"),
    )
    plan = prepare(settings)
    request = request_of(plan, plan.cells)
    spec = LaunchSpec(
        cell="c",
        argv=(sys.executable,),
        env={},
        folder="",
        sglang_version="",
        model_path="org/model",
        pass_env={"SGLANG_X": "1", "NCCL_DEBUG": "INFO"},
    )
    server, dropped = environment(spec, os.environ, gpus=[], tmpdir="", marks={})
    strays = {*STRAYS, "NCCL_DEBUG", "PATH"} - {"CUDA_VISIBLE_DEVICES"}  # the server's own GPUs
    assert {name: request.env.get(name) for name in strays} == {name: server.get(name) for name in strays}
    assert not {"NCCL_ALGO", "PYTHONPATH", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES"} & request.env.keys()
    assert (request.env["SGLANG_X"], request.env["NCCL_DEBUG"]) == ("1", "INFO")
    assert {"COV_CORE_SOURCE", "NCCL_ALGO", "PYTHONPATH", "WORLD_SIZE"} <= set(dropped)
    assert ", ".join(dropped) in request.notes[0]
