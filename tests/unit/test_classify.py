"""A table of log endings. Those in `logs/` were printed by SGLang 0.5.23; the others are put together from texts in
the releases' own code, from runs on two H200 and from public reports, which are named.
"""

# ruff: noqa: E501 (lines of logs)

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpuserve.engine import patterns
from pytest_gpuserve.model.failure import Failure, Kind
from pytest_gpuserve.model.phase import Phase
from pytest_gpuserve.serve.causes import find_causes, first_cause
from pytest_gpuserve.serve.classify import Ending, classify
from pytest_gpuserve.serve.phases import PhaseTracker
from pytest_gpuserve.serve.watch import Stall

LOGS = Path(__file__).parent / "logs"
SIGQUIT = "[2026-11-29 16:33:30] Received sigquit from a child process. It usually means the child failed.\n"
DIED = (
    "RuntimeError: Rank 0 scheduler died during initialization (exit code: {code}). If exit code is -9 (SIGKILL), a "
    "common cause is the OS OOM killer. Run `dmesg -T | grep -i oom` to check.\n"
)
START = """\
[2026-11-29 16:33:01] server_args=ServerArgs(model_path='m', chunked_prefill_size=8192)
[2026-11-29 16:33:24 TP0] Init torch distributed begin.
[2026-11-29 16:33:24 TP1] Init torch distributed begin.
[2026-11-29 16:33:25 TP0] Load weight begin. avail mem=139.09 GB
"""
LOADED = START + "[2026-11-29 16:33:26 TP0] Load weight end. elapsed=0.08 s, type=LlamaForCausalLM\n"
CAPTURING = (
    LOADED + "[2026-11-29 16:33:27 TP0] Capture target decode CUDA graph begin. backend=full, num_tokens_per_req=1\n"
)
SERVING = CAPTURING + "[2026-11-29 16:33:30] The server is fired up and ready to roll!\n"


def trace(error: str, *, who: str = "Scheduler", rank: str = "", file: str = "sglang/srt/managers/scheduler.py") -> str:
    return (
        f"[2026-11-29 16:33:30{rank and ' ' + rank}] {who} hit an exception: Traceback (most recent call last):\n"
        f'  File "/env/site-packages/{file}", line 6362, in run_scheduler_process\n'
        "    scheduler = Scheduler(server_args, port_args)\n"
        "                ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^\n"
        f"{error}\n\n"
    )


def main_trace(error: str, file: str = "sglang/srt/entrypoints/engine.py") -> str:
    return (
        "Traceback (most recent call last):\n"
        '  File "<frozen runpy>", line 198, in _run_module_as_main\n'
        f'  File "/env/site-packages/{file}", line 84, in <module>\n'
        "    run_server(server_args)\n"
        f"{error}\n"
    )


@dataclass(frozen=True)
class Case:
    name: str
    log: str
    exit: int | None
    kind: Kind
    phase: Phase
    says: tuple[str, ...]
    never: tuple[str, ...] = ()
    retryable: bool = False
    more: dict[str, object] = field(default_factory=dict)


def recorded(name: str) -> str:
    return (LOGS / f"{name}.log").read_text()


OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 12.00 GiB. GPU 0 has a total capacity of 139.8 GiB of "
    "which 3.11 GiB is free. Process 4242 has 136.00 GiB memory in use."
)
NCCL_LINES = (
    "node1:743:743 [0] NCCL INFO Channel 01/02 : 0 1\n"
    "node1:743:743 [0] enqueue.cc:1900 NCCL WARN Error : no algorithm/protocol available for function AllGather with "
    "datatype ncclInt8. NCCL_ALGO was set to Tree.\n"
)
KERNEL_OOM = "[40113.2] Memory cgroup out of memory: Killed process 4242 (sglang::schedul) total-vm:109332kB, anon-rss:13408616kB"

