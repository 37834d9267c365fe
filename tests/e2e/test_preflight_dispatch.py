"""Choices that SGLang refuses while the model is built, after its arguments were accepted: its own checks, called here.

No preflight of a cell gets this far, so the list could not be compared with SGLang otherwise. A kernel chosen by name
is refused for an arch exactly where a strict entry of the shipped list says so.
GPUSERVE_TEST_PREFLIGHT_PYTHONS names the interpreters (colon-separated); `tox -e preflight` builds two environments.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

import pytest_gpuserve
from pytest_gpuserve.matrix.find import packaged_dir
from pytest_gpuserve.matrix.known_bad import load_known_bad, matching
from pytest_gpuserve.model.cell import Cell, ModelSpec
from pytest_gpuserve.model.failure import Failure, Kind
from pytest_gpuserve.model.phase import Phase
from pytest_gpuserve.serve.environment import read_versions

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

PYTHONS = [one for one in os.environ.get("GPUSERVE_TEST_PREFLIGHT_PYTHONS", "").split(":") if one]
REASON = "GPUSERVE_TEST_PREFLIGHT_PYTHONS names no interpreter; tox -e preflight builds two"
ARCHS = ("sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm120", "sm121")
ENTRIES = load_known_bad([packaged_dir() / "known_bad.yaml"])

# Prints {flag: {choice: what was said, or null}}.
SCRIPT = """
import json, sys
sys.dont_write_bytecode = True
sys.path.insert(0, sys.argv[1])
import _fakegpu
sys.path.pop(0)
try:
    import tvm_ffi
except ImportError:
    pass
_fakegpu.define_torchvision_ops()
arch = sys.argv[2]
_fakegpu.FakeGpu(arch, cuda="13.0", driver="580.95.05", count=1).install()
_fakegpu.stand_in({**_fakegpu.kernels_required(arch), "cuda": "13.0"})
from sglang.srt.layers.quantization import fp8_utils, mxfp4

def said(call, error, beyond=()):
    try:
        call()
    except error as refusal:
        return str(refusal)
    except beyond:
        return None

def named(enum):
    return {choice.value: choice for choice in enum}

fp8 = named(fp8_utils.Fp8GemmRunnerBackend)
answers = {"fp8-gemm-backend": {}, "moe-runner-backend": {}}
for choice in sys.argv[3].split(","):
    if choice in fp8:
        call = lambda: fp8_utils._dispatch_explicit_backend(fp8[choice])
        answers["fp8-gemm-backend"][choice] = said(call, RuntimeError)

runner = named(type(mxfp4.get_moe_runner_backend()))
method = mxfp4.Mxfp4MoEMethod
class Config:
    def __getattr__(self, name):
        return Config()
for name in ("get_exec", "get_server_args", "get_global_server_args"):
    if hasattr(mxfp4, name):
        setattr(mxfp4, name, Config)
for choice in sys.argv[4].split(","):
    if choice not in runner:
        continue
    mxfp4.get_moe_runner_backend = lambda: runner[choice]
    refused = said(lambda: method(""), (RuntimeError, NotImplementedError))
    if refused is None and choice == "marlin":
        made = object.__new__(method)
        made.use_marlin, made.use_mega_moe, made.use_flashinfer, made._fi_kernel = True, False, False, None
        # Past the check it asks the layer, which is none.
        refused = said(lambda: made.process_weights_after_loading(None), RuntimeError, AttributeError)
    answers["moe-runner-backend"][choice] = refused
print(json.dumps(answers))
"""
FP8 = ("triton", "cutlass", "deep_gemm", "flashinfer_trtllm", "flashinfer_cutlass", "flashinfer_deepgemm")
MXFP4 = ("marlin", "flashinfer_mxfp4")


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("python", PYTHONS or [pytest.param("", marks=pytest.mark.skip(reason=REASON))])
def test_a_kernel_by_name_is_refused_where_a_strict_entry_says_so(python: str, arch: str) -> None:
    inside = Path(pytest_gpuserve.__file__).parent / "preflight"
    command = [python, "-c", SCRIPT, str(inside), arch, ",".join(FP8), ",".join(MXFP4)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    versions = read_versions(python, {})
    assert set(answers["fp8-gemm-backend"]) == set(FP8)
    assert set(answers["moe-runner-backend"]) >= {"flashinfer_mxfp4"}
    wrong = []
    for flag, quantization in (("fp8-gemm-backend", "fp8"), ("moe-runner-backend", "mxfp4")):
        model = ModelSpec(name="m", properties={"quantization": quantization, "moe": "true", "attention": "gqa"})
        for choice, text in answers[flag].items():
            cell = Cell(id=choice, arch=arch, model=model, axes={}, flags={flag: choice})
            strict = [one for one in matching(ENTRIES, cell, versions) if one.strict]
            if text is None:
                wrong += [f"{one.id}: {flag} {choice} is let through" for one in strict]
            elif not any(one.expect.explains(Failure.of(Kind.CRASH, Phase.WEIGHTS, text)) for one in strict):
                wrong.append(f"{flag} {choice}: {text}")
    assert wrong == []
