"""Makes docs/report.svg, the picture in README: `python docs/report_svg.py`, in an environment that has `rich` too.

A simulated run in a terminal of its own. Its scenario has a failure that the list knows, one that comes in another way
than the list says, a hang and garbage that it does not know, and a known failure that is gone.
"""

from __future__ import annotations

import io
import os
import pty
import re
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
WIDTH = 116
MODELS = "(kimi-mini or kimi-tp2 or llama-mini)"
CELLS = f"{MODELS} and (baseline or -attention or tree) and not (cutlass or flashinfer-trtllm)"
SCENARIO = """
schema: 1
defaults: {phase-seconds: 0.1, tokens-per-second: 500, memory-gib: 40}
rules:
  - {when: {attention: flashinfer, model.attention: mla}, then: {output: garbage}}
  - {when: {nccl: tree}, then: {crash: {phase: dist-init, text: "NCCL error: invalid usage"}}}
  - {when: {attention: trtllm_mla}, then: {crash: {phase: weights, text: "KeyError: 'kv_b_proj.weight_scale'"}}}
  - {when: {attention: fa4, model.attention: gqa}, then: {hang: graph-capture}}
"""


def run(folder: Path) -> str:
    """What the terminal shows of the run, with its colours."""
    scenario = folder / "scenario.yaml"
    scenario.write_text(SCENARIO)
    words = ["--gpu-matrix=sm120", "--gpu-sim=8xsm120", f"--gpu-sim-scenario={scenario}", "--gpu-stall=4"]
    words += [f"--gpu-report={folder}", "-k", CELLS, "--tb=no", "-p", "no:cacheprovider"]
    os.environ |= {"COLUMNS": str(WIDTH), "TERM": "xterm-256color"}
    os.chdir(ROOT)
    shown = bytearray()

    def keep(descriptor: int) -> bytes:
        shown.extend(data := os.read(descriptor, 4096))
        return data

    pty.spawn([sys.executable, "-m", "pytest", *words], keep)
    return shown.decode().replace("\r\n", "\n").replace(f"{folder}/", ".gpuserve/")


def picture(output: str) -> str:
    """The report's table and what follows it, as SVG without a font from elsewhere."""
    report = re.search(r"^[^\n]*= SIMULATED cells =.*?(?=^[^\n]*short test summary)", output, re.DOTALL | re.MULTILINE)
    assert report is not None, output
    last = output.rstrip("\n").rpartition("\n")[2]
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(Text.from_ansi(f"{report[0].rstrip()}\n{last}"))
    svg = console.export_svg(title="pytest --gpu-matrix sm120 --gpu-sim 8xsm120", unique_id="report")
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL).replace("Fira Code, ", "")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        (ROOT / "docs/report.svg").write_text(picture(run(Path(made).resolve())))
