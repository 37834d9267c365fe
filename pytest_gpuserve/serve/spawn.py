"""How a server process is started: its environment, its files, its arguments, and the shim that becomes it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpuserve.serve import procs
from pytest_gpuserve.serve.litter import mark_folder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_gpuserve.model.gpu import Gpu
    from pytest_gpuserve.model.launch import LaunchSpec

__all__ = [
    "Command",
    "Spawned",
    "command",
    "environment",
    "fill",
    "inherited",
    "is_secret",
    "left_out",
    "make_tmpdir",
    "marks",
    "recorded",
    "redact",
    "spawn",
    "visible",
]

HOST = "127.0.0.1"
_SHIM = Path(__file__).with_name("shim.py")

# Of the caller's environment these do not reach the server unless `pass_env` names them: each changes what is tested
# without showing in the cell (a stray NCCL_ALGO, a PYTHONPATH with another SGLang, torchrun's rank variables).
_DROPPED = re.compile(
    r"(NCCL|TORCH_NCCL|SGLANG|SGL|PYTHON|COV|COVERAGE|PYTEST|GPUSERVE)_.*|PYTHON.*"
    r"|CUDA_LAUNCH_BLOCKING|CUDA_VISIBLE_DEVICES|RUNNER_TRACKING_ID"
    r"|MASTER_ADDR|MASTER_PORT|RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE"
)
# Always the supervisor's business, so not worth a report when they are replaced.
_SILENT = re.compile(r"GPUSERVE_.*|CUDA_VISIBLE_DEVICES|PYTEST_.*|PYTHON(UNBUFFERED|DONTWRITEBYTECODE|SAFEPATH)")
_RECORDED = re.compile(
    r"(NCCL|TORCH|TORCHINDUCTOR|PYTORCH|TRITON|SGLANG|SGL|CUDA|CUBLAS|CUDNN|NVSHMEM|FLASHINFER|TVM_FFI|OMP|MKL|DG_JIT"
    r"|HF)_.*"
    r"|TRANSFORMERS_OFFLINE|PYTHONPATH|LD_LIBRARY_PATH|LD_PRELOAD|TMPDIR|SPT_NOENV"
)
_SECRET = re.compile(r"(^|[-_])(token|secret|passw(or)?d|credentials?|auth|key)$|api[-_]?key", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spawned:
    """A server process that has just been started. `output` is its log pipe's read end, `started` tells of its `exec`:
    end-of-file once the server's own interpreter runs, else the reason why it cannot.
    """

    process: subprocess.Popen[bytes]
    output: int
    started: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What a server is started with. `shown` is what of it the `spawned` event and records may show."""

    argv: list[str]
    env: dict[str, str]
    shown: dict[str, object]


def command(
    spec: LaunchSpec,
    caller: Mapping[str, str],
    *,
    gpus: Sequence[Gpu],
    tmpdir: str,
    marks: Mapping[str, str],
    ports: tuple[int, int],
    api_key: str,
) -> Command:
    """The command line and environment of one launch. `ports` are the server's and NCCL's."""
    env, dropped = environment(spec, caller, gpus=gpus, tmpdir=tmpdir, marks=marks)
    shown = {
        "url": f"http://{HOST}:{ports[0]}",
        "port": ports[0],
        "nccl_port": ports[1],
        "argv": redact(fill(spec.argv, ports=ports, api_key="<secret>")),
        "env": recorded(env, spec),
        "dropped_env": dropped,
    }
    return Command(argv=fill(spec.argv, ports=ports, api_key=api_key), env=env, shown=shown)


