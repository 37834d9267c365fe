"""Why a server ended, where the error that was raised does not say it: what stands elsewhere in the log is found.

Each case is put together from texts of public reports, which are named, in our own numbers and names.
"""

# ruff: noqa: E501 (lines of logs)

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpuserve.compare.entry import salient
from pytest_gpuserve.engine import causes as words
from pytest_gpuserve.engine import patterns
from pytest_gpuserve.model.failure import Failure, Kind
from pytest_gpuserve.model.phase import Phase
from pytest_gpuserve.serve.classify import Ending, classify
from pytest_gpuserve.serve.phases import PhaseTracker
from pytest_gpuserve.serve.watch import Stall

SIGQUIT = "[2026-11-30 10:00:30] SIGQUIT received. signum=None, frame=None. It usually means one child failed.\n"
LOADED = """\
[2026-11-30 10:00:01] server_args=ServerArgs(model_path='/models/m', chunked_prefill_size=8192)
[2026-11-30 10:00:14 TP0] Init torch distributed begin.
[2026-11-30 10:00:15 TP0] Load weight begin. avail mem=94.00 GB
[2026-11-30 10:00:20 TP0] Load weight end. elapsed=5.08 s, type=LlamaForCausalLM
"""
CAPTURING = LOADED + "[2026-11-30 10:00:21 TP0] Capture cuda graph begin. This can take up to several minutes.\n"
SERVING = CAPTURING + "[2026-11-30 10:00:30] The server is fired up and ready to roll!\n"
BAR = "Capturing batches (bs=32 avail_mem=10.30 GB):   0%|          | 0/8 [00:00<?, ?it/s]"
ABORTED = "sglang::scheduler_TP0 (pid 31), signal 6"
PACKAGES = "/env/lib/python3.12/site-packages"


def trace(error: str, *frames: tuple[str, str], rank: str = "TP0") -> str:
    files = frames or (("sglang/srt/managers/scheduler.py", "run_scheduler_process"),)
    lines = [
        f'  File "{PACKAGES}/{file}", line {n}, in {name}\n    call()\n' for n, (file, name) in enumerate(files, 7)
    ]
    return (
        f"[2026-11-30 10:00:22 {rank}] Scheduler hit an exception: Traceback (most recent call last):\n"
        f"{''.join(lines)}{error}\n\n"
    )


def ninja(*output: str) -> str:
    return trace(
        "subprocess.CalledProcessError: Command '['ninja', '-v', '-C', '/c/cached_ops']' returned non-zero exit status 1.\n\n"
        "The above exception was the direct cause of the following exception:\n\n"
        "Traceback (most recent call last):\n"
        f'  File "{PACKAGES}/flashinfer/jit/cpp_ext.py", line 299, in run_ninja\n'
        "    raise RuntimeError(msg) from e\n"
        "RuntimeError: Ninja build failed. Ninja output:\n"
        "ninja: Entering directory `/c/cached_ops'\n" + "\n".join(output) + "\nninja: build stopped: subcommand failed."
    )


@dataclass(frozen=True)
class Case:
    name: str
    log: str
    kind: Kind
    says: tuple[str, ...]
    never: tuple[str, ...] = ()
    exit: int | None = -9
    more: dict[str, object] = field(default_factory=dict)


def judge(log: str, *, exit: int | None = -9, **more: object) -> Failure:  # noqa: A002
    lines = log.splitlines()
    tracker = PhaseTracker(patterns(""), now=0.0)
    for line in lines:
        tracker.feed(line, 0.0)
    facts = {"phase": tracker.phase, "model_path": "/models/m", "draft": tracker.draft, **more}
    return classify(Ending(lines=lines, exit=exit, **facts))  # type: ignore[arg-type]


def indexing(
    expression: str, *, thread: int = 0, function: str = "indexSelectSmallIndex", file: str = "Indexing.cu"
) -> str:
    return (
        f"/pytorch/aten/src/ATen/native/cuda/{file}:1553: {function}: block: [3,0,0], thread: [{thread},0,0] "
        f"Assertion `{expression}` failed.\n"
    )


ASSERTED = (
    "torch.AcceleratorError: CUDA error: device-side assert triggered\n"
    "Search for `cudaErrorAssert' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more "
    "information.\nCUDA kernel errors might be asynchronously reported at some other API call."
)
WORK = (
    "[Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9141, OpType={op}, NumelIn=19008, "
    "NumelOut=152064, Timeout(ms)=600000) ran for 600020 milliseconds before timing out."
)


def collective(rank: int = 5, op: str = "_ALLGATHER_BASE") -> str:
    text = WORK.format(rank=rank, op=op)
    return (
        f"[rank{rank}]:[E1130 10:10:44.904 ProcessGroupNCCL.cpp:616] {text}\n"
        f"[rank{rank}]:[E1130 10:10:44.905 ProcessGroupNCCL.cpp:1785] [PG ID 2 PG GUID 3 Rank {rank}] Exception (either an "
        "error or timeout) detected by watchdog at work: 9141, last enqueued NCCL work: 9144\n"
        "terminate called after throwing an instance of 'c10::DistBackendError'\n"
        f"  what():  [PG ID 2 PG GUID 3 Rank {rank}] Process group watchdog thread terminated with exception: {text}\n"
        "Fatal Python error: Aborted\n"
    )