CASES = [
    Case(
        "an unknown flag",
        recorded("unknown-flag"),
        2,
        Kind.REJECTED,
        Phase.IMPORT,
        ("unrecognized arguments: --no-such-flag",),
    ),
    Case(
        "a backend that is no choice",
        recorded("bad-choice"),
        2,
        Kind.REJECTED,
        Phase.IMPORT,
        ("argument --attention-backend: invalid choice: 'nonsense'",),
    ),
    Case("an abbreviation", recorded("ambiguous-option"), 2, Kind.REJECTED, Phase.IMPORT, ("ambiguous option",)),
    Case(
        "context too long", recorded("context-too-long"), 1, Kind.REJECTED, Phase.IMPORT, ("context_length (999999)",)
    ),
    Case(
        "a backend that the arguments refuse",
        recorded("refused-backend"),
        1,
        Kind.REJECTED,
        Phase.IMPORT,
        ("TRTLLM MLA backend is only supported on Blackwell GPUs (SM100/SM12x)",),
    ),
    Case(
        "no such model",
        recorded("model-missing"),
        1,
        Kind.INFRA,
        Phase.IMPORT,
        ("missing or incomplete: /models/m", "Repo id must be in the form"),
    ),
    Case(
        "a model without weights",
        recorded("no-weights"),
        -9,
        Kind.INFRA,
        Phase.WEIGHTS,
        ("Cannot find any model weights",),
    ),
    Case(
        "ranks without cores: three tracebacks",
        recorded("too-many-ranks"),
        -9,
        Kind.CRASH,
        Phase.DIST_INIT,
        ("scheduler TP2 crashed", "SGLANG_CPU_OMP_THREADS_BIND is not set"),
    ),
    Case(
        "a backend the device lacks",
        recorded("fa3-on-cpu"),
        -9,
        Kind.CRASH,
        Phase.KV_CACHE,
        ("scheduler crashed in phase kv-cache", "FlashAttention v3 Backend requires SM>=80 and SM<=90"),
        ("out-of-memory",),
    ),
    Case(
        "the port is taken and the server hangs",
        recorded("port-taken"),
        None,
        Kind.INFRA,
        Phase.WARMUP,
        ("a port of the server was taken", "[Errno 98]"),
        retryable=True,
    ),
    Case(
        "a scheduler was killed while serving",
        recorded("killed-scheduler"),
        -9,
        Kind.CRASH,
        Phase.READY,
        ("sglang::scheduler (pid 2691), signal 9: it died first",),
        more={"first_dead": "sglang::scheduler (pid 2691), signal 9"},
    ),
    Case(
        "a scheduler was killed while serving, and only the log knows",
        recorded("killed-scheduler"),
        -9,
        Kind.CRASH,
        Phase.READY,
        ("scheduler_0 (pid 2691) died with signal 9",),
    ),
    Case(
        "the detokenizer was killed: main waits a minute for core dumps",
        recorded("killed-detokenizer"),
        None,
        Kind.CRASH,
        Phase.READY,
        ("sglang::detokenizer (pid 3241), signal 9: it died first",),
        more={"first_dead": "sglang::detokenizer (pid 3241), signal 9"},
    ),
    Case(
        "a scheduler was killed while importing: main's guess at the reason is not passed on",
        recorded("killed-import"),
        1,
        Kind.CRASH,
        Phase.IMPORT,
        ("Rank 0 scheduler died with signal 9",),
        ("OOM killer",),
    ),
    Case("no SGLang, -m", recorded("no-sglang-m"), 1, Kind.INFRA, Phase.IMPORT, ("--gpu-server-python",)),
    Case("no SGLang, -c", recorded("no-sglang-c"), 1, Kind.INFRA, Phase.IMPORT, ("--gpu-server-python",)),
    Case(
        "the NCCL port is taken (sglang#37215)",
        START.replace("Load weight begin. avail mem=139.09 GB", "Using NCCL")
        + trace(
            "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. "
            "port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"
        )
        + SIGQUIT,
        -9,
        Kind.INFRA,
        Phase.DIST_INIT,
        ("a port of the server was taken",),
        retryable=True,
    ),
    Case(
        "GPU memory, and the last line blames the host",
        LOADED + trace(OOM, rank="TP1") + SIGQUIT + main_trace(DIED.format(code=-9).strip()),
        -9,
        Kind.OOM,
        Phase.KV_CACHE,
        ("GPU memory ran out in phase kv-cache", "Tried to allocate 12.00 GiB"),
        ("host memory",),
    ),
    Case(
        "no room for the KV cache",
        LOADED
        + trace(
            "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: "
            "mem_fraction_static=0.2"
        ),
        -9,
        Kind.OOM,
        Phase.KV_CACHE,
        ("GPU memory ran out", "--mem-fraction-static"),
    ),
    Case(
        "weights leave no room",
        LOADED
        + trace("ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.0001."),
        -9,
        Kind.OOM,
        Phase.KV_CACHE,
        ("GPU memory ran out", "Loaded weights leave no GPU memory"),
    ),
    Case(
        "out of memory while capturing: the wrapper's hints do not matter",
        CAPTURING
        + trace(
            "torch.AcceleratorError: CUDA error: out of memory\n\n"
            "During handling of the above exception, another exception occurred:\n\n"
            "Traceback (most recent call last):\n"
            '  File "/env/site-packages/sglang/srt/model_executor/runner/decode_cuda_graph_runner.py", line 600, in __init__\n'
            "    raise Exception(\n"
            "Exception: Capture cuda graph failed: CUDA error: out of memory\n"
            "Possible solutions:\n1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)"
        ),
        -9,
        Kind.OOM,
        Phase.GRAPH_CAPTURE,
        ("GPU memory ran out in phase graph-capture",),
    ),
    Case(
        "host memory, by the kernel's word",
        START + main_trace(DIED.format(code=-9).strip()),
        1,
        Kind.OOM,
        Phase.WEIGHTS,
        ("host memory ran out", "sglang::scheduler_TP0 (pid 4242)", "Killed process 4242"),
        more={"kernel": [KERNEL_OOM], "first_dead": "sglang::scheduler_TP0 (pid 4242), signal 9"},
    ),
    Case(
        "host memory, by the container's count",
        START,
        137,
        Kind.OOM,
        Phase.WEIGHTS,
        ("host memory ran out", "out-of-memory kills rose by 1"),
        more={"oom_kills": 1},
    ),
    Case(
        "somebody else was killed for memory",
        START,
        -9,
        Kind.CRASH,
        Phase.WEIGHTS,
        ("no proof of an out-of-memory",),
        more={"kernel": [KERNEL_OOM.replace("sglang::schedul", "java")]},
    ),
    Case(
        "-9 alone is no out-of-memory",
        START + main_trace(DIED.format(code=-9).strip()),
        -9,
        Kind.CRASH,
        Phase.WEIGHTS,
        ("Rank 0 scheduler died",),
        ("host memory ran out",),
    ),
    Case(
        "the host's allocator",
        START
        + trace(
            "RuntimeError: [enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory: x"
        ),
        -9,
        Kind.OOM,
        Phase.WEIGHTS,
        ("host memory ran out",),
    ),
    Case(
        "an architecture the kernels lack (sglang#24633)",
        CAPTURING
        + trace(
            "tvm.error.InternalError: Error in function 'TllmGenFmhaRunner' at /workspace/include/flashinfer/trtllm/fmha/"
            "fmhaRunner.cuh:37: Unsupported architecture\n\n"
            "During handling of the above exception, another exception occurred:\n\n"
            "Traceback (most recent call last):\n"
            '  File "/env/site-packages/sglang/srt/managers/scheduler.py", line 4285, in run_scheduler_process\n'
            "    scheduler = Scheduler(\n"
            "Exception: Capture prefill CUDA graph failed: Error in function 'TllmGenFmhaRunner' at /workspace/include/"
            "flashinfer/trtllm/fmha/fmhaRunner.cuh:37: Unsupported architecture\n"
            "Possible solutions:\n1. disable the prefill CUDA graph by --cuda-graph-backend-prefill=disabled",
            rank="TP3",
        )
        + SIGQUIT,
        -9,
        Kind.CRASH,
        Phase.GRAPH_CAPTURE,
        ("scheduler TP3 crashed in phase graph-capture: tvm.error.InternalError", "Unsupported architecture"),
    ),
    Case(
        "a kernel image that is missing, printed by native code, then two misleading errors (H200)",
        CAPTURING
        + "CUDA error (/workspace/hopper/flash_fwd_launch_template.h:203): device kernel image is invalid\n"
        + main_trace("EOFError")
        + "\nThe above exception was the direct cause of the following exception:\n\n"
        + main_trace(DIED.format(code=1).strip()),
        1,
        Kind.CRASH,
        Phase.GRAPH_CAPTURE,
        ("device kernel image is invalid",),
        ("EOFError", "OOM killer"),
    ),
    Case(
        "NCCL_ALGO=Tree: the reason is in NCCL's warning (two H200)",
        CAPTURING
        + NCCL_LINES
        + trace(
            "RuntimeError: NCCL error: invalid usage (run with NCCL_DEBUG=WARN for details)\n\n"
            "During handling of the above exception, another exception occurred:\n\n"
            "Traceback (most recent call last):\n"
            '  File "/env/site-packages/sglang/srt/model_executor/runner/decode_cuda_graph_runner.py", line 600, in __init__\n'
            "    raise Exception(\n"
            "Exception: Capture cuda graph failed: NCCL error: invalid usage (run with NCCL_DEBUG=WARN for details)",
            rank="TP0",
        )
        + trace("RuntimeError: NCCL error: remote process exited or there was a network error", rank="TP1")
        + SIGQUIT,
        -9,
        Kind.CRASH,
        Phase.GRAPH_CAPTURE,
        ("scheduler TP0 crashed", "NCCL error: invalid usage", "NCCL_ALGO was set to Tree"),
    ),
    Case(
        "the echo of another rank comes first in the log",
        CAPTURING
        + trace(
            "torch.distributed.DistBackendError: [1] is setting up NCCL communicator and retrieving ncclUniqueId from "
            "[0] via c10d key-value store by key '0', but store->get('0') got error: Connection closed by peer",
            rank="TP1",
        )
        + trace("AttributeError: 'ModelConfig' object has no attribute 'kv_lora_rank'", rank="TP0")
        + SIGQUIT,
        -9,
        Kind.CRASH,
        Phase.GRAPH_CAPTURE,
        ("scheduler TP0 crashed", "kv_lora_rank"),
    ),
    Case(
        "torch's rank prefixes, interleaved line by line",
        LOADED
        + "[rank1]: Traceback (most recent call last):\n"
        + "[rank0]: Traceback (most recent call last):\n"
        + '[rank1]:   File "/env/site-packages/torch/distributed/x.py", line 1, in f\n'
        + '[rank0]:   File "/env/site-packages/sglang/srt/models/llama.py", line 469, in forward\n'
        + "[rank1]:     work.wait()\n"
        + "[rank1]: RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711\n"
        + "[rank0]:     hidden_states = self.model(\n"
        + "[rank0]: RuntimeError: CUDA error: an illegal memory access was encountered\n"
        + "[rank0]: CUDA kernel errors might be asynchronously reported at some other API call\n",
        -9,
        Kind.CRASH,
        Phase.KV_CACHE,
        ("rank 0 crashed", "an illegal memory access was encountered"),
        ("closed by peer",),
    ),
    Case(
        "NCCL's watchdog over a peer that was killed",
        SERVING
        + "[rank5]:[E1129 06:24:44.904 ProcessGroupNCCL.cpp:616] [Rank 5] Watchdog caught collective operation timeout: "
        + "WorkNCCL(SeqNum=808, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600020 milliseconds before timing out.\n"
        + "terminate called after throwing an instance of 'c10::DistBackendError'\n"
        + "  what():  [PG ID 2 PG GUID 3 Rank 5] Process group watchdog thread terminated with exception: [Rank 5] Watchdog "
        + "caught collective operation timeout: WorkNCCL(SeqNum=808) ran for 600020 milliseconds before timing out.\n"
        + "Fatal Python error: Aborted\n",
        -9,
        Kind.CRASH,
        Phase.SERVING,
        ("sglang::scheduler_TP2 (pid 77), signal 9: it died first",),
        more={"first_dead": "sglang::scheduler_TP2 (pid 77), signal 9", "phase": Phase.SERVING},
    ),
    Case(
        "native code throws (sglang#8296)",
        SERVING
        + "terminate called after throwing an instance of 'c10::DistBackendError'\n"
        + "  what():  [PG ID 2 PG GUID 3 Rank 1] Process group watchdog thread terminated with exception: CUDA error: an "
        + "illegal memory access was encountered\n"
        + "CUDA kernel errors might be asynchronously reported at some other API call.\n"
        + "Fatal Python error: Aborted\n"
        + "[2026-11-29 16:40:00] SIGQUIT received. signum=None, frame=None. It usually means one child failed.\n",
        -9,
        Kind.CRASH,
        Phase.READY,
        ("an illegal memory access was encountered",),
        ("Aborted",),
    ),
    Case(
        "a segmentation fault",
        LOADED + "Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f (most recent call first):\n",
        -11,
        Kind.CRASH,
        Phase.KV_CACHE,
        ("Segmentation fault",),
    ),
    Case(
        "a kernel that does not compile: the wrapper says more than the process that failed",
        CAPTURING
        + trace(
            "subprocess.CalledProcessError: Command '['ninja', '-v']' returned non-zero exit status 1.\n\n"
            "The above exception was the direct cause of the following exception:\n\n"
            "Traceback (most recent call last):\n"
            '  File "/env/site-packages/flashinfer/jit/cpp_ext.py", line 299, in run_ninja\n'
            "    raise RuntimeError(msg) from e\n"
            "RuntimeError: Ninja build failed. Ninja output:\n"
            "nvcc fatal   : Unsupported gpu architecture 'compute_120f'\n"
            "ninja: build stopped: subcommand failed."
        ),
        -9,
        Kind.CRASH,
        Phase.GRAPH_CAPTURE,
        ("Ninja build failed",),
    ),
    Case(
        "the server's own watchdog",
        SERVING
        + "[2026-11-29 16:45:00] Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)\n"
        + "[2026-11-29 16:45:05] SIGQUIT received. signum=None, frame=None. It usually means one child failed.\n",
        -9,
        Kind.HANG,
        Phase.READY,
        ("its own watchdog ended it", "Scheduler watchdog timeout"),
    ),
    Case(
        "the driver is too old",
        START
        + trace(
            "RuntimeError: The NVIDIA driver on your system is too old (found version 12040). Please update your GPU driver"
        ),
        -9,
        Kind.INFRA,
        Phase.WEIGHTS,
        ("the GPU or its driver is at fault", "too old"),
    ),
    Case(
        "no device to be seen, in an argument check: still not the arguments' fault",
        "server_args=x\n"
        + main_trace("AssertionError: no CUDA-capable device is detected", file="sglang/srt/server_args.py"),
        1,
        Kind.INFRA,
        Phase.IMPORT,
        ("the GPU or its driver is at fault",),
    ),
    Case(
        "the disk is full",
        LOADED + trace("OSError: [Errno 28] No space left on device: '/home/me/.cache/flashinfer'"),
        -9,
        Kind.INFRA,
        Phase.KV_CACHE,
        ("the disk is full",),
    ),
    Case(
        "a GPU that fell off the bus, by the kernel's word",
        SERVING + trace("torch.AcceleratorError: CUDA error: unspecified launch failure"),
        -9,
        Kind.INFRA,
        Phase.READY,
        ("a sick GPU", "Xid", "unspecified launch failure"),
        more={"kernel": ["[9.1] NVRM: Xid (PCI:0000:41:00): 79, pid=4242, GPU has fallen off the bus."]},
    ),
    Case(
        "an Xid that the program brought about",
        SERVING + trace("torch.AcceleratorError: CUDA error: an illegal memory access was encountered"),
        -9,
        Kind.CRASH,
        Phase.READY,
        ("illegal memory access",),
        more={"kernel": ["[9.1] NVRM: Xid (PCI:0000:41:00): 31, pid=4242, name=python, MMU Fault"]},
    ),
    Case(
        "a broken dependency is a crash of the cell, not of the machine",
        "server_args=x\n" + main_trace("ModuleNotFoundError: No module named 'sgl_kernel'"),
        1,
        Kind.CRASH,
        Phase.IMPORT,
        ("No module named 'sgl_kernel'",),
    ),
    Case(
        "the warm-up request fails because the scheduler crashed before",
        LOADED
        + "[2026-11-29 16:33:29] max_total_num_tokens=100, chunked_prefill_size=8192, max_prefill_tokens=1\n"
        + trace("RuntimeError: shape '[1, 64]' is invalid for input of size 12", rank="TP0")
        + "[2026-11-29 16:33:40] Initialization failed. warmup error: "
        + main_trace("requests.exceptions.ConnectionError: ('Connection aborted.', RemoteDisconnected('x'))"),
        -9,
        Kind.CRASH,
        Phase.WARMUP,
        ("scheduler TP0 crashed in phase warmup", "is invalid for input of size 12"),
    ),
    Case(
        "the detokenizer",
        SERVING + trace("UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff", who="DetokenizerManager"),
        -9,
        Kind.CRASH,
        Phase.READY,
        ("detokenizer crashed",),
    ),
    Case(
        "an error that was reported and survived is not the cause",
        "server_args=x\n"
        + main_trace("ImportError: cannot import name 'deep_ep'")
        + LOADED
        + trace("AssertionError: head_dim 64 is not supported"),
        -9,
        Kind.CRASH,
        Phase.KV_CACHE,
        ("head_dim 64 is not supported",),
        ("deep_ep",),
    ),
    Case(
        "an error that was reported and survived, then silence",
        "server_args=x\n" + main_trace("ImportError: cannot import name 'deep_ep'") + LOADED,
        -11,
        Kind.CRASH,
        Phase.KV_CACHE,
        ("died of SIGSEGV",),
        ("deep_ep",),
    ),
    Case(
        "exit 0 at the start", "server_args=x\n", 0, Kind.CRASH, Phase.IMPORT, ("ended by itself with exit status 0",)
    ),
    Case("nothing at all", "", None, Kind.CRASH, Phase.SPAWN, ("stopped working without a reason in its log",)),
    Case("exit 3", LOADED, 3, Kind.CRASH, Phase.KV_CACHE, ("exit status 3",)),
    Case("137", LOADED, 137, Kind.CRASH, Phase.KV_CACHE, ("no proof of an out-of-memory",)),
    Case(
        "one process was killed and the others live on",
        SERVING,
        None,
        Kind.CRASH,
        Phase.READY,
        ("sglang::detokenizer (pid 9), signal 9: it died first",),
        more={"first_dead": "sglang::detokenizer (pid 9), signal 9"},
    ),
    Case(
        "colours and carriage returns",
        "Loading: 10%|#\rLoading: 20%|##\r\x1b[31mserver_args=x\x1b[0m\n"
        "\x1b[1;31msglang serve: error: unrecognized arguments: --nope\x1b[0m\n",
        2,
        Kind.REJECTED,
        Phase.IMPORT,
        ("unrecognized arguments: --nope",),
        ("\x1b",),
    ),
]


