"""`gpuserve compare A B`: two records of runs, or two of preflights."""

from __future__ import annotations

import argparse
import gc
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpuserve.compare import bump_render, compare, render
from pytest_gpuserve.compare.bump import compare_preflights, records_of
from pytest_gpuserve.compare.patch import make_patch
from pytest_gpuserve.errors import GpuserveError, UsageError
from pytest_gpuserve.report.store import read_json, read_run, write_text_atomic

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_gpuserve.compare.patch import Patch
    from pytest_gpuserve.compare.values import Comparison

__all__ = ["compare_main", "patch_of"]

KNOWN_BAD = Path("matrices/known_bad.yaml")


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


def patch_of(comparison: Comparison, after: dict[str, Any], known_bad: Sequence[Path], root: Path) -> Patch:
    """The patch for the lists `known_bad` (or `matrices/known_bad.yaml`), paths relative to `root`.

    New entries go to the first list. Lists below `root` that the record's entries come from are patched too.
    UsageError for a list in `known_bad` that is not there, or not below `root`.
    """
    files: dict[str, str | None] = {}
    for path in known_bad:
        if not path.absolute().is_relative_to(root):
            raise UsageError(f"{path} is outside of {root}: one patch cannot be for two repositories.")
        if not path.is_file():
            raise UsageError(f"{path}: no such known-bad list.")
    # Only the list that nobody named may be missing: then the patch makes it.
    for path in [*(known_bad or [_default(root)]), *_named(after, root)]:
        files.setdefault(path.absolute().relative_to(root).as_posix(), _text(path))
    return make_patch(comparison, after, files, next(iter(files)))


def _default(root: Path) -> Path:
    here = Path.cwd() / KNOWN_BAD
    return here if here.is_relative_to(root) else root / KNOWN_BAD


def _named(record: dict[str, Any], root: Path) -> list[Path]:
    """The lists that hold the entries of a record's cells, as far as they are here and below `root`."""
    names = {str((cell.get("known_bad") or {}).get("file") or "") for cell in record["cells"]} - {""}
    return [path for path in sorted(map(Path, names)) if path.absolute().is_relative_to(root) and path.is_file()]


def _text(path: Path) -> str | None:
    try:
        # Bytes, not text: newlines must stay as they are, or the patch does not apply.
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {error}.") from error


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
    patch = patch_of(comparison, after, options.known_bad, _root(options.known_bad))
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


def _root(known_bad: Sequence[Path]) -> Path:
    """The repository that holds the list, else the current directory: what the patch's paths are relative to."""
    start = (known_bad[0].absolute() if known_bad else Path.cwd() / KNOWN_BAD).parent
    return next((folder for folder in (start, *start.parents) if (folder / ".git").exists()), Path.cwd())


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
