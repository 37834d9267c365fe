"""What the plugin costs: importing it idle, and collecting a large matrix against bare pytest parametrizing as much.

    python benchmarks/bench_plugin.py [--repeat 5]

Prints the milliseconds of CPU that the import takes (limit 20) and, for about 2,000 and 20,000 cells, ratios of medians
of interleaved runs: of the collection alone in CPU time (limit 1.25), and of the whole `pytest --collect-only` in wall
time, in which reading the matrix, expanding it and matching known-bad entries are counted on our side.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).resolve().parent.parent
INSTALLED = any(point.name == "gpuserve" for point in importlib.metadata.entry_points(group="pytest11"))

TIMING = """
import time, pytest
@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    began = time.process_time()
    result = yield
    print("\\nCOLLECTED", len(session.items), time.process_time() - began)
    return result
"""
IMPORT = """
import pytest, argparse, pathlib, dataclasses, shutil, sys, time
before = set(sys.modules)
began = time.process_time()
import pytest_gpuserve.plugin
print((time.process_time() - began) * 1e3, *sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
"""


def levels(variable: str, count: int) -> str:
    return "".join(f'    l{number}: {{env: {{{variable}: "{number}"}}}}\n' for number in range(count))


def project(folder: Path, side: int) -> None:
    """A matrix of `side` x `side` cells, and the same number of parameters with the same ids for bare pytest."""
    (folder / "ours" / "matrices").mkdir(parents=True)
    (folder / "bare").mkdir()
    for kind in ("ours", "bare"):
        (folder / kind / "pytest.ini").write_text("[pytest]\n")
    (folder / "timing.py").write_text(TIMING)
    (folder / "ours" / "matrices" / "big.yaml").write_text(
        "schema: 1\narch: [sm120]\nmodels:\n  m: {shape: llama-3}\naxes:\n"
        f"  a:\n{levels('A', side)}  b:\n{levels('B', side)}baseline: {{a: l0, b: l0}}\nstrategy: full\n"
    )
    (folder / "ours" / "test_x.py").write_text("def test_x(gpu_cell): pass\n")
    (folder / "bare" / "test_x.py").write_text(
        "import pytest\n"
        f"IDS = [f'sm120-m-a.l{{i // {side}}}+b.l{{i % {side}}}' for i in range({side * side})]\n"
        f"@pytest.mark.parametrize('gpu_cell', range({side * side}), ids=IDS)\ndef test_x(gpu_cell): pass\n"
    )


def collect(folder: Path, kind: str) -> tuple[int, float, float]:
    """Number of items, CPU seconds of the collection, wall seconds of the whole."""
    words = [sys.executable, "-m", "pytest", "-p", "timing", "-p", "no:cacheprovider", "-q", "-s", "--collect-only"]
    if kind == "ours":
        words += [] if INSTALLED else ["-p", "pytest_gpuserve.plugin"]
        words += ["--gpu-matrix", "big", "--gpu-sim", "4xsm120"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}
    began = perf_counter()
    words.append("test_x.py")
    done = subprocess.run(words, cwd=folder / kind, env=env, capture_output=True, text=True, check=False)
    wall = perf_counter() - began
    line = next((line for line in done.stdout.splitlines() if line.startswith("COLLECTED")), None)
    if line is None:
        sys.exit(done.stdout[-2000:] + done.stderr[-2000:])
    _, items, seconds = line.split()
    return int(items), float(seconds), wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    repeat = parser.parse_args().repeat
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    lines = [
        subprocess.run([sys.executable, "-c", IMPORT], env=env, capture_output=True, text=True, check=True).stdout
        for _ in range(max(repeat, 3))
    ]
    milliseconds = statistics.median(float(line.split()[0]) for line in lines)
    print(f"import of the idle plugin: {milliseconds:.1f} ms; new top-level modules: {' '.join(lines[0].split()[1:])}")
    for cells in (2_000, 20_000):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            project(folder, round(math.sqrt(cells)))
            runs = [(collect(folder, "bare"), collect(folder, "ours")) for _ in range(repeat)]
        count = runs[0][0][0]
        assert {run[0] for pair in runs for run in pair} == {count}
        bare, ours = ([statistics.median(pair[side][part] for pair in runs) for part in (1, 2)] for side in (0, 1))
        print(
            f"{count} cells: collection {ours[0]:.2f} s CPU, {ours[0] / bare[0]:.2f} x bare; "
            f"whole command {ours[1]:.2f} s, {ours[1] / bare[1]:.2f} x bare"
        )


if __name__ == "__main__":
    main()