CASES = [
    # ---- behind a progress bar that is still open (sglang#7324 shows such lines)
    Case(
        "native code prints behind an open bar",
        CAPTURING + f"{BAR}CUDA error (/workspace/csrc/fmha.cuh:203): no kernel image is available for execution\n",
        Kind.CRASH,
        ("CUDA error (/workspace/csrc/fmha.cuh:203): no kernel image",),
        ("without a word", "it/s"),
        more={"first_dead": ABORTED},
    ),
    Case(
        "several updates of the bar, then the error",
        CAPTURING
        + f"{BAR}\r{BAR.replace('0/8 [00:00<?, ?it/s', '1/8 [00:04<00:28,  4.05s/it')}Segmentation fault (core dumped)\n",
        Kind.CRASH,
        ("Segmentation fault",),
        ("without a word",),
        exit=-11,
    ),
    Case(
        "a traceback begins behind the bar: the rank is known",
        CAPTURING + BAR + trace("ValueError: head_dim 80 is not supported", rank="TP3"),
        Kind.CRASH,
        ("scheduler TP3 crashed", "head_dim 80"),
    ),
    Case(
        "the exception itself stands behind the bar of another rank",
        CAPTURING + trace("RuntimeError: no algorithm for this shape").replace("RuntimeError:", f"{BAR}RuntimeError:"),
        Kind.CRASH,
        ("no algorithm for this shape",),
    ),
    Case(
        "loading shards: the bar in other words",
        LOADED
        + "Loading safetensors checkpoint shards:  12% Completed | 1/8 [00:00<00:04,  1.73it/s]terminate called after\n"
        + "  what():  CUDA error: uncorrectable NVLink error detected during the execution\n",
        Kind.CRASH,
        ("uncorrectable NVLink error",),
    ),
    # ---- collectives (sglang#1693, BasicSR#737)
    Case(
        "torch's watchdog ends a rank",
        SERVING + collective(),
        Kind.HANG,
        ("_ALLGATHER_BASE of rank 5 did not end within 600 s",),
        ("without a word",),
        more={"first_dead": "sglang::scheduler_TP5 (pid 36), signal 6"},
    ),
    Case(
        "in graph capture, and nobody was seen to die",
        CAPTURING + collective(rank=0, op="ALLREDUCE") + SIGQUIT,
        Kind.HANG,
        ("hung in phase graph-capture", "ALLREDUCE of rank 0"),
    ),
    Case(
        "the ranks wait for different collectives",
        SERVING + collective(rank=1, op="BROADCAST") + collective(rank=0, op="ALLREDUCE"),
        Kind.HANG,
        ("ALLREDUCE and BROADCAST of ranks 0, 1", "different collectives"),
        more={"first_dead": ABORTED},
    ),
    Case(
        "torch 2.1's words",
        SERVING
        + "[E ProcessGroupNCCL.cpp:475] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(OpType=ALLREDUCE, "
        + "TensorShape=[7168], Timeout(ms)=1800000) ran for 1803374 milliseconds before timing out.\n",
        Kind.HANG,
        ("ALLREDUCE of rank 3 did not end within 1803 s",),
        more={"first_dead": ABORTED},
    ),
    Case(
        "a collective raised in Python",
        SERVING + trace(f"torch.distributed.DistBackendError: {WORK.format(rank=2, op='ALLTOALL')}", rank="TP2"),
        Kind.HANG,
        ("ALLTOALL of rank 2",),
    ),
    Case(
        "gloo",
        SERVING
        + trace(
            "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for "
            "recv operation to complete"
        ),
        Kind.HANG,
        ("recv (gloo)", "1800 s"),
    ),
    Case(
        "DeepEP (sglang#15598), behind the bar of a warm-up",
        SERVING
        + "DeepGEMM warmup:   2%|█▌         | 11/512 [01:09<57:05,  6.84s/it]"
        + trace("RuntimeError: DeepEP error: CPU recv timeout", rank="TP1 EP1"),
        Kind.HANG,
        ("DeepEP's dispatch did not end",),
    ),
    Case(
        "the watchdog itself is stuck",
        SERVING
        + "[rank3]:[F1130 10:10:44.904 ProcessGroupNCCL.cpp:1557] [PG ID 0 PG GUID 0(default_pg) Rank 3] [PG ID 0 Rank 3] "
        + "ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring enqueued collectives.\n",
        Kind.HANG,
        ("rank 3", "480 s"),
        more={"first_dead": ABORTED},
    ),
    Case(
        "the watchdog that is stuck ends the process, in its last words",
        SERVING
        + "[rank1]:[F1130 10:10:44 ProcessGroupNCCL.cpp:1557] [PG ID 0 PG GUID 0(default_pg) Rank 1] Terminating the process "
        + "after attempting to dump debug info, due to ProcessGroupNCCL watchdog hang.\n",
        Kind.HANG,
        ("a collective operation of rank 1 did not end",),
        more={"first_dead": ABORTED},
    ),
    Case(
        "a peer was killed before: the others only waited",
        SERVING + collective(),
        Kind.CRASH,
        ("sglang::scheduler_TP2 (pid 77), signal 9: it died first",),
        more={"first_dead": "sglang::scheduler_TP2 (pid 77), signal 9"},
    ),
    Case(
        "a peer crashed and said so: the others only waited",
        SERVING + trace("AttributeError: no kv_lora_rank", rank="TP2") + collective(),
        Kind.CRASH,
        ("scheduler TP2 crashed", "kv_lora_rank"),
        more={"first_dead": ABORTED},
    ),
    # ---- builds (flashinfer#4410, #1892, slime#1314)
    Case(
        "nvcc does not know the architecture",
        CAPTURING
        + ninja(
            "[1/4] /usr/local/cuda/bin/nvcc -c a.cu -o a.cuda.o",
            "FAILED: [code=1] a.cuda.o",
            "/usr/local/cuda/bin/nvcc -c a.cu -o a.cuda.o",
            "nvcc fatal   : Unsupported gpu architecture 'compute_120f'",
        ),
        Kind.CRASH,
        ("scheduler TP0 crashed", "Ninja build failed: nvcc fatal   : Unsupported gpu architecture 'compute_120f'"),
    ),
    Case(
        "a header is missing, fifty lines below",
        CAPTURING
        + ninja(
            *(f"[{n}/60] c++ -MMD -c file{n}.cc -Werror=error -o file{n}.o" for n in range(50)),
            "/x/cutlass/util/tensor_fill.h:49:10: fatal error: curand_kernel.h: No such file or directory",
            "   49 | #include <curand_kernel.h>",
            "compilation terminated.",
        ),
        Kind.CRASH,
        ("fatal error: curand_kernel.h: No such file or directory",),
    ),
    Case(
        "nvcc's own errors",
        CAPTURING + ninja('/x/a.cuh(123): error: identifier "__nv_fp4_e2m1" is undefined', "1 error detected in a.cu."),
        Kind.CRASH,
        ('error: identifier "__nv_fp4_e2m1" is undefined',),
    ),
    Case(
        "no nvcc at all",
        CAPTURING + ninja("FAILED: [code=127] a.o", "/bin/sh: 1: /usr/local/cuda/bin/nvcc: not found"),
        Kind.CRASH,
        ("nvcc: not found",),
    ),
    Case(
        "the linker",
        CAPTURING
        + ninja("/usr/bin/ld: cannot find -lcudart: No such file or directory", "collect2: error: ld returned 1"),
        Kind.CRASH,
        ("cannot find -lcudart",),
    ),
    Case(
        "ptxas of Triton does not know the architecture (RLinf#92)",
        CAPTURING
        + trace(
            "RuntimeError: Internal Triton PTX codegen error\n`ptxas` stderr:\n"
            "ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'\n\n"
            "Repro command: /env/triton/backends/nvidia/bin/ptxas -lineinfo -v --gpu-name=sm_121a /tmp/tmpk2.ptx -o /tmp/tmpk2.o",
            ("triton/backends/nvidia/compiler.py", "make_cubin"),
        ),
        Kind.CRASH,
        ("Triton PTX codegen error: ptxas fatal   : Value 'sm_121a' is not defined",),
    ),
    Case(
        "ptxas refuses an instruction; its last line says less",
        CAPTURING
        + trace(
            "triton.runtime.errors.PTXASError: PTXAS error: Internal Triton PTX codegen error\n`ptxas` stderr:\n"
            "ptxas /tmp/tmpab12.ptx, line 345; error   : Feature '.e2m1x2' not supported on .target 'sm_120'\n"
            "ptxas /tmp/tmpab12.ptx, line 345; error   : Modifier '.scale' requires .target sm_100a\n"
            "ptxas fatal   : Ptx assembly aborted due to errors"
        ),
        Kind.CRASH,
        ("error   : Feature '.e2m1x2' not supported",),
        ("Ptx assembly aborted",),
    ),
    Case(
        "capture wraps the error",
        CAPTURING
        + trace(
            "RuntimeError: Internal Triton PTX codegen error\n`ptxas` stderr:\nptxas fatal   : Unexpected token\n\n"
            "During handling of the above exception, another exception occurred:\n\n"
            "Traceback (most recent call last):\n"
            f'  File "{PACKAGES}/sglang/srt/managers/scheduler.py", line 4285, in run_scheduler_process\n'
            "    scheduler = Scheduler(\n"
            "Exception: Capture cuda graph failed: Internal Triton PTX codegen error\n`ptxas` stderr:\n"
            "ptxas fatal   : Unexpected token\n\nPossible solutions:\n1. set --mem-fraction-static to a smaller value"
        ),
        Kind.CRASH,
        ("ptxas fatal   : Unexpected token",),
    ),
    Case(
        "torch's extension, the compiler's words in the message",
        LOADED
        + trace(
            "RuntimeError: Error building extension 'ops': [1/2] c++ -c a.cpp\nFAILED: a.o\nc++: error: unrecognized "
            "command-line option '-std=c++23'"
        ),
        Kind.CRASH,
        ("error: unrecognized command-line option '-std=c++23'",),
    ),
    Case(
        "SGLang's own JIT (tvm-ffi)",
        LOADED
        + trace(
            "RuntimeError: ninja exited with status 1\nstdout:\n[1/2] nvcc -c cuda.cu\nFAILED: [code=2] cuda.o\n"
            "/usr/include/crt/host_config.h:132:2: error: #error -- unsupported GNU version! gcc versions later than 14 are "
            "not supported!"
        ),
        Kind.CRASH,
        ("unsupported GNU version",),
    ),
    Case(
        "DeepGEMM prints the compiler's words before it raises",
        LOADED
        + 'NVCC compilation failed: /c/kernel.cu(3): catastrophic error: cannot open source file "cute/tensor.hpp"\n'
        + "1 catastrophic error detected in the compilation\n"
        + trace('RuntimeError: Assertion error (csrc/jit/compiler.hpp:150): false and "NVCC compilation failed"'),
        Kind.CRASH,
        ('catastrophic error: cannot open source file "cute/tensor.hpp"',),
    ),
    Case(
        "Triton shows the place in the source, and then why",
        CAPTURING
        + trace(
            "triton.compiler.errors.CompilationError: at 34:12:\n    k = tl.load(K)\n    qk = tl.dot(q, k)\n            ^\n"
            "type fp8e4nv not supported in this architecture. The supported fp8 dtypes are ('fp8e4b15', 'fp8e5')"
        ),
        Kind.CRASH,
        ("type fp8e4nv not supported in this architecture",),
    ),
    Case(
        "the disk is full, says the assembler",
        CAPTURING + ninja("/x/a.cu: fatal error: error writing to /tmp/ccA1.s: No space left on device"),
        Kind.INFRA,
        ("the disk is full",),
    ),
    Case(
        "NVRTC says what is wrong on the next line (DeepGEMM#359)",
        LOADED
        + "/w/deep_gemm/impls/sm90_gemm.cuh(120): error:\n"
        + '  identifier "cudaGridDependencySynchronize" is undefined\n1 error detected in the compilation of "kernel.cu".\n'
        + trace("RuntimeError: NVRTC compilation failed"),
        Kind.CRASH,
        ('error: identifier "cudaGridDependencySynchronize" is undefined',),
    ),
    Case(
        "the compiler itself crashed (sglang#30936)",
        CAPTURING
        + trace(
            "RuntimeError: ninja exited with status 139\nstdout:\n[1/2] nvcc -c cuda.cu -o cuda_0.o\nFAILED: [code=139] "
            "cuda_0.o\nnvcc -c cuda.cu -o cuda_0.o\nSegmentation fault (core dumped)\nninja: build stopped: subcommand failed."
        ),
        Kind.CRASH,
        ("scheduler TP0 crashed", "ninja exited with status 139: Segmentation fault (core dumped)"),
    ),
    Case(
        "the linker lacks what was compiled (sglang#26545)",
        CAPTURING
        + trace(
            "RuntimeError: ninja exited with status 1\nstdout:\n[1/2] nvcc -c cuda.cu -o cuda_0.o\n[2/2] c++ cuda_0.o -shared "
            "-o jit.so\nFAILED: [code=1] jit.so\nc++ cuda_0.o -shared -o jit.so\n"
            "/usr/bin/ld: cannot find cuda_0.o: No such file or directory\ncollect2: error: ld returned 1 exit status"
        ),
        Kind.CRASH,
        ("ld: cannot find cuda_0.o",),
        ("collect2",),
    ),
    # ---- compilers killed for memory (flashinfer#3634, cudf#8018, flash-attention#1549)
    Case(
        "cicc was killed, says nvcc",
        CAPTURING + ninja("FAILED: [code=1] a.o", "nvcc error   : 'cicc' died due to signal 9 (Kill signal)"),
        Kind.OOM,
        ("host memory ran out in phase graph-capture", "estimated", "'cicc' died due to signal 9"),
        ("GPU memory",),
    ),
    Case(
        "the same, and the kernel says so",
        CAPTURING + ninja("FAILED: [code=137] a.cuda.o", "/usr/local/cuda/bin/nvcc -c a.cu"),
        Kind.OOM,
        ("host memory ran out", "Killed process 999 (cicc)"),
        ("estimated",),
        more={"kernel": ["[12.1] Out of memory: Killed process 999 (cicc) total-vm:9GB, anon-rss:8GB"], "oom_kills": 1},
    ),
    Case(
        "the container's count",
        CAPTURING + ninja("FAILED: [code=137] a.cuda.o", "/usr/local/cuda/bin/nvcc -c a.cu"),
        Kind.OOM,
        ("out-of-memory kills rose by 3",),
        more={"oom_kills": 3},
    ),
    Case(
        "the host's compiler",
        CAPTURING + ninja("c++: fatal error: Killed signal terminated program cc1plus", "compilation terminated."),
        Kind.OOM,
        ("host memory ran out", "cc1plus"),
    ),
    Case(
        "a compiler that found no memory itself",
        CAPTURING + ninja("cc1plus: out of memory allocating 65536 bytes after a total of 9 bytes"),
        Kind.OOM,
        ("host memory ran out in phase graph-capture", "out of memory allocating"),
        ("GPU memory", "estimated"),
    ),
    Case(
        "the build command itself",
        CAPTURING
        + trace(
            "subprocess.CalledProcessError: Command '['/usr/local/cuda/bin/nvcc', '-c']' died with <Signals.SIGKILL: 9>."
        ),
        Kind.OOM,
        ("host memory ran out",),
    ),
    Case(
        "a compiler that crashed by itself is no lack of memory",
        CAPTURING + ninja("nvcc error   : 'ptxas' died due to signal 11 (Invalid memory reference)"),
        Kind.CRASH,
        ("'ptxas' died due to signal 11",),
    ),
    Case(
        "a header that is missing is no lack of memory, whatever else the container lost",
        CAPTURING + ninja("a.cu:1:10: fatal error: x.h: No such file or directory"),
        Kind.CRASH,
        ("x.h: No such file",),
        more={"oom_kills": 2},
    ),
    Case(
        "ninja says no more than that it failed, the kernel says why",
        CAPTURING + ninja("FAILED: [code=1] a.cuda.o"),
        Kind.OOM,
        ("host memory ran out", "Killed process 999 (nvcc)"),
        more={"kernel": ["[12.1] Memory cgroup out of memory: Killed process 999 (nvcc) total-vm:9GB"]},
    ),
    Case(
        "somebody else's compiler was killed, ours had a reason of its own",
        CAPTURING + ninja("nvcc fatal   : Unsupported gpu architecture 'compute_120f'"),
        Kind.CRASH,
        ("Unsupported gpu architecture",),
        ("memory",),
        more={"kernel": ["[12.1] Out of memory: Killed process 999 (cicc) total-vm:9GB"]},
    ),
    # ---- a draft model
    Case(
        "no such draft model",
        LOADED + trace("OSError: /models/m-eagle does not appear to have a file named config.json."),
        Kind.INFRA,
        ("missing or incomplete: the draft model /models/m-eagle",),
        more={"draft_path": "/models/m-eagle"},
    ),
    Case(
        "no such target, though there is a draft model beside it",
        LOADED + trace("RuntimeError: Cannot find any model weights with `/models/m`"),
        Kind.INFRA,
        ("missing or incomplete: /models/m",),
        ("draft",),
        more={"draft_path": "/models/m-eagle"},
    ),
    Case(
        "the draft model lies in the target's folder",
        LOADED + trace("RuntimeError: Cannot find any model weights with `/models/m/draft`"),
        Kind.INFRA,
        ("the draft model /models/m/draft",),
        more={"draft_path": "/models/m/draft"},
    ),
    Case(
        "an error without a name, from the code that reads the draft's configuration (sglang#25428)",
        "server_args=x\n"
        + trace(
            "huggingface_hub.errors.LocalEntryNotFoundError: cannot find the requested files in the local cache",
            ("sglang/srt/arg_groups/speculative_hook.py", "_resolve_speculative_algorithm_alias"),
            ("huggingface_hub/file_download.py", "hf_hub_download"),
        ),
        Kind.INFRA,
        ("the draft model org/eagle",),
        more={"draft_path": "org/eagle"},
    ),
    # ---- errors that say nothing (slime#1998, sglang#28672, sglang#4205)
    Case(
        "custom all-reduce in capture",
        CAPTURING
        + trace(
            "RuntimeError: invalid argument",
            ("sglang/srt/managers/scheduler.py", "run_scheduler_process"),
            ("sglang/srt/distributed/device_communicators/custom_all_reduce.py", "register_graph_buffers"),
            ("torch/_ops.py", "__call__"),
        ),
        Kind.CRASH,
        ("invalid argument (in register_graph_buffers (custom_all_reduce.py))",),
    ),
    Case(
        "its second version, wrapped",
        CAPTURING
        + trace(
            "RuntimeError: Runtime check failed at /w/sgl_kernel/distributed/custom_all_reduce.cuh:37: CUDA error: invalid "
            "argument\n\nDuring handling of the above exception, another exception occurred:\n\n"
            "Traceback (most recent call last):\n"
            f'  File "{PACKAGES}/sglang/srt/managers/scheduler.py", line 4285, in run_scheduler_process\n'
            "    scheduler = Scheduler(\n"
            "Exception: Capture cuda graph failed: Runtime check failed at /w/sgl_kernel/distributed/custom_all_reduce.cuh:37: "
            "CUDA error: invalid argument\nPossible solutions:\n1. disable CUDA graph by --disable-cuda-graph",
            ("sglang/srt/distributed/device_communicators/custom_all_reduce_v2.py", "share_graph_inputs"),
        ),
        Kind.CRASH,
        ("in share_graph_inputs (custom_all_reduce_v2.py)",),
    ),
    Case(
        "printed by native code",
        CAPTURING + "Failed: Cuda error /w/csrc/allreduce/custom_all_reduce.cuh:455 'invalid argument'\n",
        Kind.CRASH,
        ("invalid argument' (in custom_all_reduce.cuh)",),
    ),
    Case(
        "an assertion without a text",
        LOADED + trace("AssertionError", ("sglang/srt/layers/moe/topk.py", "select_experts")),
        Kind.CRASH,
        ("AssertionError (in select_experts (topk.py))",),
    ),
    Case(
        "a first line that only announces the second",
        LOADED + trace("ValueError: The configuration is wrong:\n  page size 1 needs FA3\n  and more"),
        Kind.CRASH,
        ("The configuration is wrong: page size 1 needs FA3",),
    ),
    Case(
        "native code names its own place",
        CAPTURING + f"{BAR}CUDA Error: invalid argument at /w/csrc/moe_align.cu:12\n",
        Kind.CRASH,
        ("(in moe_align.cu)",),
    ),
    Case(
        "older words of the same macro (vllm#5613)",
        CAPTURING + "Failed: /w/csrc/custom_all_reduce.cuh:310 'invalid argument'\n",
        Kind.CRASH,
        ("'invalid argument' (in custom_all_reduce.cuh)",),
    ),
    Case(
        "NCCL names its last error two lines below (nccl#1410)",
        LOADED
        + trace(
            "torch.distributed.DistBackendError: NCCL error in: /pytorch/NCCLUtils.hpp:275, unhandled cuda error (run with "
            "NCCL_DEBUG=INFO for details), NCCL version 2.27.5\nncclUnhandledCudaError: Call to CUDA function failed.\n"
            "Last error:\nCuda failure 1 'invalid argument'"
        ),
        Kind.CRASH,
        ("(last error: Cuda failure 1 'invalid argument')",),
    ),
    Case(
        "a segmentation fault behind a bar, in UCX's words (sglang#6496)",
        CAPTURING
        + f"{BAR}[node:69418:0:69418] Caught signal 11 (Segmentation fault: address not mapped to object at address 0x10000)\n"
        + "==== backtrace (tid:  69418) ====\n",
        Kind.CRASH,
        ("Caught signal 11 (Segmentation fault: address not mapped",),
        exit=-11,
    ),
    Case(
        "torch's watchdog tells of an error that is no timeout (sglang#14193)",
        SERVING
        + "[rank1]:[E1130 10:28:15.281 ProcessGroupNCCL.cpp:2057] [PG ID 2 PG GUID 3 Rank 1] Process group watchdog thread "
        + "terminated with exception: CUDA error: an illegal memory access was encountered\n",
        Kind.CRASH,
        ("an illegal memory access was encountered",),
        ("hung",),
        more={"first_dead": ABORTED},
    ),
    Case(
        "a segmentation fault, and Python's frames below it",
        CAPTURING
        + "Fatal Python error: Segmentation fault\n\nThread 0x0001 (most recent call first):\n"
        + '  File "/usr/lib/python3.12/threading.py", line 320 in wait\n\nCurrent thread 0x0002 (most recent call first):\n'
        + f'  File "{PACKAGES}/torch/_ops.py", line 1116 in __call__\n'
        + f'  File "{PACKAGES}/sglang/srt/distributed/device_communicators/pynccl_wrapper.py", line 373 in ncclAllReduce\n'
        + f'  File "{PACKAGES}/sglang/srt/models/llama.py", line 400 in forward\n\nExtension modules: numpy\n',
        Kind.CRASH,
        ("Segmentation fault (in ncclAllReduce (pynccl_wrapper.py))",),
        exit=-11,
    ),
    Case(
        "an asynchronous error: the frame is chance and is left out",
        SERVING
        + trace(
            "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
            ("sglang/srt/managers/x.py", "f"),
        ),
        Kind.CRASH,
        ("an illegal memory access was encountered",),
        ("x.py",),
    ),
    # ---- assertions on the device (sglang#1279)
    Case(
        "an index on the device, 2,700 threads",
        SERVING
        + "[2026-11-30 10:01:00 TP0] Prefill batch, #new-seq: 1, #new-token: 8192, #cached-token: 0, token usage: 0.01\n"
        + "".join(indexing("srcIndex < srcSelectDimSize", thread=n) for n in range(2700))
        + trace(ASSERTED),
        Kind.CRASH,
        (
            "device-side assert triggered: `srcIndex < srcSelectDimSize` failed (Indexing.cu)",
            "Prefill batch, #new-seq: 1",
        ),
    ),
    Case(
        "a function with templates, an assertion with a text",
        SERVING
        + indexing(
            '-sizes[i] <= index && index < sizes[i] && "index out of bounds"',
            function="operator()<at::native::(anonymous)>(int, char *)::[lambda]",
            file="IndexKernel.cu",
        )
        + trace(ASSERTED),
        Kind.CRASH,
        ("index < sizes[i]", "(IndexKernel.cu)"),
    ),
    Case(
        "nothing is raised after it",
        SERVING + indexing("t >= 0 && t < n_classes", function="nll_loss", file="Loss.cu"),
        Kind.CRASH,
        ("device-side assert: `t >= 0 && t < n_classes` failed (Loss.cu)",),
        more={"first_dead": ABORTED},
    ),
    Case(
        "DeepGEMM's, and the trap that follows",
        SERVING
        + "Assertion failed: /w/deep_gemm/include/deep_gemm/fp8_gemm.cuh:88, condition: shape_n % BLOCK_N == 0\n"
        + trace("torch.AcceleratorError: CUDA error: unspecified launch failure"),
        Kind.CRASH,
        ("unspecified launch failure: `shape_n % BLOCK_N == 0` failed (fp8_gemm.cuh)",),
    ),
    Case(
        "CuTe's (sglang#3513)",
        SERVING + "Out Of Bound Tensor access detected at dim[1]: assert(64 < 63)\n" * 900 + trace(ASSERTED),
        Kind.CRASH,
        ("device-side assert triggered: `assert(64 < 63)` failed",),
    ),
    # ---- SGLang's own watchdog (sglang#7783)
    Case(
        "0.5.6's words",
        SERVING
        + "[2026-11-30 10:06:00 TP3] Watchdog timeout (self.watchdog_timeout=300)\n"
        + "[2026-11-30 10:06:00 TP3] self.cur_batch.batch_size()=109, self.cur_batch.reqs=[Req(rid=1)]\n"
        + SIGQUIT,
        Kind.HANG,
        ("its own watchdog ended it after 300 s", "TP3"),
    ),
    Case(
        "another process of SGLang 0.5.20",
        SERVING
        + "[2026-11-30 10:06:00] DataParallelController watchdog timeout (self.watchdog_timeout=300.0, self.soft=False)\n",
        Kind.HANG,
        ("DataParallelController watchdog timeout",),
    ),
    Case(
        "a soft watchdog is no end: the kernel's word counts",
        SERVING
        + "[2026-11-30 10:06:00] TokenizerManager watchdog timeout (self.watchdog_timeout=300, self.soft=True)\n",
        Kind.OOM,
        ("host memory ran out",),
        ("watchdog",),
        more={
            "kernel": ["[12.1] Out of memory: Killed process 31 (sglang::schedul) total-vm:9GB"],
            "first_dead": "sglang::scheduler_TP0 (pid 31), signal 9",
        },
    ),
    Case(
        "a soft watchdog, and nothing else",
        SERVING + "[2026-11-30 10:06:00] Scheduler watchdog timeout (self.watchdog_timeout=10, self.soft=True)\n",
        Kind.CRASH,
        ("no proof of an out-of-memory",),
        ("watchdog",),
    ),
    Case(
        "a heap that broke while an error was handled is not the cause",
        SERVING + trace("RuntimeError: shape '[1, 64]' is invalid for input of size 12") + "free(): invalid pointer\n",
        Kind.CRASH,
        ("is invalid for input of size 12",),
        ("free()",),
    ),
    Case(
        "a heap that broke, and nothing else",
        SERVING + "double free or corruption (!prev)\n",
        Kind.CRASH,
        ("double free or corruption",),
        more={"first_dead": ABORTED},
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_reason_is_found(case: Case) -> None:
    failure = judge(case.log, exit=case.exit, **case.more)
    assert failure.kind is case.kind, failure.message
    for text in case.says:
        assert text in failure.message
    for text in case.never:
        assert text not in failure.message
    assert len(failure.message) < 1500


def signatures(*logs: str) -> set[str]:
    return {judge(log, first_dead=ABORTED).signature for log in logs}


def test_deaths_behind_a_bar_are_as_different_as_their_texts() -> None:
    texts = ("CUDA error: no kernel image is available", "CUDA error: misaligned address", "Segmentation fault")
    assert len(signatures(*(f"{CAPTURING}{BAR}{text}\n" for text in texts))) == 3
    other = BAR.replace("bs=32 avail_mem=10.30", "bs=8 avail_mem=9.75").replace("00:00<?, ?", "00:09<00:10,  1.30")
    assert len(signatures(*(f"{CAPTURING}{bar}{texts[0]}\n" for bar in (BAR, other)))) == 1


BUILDS = (
    ninja("nvcc fatal   : Unsupported gpu architecture 'compute_120f'"),
    ninja("/x/a.h:49:10: fatal error: curand_kernel.h: No such file or directory"),
    ninja('/x/a.cuh(123): error: identifier "__nv_fp4_e2m1" is undefined'),
    trace(
        "RuntimeError: Internal Triton PTX codegen error\nptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'"
    ),
)


def test_builds_that_fail_for_different_reasons_are_different_failures() -> None:
    assert len(signatures(*(CAPTURING + build for build in BUILDS))) == len(BUILDS)


def test_a_build_that_fails_at_another_place_for_the_same_reason_is_the_same_failure() -> None:
    moved = (
        BUILDS[1].replace("/x/a.h:49:10", "/home/me/cutlass/b.h:7:2").replace("/c/cached_ops", "/home/me/.cache/ops")
    )
    assert len(signatures(CAPTURING + BUILDS[1], CAPTURING + moved)) == 1


@pytest.mark.parametrize(
    ("build", "pattern"),
    list(
        zip(
            BUILDS,
            (
                "Unsupported gpu architecture 'compute_120f'",
                "curand_kernel.h: No such file or directory",
                'identifier "__nv_fp4_e2m1" is undefined',
                "'sm_121a' is not defined for option 'gpu-name'",
            ),
            strict=True,
        )
    ),
)
def test_compare_proposes_the_compilers_words(build: str, pattern: str) -> None:
    failure = judge(CAPTURING + build)
    proposed = salient(failure.to_json())
    assert pattern in proposed
    assert "Ninja" not in proposed
    assert proposed in failure.text


def test_compare_proposes_the_reason_and_never_a_line_that_came_last_by_chance() -> None:
    asserted = judge(SERVING + indexing("srcIndex < srcSelectDimSize") + "Decode batch, nothing wrong\n", exit=-6)
    assert "srcIndex < srcSelectDimSize" in salient(asserted.to_json())
    killed = judge(CAPTURING + f"{BAR}\n", first_dead="sglang::scheduler_TP0 (pid 31), signal 7")
    assert salient(killed.to_json()) == "sglang::scheduler_TP"
    for failure in (asserted, killed):
        assert salient(failure.to_json()) in failure.text


def test_a_build_without_a_reason_is_called_as_before() -> None:
    assert judge(CAPTURING + ninja()).signature.startswith("RuntimeError: Ninja build failed. Ninja output: #")


def test_errors_that_say_nothing_differ_by_their_place_and_not_by_its_line() -> None:
    def log(line: int, name: str) -> str:
        error = trace("RuntimeError: CUDA error: invalid argument", ("sglang/srt/layers/x.py", name))
        return CAPTURING + error.replace("line 7", f"line {line}")

    assert len(signatures(log(7, "f"), log(8, "f"))) == 1
    assert len(signatures(log(7, "f"), log(7, "g"))) == 2


def test_the_assertions_of_all_threads_are_one_signature() -> None:
    def log(first: int) -> str:
        return SERVING + indexing("srcIndex < srcSelectDimSize", thread=first) * 3 + trace(ASSERTED)

    assert len(signatures(log(1), log(64))) == 1
    other = SERVING + indexing("index >= 0", thread=1) + trace(ASSERTED)
    assert len(signatures(log(1), other)) == 2


def test_a_watchdog_is_the_same_failure_in_old_and_new_words() -> None:
    old = SERVING + "[2026-11-30 10:06:00 TP3] Watchdog timeout (self.watchdog_timeout=300)\n"
    new = (
        SERVING + "[2026-11-30 10:06:00 TP1] Scheduler watchdog timeout (self.watchdog_timeout=600, self.soft=False)\n"
    )
    assert len(signatures(old, new)) == 1


def test_a_collective_is_the_same_failure_whichever_rank_gives_up_first() -> None:
    assert len(signatures(SERVING + collective(rank=1), SERVING + collective(rank=6))) == 1
    assert len(signatures(SERVING + collective(), SERVING + collective(op="ALLREDUCE"))) == 2


DRAFT = (
    CAPTURING
    + "[2026-11-30 10:00:40 TP0] Capture cuda graph end. Time elapsed: 9.00 s. mem usage=1.00 GB. avail mem=8.00 GB\n"
    + "[2026-11-30 10:00:41 TP0] Init torch distributed begin.\n"
    + "[2026-11-30 10:00:41 TP0] Load weight begin. avail mem=8.00 GB\n"
)


def stalled(phase: Phase) -> Stall:
    return Stall(phase=phase, why="stall", seconds=190.0, quiet=180.0, limit=180.0, last="disk reads")


def test_a_hang_while_the_draft_model_is_loaded_says_so() -> None:
    failure = judge(DRAFT, exit=None, stall=stalled(Phase.WEIGHTS))
    assert (failure.kind, failure.phase) == (Kind.HANG, Phase.WEIGHTS)
    assert "in phase weights, of the draft model" in failure.message
    target = judge(DRAFT[: DRAFT.index("[2026-11-30 10:00:20")], exit=None, stall=stalled(Phase.WEIGHTS))
    assert "draft" not in target.message
    assert target.signature != failure.signature


def test_a_hang_of_a_silent_server_names_no_phase() -> None:
    failure = judge("nothing of use\n", exit=None, stall=stalled(Phase.IMPORT), blind="--log-level warning")
    assert (failure.kind, failure.phase) == (Kind.HANG, Phase.IMPORT)
    assert "--log-level warning hides the lines that tell the phase" in failure.message
    assert "importing" not in failure.message


@given(
    st.sampled_from(
        [
            words.after_bar,
            words.native_error,
            words.heap_error,
            words.device_assertion,
            words.watchdog_end,
            words.collective_timeout,
            words.says_nothing,
            words.is_build_heading,
            lambda line: words.build_reason("Ninja build failed", [line]),
            lambda line: words.build_reason("CompilationError: at 1:0:", [line]),
        ]
    ),
    st.lists(
        st.one_of(
            st.text(max_size=20),
            st.sampled_from(
                ["[00:00<?, ?it/s]", "Assertion `", "` failed", "watchdog timeout (", "error: ", "x.cu:1: "]
            ),
        ),
        max_size=12,
    ),
    st.integers(1, 3000),
)
def test_any_line_can_be_read(read: object, parts: list[str], times: int) -> None:
    read("".join(parts) * min(times, 20_000 // (len("".join(parts)) + 1) + 1))  # type: ignore[operator]
