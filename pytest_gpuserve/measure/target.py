"""What a measurement needs to know of the server it is sent to: its vocabulary and its longest prompt."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Target", "target_of"]

# Where the model's config cannot be read: every model has this many tokens, and this much context.
_VOCABULARY = 4096
_CONTEXT = 2048


@dataclass(frozen=True, slots=True)
class Target:
    """`vocabulary`: token ids below it exist. `longest`: tokens of a prompt with its answer that the server takes."""

    vocabulary: int
    longest: int


def target_of(info: Mapping[str, Any]) -> Target:
    """From what `/server_info` says, and the config.json of the model path it names."""
    config = _config(str(info.get("model_path") or ""))
    text = config.get("text_config") or config
    context = info.get("context_length") or text.get("max_position_embeddings") or _CONTEXT
    capacity = info.get("max_total_num_tokens") or info.get("max_total_tokens") or context
    return Target(int(text.get("vocab_size") or _VOCABULARY), min(int(context), int(capacity)))


def _config(path: str) -> dict[str, Any]:
    try:
        config = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}
