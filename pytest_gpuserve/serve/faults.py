"""Texts that tell whose fault it was: the machine's, the memory's, or the GPU's own. Pure tables, one place."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["KERNEL", "compiler_killed", "fault_of_gpu", "fault_of_machine", "killed_for_memory", "memory_of"]


def _any(*patterns: str) -> re.Pattern[str]:
    return re.compile("|".join(patterns))


_MACHINE: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        _any(r"No module named '?sglang'?(?:$|\W)"),
        "this Python has no SGLang; name the interpreter of the environment under test with --gpu-server-python",
    ),
    (
        _any(r"No space left on device", r"\[Errno 28\]", r"Disk quota exceeded"),
        "the disk is full; free some space",
    ),
    (
        _any(
            r"Repo id must be in the form",
            r"is not a local folder and is not a valid model identifier",
            r"LocalEntryNotFoundError|RepositoryNotFoundError|GatedRepoError|OfflineModeIsEnabled",
            r"couldn't connect to 'https://huggingface\.co'|Cannot send a request to the Hub",
            r"Cannot find any model weights with",
            r"does not appear to have a file named config\.json",
            r"Unrecognized model in",
        ),
        "the model is missing or incomplete: {model}; nothing is ever downloaded",
    ),
    (
        _any(
            r"CUDA driver version is insufficient|NVIDIA driver on your system is too old|Found no NVIDIA driver",
            r"forward compatibility was attempted|cudaErrorSystemDriverMismatch|[Dd]river/library version mismatch",
            r"no CUDA-capable device|CUDA unknown error|system not yet initialized|busy or unavailable",
            r"NVML_ERROR|NVML Shared Library|Unable to determine the device handle|Driver Not Loaded",
            r"fallen off the bus|uncorrectable ECC",
        ),
        "the GPU or its driver is at fault; look at nvidia-smi",
    ),
)
_GPU_MEMORY = _any(
    r"OutOfMemoryError|CUDA out of memory|CUDA error: out of memory|Cuda failure.*out of memory",
    r"cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|CUBLAS_STATUS_ALLOC_FAILED",
    r"[Ff]ailed to C(?:UDA|uda) [mc]alloc",
    r"Not enough memory\. Please try to increase --mem-fraction-static|Loaded weights leave no GPU memory",
)
_HOST_MEMORY = _any(
    r"^MemoryError|std::bad_alloc|Cannot allocate memory|\[Errno 12\]",
    r"virtual memory exhausted|out of memory allocating \d+ bytes|LLVM ERROR: out of memory",
    r"DefaultCPUAllocator: (?:not enough|can't allocate) memory",
    r"[Ii]nsufficient shared memory|unable to (?:open|mmap) shared memory",
)
_KILLED = _any(r"[Oo]ut of memory: Kill(?:ed)? process (\d+) \(([^)]*)\)")
_COMPILERS = (
    *("nvcc", "cicc", "ptxas", "cudafe++", "nvlink", "fatbinary", "cc1plus", "cc1", "c++", "g++", "gcc", "clang", "ld"),
    *("ninja", "x86_64-linux-gnu-", "aarch64-linux-g"),
)
_XID = _any(r"NVRM: Xid .*?: (\d+)")
# Xids that tell of the GPU, its memory, its link or its firmware; the others (13, 31, 43, 45 …) tell of the program.
_SICK = frozenset({"48", "63", "64", "74", "79", "92", "94", "95", "119", "120", "121", "140", "154"})
# Which kernel messages are worth keeping.
KERNEL = _any(
    r"NVRM|nvidia|Xid|[Oo]ut of memory|oom[-_]kill|oom_reaper|segfault|general protection|traps:|hung_task|"
    r"blocked for more than|I/O error|EXT4-fs error|AER:|Machine Check|mce:"
)


def fault_of_machine(text: str, model: str) -> str | None:
    """What a person should hear if `text` blames the machine, its disk, its driver, its Python or the model's files."""
    for pattern, said in _MACHINE:
        if pattern.search(text):
            return said.format(model=model or "see the log")
    return None


def fault_of_gpu(kernel: Sequence[str]) -> str | None:
    """The first kernel message that says that a GPU is sick, not that a program did something wrong."""
    return next((line.strip() for line in kernel if (xid := _XID.search(line)) and xid[1] in _SICK), None)


def memory_of(text: str) -> str | None:
    """`GPU` or `host`, if `text` says that its memory ran out."""
    if _GPU_MEMORY.search(text):
        return "GPU"
    return "host" if _HOST_MEMORY.search(text) else None


def killed_for_memory(kernel: Sequence[str], pid: str | None) -> str | None:
    """The kernel message that says that one of ours was killed to free memory. Pids differ inside a container, so a
    process named like ours is believed too.
    """
    for line in kernel:
        if (killed := _KILLED.search(line)) and (killed[1] == pid or killed[2].startswith(("sglang", "python"))):
            return line.strip()
    return None


def compiler_killed(kernel: Sequence[str]) -> str | None:
    """The kernel message that says that a compiler was killed to free memory."""
    for line in kernel:
        if (killed := _KILLED.search(line)) and killed[2].startswith(_COMPILERS):
            return line.strip()
    return None
