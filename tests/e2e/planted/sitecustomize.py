"""Put on PYTHONPATH of a real server: makes one page of every cached prefix stale, as a lost KV write would.

Nothing of SGLang's files is touched: its prefix cache is wrapped when it is imported. The page in the middle of a
matched prefix gets the keys and values of the page before it, in every layer.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path

_MODULES = {
    "sglang.srt.mem_cache.unified_radix_cache": "UnifiedRadixCache",
    "sglang.srt.mem_cache.radix_cache": "RadixCache",
}
_PAGE = int(os.environ.get("PLANTED_STALE_PAGE", "0"))


def _buffers(pool):
    for name in ("k_buffer", "v_buffer", "kv_buffer"):
        yield from getattr(pool, name, None) or ()


def _spoil(cache, indices) -> None:
    """The page in the middle of `indices` becomes a copy of the one before it."""
    middle = len(indices) // 2 // _PAGE * _PAGE
    if middle >= _PAGE:
        stale, other = indices[middle : middle + _PAGE], indices[middle - _PAGE : middle]
        for buffer in _buffers(cache.token_to_kv_pool_allocator.get_kvcache()):
            buffer[stale] = buffer[other]


def _wrap(cls) -> None:
    # From 0.5.2x on a match names a node, and its slots are read when the request is given its own.
    name = "prefix_device_indices" if hasattr(cls, "prefix_device_indices") else "match_prefix"
    original = getattr(cls, name)

    def wrapped(self, *args, **kwargs):
        found = original(self, *args, **kwargs)
        _spoil(self, getattr(found, "device_indices", found))
        return found

    setattr(cls, name, wrapped)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name not in _MODULES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            _wrap(getattr(module, _MODULES[name]))

        spec.loader.exec_module = exec_module
        return spec


def _next_sitecustomize() -> None:
    """Another one further down the path (the CPU engine's shim) still has its say."""
    here = Path(__file__).resolve().parent
    for folder in sys.path:
        file = Path(folder or ".") / "sitecustomize.py"
        if file.exists() and file.resolve().parent != here:
            spec = importlib.util.spec_from_file_location("planted_next", file)
            # Held for the life of the process, as Python holds the one it finds first.
            module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return


_next_sitecustomize()
if _PAGE:
    sys.meta_path.insert(0, _Finder())