def judge(case: Case) -> Failure:
    lines = case.log.splitlines()
    tracker = PhaseTracker(patterns("0.5.23"), now=0.0)
    for line in lines:
        tracker.feed(line, 0.0)
    facts = {"phase": tracker.phase, "exit": case.exit, "model_path": "/models/m", **case.more}
    return classify(Ending(lines=lines, **facts))  # type: ignore[arg-type]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_endings(case: Case) -> None:
    failure = judge(case)
    assert (failure.kind, failure.phase) == (case.kind, case.phase), failure.message
    for text in case.says:
        assert text in failure.message
    for text in case.never:
        assert text not in failure.message
    assert failure.retryable is case.retryable
    assert len(failure.message) < 1500


@pytest.mark.parametrize("case", [case for case in CASES if case.log.strip()], ids=lambda case: case.name)
def test_what_known_bad_entries_search_holds_the_logs_end(case: Case) -> None:
    last = case.log.rstrip().splitlines()[-1]
    assert last.rpartition("\r")[2].replace("\x1b[1;31m", "").replace("\x1b[0m", "").strip() in judge(case).text


def test_two_runs_have_one_signature() -> None:
    first = next(case for case in CASES if case.name.startswith("an architecture"))
    again = first.log.replace("TP3", "TP6").replace("16:33:", "18:01:").replace("/workspace/include", "/opt/x/include")
    assert judge(first).signature == judge(Case("", again, -9, first.kind, first.phase, ())).signature


