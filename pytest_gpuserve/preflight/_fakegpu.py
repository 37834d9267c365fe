"""A GPU that is not there, as far as SGLang's argument logic looks. Runs inside the environment under test.

No kernel is ever called: what SGLang asks while it parses and resolves arguments are capabilities, memory sizes, and
whether a kernel package can be imported. Packages that need a driver to load are stood in for by modules that have
every name; which ones decides the answer (without a `flashinfer` module SM120's default becomes `triton`), so they are
the ones that this SGLang's own requirements would have installed on the target machine.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import types
from typing import Any

__all__ = ["ARCHS", "KERNELS", "FakeGpu", "Unpretended", "define_torchvision_ops", "kernels_required", "stand_in"]

# arch: capability, name, memory (GiB), SMs, shared memory a block may opt into and an SM has (bytes).
ARCHS: dict[str, tuple[tuple[int, int], str, int, int, int, int]] = {
    "sm80": ((8, 0), "NVIDIA A100-SXM4-80GB", 80, 108, 166912, 167936),
    "sm86": ((8, 6), "NVIDIA A10", 24, 72, 101376, 102400),
    "sm89": ((8, 9), "NVIDIA L40S", 48, 142, 101376, 102400),
    "sm90": ((9, 0), "NVIDIA H100 80GB HBM3", 80, 132, 232448, 233472),
    "sm100": ((10, 0), "NVIDIA B200", 180, 148, 232448, 233472),
    "sm103": ((10, 3), "NVIDIA B300 SXM6 AC", 270, 148, 232448, 233472),
    "sm120": ((12, 0), "NVIDIA RTX PRO 6000 Blackwell Server Edition", 96, 188, 101376, 102400),
    "sm121": ((12, 1), "NVIDIA GB10", 119, 48, 101376, 102400),
}

# Distribution that SGLang requires → modules that its wheel installs (read from the wheels; sglang-kernel brings
# triton_kernels, and until 0.4.1 deep_gemm, which later is a distribution of its own).
KERNELS: dict[str, tuple[str, ...]] = {
    "sglang-kernel": ("sgl_kernel", "triton_kernels", "deep_gemm"),
    "sgl-kernel": ("sgl_kernel", "triton_kernels", "deep_gemm"),
    "flashinfer-python": ("flashinfer",),
    "flash-attn-4": ("flash_attn",),
    "sgl-deep-gemm": ("deep_gemm",),
    "sgl-flash-mla": ("flash_mla",),
    "nvidia-cutlass-dsl": ("cutlass",),
    "quack-kernels": ("quack",),
    "tilelang": ("tilelang",),
    "tokenspeed-mla": ("tokenspeed_mla",),
    "humming-kernels": ("humming",),
    "helion": ("helion",),
    "torch-memory-saver": ("torch_memory_saver",),
}


class Unpretended(AttributeError):
    """SGLang asked the fake GPU for something it has no answer to: the preflight is unavailable, not the cell bad."""


class _Properties(types.SimpleNamespace):
    def __getattr__(self, name: str) -> Any:
        raise Unpretended(f"the pretended GPU's properties have no {name!r}")


class FakeGpu:
    """`install()` answers torch.cuda and nvidia-smi as `count` GPUs of `arch` would; `functions` says what it set."""

    installed = False

    def __init__(self, arch: str, *, cuda: str, driver: str, count: int) -> None:
        self.arch, self.cuda, self.driver, self.count = arch, cuda, driver, count
        self.capability, self.name, self.memory_gib, self.sms, self.block_smem, self.sm_smem = ARCHS[arch]
        self.functions: list[str] = []

    def describe(self) -> dict[str, Any]:
        """For the record."""
        return {
            "name": self.name,
            "capability": f"{self.capability[0]}.{self.capability[1]}",
            "memory_gib": self.memory_gib,
            "sms": self.sms,
            "count": self.count,
            "cuda": self.cuda,
            "driver": self.driver,
        }

    def install(self) -> None:
        """Before SGLang is imported: it reads capabilities into module globals."""
        import torch

        FakeGpu.installed = True
        major, minor = self.capability
        total = self.memory_gib << 30
        properties = _Properties(
            name=self.name,
            major=major,
            minor=minor,
            total_memory=total,
            multi_processor_count=self.sms,
            is_integrated=self.arch == "sm121",
            is_multi_gpu_board=False,
            uuid="GPU-00000000-0000-0000-0000-000000000000",
            shared_memory_per_block=49152,
            shared_memory_per_block_optin=self.block_smem,
            shared_memory_per_multiprocessor=self.sm_smem,
            regs_per_multiprocessor=65536,
            max_threads_per_multi_processor=2048 if major in (8, 9, 10) and minor == 0 else 1536,
            warp_size=32,
            L2_cache_size=50 << 20,
            gcnArchName="",
        )
        answers: dict[str, Any] = {
            "is_available": lambda: True,
            "is_initialized": lambda: True,  # else SGLang asks NVML, which on a GPU machine would answer for real
            "init": lambda: None,
            "_lazy_init": lambda: None,
            "device_count": lambda: self.count,
            "current_device": lambda: 0,
            "set_device": lambda device: None,  # noqa: ARG005
            "synchronize": lambda device=None: None,  # noqa: ARG005
            "empty_cache": lambda: None,
            "get_device_capability": lambda device=None: self.capability,  # noqa: ARG005
            "get_device_properties": lambda device=None: properties,  # noqa: ARG005
            "get_device_name": lambda device=None: self.name,  # noqa: ARG005
            "get_arch_list": lambda: [f"sm_{major}{minor}"],
            "mem_get_info": lambda device=None: (total * 98 // 100, total),  # noqa: ARG005
            "is_bf16_supported": lambda including_emulation=True: True,  # noqa: ARG005
        }
        for name, answer in answers.items():
            self._set(torch.cuda, name, answer)
        self._set(torch.version, "cuda", self.cuda)
        self._set(torch.version, "hip", None)
        self._set(subprocess, "run", self._run(subprocess.run))
        # NVML would answer for the real machine, or fail in its own way where there is none.
        sys.modules["pynvml"] = None  # type: ignore[assignment]
        self.functions.append("pynvml (hidden)")

    def _set(self, owner: Any, name: str, value: Any) -> None:
        setattr(owner, name, value)
        self.functions.append(f"{owner.__name__}.{name}")

    def _run(self, real: Any) -> Any:
        # A GB10's memory is the host's: its nvidia-smi has no figure for it.
        answers = {
            "memory.total": "[N/A]" if self.arch == "sm121" else str(self.memory_gib * 1024),
            "compute_cap": f"{self.capability[0]}.{self.capability[1]}",
            "driver_version": self.driver,
            "name": self.name,
        }

        def run(command: Any, *args: Any, **kwargs: Any) -> Any:
            words = command.split() if isinstance(command, str) else list(command)
            if not words or words[0].rsplit("/", 1)[-1] != "nvidia-smi":
                return real(command, *args, **kwargs)
            queries = [word.split("=", 1)[1] for word in words if str(word).startswith("--query-gpu=")]
            if not queries or queries[0] not in answers:
                raise FileNotFoundError(2, f"the pretended nvidia-smi cannot answer {words[1:]}", "nvidia-smi")
            text = "\n".join([answers[queries[0]]] * self.count) + "\n"
            as_text = any(kwargs.get(key) for key in ("text", "universal_newlines", "encoding", "errors"))
            return subprocess.CompletedProcess(command, 0, text if as_text else text.encode(), "" if as_text else b"")

        return run


def kernels_required(arch: str, distribution: str = "sglang") -> dict[str, str]:
    """{module: version} of the kernel packages that the installed SGLang requires: installed, else as it pins them.

    On a CPU the only one is sgl_kernel, in a build of its own, and a real one is used where it is here.
    """
    found: dict[str, str] = {}
    for text in importlib.metadata.requires(distribution) or []:
        requirement, _, marker = text.partition(";")
        name = re.match(r"[A-Za-z0-9._-]+", requirement)
        canonical = re.sub(r"[-_.]+", "-", name.group()).lower() if name else ""
        if canonical not in KERNELS or "extra" in marker:
            continue
        pinned = re.search(r"[=>]=\s*([0-9][\w.+!]*)", requirement)
        try:
            version = importlib.metadata.version(canonical)
        except importlib.metadata.PackageNotFoundError:
            version = pinned.group(1) if pinned else "0"
        for module in KERNELS[canonical]:
            found.setdefault(module, version)
    if arch == "cpu":
        here = importlib.util.find_spec("sgl_kernel") is not None
        return {} if here else {"sgl_kernel": found.get("sgl_kernel", "0")}
    return found


class _Anything:
    """A name of a stand-in module: callable, a decorator, a base class, empty when iterated; nothing more is needed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else _Anything()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise Unpretended(name)
        return _Anything()

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return (object,)

    def __iter__(self) -> Any:
        return iter(())


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, versions: dict[str, str], touched: set[str]) -> None:
        self.versions, self.touched = versions, touched

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:  # noqa: ARG002
        if fullname.split(".", 1)[0] in self.versions:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        versions, touched = self.versions, self.touched

        class StandIn(types.ModuleType):
            def __getattr__(self, name: str) -> Any:
                if name == "__version__":
                    return versions[self.__name__.split(".", 1)[0]]
                if name.startswith("__"):
                    raise AttributeError(name)
                touched.add(f"{self.__name__}.{name}")
                return _Anything()

        module = StandIn(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run: the names appear when they are asked for."""


def stand_in(versions: dict[str, str]) -> set[str]:
    """Let every module in `versions`, with all its submodules, be imported; returns the (growing) set of names read."""
    touched: set[str] = set()
    sys.meta_path.insert(0, _StandIns(versions, touched))
    return touched


def define_torchvision_ops() -> str | None:
    """Define the operators that keep the CUDA build of torchvision from being imported beside a CPU torch.

    Returns what was defined, for the record, or None where nothing is missing.
    """
    import torch

    if importlib.util.find_spec("torchvision") is None or "+cpu" not in torch.__version__:
        return None
    if "+cpu" in importlib.metadata.version("torchvision") or hasattr(torch.ops.torchvision, "nms"):
        return None
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    define_torchvision_ops.kept = library  # type: ignore[attr-defined]  # the definitions live as long as it does
    return "torch.ops.torchvision.nms, qnms (schema only)"
