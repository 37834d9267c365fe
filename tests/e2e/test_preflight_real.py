"""Preflight against real SGLang releases: what each of them itself answered, recorded with its version.

GPUSERVE_TEST_PREFLIGHT_PYTHONS names the interpreters (colon-separated); `tox -e preflight` builds two environments.
`python tests/e2e/test_preflight_real.py PYTHON…` records the expected answers anew: read the difference before it is
committed, it is what a bump of SGLang changed.
"""

import atexit
import functools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuserve.model.cell import Cell, ModelSpec
from pytest_gpuserve.model.failure import Kind
from pytest_gpuserve.preflight.record import failure_of
from pytest_gpuserve.preflight.run import preflight

pytestmark = pytest.mark.real

EXPECTED = Path(__file__).parent / "expected"
ARCHS = ("sm90", "sm100", "sm120")
PYTHONS = [one for one in os.environ.get("GPUSERVE_TEST_PREFLIGHT_PYTHONS", "").split(":") if one]

COMMON = {
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 2,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_size": 128,
    "intermediate_size": 256,
}
LLAMA = COMMON | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
}
DEEPSEEK_V3 = COMMON | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,
    "rms_norm_eps": 1e-6,
}
DEEPSEEK_V32 = DEEPSEEK_V3 | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_n_heads": 8,
    "index_head_dim": 128,
    "index_topk": 256,
}
FP8 = {
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
}
MODELS = {"llama": LLAMA, "deepseek-v3": DEEPSEEK_V3, "deepseek-v3.2": DEEPSEEK_V32}
MODELS |= {f"{name}-fp8": config | FP8 for name, config in MODELS.items()}

CASES: dict[str, dict[str, Any]] = {
    "default": {},
    **{
        name: {"attention-backend": name}
        for name in ("triton", "flashinfer", "fa3", "fa4", "trtllm_mha", "trtllm_mla", "flashmla", "cutlass_mla")
    },
    "nsa-prefill": {"nsa-prefill-backend": "flashmla_sparse"},
    "dsa-prefill": {"dsa-prefill-backend": "flashmla_sparse"},
    "moe-trtllm": {"moe-runner-backend": "flashinfer_trtllm"},
    "kv-fp8": {"kv-cache-dtype": "fp8_e4m3"},
    "page-16": {"page-size": 16},
    "no-graphs": {"disable-cuda-graph": True},
    "tp-8": {"tp-size": 8},
    "no-deepgemm": {},
}
ENV = {"no-deepgemm": {"SGLANG_ENABLE_JIT_DEEPGEMM": "0", "NCCL_ALGO": "Tree"}}
FP8_CASES = ("default", "triton", "fa4", "trtllm_mla", "moe-trtllm", "kv-fp8", "page-16")
SHOWN = (
    "prefill_attention_backend",
    "decode_attention_backend",
    "dsa_prefill_backend",
    "dsa_decode_backend",
    "moe_runner_backend",
    "kv_cache_dtype",
    "page_size",
    "quantization",
    "disable_cuda_graph",
)


def cells(arch: str) -> list[Cell]:
    return [
        Cell(
            id=f"{arch}-{model}-{case}",
            arch=arch,
            model=ModelSpec(name=model, gpus=8 if case == "tp-8" else 1),
            axes={"case": case},
            flags=flags,
            env=ENV.get(case, {}),
        )
        for model in MODELS
        for case, flags in CASES.items()
        if not model.endswith("-fp8") or case in FP8_CASES
    ]


@functools.cache
def model_dirs() -> dict[str, Path]:
    root = Path(tempfile.mkdtemp(prefix="preflight-models-"))
    atexit.register(shutil.rmtree, root)
    for name, config in MODELS.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config))
    return {name: root / name for name in MODELS}