def test_the_order_of_choices_is_not_part_of_the_signature() -> None:
    one = "sglang serve: error: argument --sampling-backend: invalid choice: 'x' (choose from 'ascend', 'pytorch')\n"
    two = one.replace("'ascend', 'pytorch'", "'pytorch', 'ascend'")
    assert (
        judge(Case("", one, 2, Kind.REJECTED, Phase.IMPORT, ())).signature
        == judge(Case("", two, 2, Kind.REJECTED, Phase.IMPORT, ())).signature
    )


STALL = Stall(phase=Phase.GRAPH_CAPTURE, why="stall", seconds=130.0, quiet=120.0, limit=120.0, last="GPU memory")


def test_a_stall_is_a_hang_with_the_evidences_sentence() -> None:
    lines = CAPTURING.splitlines()
    sentence = "weights are loaded, the port never opened: stuck in CUDA graph capture"
    failure = classify(
        Ending(
            phase=Phase.GRAPH_CAPTURE,
            lines=lines,
            exit=None,
            stall=STALL,
            conclusion=sentence,
            evidence=("processes.txt",),
        )
    )
    assert (failure.kind, failure.phase) == (Kind.HANG, Phase.GRAPH_CAPTURE)
    assert failure.message == f"the server hangs in phase graph-capture: {sentence}"
    assert failure.evidence == ("processes.txt",)
    other = classify(
        Ending(phase=Phase.GRAPH_CAPTURE, lines=lines, exit=None, stall=STALL, conclusion="another sentence")
    )
    assert other.signature == failure.signature


