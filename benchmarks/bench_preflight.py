"""How long preflight takes: `python benchmarks/bench_preflight.py [--arch sm120,…] PYTHON…`, one or more environments.

Sixty cells an arch (three models, the flags that matrices vary), each arch in a fresh process. Limits: 45 s for an arch
from cold, 0.2 s for a cell; exit 1 where one is broken. Wall times of a busy machine say little: the CPU seconds of the
process stand beside them.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from pytest_gpuserve.model.cell import Cell, ModelSpec
from pytest_gpuserve.models.materialise import materialise
from pytest_gpuserve.preflight.run import preflight

ARCHS = ("cpu", "sm89", "sm90", "sm100", "sm103", "sm120", "sm121")
SHAPES = ("tiny-llama", "tiny-mla", "llama-3")
ARCH_LIMIT, CELL_LIMIT = 45.0, 0.2
FLAGS = [
    {},
    *({"attention-backend": name} for name in ("triton", "flashinfer", "fa3", "fa4", "trtllm_mha", "trtllm_mla")),
    *({"moe-runner-backend": name} for name in ("triton", "cutlass", "flashinfer_trtllm", "deep_gemm")),
    *({"kv-cache-dtype": name} for name in ("fp8_e4m3", "bf16")),
    {"page-size": 64},
    {"disable-cuda-graph": True},
    {"disable-radix-cache": True},
    {"disable-overlap-schedule": True},
    {"disable-custom-all-reduce": True, "tp-size": 8},
    {"chunked-prefill-size": 4096},
    {"cuda-graph-max-bs": 16},
]


def cells(arch: str) -> list[Cell]:
    return [
        Cell(
            id=f"{arch}-{shape}-{number}", arch=arch, model=ModelSpec(name=shape), axes={"n": str(number)}, flags=flags
        )
        for shape in SHAPES
        for number, flags in enumerate(FLAGS)
    ]


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pythons", nargs="+", metavar="PYTHON")
    parser.add_argument("--arch", default=",".join(ARCHS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows, broken = [], False
    print(f"{'SGLang':<14}{'arch':<7}{'cells':>6}{'total s':>9}{'import s':>10}{'cell s':>8}{'max s':>8}{'CPU s':>7}")
    with tempfile.TemporaryDirectory() as folder:
        for python in options.pythons:
            ask = [python, "-c", "import importlib.metadata as m; print(m.version('sglang'))"]
            version = subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip()
            models = {
                name: materialise(
                    ModelSpec(name=name, shape=name), python=python, env={}, weights=False, cache=Path(folder)
                )
                for name in SHAPES
            }
            for arch in options.arch.split(","):
                before = cpu_seconds()
                env = {"PATH": os.defpath, "HOME": str(Path.home())}
                env |= {"SGLANG_USE_CPU_ENGINE": "1"} if arch == "cpu" else {}
                record = preflight(
                    cells(arch), arch=arch, python=python, env=env, versions={"sglang": version}, model_dirs=models
                )
                taken = record["seconds"]
                row = {
                    "sglang": version,
                    "arch": arch,
                    "cells": len(record["cells"]),
                    "status": record["status"],
                    **taken,
                }
                row["cpu"] = round(cpu_seconds() - before, 1)
                rows.append(row)
                if record["status"] != "ok":
                    print(f"{version:<14}{arch:<7}{record['reason']}")
                    broken = True
                    continue
                print(
                    f"{version:<14}{arch:<7}{row['cells']:>6}{row['total']:>9.1f}{row['import']:>10.1f}"
                    f"{row['cell_median']:>8.3f}{row['cell_max']:>8.3f}{row['cpu']:>7.1f}"
                )
                broken |= row["total"] > ARCH_LIMIT or row["cell_median"] > CELL_LIMIT
    print(
        f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; limits {ARCH_LIMIT:g} s and {CELL_LIMIT:g} s"
    )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