def environment(
    spec: LaunchSpec, caller: Mapping[str, str], *, gpus: Sequence[Gpu], tmpdir: str, marks: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """The server's environment, and the caller's names that were dropped and could have mattered."""
    env, dropped = inherited(caller, spec.pass_env, python=spec.argv[0])
    home = env.get("HOME") or str(Path.home())
    cache = env.get("XDG_CACHE_HOME") or f"{home}/.cache"
    # Triton, FlashInfer and tvm-ffi keep compiled kernels under $HOME; inductor alone would use the private TMPDIR,
    # and every cell would compile again.
    env.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{cache}/torchinductor")
    env["PYTHONUNBUFFERED"] = "1"
    if Path(spec.model_path).is_dir():
        env |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    # Also over what was just set.
    env |= spec.pass_env
    env |= spec.env
    env |= {
        "TMPDIR": tmpdir,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": visible(gpus) if spec.gpus_visible else "",
        # Else SGLang's setproctitle overwrites the environment block in which the marks are looked for.
        "SPT_NOENV": "1",
    }
    env |= marks
    return env, dropped


def inherited(
    caller: Mapping[str, str], pass_env: Mapping[str, str], *, python: str
) -> tuple[dict[str, str], list[str]]:
    """The caller's environment as whatever asks the SGLang of `python` gets it, a server or a preflight, with
    `pass_env` let through or set; and the caller's names that were dropped and could have mattered.
    """
    dropped = [name for name in caller if _DROPPED.fullmatch(name) and name not in pass_env]
    env = {name: value for name, value in caller.items() if name not in dropped}
    # FlashInfer runs a bare `ninja`: that of the environment under test.
    env["PATH"] = os.pathsep.join([str(Path(python).parent), env.get("PATH", os.defpath)])
    return {**env, **pass_env}, sorted(name for name in dropped if not _SILENT.fullmatch(name))


def left_out(dropped: Sequence[str]) -> str:
    """The note of a record whose server or preflight did not get these variables of the caller's."""
    return f"left out of the server's environment: {', '.join(dropped)} (--gpu-server-env lets them through)"


def marks(run_id: str, lease: str) -> dict[str, str]:
    """What the server's processes are known by: to this supervisor, to a later lease, and to `gpuserve reap`."""
    return {"GPUSERVE_RUN_ID": run_id, "GPUSERVE_LEASE": lease, "GPUSERVE_SUPERVISOR": procs.identity(os.getpid())}


def visible(gpus: Sequence[Gpu]) -> str:
    """CUDA_VISIBLE_DEVICES: indices, because SGLang's custom all-reduce reads them with int() and otherwise switches
    itself off; a MIG instance can only be named by its UUID.
    """
    return ",".join(gpu.uuid if gpu.parent else str(gpu.index) for gpu in gpus)


def recorded(env: Mapping[str, str], spec: LaunchSpec) -> dict[str, str]:
    """What of the environment a record may show: the names that change how SGLang runs, and never a secret."""
    shown = {name for name in env if _RECORDED.fullmatch(name)} | set(spec.env) | set(spec.pass_env)
    return {name: env[name] for name in sorted(shown) if not is_secret(name) and not name.startswith("GPUSERVE_")}


def fill(argv: Sequence[str], *, ports: tuple[int, int], api_key: str) -> list[str]:
    """The command line with its placeholders filled in; `ports` are the server's and NCCL's."""
    values = {"{port}": str(ports[0]), "{nccl_port}": str(ports[1]), "{host}": HOST, "{api_key}": api_key}
    pattern = re.compile("|".join(map(re.escape, values)))
    return [pattern.sub(lambda match: values[match[0]], word) for word in argv]


def redact(argv: Sequence[str]) -> list[str]:
    """The command line for records: the values of `--api-key` and the like replaced."""
    shown: list[str] = []
    for word in argv:
        before = shown[-1] if shown else ""
        flag, equals, _ = word.partition("=")
        if before.startswith("--") and "=" not in before and is_secret(before) and not word.startswith("--"):
            shown.append("<secret>")
        elif equals and flag.startswith("--") and is_secret(flag):
            shown.append(f"{flag}=<secret>")
        else:
            shown.append(word)
    return shown


def is_secret(name: str) -> bool:
    """Whether a variable, flag or JSON key of that name holds something no record may show."""
    return _SECRET.search(name) is not None


def make_tmpdir(lease: str) -> str:
    """A private TMPDIR with a short path (ZeroMQ's socket files lie in it), marked as this process's own."""
    parent = tempfile.gettempdir()
    if len(parent) > 40:
        parent = "/tmp"  # noqa: S108 (a Unix socket path has 107 bytes)
    path = tempfile.mkdtemp(prefix=f"gpuserve-{lease.rpartition('-')[2]}-", dir=parent)
    mark_folder(path)
    return path


def spawn(argv: Sequence[str], env: Mapping[str, str], cwd: str) -> Spawned:
    """Starts the shim, which becomes `argv`, in a session of its own. To be called from the main thread only: the
    kernel sends the parent-death signal when the *thread* that spawned ends. OSError when nothing can be started.
    """
    output, output_end = os.pipe2(os.O_CLOEXEC)
    started, started_end = os.pipe2(os.O_CLOEXEC)
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_SHIM), str(os.getpid()), str(started_end), cwd, *argv],
            env=dict(env),
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=output_end,
            stderr=output_end,
            start_new_session=True,
            pass_fds=(started_end,),
        )
    except OSError:
        os.close(output)
        os.close(started)
        raise
    finally:
        os.close(output_end)
        os.close(started_end)
    return Spawned(process=process, output=output, started=started)
