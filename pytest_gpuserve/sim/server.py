"""`python -m pytest_gpuserve.sim.server <SGLang's arguments>`: the main process of a simulated server."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pytest_gpuserve.errors import GpuserveError
from pytest_gpuserve.model.phase import Phase
from pytest_gpuserve.sim import SGLANG_VERSION
from pytest_gpuserve.sim.arguments import parse_arguments
from pytest_gpuserve.sim.behaviour import Behaviour, load_behaviour
from pytest_gpuserve.sim.config import resolve
from pytest_gpuserve.sim.devices import Devices
from pytest_gpuserve.sim.logs import Log
from pytest_gpuserve.sim.processes import end_as, fork, run_compiler, set_title
from pytest_gpuserve.sim.tree import Tree, give_up

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

__all__ = ["main"]

_ARGUMENT_ERRORS = ("argument ", "unrecognized arguments", "ambiguous option", "the following arguments")


def _escape(devices: Devices, memory: int) -> None:
    """A helper that left the session and the tree, as a worker that calls setsid does; it keeps some GPU memory."""

    def helper() -> None:
        os.setsid()
        set_title("sglang::worker")
        devices.take(0, memory)
        while True:
            signal.pause()

    def intermediate() -> None:
        fork("worker", helper)

    fork("intermediate", intermediate).reap(block=True)


def _spawn_phase(behaviour: Behaviour, log: Log) -> None:
    """Main's own imports, before SGLang reads its arguments."""
    if behaviour.hang is Phase.SPAWN:
        while True:
            log.repeat()
            time.sleep(0.1 if behaviour.log == "flood" else 1.0)
    if behaviour.compile is not None and behaviour.compile.phase is Phase.SPAWN:
        run_compiler(behaviour.compile.seconds)
    time.sleep(behaviour.phase_seconds)
    if behaviour.crash is not None and behaviour.crash.phase is Phase.SPAWN:
        log.raw(
            f'Traceback (most recent call last):\n  File "<frozen runpy>", line 198, in _run_module_as_main\n'
            f"{behaviour.crash.text}\n"
        )
        end_as(1 if behaviour.crash.exit is None else behaviour.crash.exit)
    if behaviour.exit_zero:
        os._exit(0)


def _reject(text: str, log: Log) -> NoReturn:
    """Refused arguments: by argparse (exit 2) if the text is one of its own, else by SGLang's checks (exit 1)."""
    if text.startswith(_ARGUMENT_ERRORS):
        log.raw(f"usage: sglang serve [-h] --model-path MODEL_PATH\nsglang serve: error: {text}\n")
        os._exit(2)
    name, _, rest = text.partition(":")
    line = text if rest and name.isidentifier() and name.endswith(("Error", "Exception")) else f"ValueError: {text}"
    log.raw(
        "Traceback (most recent call last):\n"
        '  File "<frozen runpy>", line 198, in _run_module_as_main\n'
        '  File ".../sglang/launch_server.py", line 84, in <module>\n'
        "    server_args.resolve_once()\n"
        f"{line}\n"
    )
    os._exit(1)


def _launch_phase_signals(behaviour: Behaviour, log: Log) -> None:
    """A child's SIGQUIT ends everything, in SGLang's words."""

    def sigquit(_number: int, _frame: FrameType | None) -> None:
        log.line("Received sigquit from a child process. It usually means the child failed.")
        give_up(behaviour, log)

    signal.signal(signal.SIGQUIT, sigquit)


def main(argv: Sequence[str]) -> None:
    """Runs a server until it is ended."""
    begun = time.monotonic()
    try:
        behaviour = load_behaviour(os.environ.get("GPUSERVE_SIM_BEHAVIOUR"))
        devices = Devices.of_environment(behaviour.hold_memory)
    except (ValueError, GpuserveError) as error:
        sys.exit(f"simulated server: {error}")
    log = Log(behaviour.log)
    log.banner(f"SIMULATED SGLang {SGLANG_VERSION}: no model and no GPU, made by pytest-gpuserve")
    if behaviour.ignore_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _spawn_phase(behaviour, log)
    if behaviour.reject is not None:
        _reject(behaviour.reject, log)
    given = parse_arguments(argv)
    try:
        config = resolve(given, argv, devices.arch, behaviour)
    except OSError as error:
        _reject(f"OSError: {error}", log)
    hidden = {name: "***" for name in ("api_key", "admin_api_key") if config.args[name]}
    log.line(f"server_args={dict(config.args) | hidden}")
    log.line("Using default HuggingFace chat template with detected content format: string")
    _launch_phase_signals(behaviour, log)
    if behaviour.escape_session:
        _escape(devices, min(behaviour.memory, 1 << 29))
    for index in range(behaviour.zombies):
        fork(f"zombie_{index}", lambda: None)
    tree = Tree(config, behaviour, devices, log)
    # Imported while the schedulers start; they need none of it.
    from pytest_gpuserve.sim.serving import serve

    tree.wait_ready()
    serve(tree, behaviour, begun, port_taken=_port_taken(behaviour))


def _port_taken(behaviour: Behaviour) -> bool:
    """True if this start is scripted to find its port taken; `once` means once in the simulated machine."""
    if behaviour.port_taken != "once":
        return behaviour.port_taken is not None
    folder = Path(os.environ.get("GPUSERVE_SIM_DIR") or ".")
    with suppress(FileExistsError):
        (folder / "port-was-taken").touch(exist_ok=False)
        return True
    return False


if __name__ == "__main__":
    main(sys.argv[1:])