def test_a_stall_after_one_rank_crashed_is_a_crash() -> None:
    lines = (CAPTURING + trace("RuntimeError: shape mismatch", rank="TP1")).splitlines()
    failure = classify(Ending(phase=Phase.GRAPH_CAPTURE, lines=lines, exit=None, stall=STALL))
    assert failure.kind is Kind.CRASH
    assert "scheduler TP1 crashed in phase graph-capture and the server did not end: RuntimeError" in failure.message


def test_the_first_of_two_unmarked_interleaved_tracebacks_gets_the_first_error() -> None:
    log = [
        "Traceback (most recent call last):",
        '  File "/a/one.py", line 1, in f',
        "Traceback (most recent call last):",
        '  File "/b/two.py", line 2, in g',
        "    one()",
        "ValueError: first",
        "    two()",
        "RuntimeError: second",
    ]
    found = find_causes(log)
    assert [(cause.line, cause.files) for cause in found] == [
        ("ValueError: first", ("/a/one.py",)),
        ("RuntimeError: second", ("/b/two.py",)),
    ]
    first = first_cause(found)
    assert first is not None
    assert first.line == "ValueError: first"


def test_a_megabyte_of_log_is_judged_at_once() -> None:
    decode = (
        "[2026-11-29 16:33:24 TP0] Decode batch, #running-req: 7, #token: 9, token usage: 0.1, gen throughput: 8.1\n"
    )
    usage = "[--tool-call-parser {" + ",".join(f"parser{n}" for n in range(300)) + "}]\n"
    log = SERVING + (decode * 30 + usage) * 200 + trace(OOM, rank="TP1") * 8
    lines = log.splitlines()
    assert sum(map(len, lines)) > 1_000_000
    began = time.process_time()
    failure = classify(Ending(phase=Phase.SERVING, lines=lines, exit=-9))
    assert time.process_time() - began < 0.1
    assert failure.kind is Kind.OOM


@given(
    st.lists(
        st.one_of(
            st.text(max_size=80),
            st.sampled_from(
                [line for case in CASES for line in case.log.splitlines()]
                + [
                    "The above exception was the direct cause of the following exception:",
                    "[rank0]: ",
                    "\x1b[",
                    "what():",
                ]
            ),
        ),
        max_size=60,
    ),
    st.sampled_from([None, 0, 1, 2, -9, -6, 137, 255, 300, -64]),
    st.sampled_from(list(Phase)),
)
def test_any_log_gives_a_verdict(lines: list[str], status: int | None, phase: Phase) -> None:
    failure = classify(Ending(phase=phase, lines=lines, exit=status))
    assert failure.message
    assert failure.signature
    assert Failure.from_json(failure.to_json()) == failure
