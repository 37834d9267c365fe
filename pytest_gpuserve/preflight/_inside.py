"""Asks the installed SGLang what its arguments say. Runs inside the environment under test, by path.

Standard input: one JSON object {arch, cuda, driver, count, kernels, cell_seconds, cells: [{argv, env, model}]}.
Standard output: JSON lines, first `ready` or `unavailable`, then `cell` or `deferred` for each cell, last `done`.

Every cell is asked in a fork of one process that has imported SGLang and resolved nothing: no variable, cache, logger
or published global can go from one cell to the next. Modules that SGLang imports only while it resolves are imported
before the forks, found by resolving each model once in a fork that is thrown away. A variable that was read while
SGLang was imported cannot be changed for one cell afterwards: a cell that needs another value is `deferred` to a
process of its own (run.py starts it).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import re
import select
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

_here = str(Path(__file__).resolve().parent)
sys.path[:] = [entry for entry in sys.path if entry and Path(entry).resolve() != Path(_here)]
sys.path.insert(0, _here)
import _fakegpu  # type: ignore[import-not-found]  # noqa: E402
import _gate  # type: ignore[import-not-found]  # noqa: E402

sys.path.remove(_here)

_READ: set[str] = set()


class _Watched(type(os.environ)):  # type: ignore[misc]
    """os.environ that remembers which names were read."""

    def __getitem__(self, key: str) -> str:
        _READ.add(key)
        value: str = super().__getitem__(key)
        return value


def _plain(value: Any) -> Any:
    """JSON types; an object's fields where it has some, else its text without addresses."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return getattr(value, "value", value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(item) for item in value), key=str)
    fields = getattr(value, "__dataclass_fields__", None) or getattr(value, "__struct_fields__", None)
    if fields:
        return {name: _plain(getattr(value, name)) for name in fields}
    return re.sub(r" at 0x[0-9a-f]+", "", str(getattr(value, "value", value)))


def _options(parser: Any) -> dict[str, Any]:
    """SGLang's option table: every option string with what argparse knows of it."""
    table = {}
    for text, action in sorted(parser._option_string_actions.items()):
        if text in ("-h", "--help"):
            continue
        table[text] = {
            "dest": action.dest,
            "choices": sorted(map(str, action.choices)) if action.choices else None,
            "default": None if action.default == "==SUPPRESS==" else _plain(action.default),
            "nargs": None if action.nargs is None else str(action.nargs),
            "type": getattr(action.type, "__name__", None) if action.type else None,
            "deprecated": "eprecated" in type(action).__name__ + str(action.help or "")[:40],
        }
    return table


class _Log:
    """Collects what SGLang logs and warns; its own handlers may be replaced while it parses."""

    def __init__(self) -> None:
        import logging
        import warnings

        self.warnings: list[str] = []
        self.notes: list[str] = []
        outer = self

        class Handler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                outer._add(record.getMessage(), serious=record.levelno >= logging.WARNING)

        logging.getLogger("sglang").addHandler(Handler())
        logging.getLogger().setLevel(logging.INFO)
        warnings.showwarning = lambda message, *rest: self._add(str(message), serious=True)  # noqa: ARG005
        warnings.simplefilter("default")

    def _add(self, text: str, *, serious: bool) -> None:
        lines = self.warnings if serious else self.notes
        text = re.sub(r"\x1b\[[0-9;]*m", "", text).strip()[:600]
        if text and text not in lines and len(lines) < 40:
            lines.append(text)


