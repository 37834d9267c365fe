"""What may be recorded: environment values by an allow-list, and no secret in any text."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = [
    "HIDDEN",
    "is_recorded",
    "scrub_argv",
    "scrub_cell",
    "scrub_env",
    "scrub_event",
    "scrub_text",
    "scrub_values",
]

HIDDEN = "***"
_ALLOWED = re.compile(
    r"(?:NCCL|CUDA|CUDNN|CUBLAS|CUBLASLT|NVIDIA|NVSHMEM|UCX|GLOO|SGLANG|SGL|SPT|FLASHINFER|FLASH_ATTENTION|DG_JIT|"
    r"TRITON|TORCH|TORCHINDUCTOR|PYTORCH|TVM|OMP|MKL|KMP|HF_HUB|HF|TRANSFORMERS|TOKENIZERS|GPUSERVE)_\w+"
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
_SECRET_FLAG = re.compile(r"--?[\w-]*(?:api-key|token|secret|password)", re.IGNORECASE)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_TEXT = (
    re.compile(r"""(?i)((?:api[_-]?key|secret|password|passwd)['"]?\s*[=:]\s*['"]?)(?!None\b|null\b)[^\s'",)}\]]+"""),
    re.compile(r"""(--(?:admin-)?api-key[= ]['"]?)[^\s'"]+"""),
    re.compile(r"""(\b[A-Z][A-Z0-9_]*(?:TOKEN|_KEY)['"]?\s*[=:]\s*['"]?)[^\s'",)}\]]+"""),
    re.compile(r"(\bBearer\s+)[\w.~+/=-]{8,}"),
    re.compile(r"()\b(?:hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,})"),
)
_HINT = re.compile(r"key|secret|passw|token|bearer|hf_|sk-|gh[pousr]_", re.IGNORECASE)


def is_recorded(name: str) -> bool:
    """True if the value of this environment variable may stand in a record."""
    return _ALLOWED.fullmatch(name) is not None and _SECRET.search(name) is None


def scrub_env(env: Mapping[str, Any]) -> dict[str, str]:
    """Every name stays, since that it was set matters; values outside the allow-list become `***`."""
    return {name: scrub_text(str(value)) if is_recorded(name) else HIDDEN for name, value in env.items()}


def scrub_text(text: str) -> str:
    """`text` without API keys, bearer tokens and the like; SGLang prints its whole configuration into its log."""
    if not _HINT.search(text):
        return text
    for pattern in _TEXT:
        text = pattern.sub(rf"\1{HIDDEN}", text)
    return text


def scrub_argv(argv: Iterable[str]) -> list[str]:
    """A command line without secrets: `--api-key X`, `--gpu-server-env NAME=VALUE`, `NAME_TOKEN=X`."""
    result: list[str] = []
    hide = env = False
    for word in argv:
        name, equals, value = word.partition("=")
        is_env, env = env, False
        if hide:
            result.append(HIDDEN)
            hide = False
        elif is_env:
            result.append(_assignment(word))
        elif name == "--gpu-server-env":
            env = not equals
            result.append(f"{name}={_assignment(value)}" if equals else word)
        elif _SECRET_FLAG.fullmatch(name):
            hide = not equals
            result.append(f"{name}={HIDDEN}" if equals else word)
        elif _SECRET.search(name) and _ASSIGNMENT.fullmatch(word):
            result.append(_assignment(word))
        else:
            result.append(scrub_text(word))
    return result


def _assignment(word: str) -> str:
    name, equals, value = word.partition("=")
    return word if not equals or is_recorded(name) else f"{name}={HIDDEN}" if value else word


def scrub_values(value: Any) -> Any:
    """A JSON value of any depth: texts scrubbed, and the values of keys that name a secret hidden."""
    if isinstance(value, str):
        return scrub_text(value)
    if isinstance(value, dict):
        return {name: _hide(name, item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [scrub_values(item) for item in value]
    return value


def _hide(name: object, value: Any) -> Any:
    if isinstance(value, str) and value and re.search(r"api_?key|secret|password|hf_token", str(name), re.IGNORECASE):
        return HIDDEN
    return scrub_values(value)


_FREE_TEXT: Sequence[str] = ("failure", "known_bad", "reason", "resolved", "flags", "control", "notes")


def scrub_cell(cell: Mapping[str, Any]) -> dict[str, Any]:
    """A cell's record (`CellRecord.to_json()`) as it may be written; scrubbing twice changes nothing."""
    clean = dict(cell)
    clean |= {name: scrub_values(cell[name]) for name in _FREE_TEXT if cell.get(name)}
    if cell.get("env"):
        clean["env"] = scrub_env(cell["env"])
    if cell.get("argv"):
        clean["argv"] = scrub_argv(cell["argv"])
    return clean


def scrub_event(event: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an event as `events.jsonl` may hold them: cells of a run, a cell, or a check."""
    if event == "cell":
        return scrub_cell(fields)
    cells = fields.get("planned")
    clean = {name: value if name == "planned" else scrub_values(value) for name, value in fields.items()}
    return clean if cells is None else clean | {"planned": [scrub_cell(cell) for cell in cells]}
