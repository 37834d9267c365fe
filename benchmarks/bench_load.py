"""How exact the load client is, and how fast, beside `sglang.bench_serving` against the same server in the same run.

    python benchmarks/bench_load.py                                   # the exactness alone
    GPUSERVE_TEST_SERVER_PYTHON=…/bin/python python benchmarks/bench_load.py --model FOLDER    # and the ceiling

The first table's servers are simulated, with a token clock of their own that does not drift. The second's is
`blast.py`, since a server that keeps a rate would be the bottleneck. FOLDER holds a tokenizer, which bench_serving
wants although its prompts are random ids: that of a shape, under `~/.cache/pytest-gpuserve/models` after a run.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pytest_gpuserve.measure.load import run_load  # noqa: E402
from pytest_gpuserve.measure.profile import LoadProfile  # noqa: E402

# (streams, tokens a second of each): what 2 cores serve and read without waiting.
EXACT = ((1, 500.0), (64, 50.0), (256, 12.5))
CEILING = (1, 64, 256)
OUTPUT = 256


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def running(words: list[str], ready: str, env: dict[str, str] | None = None):
    """The process, once its output holds `ready`."""
    with tempfile.NamedTemporaryFile() as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, env=os.environ | (env or {}), start_new_session=True)
        try:
            deadline = time.monotonic() + 60
            while ready not in Path(log.name).read_text(errors="replace"):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(Path(log.name).read_text(errors="replace"))
                time.sleep(0.05)
            yield process
        finally:
            process.terminate()
            process.wait()


def exactness(output: int) -> None:
    print(f"Against simulated servers of known rates, {output} tokens an answer, median of 3 windows:\n")
    print("| streams | server's rate, tok/s | output_throughput | error | client's CPU |\n|---|---|---|---|---|")
    for streams, rate in EXACT:
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder) / "behaviour.json"
            script.write_text(json.dumps({"tokens-per-second": rate}))
            port = free_port()
            words = [sys.executable, "-m", "pytest_gpuserve.sim.server", "--model-path", "tiny", "--port", str(port)]
            env = {"GPUSERVE_SIM_BEHAVIOUR": str(script), "PYTHONPATH": str(ROOT)}
            with running([*words, "--host", "127.0.0.1"], "fired up and ready", env):
                profile = LoadProfile(name="exact", concurrency=streams, input=32, output=output, windows=3)
                found = run_load(f"http://127.0.0.1:{port}", profile, vocabulary=1000)
        known, seen = streams * rate, median(found.samples("output_throughput"))
        print(f"| {streams} | {known:g} | {seen:.1f} | {seen / known - 1:+.2%} | {found.client_cpu:.0%} |", flush=True)


def ceiling(python: str | None, model: Path | None, repeats: int) -> None:
    print(f"\nCeiling against a server that only streams, {OUTPUT} tokens an answer, tok/s, best of {repeats}:\n")
    print("| streams | this client | sglang.bench_serving | server's CPU under this client |\n|---|---|---|---|")
    for streams in CEILING:
        port = free_port()
        with running([sys.executable, str(ROOT / "benchmarks" / "blast.py"), str(port)], "ready") as process:
            ours, theirs, busy = [], [], []
            for _ in range(repeats):
                # Alternating: whatever else the machine does meets both.
                speed, cpu = our_ceiling(port, streams, process.pid)
                ours.append(speed)
                busy.append(cpu)
                if python and model:
                    theirs.append(bench_serving(python, model, f"http://127.0.0.1:{port}", streams, OUTPUT))
        other = f"{max(theirs):,.0f}" if theirs else "not run"
        print(f"| {streams} | {max(ours):,.0f} | {other} | {max(busy):.0%} |", flush=True)


def our_ceiling(port: int, streams: int, pid: int) -> tuple[float, float]:
    profile = LoadProfile(name="ceiling", concurrency=streams, input=32, output=OUTPUT, windows=4)
    server = psutil.Process(pid)
    before, began = server.cpu_times(), time.monotonic()
    found = run_load(f"http://127.0.0.1:{port}", profile, vocabulary=1000)
    after = server.cpu_times()
    used = (after.user + after.system - before.user - before.system) / (time.monotonic() - began)
    return median(found.samples("output_throughput")), used


def bench_serving(
    python: str, model: Path, url: str, streams: int, output: int, requests: int = 0, meanwhile=lambda: None
) -> float:
    """`output_throughput` of `sglang.bench_serving`, with as many requests as this client's windows have.

    `meanwhile` is called when its warm-up is over, as its own run begins.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.jsonl"
        words = [python, "-m", "sglang.bench_serving", "--backend", "sglang", "--base-url", url]
        words += ["--dataset-name", "random-ids", "--random-input-len", "32", "--random-output-len", str(output)]
        words += ["--random-range-ratio", "1", "--num-prompts", str(requests or 6 * streams)]
        words += ["--max-concurrency", str(streams), "--model", str(model), "--tokenizer", str(model)]
        words += ["--warmup-requests", "1", "--disable-tqdm", "--tokenize-prompt", "--output-file", str(result)]
        env = os.environ | server_env() | {"PYTHONUNBUFFERED": "1"}
        said = []
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) as process:
            for line in process.stdout:
                said.append(line)
                if "Starting main benchmark run" in line:
                    meanwhile()
        if process.returncode or not result.exists():
            raise SystemExit(f"{' '.join(words)}\n{''.join(said)[-5000:]}")
        return float(json.loads(result.read_text().splitlines()[-1])["output_throughput"])


def server_env() -> dict[str, str]:
    """The CPU engine's shim: a CPU torch cannot import torchvision without it. Harmless beside a CUDA one."""
    paths = [str(ROOT / "tests" / "envs" / "sglang-cpu-shim"), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder with a tokenizer, for bench_serving")
    parser.add_argument("--output", type=int, default=512, help="tokens an answer in the first table")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--skip-exactness", action="store_true")
    args = parser.parse_args()
    if not args.skip_exactness:
        exactness(args.output)
    ceiling(os.environ.get("GPUSERVE_TEST_SERVER_PYTHON"), args.model, args.repeats)


if __name__ == "__main__":
    main()
