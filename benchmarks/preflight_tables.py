"""What the SGLang of several environments says of every cell of the shipped matrices, and what each bump changes.

Writes Markdown: a table an arch with a column an environment, then a report from each environment to the next.

    python benchmarks/preflight_tables.py --python ENV/bin/python --python OTHER/bin/python [--records DIR] > tables.md

Nothing is launched and no GPU is needed: each environment's own argument logic is asked, with a GPU of each arch
pretended. With `--records`, one JSON record an environment goes there, for `gpuserve compare`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from difflib import SequenceMatcher
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpuserve.compare.bump import compare_preflights
from pytest_gpuserve.compare.bump_render import markdown
from pytest_gpuserve.matrix.expand import expand
from pytest_gpuserve.matrix.find import packaged_dir
from pytest_gpuserve.matrix.known_bad import load_known_bad, matching
from pytest_gpuserve.matrix.schema import load_matrix
from pytest_gpuserve.models import shapes
from pytest_gpuserve.models.materialise import materialise
from pytest_gpuserve.preflight.command import Request, ask, write_records
from pytest_gpuserve.preflight.record import failure_of
from pytest_gpuserve.serve.environment import read_versions

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pytest_gpuserve.matrix.types import Matrix
    from pytest_gpuserve.model.cell import ModelSpec

__all__ = ["main", "records_of"]

# Quantizations of published checkpoints that shapes are not made in, and the nearest that they are.
_NEAREST = {"modelopt_fp4": "nvfp4", "compressed-tensors": "none"}


def _shape_of(model: ModelSpec) -> ModelSpec:
    """A model at full size is asked as the mini of its shape: resolution reads a config, never weights."""
    if model.path is None:
        return model
    published = Path(model.path).name.lower()
    alike = [name for name in shapes.names() if _kind(shapes.properties(name)) == _kind(model.properties)]
    shape = max(alike, key=lambda name: SequenceMatcher(None, name, published).ratio())
    quantization = model.properties.get("quantization", "none")
    properties = {**model.properties, "quantization": _NEAREST.get(quantization, quantization)}
    return replace(model, path=None, shape=shape, properties=properties)


def _kind(properties: Mapping[str, str]) -> tuple[str | None, str, str]:
    return properties.get("attention"), properties.get("moe", "false"), properties.get("sinks", "false")


def matrices(names: Sequence[str]) -> list[Matrix]:
    """The shipped matrices of these names, all of them for none."""
    paths = [path for path in sorted(packaged_dir().glob("*.yaml")) if path.stem != "known_bad"]
    return [load_matrix(path) for path in paths if not names or path.stem in names]


def records_of(python: str, asked: Sequence[Matrix], cache: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(one preflight record an arch, the known-bad entries that match a cell by its id)."""
    versions = read_versions(python, {})
    entries = load_known_bad([packaged_dir() / "known_bad.yaml"])
    records: list[dict[str, Any]] = []
    found: dict[str, Any] = {}
    for matrix in asked:
        cells = [cell for arch in matrix.archs for cell in expand(matrix, arch, versions=versions)]
        folders = {
            model.name: materialise(_shape_of(model), python=python, env={}, weights=False, cache=cache)
            for model in matrix.models.values()
        }
        matched = {cell.id: matching(entries, cell, versions) for cell in cells}
        request = Request(
            cells=cells,
            python=python,
            env={"PATH": os.defpath, "HOME": str(Path.home())},
            versions=versions,
            model_dirs=folders,
            entries=matched,
        )
        records += ask(request)
        found |= matched
    return records, found


def answer(cell: dict[str, Any], entries: Sequence[Any]) -> str:
    """One cell's answer in a table: what was resolved, or what SGLang said and the entry that knew."""
    failure = failure_of(cell)
    if cell["outcome"] == "skipped":
        return f"– {cell['reason'].partition(' needs ')[2] or cell['reason']}"
    if failure is None:
        settings = cell["settings"]
        stages = dict.fromkeys(str(settings.get(f"{stage}_attention_backend")) for stage in ("prefill", "decode"))
        changed = [f"{name}: {one['asked']} → {one['resolved']}" for name, one in cell["rewritten"].items()]
        return "; ".join([f"{' / '.join(stages)}, page {settings.get('page_size')}", *changed])
    known = next((entry.id for entry in entries if entry.expect.explains(failure)), "**not known**")
    text = failure.text or failure.message
    return f"{failure.kind}, {known}: {' '.join(text.partition(' (choose from')[0].split())[:160]}"


def tables(runs: Sequence[tuple[list[dict[str, Any]], dict[str, Any]]]) -> Iterator[str]:
    """Markdown: a table an arch, a column a version."""
    versions = [records[0]["versions"]["sglang"] for records, _ in runs]
    archs = [record["arch"] for record in runs[0][0]]
    for number, arch in enumerate(archs):
        records = [run[number] for run, _ in runs]
        yield f"\n## {arch}\n"
        for version, record in zip(versions, records, strict=True):
            counts = Counter(cell["outcome"] for cell in record["cells"])
            yield f"- {version}: {', '.join(f'{count} {name}' for name, count in sorted(counts.items()))}" + (
                f" ({record['reason']})" if record["reason"] else ""
            )
        yield f"\n| cell | {' | '.join(versions)} |"
        yield f"|---|{'---|' * len(versions)}"
        for row in zip(*(record["cells"] for record in records), strict=True):
            told = [answer(cell, found.get(cell["id"], ())) for cell, (_, found) in zip(row, runs, strict=True)]
            name = row[0]["id"].removeprefix(f"{arch}-")
            yield f"| {name} | {' | '.join(text.replace('|', chr(92) + '|') for text in told)} |"


def bumps(runs: Sequence[tuple[list[dict[str, Any]], dict[str, Any]]]) -> Iterator[str]:
    """Markdown: what each bump from one environment to the next changes for these cells."""
    for (before, _), (after, _) in pairwise(runs):
        yield markdown(compare_preflights(before, after))


def main(argv: Sequence[str] | None = None) -> int:
    """The command: 0, or 1 if a refusal is neither gated by a version nor known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", required=True, help="an interpreter with SGLang; repeatable")
    parser.add_argument("--records", type=Path, help="a folder for the records")
    parser.add_argument("matrix", nargs="*", help="names of shipped matrices (default: all)")
    options = parser.parse_args(argv)
    asked = matrices(options.matrix)
    with tempfile.TemporaryDirectory(prefix="preflight-models-") as cache:
        runs = [records_of(python, asked, Path(cache)) for python in options.python]
    if options.records:
        for records, _ in runs:
            write_records(options.records / f"preflight-{records[0]['versions']['sglang']}.json", records)
    lines = list(tables(runs))
    print("\n".join([*lines, "", *bumps(runs)]))
    return int(any("**not known**" in line or "unavailable" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
