"""Reads SGLang's stream of a `/generate` answer: pure, and cheap enough not to be what is measured.

Every event says how many tokens there are so far, and carries the whole text so far as well: to parse each as JSON
costs the square of the answer's length. So the number is looked for in the bytes, and only the last event is parsed.
"""

from __future__ import annotations

import json
import re
from typing import Any

__all__ = ["TokenStream"]

# Inside a JSON text a quote is escaped, so this cannot be a part of the answer.
_MARK = b'"completion_tokens":'
_NUMBER = re.compile(rb" ?(\d+)")


class TokenStream:
    """`feed` it what arrives, cut anywhere; `count` is the number of tokens so far; `problem` judges the whole."""

    __slots__ = ("_counted", "_last", "_tail", "count")

    def __init__(self) -> None:
        self.count = 0
        self._tail = b""
        self._last = b""
        self._counted = b""

    def feed(self, piece: bytes) -> int:
        """Take in bytes; the number of tokens that have arrived by now."""
        data = self._tail + piece if self._tail else piece
        end = data.rfind(b"\n\n")
        if end < 0:
            self._tail = data
            return self.count
        self._tail = data[end + 2 :]
        self._last = data
        at = data.rfind(_MARK, 0, end)
        if at >= 0:
            self._counted = data
            found = _NUMBER.match(data, at + len(_MARK))
            if found is not None:
                self.count = max(self.count, int(found.group(1)))
        return self.count

    def problem(self, wanted: int) -> str | None:
        """Why the answer is not `wanted` tokens, with the server's own words; None if all is well."""
        event = _last_event(self._counted) or _last_event(self._last) or {}
        if self.count != wanted:
            return f"{self.count} of {wanted} tokens{_reason(event or _last_event(self._last) or {})}"
        # In an incremental stream the last event has only the last token, which may decode to nothing.
        if not event.get("text") and not event.get("output_ids"):
            return f"{wanted} tokens by the server's count, and an empty answer"
        return None


def _last_event(data: bytes) -> dict[str, Any] | None:
    for line in reversed(data.split(b"\n")):
        if line.startswith(b"data: {"):
            try:
                event: dict[str, Any] = json.loads(line[6:])
            except ValueError:
                continue
            return event
    return None


def _reason(event: dict[str, Any]) -> str:
    error = event.get("error")
    if error:
        return f" ({error.get('message', error) if isinstance(error, dict) else error})"[:300]
    reason = (event.get("meta_info") or {}).get("finish_reason")
    if isinstance(reason, dict):
        return f" (finish reason {reason.get('type')}{': ' + str(reason['message']) if 'message' in reason else ''})"
    return ""
