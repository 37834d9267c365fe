"""The command `gpuserve`. Every subcommand exits 0 when fine, 1 with findings, 2 when it cannot."""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpuserve import __version__
from pytest_gpuserve.errors import GpuserveError, UsageError
from pytest_gpuserve.model.words import number

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest_gpuserve.preflight.command import Request

__all__ = ["COMMANDS", "main"]


def _plan(arguments: Sequence[str]) -> int:
    """What a run would do: cells, expected outcomes, GPUs, time. Further arguments go to pytest (-k, --gpu-sim, …)."""
    parser = argparse.ArgumentParser(prog="gpuserve plan", description=_plan.__doc__)
    parser.add_argument("--matrix", required=True, help="names or files of matrices, separated by commas, or auto")
    options, rest = parser.parse_known_args(arguments)
    # A process of its own: pytest rewrites assertions of plugins on import, and this one has imported the plugin's.
    words = [sys.executable, "-m", "pytest", "--gpu-plan", f"--gpu-matrix={options.matrix}", *rest]
    return 0 if subprocess.call(words) == 0 else 2


def _preflight(arguments: Sequence[str]) -> int:
    """What the SGLang of an environment says of a matrix's cells, without a GPU."""
    from pytest_gpuserve.preflight.command import preflight_main

    return preflight_main(arguments, _asked)


def _asked(options: argparse.Namespace) -> Request:
    from pytest_gpuserve.manager.asking import request_of
    from pytest_gpuserve.manager.prepare import prepare
    from pytest_gpuserve.model.settings import Settings

    root = Path.cwd()
    settings = Settings(
        rootdir=root,
        report=root / ".gpuserve",
        preflight=True,
        matrix=tuple(name.strip() for name in options.matrix.split(",") if name.strip()),
        server_python=options.gpu_server_python,
        server_env=tuple(options.gpu_server_env),
        version=tuple(map(_taken, options.gpu_version)),
        known_bad=tuple(options.gpu_known_bad),
        strategy=options.gpu_strategy,
    )
    plan = prepare(settings, pretended={"driver": options.driver, "cuda": options.cuda})
    request = request_of(plan, plan.cells)
    return dataclasses.replace(request, notes=(*plan.remarks, *request.notes))


def _taken(text: str) -> tuple[str, str]:
    from pytest_gpuserve.model.versions import read_taken

    try:
        return read_taken(text)
    except ValueError as error:
        raise UsageError(f"--gpu-version {text}: {error}") from None


def _validate(arguments: Sequence[str]) -> int:
    """Checks matrices and known-bad lists: each file, and what no single file can know of itself."""
    parser = argparse.ArgumentParser(prog="gpuserve validate", description=_validate.__doc__)
    parser.add_argument("matrices", nargs="*", help="names or files; default: all that can be named here")
    parser.add_argument("--known-bad", type=Path, action="append", default=[], metavar="PATH", help="more entries")
    options = parser.parse_args(arguments)
    from pytest_gpuserve.matrix.find import available, find_matrices, known_bad_paths, packaged_dir
    from pytest_gpuserve.matrix.validate import validate

    root = Path.cwd()
    paths = find_matrices(options.matrices, root, ()) if options.matrices else list(available(root).values())
    lists = known_bad_paths(root, options.known_bad)
    # Entries may be about any matrix there is: also one that is not asked about, or that a project's own hides.
    known = {*available(root).values(), *available(packaged_dir().parent).values()}
    problems = validate(paths, lists, beside=sorted(known - set(paths)))
    for problem in problems:
        print(problem)
    wrong = sum(not problem.warning for problem in problems)
    asked = f"{number(len(paths), 'matrix', 'matrices')}, {number(len(lists), 'known-bad list')}"
    print(f"{asked}: {number(wrong, 'problem')}, {number(len(problems) - wrong, 'warning')}")
    return int(bool(wrong))


def _lock_dir(name: str, description: str | None, arguments: Sequence[str]) -> Path:
    from pytest_gpuserve.gpu.lockdir import default_lock_dir

    parser = argparse.ArgumentParser(prog=f"gpuserve {name}", description=description)
    parser.add_argument(
        "--lock-dir", type=Path, metavar="DIR", help="default: GPUSERVE_LOCK_DIR, as for pytest, or the machine's own"
    )
    given: Path | None = parser.parse_args(arguments).lock_dir
    named = os.environ.get("GPUSERVE_LOCK_DIR")
    lock_dir = given or (Path(named).expanduser() if named else default_lock_dir())
    if lock_dir.exists() and not lock_dir.is_dir():
        raise UsageError(f"the lock directory {lock_dir} is not a directory (--lock-dir, GPUSERVE_LOCK_DIR)")
    return lock_dir


def _status(arguments: Sequence[str]) -> int:
    """Who holds which GPU, in which phase, since when; and what dead runs left. 1 if something was left."""
    lock_dir = _lock_dir("status", _status.__doc__, arguments)
    from pytest_gpuserve.gpu.lease import holders, quarantined
    from pytest_gpuserve.serve.reap import find_leftovers

    held = [holder for holder in holders(lock_dir) if holder.held]
    for holder in held:
        print(holder)
    for uuid, reason in quarantined(lock_dir).items():
        print(f"{uuid}: quarantined: {reason}")
    left = find_leftovers(lock_dir)
    for item in left:
        print(f"left over: {item.what}")
    if not held and not left:
        print(f"no GPU is held, and nothing was left over ({lock_dir})")
    if left:
        print("`gpuserve reap` ends the processes and removes the folders")
    return int(bool(left))


def _reap(arguments: Sequence[str]) -> int:
    """Ends what dead runs left: only processes that carry this tool's mark. 1 if something could not be ended."""
    lock_dir = _lock_dir("reap", _reap.__doc__, arguments)
    from pytest_gpuserve.serve.reap import reap

    gone, left = reap(lock_dir)
    for item in gone:
        print(f"gone: {item.what}")
    for item in left:
        print(f"still there: {item.what}")
    if not gone and not left:
        print("nothing was left over")
    return int(bool(left))


def _compare(arguments: Sequence[str]) -> int:
    """What a bump fixed, broke, changed and slowed: two records of runs, or two of preflights."""
    from pytest_gpuserve.compare.cli import compare_main

    return compare_main(arguments)


def _merge(arguments: Sequence[str]) -> int:
    """One record of several: shards, machines, archs."""
    from pytest_gpuserve.compare.merge import merge_main

    return merge_main(arguments)


def _report(arguments: Sequence[str]) -> int:
    """A page of one record, or of several side by side; or a bug report for one failed cell."""
    from pytest_gpuserve.report.command import report_main

    return report_main(arguments)


def _history(arguments: Sequence[str]) -> int:
    """A cell over the runs of a report folder: outcome, speed, and what moved."""
    from pytest_gpuserve.report.command import history_main

    return history_main(arguments)


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "plan": _plan,
    "preflight": _preflight,
    "validate": _validate,
    "status": _status,
    "reap": _reap,
    "compare": _compare,
    "merge": _merge,
    "report": _report,
    "history": _history,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The entry point. Each command parses its own arguments: `gpuserve COMMAND --help`."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="gpuserve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"pytest-gpuserve {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, run in COMMANDS.items():
        commands.add_parser(name, help=(run.__doc__ or "").partition("\n")[0], add_help=False)
    # Only the command's name is parsed here, so that its own options are its own.
    chosen = parser.parse_args(words[:1]).command
    try:
        return COMMANDS[chosen](words[1:])
    except GpuserveError as error:
        print(f"gpuserve {chosen}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 2


if __name__ == "__main__":
    sys.exit(main())