@functools.cache
def sglang_of(python: str) -> str:
    command = [python, "-c", "import importlib.metadata as m; print(m.version('sglang'))"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def asked(python: str, arch: str, these: list[Cell], env: Mapping[str, str] | None = None) -> dict[str, Any]:
    return preflight(
        these,
        arch=arch,
        python=python,
        env={"PATH": os.defpath, "HOME": str(Path.home()), **(env or {})},
        versions={"sglang": sglang_of(python)},
        model_dirs=model_dirs(),
    )


@functools.cache
def record(python: str, arch: str) -> dict[str, Any]:
    return asked(python, arch, cells(arch))


def essence(cell: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept in `expected/`: the answer, without the list of choices that argparse prints."""
    if cell["outcome"] == "rejected":
        rejection = cell["rejection"]
        text = rejection["text"].partition(" (choose from")[0]
        return {"outcome": "rejected", "text": text, "exit": rejection["exit"], "where": rejection["where"]}
    settings = {name: cell["settings"][name] for name in SHOWN if cell["settings"].get(name) is not None}
    return {
        "outcome": cell["outcome"],
        **({"rewritten": cell["rewritten"]} if cell["rewritten"] else {}),
        "settings": settings,
        "gate": cell["gate"],
    }


def expected_file(version: str) -> Path:
    return EXPECTED / f"preflight-{version}.json"


def recorded(python: str) -> dict[str, Any]:
    return {
        "sglang": sglang_of(python),
        "pretended": record(python, ARCHS[0])["pretended"]["modules"],
        "cells": {cell["id"]: essence(cell) for arch in ARCHS for cell in record(python, arch)["cells"]},
    }


def write(file: Path, answers: Mapping[str, Any]) -> None:
    """One line a cell, so that a difference can be read."""
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(cell)}" for name, cell in answers["cells"].items())
    head = "\n".join(f" {json.dumps(name)}: {json.dumps(answers[name])}," for name in ("sglang", "pretended"))
    file.write_text(f'{{\n{head}\n "cells": {{\n{lines}\n }}\n}}\n')


def releases() -> list[Any]:
    """The interpreters as parameters, named by their SGLang; one skipped parameter where none is given."""
    reason = "GPUSERVE_TEST_PREFLIGHT_PYTHONS names no interpreter; tox -e preflight builds two"
    none = pytest.param("", id="none", marks=pytest.mark.skip(reason=reason))
    return [pytest.param(python, id=sglang_of(python)) for python in PYTHONS] or [none]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("python", releases())
def test_sglang_answers_as_recorded(python: str, arch: str) -> None:
    file = expected_file(sglang_of(python))
    if not file.exists():
        pytest.skip(f"no answers of SGLang {sglang_of(python)} are recorded")
    expected = json.loads(file.read_text())["cells"]
    answers = record(python, arch)
    assert answers["status"] == "ok", answers["reason"]
    got = {cell["id"]: essence(cell) for cell in answers["cells"]}
    assert got == {name: answer for name, answer in expected.items() if name.startswith(f"{arch}-")}


@pytest.mark.parametrize("python", releases())
def test_the_order_of_the_cells_changes_nothing(python: str) -> None:
    """Every field of every cell, all resolved arguments included; and a cell asked alone."""

    def answers(of: Mapping[str, Any]) -> dict[str, Any]:
        return {one["id"]: {**one, "seconds": None} for one in of["cells"]}

    these = cells("sm100")[::2]
    straight = answers(record(python, "sm100"))
    shuffled = answers(asked(python, "sm100", random.Random(4).sample(these, len(these))))
    assert shuffled == {cell.id: straight[cell.id] for cell in these}
    last = these[-1]
    assert answers(asked(python, "sm100", [last]))[last.id] == straight[last.id]


@pytest.mark.parametrize("python", releases())
def test_a_requirement_that_is_missing_is_never_an_acceptance(python: str, tmp_path: Path) -> None:
    (tmp_path / "transformers.py").write_text("raise ImportError('not for this test')")
    answers = asked(python, "sm90", cells("sm90")[:3], env={"PYTHONPATH": str(tmp_path)})
    assert answers["status"] == "unavailable"
    assert answers["reason"].startswith(f"preflight unavailable: SGLang {sglang_of(python)}: ImportError: not for this")
    assert {cell["outcome"] for cell in answers["cells"]} == {"unavailable"}
    failures = [failure_of(cell) for cell in answers["cells"]]
    assert all(failure is not None and failure.kind is Kind.INFRA for failure in failures)


def both() -> tuple[str, str]:
    """The interpreters with the two releases that the issue compares."""
    by_version = {sglang_of(python): python for python in PYTHONS}
    missing = {"0.5.10.post1", "0.5.23"} - by_version.keys()
    if missing:
        pytest.skip(f"needs an environment with SGLang {' and '.join(sorted(missing))}")
    return by_version["0.5.10.post1"], by_version["0.5.23"]


def answer(python: str, arch: str, model: str, case: str) -> dict[str, Any]:
    found: dict[str, Any] = next(
        cell for cell in record(python, arch)["cells"] if (cell["model"], cell["axes"]["case"]) == (model, case)
    )
    return found


def test_what_the_bump_took_away() -> None:
    old, new = both()
    assert answer(old, "sm100", "deepseek-v3", "cutlass_mla")["settings"]["page_size"] == 128
    gone = answer(new, "sm100", "deepseek-v3", "cutlass_mla")
    assert "invalid choice: 'cutlass_mla'" in gone["rejection"]["text"]
    assert gone["rejection"]["exit"] == 2
    options_old, options_new = record(old, "sm100")["options"], record(new, "sm100")["options"]
    assert "cutlass_mla" in options_old["--attention-backend"]["choices"]
    assert "cutlass_mla" not in options_new["--attention-backend"]["choices"]
    nsa = {"--nsa-prefill-backend", "--nsa-decode-backend"}
    assert nsa <= options_old.keys()
    assert nsa.isdisjoint(options_new)
    assert {"--dsa-prefill-backend", "--dsa-decode-backend"} <= options_new.keys()
    assert answer(old, "sm90", "deepseek-v3.2", "nsa-prefill")["outcome"] == "accepted"
    assert "unrecognized arguments" in answer(new, "sm90", "deepseek-v3.2", "nsa-prefill")["rejection"]["text"]


@pytest.mark.parametrize("arch", ["sm90", "sm120"])
def test_what_the_bump_allowed(arch: str) -> None:
    old, new = both()
    refused = answer(old, arch, "llama", "trtllm_mha")
    assert "TRTLLM MHA backend for prefill is only supported on Blackwell GPUs" in refused["rejection"]["text"]
    allowed = answer(new, arch, "llama", "trtllm_mha")
    assert (allowed["outcome"], allowed["settings"]["page_size"]) == ("accepted", 64)


def test_what_the_bump_changed() -> None:
    old, new = both()
    pages = [answer(python, "sm100", "llama", "fa4")["settings"]["page_size"] for python in (old, new)]
    assert pages == [1, 128]


def test_a_model_that_a_backend_is_not_for_is_told_by_the_registry() -> None:
    """Accepted by the arguments, refused later: what separates "accepted" from "supported"."""
    for python in both():
        cell = answer(python, "sm100", "llama", "trtllm_mla")
        assert cell["outcome"] == "accepted"
        failure = failure_of(cell)
        assert failure is not None
        assert failure.kind is Kind.CRASH
        assert "can only be used with MLA models" in failure.text


if __name__ == "__main__":
    EXPECTED.mkdir(exist_ok=True)
    for interpreter in sys.argv[1:]:
        write(expected_file(sglang_of(interpreter)), recorded(interpreter))
