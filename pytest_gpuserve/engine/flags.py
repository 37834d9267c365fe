"""SGLang's flags by name: which spellings are one flag, which are not a matrix's to set, how many GPUs they take.

Read in the option tables of 0.5.6, 0.5.10.post1, 0.5.17 and 0.5.23. Flags that were renamed from one release to another
(`nsa-decode-backend`, `dsa-decode-backend`) are not here: each exists only in some releases, so they are two flags.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpuserve.model.cell import FlagValue

__all__ = [
    "PARALLEL_SIZES",
    "canonical",
    "canonical_fact",
    "refusal",
    "size_problem",
    "tensor_parallel",
    "told_elsewhere",
]

# Another spelling → the name that every release has. `tp`, `dp`, `pp` are no options: argparse takes the first two as
# abbreviations, and calls `--pp` ambiguous.
_SPELLINGS = {
    "tp": "tp-size",
    "tensor-parallel-size": "tp-size",
    "pp": "pp-size",
    "pipeline-parallel-size": "pp-size",
    "dp": "dp-size",
    "data-parallel-size": "dp-size",
    "ep": "ep-size",
    "expert-parallel-size": "ep-size",
    "attention-data-parallel-size": "attn-dp-size",
    "attention-context-parallel-size": "attn-cp-size",
    "moe-data-parallel-size": "moe-dp-size",
    "decode-context-parallel-size": "dcp-size",
    "model": "model-path",
    "nccl-init-addr": "dist-init-addr",
    "speculative-algo": "speculative-algorithm",
    "speculative-draft-model": "speculative-draft-model-path",
    "enable-hicache": "enable-hierarchical-cache",
    "hierarchical-sparse-attention-extra-config": "hisparse-config",
    "grpc-http-sidecar-port": "smg-http-sidecar-port",
}

_SET_HERE = "is set by gpuserve itself for each start"
_ONE_NODE = "is for servers of several nodes; gpuserve starts servers of one node"
_THE_LEASE = "chooses GPUs; gpuserve chooses them, and a server sees only those that it has leased, from index 0 on"
_ONE_ADDRESS = "names one address for every server of the matrix; of two servers at once the second would find it taken"
_PLAIN_HTTP = "makes the server speak TLS; gpuserve asks it over plain HTTP on the loopback address"
_NO_HTTP = "takes away the HTTP server that every check asks"
_A_PAIR = "makes the server one half of a pair; gpuserve starts single servers"
# Why a matrix cannot set the flag, by its canonical name.
_REFUSED = {
    **dict.fromkeys(("model-path", "host", "port", "nccl-port", "api-key"), _SET_HERE),
    "admin-api-key": "shuts gpuserve out of the requests that end a server's work; each start has a key of its own",
    **dict.fromkeys(("nnodes", "node-rank"), _ONE_NODE),
    **dict.fromkeys(("base-gpu-id", "gpu-id-step"), _THE_LEASE),
    **dict.fromkeys(
        (
            "dist-init-addr",
            "grpc-port",
            "smg-http-sidecar-port",
            "engine-info-bootstrap-port",
            "disaggregation-bootstrap-port",
            "encoder-bootstrap-port",
        ),
        _ONE_ADDRESS,
    ),
    "gated-launch-port": "stops the start until somebody sends a request to that port; gpuserve sends none",
    "config": "reads more flags from a file, which neither this check nor the run's record would see; write them here",
    **dict.fromkeys(
        ("ssl-keyfile", "ssl-certfile", "ssl-ca-certs", "ssl-keyfile-password", "enable-ssl-refresh"), _PLAIN_HTTP
    ),
    **dict.fromkeys(("grpc-mode", "smg-grpc-mode"), _NO_HTTP),
    **dict.fromkeys(("disaggregation-mode", "encoder-only"), _A_PAIR),
    "use-ray": "starts processes through Ray, outside of the server's own session, where gpuserve cannot end them",
}

# What GPUs are counted by, each 1 unless it is set. The first three multiply; the others divide the tensor parallel
# group (`compute_world_size` and `handle_context_parallelism` in SGLang 0.5.23).
PARALLEL_SIZES = (
    "tp-size",
    "pp-size",
    "dp-size",
    "ep-size",
    "moe-dp-size",
    "attn-dp-size",
    "attn-cp-size",
    "dcp-size",
)


def canonical(name: str) -> str:
    """The one name of a flag that SGLang takes under several: `tensor-parallel-size` and `tp` are `tp-size`."""
    return _SPELLINGS.get(name, name)


def canonical_fact(fact: str) -> str:
    """The same for a fact of a `when`: `flag.tp` is `flag.tp-size`; any other fact stays as it is."""
    return f"flag.{canonical(fact[5:])}" if fact.startswith("flag.") else fact


def refusal(name: str) -> str | None:
    """Why no matrix can set this flag, as the end of a sentence that begins with its name; None if one can."""
    return _REFUSED.get(canonical(name))


def tensor_parallel(flags: Mapping[str, FlagValue], gpus: int) -> int:
    """The `--tp-size` with which the server takes `gpus` GPUs: the one that is set, else what the other sizes leave."""
    if "tp-size" in flags:
        return _size(flags, "tp-size")
    return max(gpus // _replicas(flags), 1)


def size_problem(flags: Mapping[str, FlagValue], gpus: int) -> str:
    """Why a server with these flags (canonical names) would not take exactly `gpus` GPUs; empty if it would.

    Data-parallel replicas and pipeline stages multiply tensor parallelism. Attention data parallelism (`attn-dp-size`,
    or `dp-size` with `enable-dp-attention`), expert and context parallelism work inside the tensor parallel group.
    """
    unclear = [name for name in PARALLEL_SIZES if name in flags and _size(flags, name) < 1]
    if unclear:
        return f"{unclear[0]} must be a whole number of at least 1, got {flags[unclear[0]]!r}"
    tensor, replicas = tensor_parallel(flags, gpus), _replicas(flags)
    taken = tensor * replicas
    shown = _product(flags, tensor)
    if "tp-size" not in flags and taken != gpus:
        return f"{_multiplying(flags)} does not divide the model's gpus: {gpus}"
    if taken > gpus:
        return f"{shown} takes {taken} GPUs, more than the model's gpus: {gpus}"
    if taken < gpus:
        return f"{shown} takes {taken} of the model's gpus: {gpus}, and the others would be idle"
    for names in (("ep-size", "moe-dp-size"), (*_attention(flags), "attn-cp-size"), ("dcp-size",)):
        inside = 1
        for name in names:
            inside *= _size(flags, name)
        if tensor % inside:
            sizes = " x ".join(f"{name} {_size(flags, name)}" for name in names if _size(flags, name) > 1)
            return f"{sizes} is inside the tensor parallel group, and does not divide its tp-size {tensor}"
    return ""


def told_elsewhere(name: str, flags: Mapping[str, FlagValue], resolved: Mapping[str, object]) -> bool:
    """True if SGLang reports what this flag asked for under a newer name, so that its own says nothing of it.

    In 0.5.23 (not in 0.5.17) `--dp-size N --enable-dp-attention` resolves to `attn_dp_size` N and `dp_size` 1.
    """
    return name == "dp-size" and _attention(flags) == ("dp-size",) and resolved.get("attn_dp_size") == flags[name]


def _size(flags: Mapping[str, FlagValue], name: str) -> int:
    """The size, 1 where it is not set (`false` leaves a flag out), 0 where it is no whole number."""
    value = flags.get(name, 1)
    if value is False:
        return 1
    text = str(value)
    return int(text) if not isinstance(value, bool) and text.isascii() and text.isdigit() else 0


def _attention(flags: Mapping[str, FlagValue]) -> tuple[str, ...]:
    """The flags that count attention's data-parallel groups, inside the tensor parallel group.

    `--dp-size N --enable-dp-attention` is the older spelling of `--attn-dp-size N`, and only beside none of that.
    """
    older = flags.get("enable-dp-attention", False) is not False and _size(flags, "attn-dp-size") == 1
    # DWDP groups are attention's data-parallel groups too.
    return ("dp-size",) if older or _size(flags, "dwdp-size") > 1 else ("attn-dp-size",)


def _replicas(flags: Mapping[str, FlagValue]) -> int:
    """What tensor parallelism is multiplied by: pipeline stages, and copies of the model."""
    copies = 1 if "dp-size" in _attention(flags) else _size(flags, "dp-size")
    return max(_size(flags, "pp-size") * copies, 1)


def _multiplying(flags: Mapping[str, FlagValue]) -> str:
    names = ["pp-size", *([] if "dp-size" in _attention(flags) else ["dp-size"])]
    return " x ".join(f"{name} {_size(flags, name)}" for name in names if _size(flags, name) > 1)


def _product(flags: Mapping[str, FlagValue], tensor: int) -> str:
    rest = _multiplying(flags)
    return f"tp-size {tensor}" + (f" x {rest}" if rest else "")
