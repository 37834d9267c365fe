"""`gpuserve compare A B`: two records of runs, or two of preflights."""

from __future__ import annotations

import argparse
import gc
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpuserve.compare import bump_render, compare, render
from pytest_gpuserve.compare.bump import compare_preflights
from pytest_gpuserve.compare.lists import KNOWN_BAD, patch_of
from pytest_gpuserve.errors import GpuserveError, UsageError
from pytest_gpuserve.preflight.record import records_of
from pytest_gpuserve.report.store import read_json, read_run, write_text_atomic

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["compare_main"]


def compare_main(argv: Sequence[str]) -> int:
    """The command: 0 when nothing got worse, 1 with findings, 2 when it cannot say."""
    options = _parser().parse_args(argv)
    try:
        with _without_collector():
            told, patch, code = _compared(options)
        if options.patch is not None and patch is not None and str(options.patch) != "-":
            write_text_atomic(options.patch, patch)
        if str(options.patch) == "-":
            told = patch or ""
        if options.output:
            write_text_atomic(options.output, told)
        else:
            print(told.encode("utf-8", "backslashreplace").decode(), end="")
    except GpuserveError as error:
        print(f"gpuserve compare: {error}", file=sys.stderr)
        return 2
    return code


def _compared(options: argparse.Namespace) -> tuple[str, str | None, int]:
    preflights = [_preflights(path) for path in (options.before, options.after)]
    if all(preflights):
        report = compare_preflights(*(records for records in preflights if records))
        renderers = {"text": bump_render.text, "markdown": bump_render.markdown, "json": bump_render.as_json}
        return renderers[options.format](report), None, report.exit_code
    if any(preflights):
        which = options.before if preflights[0] else options.after
        raise UsageError(f"{which} is a preflight and the other is a run: they say different things about a cell.")
    before, after = read_run(options.before), read_run(options.after)
    comparison = compare(before, after)
    patch = patch_of(comparison, after, Path.cwd(), options.known_bad)
    views = {"text": render.text, "markdown": render.markdown, "json": render.as_json}
    return views[options.format](comparison, patch), patch.text, comparison.exit_code


def _preflights(path: Path) -> list[dict[str, Any]] | None:
    """The preflight records in a file; None for a run's file or folder."""
    if path.is_dir():
        return None
    with path.open("rb") if path.is_file() else _nothing() as file:
        head = file.read(4096) if file else b""
    if b'"preflight"' not in head:
        return None
    data = read_json(path)
    return records_of(data, str(path)) if data.get("kind") == "preflight" else None


@contextmanager
def _nothing() -> Iterator[None]:
    yield None


@contextmanager
def _without_collector() -> Iterator[None]:
    """Two records are a million small objects that live until the end: collecting among them takes half the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpuserve compare",
        description="What a dependency bump fixed, broke, changed and slowed, with the patch to known_bad.yaml.",
        epilog="Exit 0: nothing got worse. 1: BROKE, CHANGED, SLOWER, or a result that is lost (NOT-RUN, GONE); of "
        "preflights, a cell that SGLang's arguments take otherwise. 2: the records cannot be compared.",
    )
    parser.add_argument("before", type=Path, help="run.json, a run's folder, or a preflight's record")
    parser.add_argument("after", type=Path, help="the same of the newer environment")
    parser.add_argument("--format", choices=("text", "markdown", "json"), default="text", help="default: text")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the report there, not to the terminal")
    parser.add_argument(
        "--patch", type=Path, metavar="FILE", help="also write the patch to FILE, for git apply; '-' prints only it"
    )
    parser.add_argument(
        "--known-bad",
        type=Path,
        action="append",
        default=[],
        metavar="PATH",
        help=f"the list to patch (repeatable; new entries go to the first; default: {KNOWN_BAD})",
    )
    return parser
