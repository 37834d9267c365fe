"""Simulated SGLang servers: real process trees with real sockets, for fault injection, scale and a first try.

`python -m pytest_gpuserve.sim.server <SGLang's arguments>` behaves as `sglang serve` does, in seconds and without a
GPU. Its behaviour comes from `GPUSERVE_SIM_BEHAVIOUR` (see `behaviour`), its GPUs from `GPUSERVE_SIM_DIR`.
"""

SGLANG_VERSION = "0.5.23"
"""The SGLang whose arguments, log lines and HTTP API are imitated."""