def _where(error: BaseException) -> tuple[str, str]:
    """(`sglang/….py:function` of the innermost SGLang frame, file of the innermost frame)."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if "/sglang/" in frame.filename]
    if not inside:
        return "", frames[-1].filename if frames else ""
    name = "sglang/" + inside[-1].filename.rpartition("/sglang/")[2]
    return f"{name}:{inside[-1].name}", frames[-1].filename


def _refusal(error: BaseException, usage: str) -> dict[str, Any]:
    """A rejection by SGLang, or `unavailable` where the pretence or this environment is what failed."""
    kind = type(error).__name__
    where, last = _where(error)
    if isinstance(error, SystemExit):
        text = usage.strip().splitlines()[-1] if usage.strip() else f"exit {error.code}"
        exit_code = error.code if isinstance(error.code, int) else 1
        return {"rejection": {"text": text, "exception": kind, "exit": exit_code, "where": where or "argparse"}}
    beyond_the_fake = _fakegpu.FakeGpu.installed and "/torch/" in last
    if beyond_the_fake or isinstance(error, (ImportError, OSError, _fakegpu.Unpretended)):
        return {"unavailable": f"{kind}: {error} (at {where or last})"}
    return {"rejection": {"text": str(error) or kind, "exception": kind, "exit": 1, "where": where}}


def _resolve(argv: list[str], env: dict[str, str]) -> dict[str, Any]:
    """One cell, in a process of its own: parse, resolve and check as `sglang.launch_server` does before it spawns."""
    import io

    from sglang.srt.server_args import prepare_server_args

    os.environ.update(env)
    before = dict(os.environ)
    log = _Log()
    usage = io.StringIO()
    answer: dict[str, Any] = {}
    try:
        with contextlib.redirect_stderr(usage):
            server_args = prepare_server_args(argv)
            if hasattr(server_args, "resolve_once"):
                server_args.resolve_once()
            if hasattr(server_args, "check_server_args"):
                server_args.check_server_args()
            if hasattr(server_args, "resolved_dict"):
                resolved = _plain(server_args.resolved_dict())
            else:
                resolved = {name: _plain(getattr(server_args, name)) for name in server_args.__dataclass_fields__}
            answer = {"resolved": resolved, "gate": _gate.ask(server_args, resolved)}
    except BaseException as error:  # noqa: BLE001 - argparse exits; everything SGLang raises here is its answer
        answer = _refusal(error, usage.getvalue())
    after = dict(os.environ)
    answer["env_set"] = {
        name: after.get(name) for name in sorted(before.keys() | after.keys()) if before.get(name) != after.get(name)
    }
    return {**answer, "warnings": log.warnings, "notes": log.notes}


def _forked(work: Any, seconds: float) -> dict[str, Any]:
    """`work()`'s answer from a fork that then ends; {"unavailable": …} if it dies or takes longer than `seconds`."""
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(receive)
            with os.fdopen(send, "w") as pipe:
                json.dump(work(), pipe)
            status = 0
        except BaseException:  # noqa: BLE001 - a fork never returns into the loop it came from
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    os.close(send)
    chunks, deadline, late = [], time.monotonic() + seconds, False
    while True:
        ready, _, _ = select.select([receive], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            late = True
            os.kill(pid, signal.SIGKILL)
            break
        chunk = os.read(receive, 1 << 20)
        if not chunk:
            break
        chunks.append(chunk)
    os.close(receive)
    _, status = os.waitpid(pid, 0)
    if late:
        return {"unavailable": f"no answer in {seconds:g} s"}
    if status:
        return {"unavailable": f"the process that asked SGLang ended with {os.waitstatus_to_exitcode(status)}"}
    answer: dict[str, Any] = json.loads(b"".join(chunks))
    return answer


def _warm(models: list[str], seconds: float) -> None:
    """Import what SGLang imports late: resolve each model once in a fork, and import the modules it came back with."""

    def loaded(model: str) -> dict[str, Any]:
        before = set(sys.modules)
        _resolve(["--model-path", model], {})
        return {"modules": sorted(set(sys.modules) - before)}

    for model in models:
        for name in _forked(lambda model=model: loaded(model), seconds).get("modules", ()):
            # What a thrown-away fork could import and this process cannot will be imported in the forks again.
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def _import_sglang(request: dict[str, Any]) -> dict[str, Any]:
    """Pretend, import, and say what was pretended and which options there are."""
    functions: list[str] = []
    shim = _fakegpu.define_torchvision_ops()
    if shim:
        functions.append(shim)
    gpu = None
    kernels = request["kernels"]
    if kernels is None:
        kernels = _fakegpu.kernels_required(request["arch"])
    if request["arch"] != "cpu":
        fake = _fakegpu.FakeGpu(request["arch"], cuda=request["cuda"], driver=request["driver"], count=request["count"])
        fake.install()
        functions += fake.functions
        gpu = fake.describe()
    touched = _fakegpu.stand_in(kernels)
    import argparse

    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    _warm(sorted({cell["model"] for cell in request["cells"]}), request["cell_seconds"])
    return {
        "options": _options(parser),
        "pretended": {
            "gpu": gpu,
            "functions": functions,
            "commands": ["nvidia-smi"] if gpu else [],
            "modules": kernels,
            "touched": sorted(touched),
        },
    }


def main() -> int:
    """Answer the request on standard input."""
    request = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # SGLang prints: that belongs to the log

    def emit(**line: Any) -> None:
        out.write(json.dumps(line) + "\n")
        out.flush()

    started = time.monotonic()
    initial = dict(os.environ)
    os.environ.__class__ = _Watched
    try:
        facts = _import_sglang(request)
    except BaseException as error:  # noqa: BLE001 - whatever stops the import is the answer
        traceback.print_exc()
        where, last = _where(error)
        emit(kind="unavailable", reason=f"{type(error).__name__}: {error} (at {where or last})")
        return 0
    os.environ.__class__ = type(os.environ).__mro__[1]
    read = frozenset(_READ)
    python = ".".join(map(str, sys.version_info[:3]))
    emit(kind="ready", **facts, python=python, import_seconds=round(time.monotonic() - started, 3))
    gc.collect()
    gc.freeze()
    for index, cell in enumerate(request["cells"]):
        env = {name: value for name, value in cell["env"].items() if initial.get(name) != value}
        if not read.isdisjoint(env):
            emit(kind="deferred", index=index, names=sorted(read.intersection(env)))
            continue
        began = time.monotonic()
        answer = _forked(lambda argv=cell["argv"], env=env: _resolve(argv, env), request["cell_seconds"])
        emit(kind="cell", index=index, seconds=round(time.monotonic() - began, 4), **answer)
    emit(kind="done")
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # destructors of compiled extensions print pages at exit
