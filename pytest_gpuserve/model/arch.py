"""GPU architectures by compute capability.

The word "Blackwell" is never used as a name: SM100, SM103, SM120 and SM121 are different things, and every project
that had one name for them got a check wrong (flashinfer#3170, sglang#34327).
"""

from __future__ import annotations

import re

__all__ = ["CPU", "arch_of_capability", "family_of", "is_arch", "matches_arch"]

CPU = "cpu"
_ARCH = re.compile(r"sm(\d{2,3})")
_FAMILY = re.compile(r"sm(\d{1,2})x")


def arch_of_capability(major: int, minor: int) -> str:
    """`(12, 0)` → `"sm120"`, NVML's `nvmlDeviceGetCudaComputeCapability`."""
    return f"sm{major * 10 + minor}"


def is_arch(name: str) -> bool:
    """True for `cpu` and `sm90`-like names, not for families."""
    return name == CPU or _ARCH.fullmatch(name) is not None


def family_of(arch: str) -> str:
    """`sm121` → `sm12x`; `cpu` is its own family."""
    return arch if arch == CPU else f"{arch[:-1]}x"


def matches_arch(wanted: str, arch: str) -> bool:
    """True if `arch` is `wanted` or belongs to the family `wanted`."""
    if _FAMILY.fullmatch(wanted):
        return family_of(arch) == wanted
    return wanted == arch
