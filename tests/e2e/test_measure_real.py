"""Measurement on a real SGLang (its CPU engine): the plugin's throughput is bench_serving's, and the canary is quiet.

Needs GPUSERVE_TEST_SERVER_PYTHON. bench_serving runs in the same environment, against the same server, in turns.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

SERVER_PYTHON = os.environ.get("GPUSERVE_TEST_SERVER_PYTHON", "")
ROOT = Path(__file__).parents[2]
SHIM = ROOT / "tests" / "envs" / "sglang-cpu-shim"
MATRIX = """
schema: 1
arch: [cpu]
defaults:
  flags: {disable-cuda-graph: true, max-total-tokens: 4096, mem-fraction-static: 0.3}
  # One thread: two that wait for each other on a busy machine are most of the noise.
  env: {SGLANG_USE_CPU_ENGINE: "1", OMP_NUM_THREADS: "1"}
models: {tiny-llama: {shape: tiny-llama}}
axes:
  attention: {torch_native: {flags: {attention-backend: torch_native}}}
  dtype:
    bf16: {}
    fp16: {flags: {dtype: float16}}
baseline: {attention: torch_native, dtype: bf16}
loads:
  agree: {concurrency: 1, input: 32, output: 256, windows: 20}
"""
AGREE = """
import json, sys
from pathlib import Path
from statistics import harmonic_mean
sys.path.insert(0, ROOT)
from benchmarks.bench_load import bench_serving

def test_agree(sglang_server, load, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", sglang_server.api_key)
    model = Path(sglang_server.info["model_path"])

    def ours():
        # One window a request here, and bench_serving's figure is of all requests together: so is the harmonic mean.
        return harmonic_mean(load("agree")["output_throughput"].samples)

    def theirs(**more):
        return bench_serving(PYTHON, model, sglang_server.url, 1, 256, requests=24, **more)

    turns = [(ours(), theirs()) for _ in range(5)]
    together = []
    for _ in range(5):
        mine = []
        other = theirs(meanwhile=lambda: mine.append(ours()))
        together.append((*mine, other))
    Path("speeds.json").write_text(json.dumps([turns, together]))
"""

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not SERVER_PYTHON, reason="GPUSERVE_TEST_SERVER_PYTHON names no environment with SGLang"),
]


def run(folder: Path, *arguments: str) -> tuple[dict, str]:
    """Pytest with the plugin in `folder`; its record and what it printed."""
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -p no:cacheprovider\n")
    (folder / "matrices").mkdir(exist_ok=True)
    (folder / "matrices" / "tiny.yaml").write_text(MATRIX)
    words = [sys.executable, "-m", "pytest", "--gpu-matrix", "tiny", f"--gpu-server-python={SERVER_PYTHON}"]
    words += ["--gpu-server-env", f"PYTHONPATH={SHIM}", f"--gpu-lock-dir={folder / 'locks'}", "-rs", *arguments]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False, timeout=1800)
    latest = folder / ".gpuserve" / "runs" / "latest" / "run.json"
    return json.loads(latest.read_text()) if latest.exists() else {}, done.stdout + done.stderr


# A figure of 5 % on a machine that others use too: not for CI.
@pytest.mark.slow
def test_output_throughput_is_bench_servings(tmp_path) -> None:
    """One stream: then there are no ramps, which bench_serving counts in. Medians of five runs of each client.

    In turns, and at the same time: the server then decodes both streams in one batch, a token of each at every step, so
    what else the machine does meets both alike. The turns need a machine that nobody else uses: there two runs of the
    same client are 3 % apart, on a busy one 10 to 25 %.
    """
    (tmp_path / "test_agree.py").write_text(
        AGREE.replace("ROOT", repr(str(ROOT))).replace("PYTHON,", f"{SERVER_PYTHON!r},")
    )
    record, text = run(tmp_path, "test_agree.py", "-k", "baseline")
    assert [check["outcome"] for check in record["checks"]] == ["passed"], text
    turns, together = json.loads((tmp_path / "speeds.json").read_text())
    print(f"plugin and bench_serving, tok/s: in turns {turns}, together {together}")
    for pairs in (together, turns):
        ours, theirs = zip(*pairs, strict=True)
        assert median(ours) == pytest.approx(median(theirs), rel=0.05), pairs


def test_two_sound_dtypes_pass_every_check(tmp_path) -> None:
    record, text = run(tmp_path)
    outcomes = {cell["id"]: cell["outcome"] for cell in record["cells"]}
    assert outcomes == {"cpu-tiny-llama-baseline": "passed", "cpu-tiny-llama-dtype.fp16": "passed"}, text
    same, other = (cell["output"] for cell in record["cells"])
    assert {part["mean"] for part in same["parts"].values()} == {0}
    assert same["cached_tokens"] == 4 * 192
    assert other["compared_with"] == "cpu-tiny-llama-baseline"
    for part in other["parts"].values():
        assert 0 < part["mean"] < part["mean_limit"]
        assert 0 < part["p99"] < part["p99_limit"]
    assert same["long_context"] > 1500
