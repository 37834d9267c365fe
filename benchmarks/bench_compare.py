"""Comparing two 20,000-cell records, and writing one: `python benchmarks/bench_compare.py [CELLS]`.

Prints seconds, and the ratio to reading the same two files with `json` alone, which no comparison can beat.
Seconds are of CPU time, which a busy machine lengthens less. Exits 1 if the comparison takes more than 2 s.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from pytest_gpuserve.compare.cli import compare_main
from pytest_gpuserve.model.failure import Failure, Kind
from pytest_gpuserve.model.outcome import Outcome
from pytest_gpuserve.model.phase import Phase
from pytest_gpuserve.model.record import CellRecord, CheckRecord, Measurement
from pytest_gpuserve.report.store import run_header, run_record, write_json_atomic

LIMIT = 2.0
CHECKS = ("ready", "answers", "backend", "canary", "throughput", "shutdown")
LEVELS = {f"axis{number}": [f"level{level}" for level in range(6)] for number in range(8)}
BASELINE = {axis: levels[0] for axis, levels in LEVELS.items()}
CRASH = Failure.of(
    Kind.CRASH, Phase.WARMUP, "the scheduler died (exit -9)", line="RuntimeError: Unsupported architecture"
)


def cell(number: int, bump: int) -> CellRecord:
    axes, rest = dict(BASELINE), number
    for axis, levels in LEVELS.items():
        rest, index = divmod(rest, len(levels))
        axes[axis] = levels[index]
    fails = (number + bump) % 20 == 0
    samples = [60.0 + (number % 7) + 0.1 * sample + 4 * bump * (number % 3) for sample in range(5)]
    rate = Measurement(
        metric="output_throughput",
        unit="tok/s",
        direction="higher",
        load="single-stream",
        samples=samples,
        median=samples[2],
        spread=0.1,
    )
    return CellRecord(
        id="sm120-kimi-" + "+".join(f"{axis}.{level}" for axis, level in axes.items() if BASELINE[axis] != level),
        arch="sm120",
        model="kimi",
        axes=axes,
        baseline=BASELINE,
        outcome=Outcome.FAILED if fails else Outcome.PASSED,
        failure=CRASH if fails else None,
        flags=dict(axes),
        argv=["python", "-m", "sglang.launch_server", *(f"--{axis}={level}" for axis, level in axes.items())],
        timings={"total": 61.5, "phases": {"weights": 4.5, "graph-capture": 9.25}},
        measurements=[] if fails else [rate.to_json()],
        server_starts=1,
    )


def record(count: int, bump: int) -> dict[str, object]:
    cells = [cell(number, bump) for number in range(count)]
    checks = [
        CheckRecord(name=name, cell=one.id, outcome=one.outcome, duration=0.5) for one in cells for name in CHECKS
    ]
    when = datetime(2026, 11, 28 + bump, tzinfo=UTC)
    versions = {"sglang": ("0.5.10.post1", "0.5.23")[bump]}
    header = run_header(
        simulated=False, started=when, command=[], versions=versions, driver={}, host="h", gpus=[], matrices=["m"]
    )
    return run_record(header, cells=cells, checks=checks, finished=when)


def timed(work: object) -> float:
    assert callable(work)
    started = time.process_time()
    work()
    return time.process_time() - started


def main() -> int:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("before.json", "after.json")]
        for bump, path in enumerate(paths):
            data = record(count, bump)
            written = timed(lambda path=path, data=data: write_json_atomic(path, data))
        del data
        size = sum(path.stat().st_size for path in paths) / 2**20
        with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
            compared = min(timed(lambda: compare_main([str(path) for path in paths])) for _ in range(3))
        bare = min(timed(lambda: [json.loads(path.read_bytes()) for path in paths]) for _ in range(3))
    print(f"write one run.json of {count} cells: {written:.2f} s")
    print(f"compare two of them ({size:.0f} MiB): {compared:.2f} s, {compared / bare:.1f} x json.loads ({bare:.2f} s)")
    return int(compared > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
