"""The record of a preflight: what SGLang's own arguments said about every cell of one arch.

Top level (plain JSON types):

| key | content |
|---|---|
| `schema`, `kind` | 1, `"preflight"` |
| `arch`, `status` | `sm120`; `ok`, or `unavailable`: SGLang could not be asked and no cell says `accepted` |
| `reason` | "preflight unavailable: …", empty when `ok` |
| `started`, `seconds` | UTC time; wall seconds: {total, import, cell_median, cell_max}, and `processes` |
| `versions` | of the environment under test, as given to `preflight()` |
| `python` | the version of its interpreter |
| `pretended` | {gpu: {name, capability, memory_gib, count, cuda, …} or null, functions: [torch.cuda.…], commands: |
|             | [nvidia-smi], modules: {import name: version}, touched: [what SGLang read of those modules]} |
| `options` | SGLang's option table: {`--flag`: {dest, choices, default, nargs, type, deprecated}}; an alias is an |
|           | entry too |
| `cells` | a list, in the order asked |

A cell:

| key | content |
|---|---|
| `id`, `arch`, `model`, `axes` | who it is; comparisons pair by arch + model + axes |
| `flags`, `env`, `argv` | what was asked; `argv` is what SGLang's parser was given |
| `outcome` | `accepted`: by SGLang's arguments, which is never "supported"; `rewritten`: accepted, but a value that |
|           | was asked for is another one after resolution; `rejected`; `unavailable`: SGLang could not be asked; |
|           | `skipped`: it does not apply to these versions or this machine, and was not asked |
| `rejection` | null or {text, exception, exit, where}: the message, the exception's type, the exit code that a server |
|             | would have had, and `file:function` inside sglang |
| `reason` | of `unavailable` and `skipped` |
| `rewritten` | {field: {asked, resolved}} |
| `settings` | {name: value}: the backends, sizes and switches that matter, asked or not, under the same names for all |
|            | versions and in run records (`engine.resolved_of`) |
| `resolved` | every resolved argument but the `VOLATILE` |
| `env_set` | {name: value or null}: variables that SGLang set (null: removed) while it parsed and resolved |
| `warnings`, `notes` | what it logged, at WARNING and above, and at INFO |
| `gate` | {attention backend: `passes` / `rejected: TEXT` / `absent` / `not asked: WHY`}: the check that SGLang's |
|        | attention registry makes before it builds a backend. Later checks, in kernels, are not seen here |
| `seconds` | wall time of this cell |

In every text, `<model>` stands for the model's folder and `~` for the home folder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_gpuserve.engine import resolved_of
from pytest_gpuserve.errors import UsageError
from pytest_gpuserve.model.failure import Failure, Kind
from pytest_gpuserve.model.phase import Phase

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["SCHEMA", "VOLATILE", "VOLATILE_ENV", "check_schema", "failure_of", "records_of", "settings_of", "summary"]

SCHEMA = 1

# Resolved arguments that depend on more than SGLang, the flags and the arch: on the machine, the clock or chance.
VOLATILE = frozenset(
    {
        "admin_api_key",
        "api_key",
        "device_index",
        "dist_init_addr",
        "download_dir",
        "hicache_host_memory_fraction",
        "host",
        "launch_command",
        "mem_fraction_static",
        "model_path",
        "nccl_port",
        "numa_node",
        "port",
        "random_seed",
        "served_model_name",
        "tokenizer_path",
    }
)
# Variables that SGLang sets to a folder or a thread count of this machine.
VOLATILE_ENV = frozenset({"DG_JIT_CACHE_DIR", "OMP_NUM_THREADS", "SGLANG_CPU_OMP_THREADS_BIND", "TRITON_CACHE_DIR"})


def settings_of(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """A resolved configuration under the names that run records use too (`engine.resolved_of`), `VOLATILE` left out.

    Where no own backend is named for prefill or decode, it is the common one, as in SGLang.
    """
    settings: dict[str, Any] = {
        name: value for name, value in resolved_of(resolved).items() if name not in VOLATILE and name != "version"
    }
    for stage in ("prefill", "decode"):
        name = f"{stage}_attention_backend"
        if name in settings:
            settings[name] = settings[name] or settings.get("attention_backend")
    return settings


def failure_of(cell: Mapping[str, Any]) -> Failure | None:
    """What a test of this cell fails with, as a launch would report it; None if SGLang's arguments let it pass.

    A rejection is `rejected` in the phase `import`: a server's main process parses its arguments while it imports, and
    has loaded nothing. The refusal of the attention registry is an exception in the scheduler after the weights and
    before the graphs: `crash` in the phase `kv-cache`. Where SGLang could not be asked it is `infra`, never the cell's
    fault.
    """
    if cell["outcome"] == "unavailable":
        return Failure.of(Kind.INFRA, Phase.IMPORT, cell["reason"])
    if cell["outcome"] == "rejected":
        rejection = cell["rejection"]
        text, usage = rejection["text"], rejection["exception"] == "SystemExit"
        line = text.partition(": error: ")[2] or text if usage else f"{rejection['exception']}: {text}"
        message = (
            f"rejected by SGLang's arguments: {line}\n"
            f"  in {rejection['where']}; a server would exit {rejection['exit']}\n  asked for: {_asked(cell)}"
        )
        # The list of choices is not the same in two versions, the failure is.
        steady = line.partition(" (choose from")[0]
        return Failure.of(Kind.REJECTED, Phase.IMPORT, message, line=steady, text=line)
    for backend, answer in cell["gate"].items():
        if answer.startswith("rejected: "):
            line = answer.removeprefix("rejected: ")
            message = (
                f"accepted by SGLang's arguments, then refused by its attention registry: {line}\n"
                f"  backend {backend}; a server would load its weights first\n  asked for: {_asked(cell)}"
            )
            return Failure.of(Kind.CRASH, Phase.KV_CACHE, message, line=line)
    return None


def _asked(cell: Mapping[str, Any]) -> str:
    env = " ".join(f"{name}={value}" for name, value in cell["env"].items())
    return " ".join(part for part in (env, " ".join(cell["argv"])) if part)


def summary(record: Mapping[str, Any]) -> list[str]:
    """The record for a terminal: one line a cell, the outcome first, under a heading that says what was asked."""
    sglang = record["versions"].get("sglang", "?")
    if record["status"] != "ok":
        return [f"{record['arch']}, SGLang {sglang}: {record['reason']}"]
    lines = [f"{record['arch']}, SGLang {sglang}: what its arguments say (accepted is not supported)"]
    width = max((len(cell["id"]) for cell in record["cells"]), default=0)
    lines += [f"  {cell['outcome']:<11} {cell['id']:<{width}}  {_detail(cell)}".rstrip() for cell in record["cells"]]
    counts: dict[str, int] = {}
    for cell in record["cells"]:
        counts[cell["outcome"]] = counts.get(cell["outcome"], 0) + 1
    lines.append(", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())) or "no cells")
    return lines


def _detail(cell: Mapping[str, Any]) -> str:
    if cell["outcome"] in ("unavailable", "skipped"):
        return str(cell["reason"])
    if cell["outcome"] == "rejected":
        return " ".join(cell["rejection"]["text"].partition(" (choose from")[0].split())
    settings = cell["settings"]
    attention = f"{settings.get('prefill_attention_backend')}/{settings.get('decode_attention_backend')}"
    parts = [f"attention {attention}, moe {settings.get('moe_runner_backend')}, page {settings.get('page_size')}"]
    parts.append(f"KV {settings.get('kv_cache_dtype')}")
    parts += [f"{name}: {change['asked']} → {change['resolved']}" for name, change in cell["rewritten"].items()]
    parts += [f"gate {name}: {answer}" for name, answer in cell["gate"].items() if answer.startswith("rejected")]
    return "; ".join(parts)


def check_schema(record: Mapping[str, Any], where: str) -> None:
    """Raise UsageError unless `record` is a preflight record of a schema this version reads."""
    if record.get("kind") != "preflight":
        raise UsageError(f"{where}: not a preflight record (`gpuserve preflight -o FILE` writes one)")
    if record.get("schema", 0) > SCHEMA:
        raise UsageError(
            f"{where}: preflight record of schema {record['schema']}, this version reads up to {SCHEMA}; "
            "update pytest-gpuserve, or write the record again"
        )


def records_of(data: Mapping[str, Any], source: str) -> list[dict[str, Any]]:
    """The records of a preflight file: one arch, or several under `runs`. UsageError if it is newer or not one."""
    records = data.get("runs", [data])
    for record in records:
        if not isinstance(record, dict) or not {"arch", "status", "options", "cells", "versions"} <= record.keys():
            raise UsageError(f"{source}: not a preflight record: arch, status, options, cells or versions is missing.")
        check_schema(record, source)
    return list(records)
