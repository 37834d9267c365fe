"""Stands in for the CPU build of `sgl_kernel`, which is not on PyPI (its wheels there are CUDA's).

Holds what a small Llama on `--attention-backend torch_native` needs, in plain torch. Anything else raises with its
name when called, so that a test can never pass on an operator that does nothing.
"""

import torch

__version__ = "99.0.0+cpu.shim"

_library = torch.library.Library("sgl_kernel", "FRAGMENT")
_library.define("init_cpu_threads_env(str cpu_ids) -> str")
_library.impl(
    "init_cpu_threads_env", lambda cpu_ids: f"threads not bound to {cpu_ids} (shim)", "CompositeExplicitAutograd"
)


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, starts, ends, cache_locations, pool_length):
    """Write each request's slice of `cache_locations` into its row of `req_to_token`."""
    at = 0
    for request, start, end in zip(req_pool_indices.tolist(), starts.tolist(), ends.tolist(), strict=True):
        req_to_token[request, start:end] = cache_locations[at : at + end - start].to(req_to_token.dtype)
        at += end - start


def copy_all_layer_kv_cache_cpu(key_buffers, value_buffers, target, source, *_rest):
    """Copy cache rows `source` to `target` in every layer."""
    for buffer in (*key_buffers, *value_buffers):
        buffer[target] = buffer[source]


class _Absent:
    def __init__(self, name):
        self.name = name

    def __call__(self, *_args, **_kwargs):
        raise NotImplementedError(f"sgl_kernel.{self.name} is not in the CPU shim")


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Absent(name)
