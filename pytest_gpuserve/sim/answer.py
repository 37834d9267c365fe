"""Answers: the JSON and the server-sent events of `/generate`, `/v1/completions` and `/v1/chat/completions`.

Shapes and key order are those of SGLang 0.5.23 (recorded from a real server).
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from pytest_gpuserve.sim.http import dumps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpuserve.sim.http import Exchange
    from pytest_gpuserve.sim.requests import Generation

__all__ = ["Answer", "Chat", "Completion", "Native"]


def _event(content: object) -> bytes:
    return b"data: " + dumps(content) + b"\n\n"


def _escaped(text: str) -> bytes:
    return json.dumps(text, ensure_ascii=False)[1:-1].encode(errors="replace")


class Answer:
    """What one HTTP request gets for its prompts: a stream of events, or one JSON document."""

    def __init__(self, exchange: Exchange, generations: Sequence[Generation], *, stream: bool) -> None:
        self.generations = tuple(generations)
        self.stream = stream
        self._exchange = exchange
        self._open = len(self.generations)
        self._index = {one: index for index, one in enumerate(self.generations)}
        self.created = int(time.time())
        exchange.on_gone = self._gone
        if stream:
            exchange.begin()
            exchange.write(self.opening())

    @property
    def writable(self) -> bool:
        """False while the client is slow."""
        return self._exchange.writable

    def send(self, events: bytes) -> None:
        """Sends events at once."""
        self._exchange.write(events)

    def finished(self) -> None:
        """One generation ended."""
        self._open -= 1
        if self._open == 0:
            if self.stream:
                self._exchange.finish(self.closing() + b"data: [DONE]\n\n")
            else:
                self._exchange.json(self.whole())

    def _gone(self) -> None:
        for one in self.generations:
            if one.finish is None:
                one.answer = None
                one.engine.forget(one)

    def opening(self) -> bytes:
        """Events before the first token."""
        return b""

    def event(self, one: Generation) -> bytes:
        """The events for the newest token, and for the end when `one.finish` is set."""
        raise NotImplementedError

    def closing(self) -> bytes:
        """Events after the last token."""
        return b""

    def whole(self) -> object:
        """The document of an answer that is not a stream."""
        raise NotImplementedError


def text_of(one: Generation) -> str:
    """The generated text."""
    return "".join(one.model.text(token) for token in one.ids)


class Native(Answer):
    """`/generate`. A stream is cumulative, as SGLang's without `--incremental-streaming-output`."""

    def __init__(
        self,
        exchange: Exchange,
        generations: Sequence[Generation],
        *,
        stream: bool,
        batch: bool,
        incremental: bool = False,
    ) -> None:
        self._batch = batch
        self._incremental = incremental
        for one in generations:
            one.scratch = _Cumulative(one)
        super().__init__(exchange, generations, stream=stream)

    def event(self, one: Generation) -> bytes:
        """See `Answer`."""
        if one.finish is None and not one.want.logprobs and not self._incremental and len(one.ids) > 1:
            index = b',"index":%d' % self._index[one] if self._batch else b""
            return one.scratch.event(index)  # type: ignore[no-any-return]
        document = self._document(one)
        if self._incremental:
            document["text"] = one.model.text(one.ids[-1]) if one.ids else ""
            document["output_ids"] = one.ids[-1:]
        elif one.finish is None and not one.want.logprobs:
            one.scratch.grow()
        if self._batch:
            document["index"] = self._index[one]
        return _event(document)

    def whole(self) -> object:
        """See `Answer`."""
        documents = [self._document(one) for one in self.generations]
        return documents if self._batch else documents[0]

    def _document(self, one: Generation) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": one.want.rid,
            "finish_reason": one.finish,
            "prompt_tokens": one.prompt_tokens,
            "weight_version": "default",
            "num_retractions": 0,
        }
        if one.want.logprobs:
            meta |= {
                "input_token_logprobs": one.input_logprobs,
                "output_token_logprobs": one.output_logprobs,
                "output_token_logprobs_length": len(one.output_logprobs),
            }
            if one.want.top:
                meta |= {"input_top_logprobs": one.input_top, "output_top_logprobs": one.output_top}
        meta |= {"reasoning_tokens": 0, "completion_tokens": len(one.ids), "cached_tokens": one.cached}
        if one.finish is not None:
            meta["weight_versions"] = [{"version": "default", "start": 0, "end": len(one.ids)}]
        meta |= {"cached_tokens_details": _cache_details(one), "dp_rank": None}
        if one.finish is not None and one.finished is not None:
            meta["e2e_latency"] = one.finished - one.received
        if one.first is not None and (len(one.ids) == 1 or one.finish is not None):
            meta["response_sent_to_client_ts"] = one.first
        return {"text": text_of(one), "output_ids": list(one.ids), "meta_info": meta}


def _cache_details(one: Generation) -> dict[str, int] | None:
    return {"device": one.cached, "host": 0} if one.cached else None


class _Cumulative:
    """Grows the event of a cumulative stream by one token: rendering it anew would cost its length every time."""

    def __init__(self, one: Generation) -> None:
        self._one = one
        self._text = bytearray()
        self._ids = bytearray()
        self._words: dict[int, bytes] = {}
        self._before = dumps({"id": one.want.rid, "finish_reason": None, "prompt_tokens": one.prompt_tokens})[:-1]
        rest = {"cached_tokens": one.cached, "cached_tokens_details": _cache_details(one), "dp_rank": None}
        self._after = dumps(rest)[1:]

    def grow(self) -> None:
        """Takes in the newest token."""
        token = self._one.ids[-1]
        word = self._words.get(token)
        if word is None:
            word = self._words[token] = _escaped(self._one.model.text(token))
        self._text += word
        self._ids += b",%d" % token if self._ids else b"%d" % token

    def event(self, index: bytes) -> bytes:
        """The event for the newest token."""
        self.grow()
        return (
            b'data: {"text":"%b","output_ids":[%b],"meta_info":%b,"weight_version":"default","num_retractions":0,'
            b'"reasoning_tokens":0,"completion_tokens":%d,%b%b}\n\n'
            % (bytes(self._text), bytes(self._ids), self._before, len(self._one.ids), self._after, index)
        )


class _OpenAI(Answer):
    """What both OpenAI endpoints share."""

    kind = ""

    def __init__(
        self,
        exchange: Exchange,
        generations: Sequence[Generation],
        *,
        stream: bool,
        model: str,
        usage: bool = False,
    ) -> None:
        self.model = model
        self._usage_wanted = usage
        self.id = generations[0].want.rid
        super().__init__(exchange, generations, stream=stream)

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": self.kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        } | more

    def closing(self) -> bytes:
        """See `Answer`."""
        if not self._usage_wanted:
            return b""
        return _event(self._chunk([], usage=self._usage()))

    def _usage(self) -> dict[str, Any]:
        prompt = sum(one.prompt_tokens for one in self.generations)
        completion = sum(len(one.ids) for one in self.generations)
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": None,
            "reasoning_tokens": 0,
            "completion_tokens_details": None,
        }

    def _metadata(self) -> dict[str, Any]:
        end = sum(len(one.ids) for one in self.generations)
        return {"weight_version": "default", "weight_versions": [{"version": "default", "start": 0, "end": end}]}

    def _ending(self, one: Generation) -> dict[str, Any]:
        reason = one.finish or {}
        return {"finish_reason": reason.get("type"), "matched_stop": reason.get("matched")}


class Completion(_OpenAI):
    """`/v1/completions`."""

    kind = "text_completion"

    def event(self, one: Generation) -> bytes:
        """See `Answer`."""
        text = one.model.text(one.ids[-1]) if one.ids else ""
        choice = {"index": self._index[one], "text": text, "logprobs": self._logprobs(one, -1)} | self._ending(one)
        return _event(self._chunk([choice], usage=None))

    def whole(self) -> object:
        """See `Answer`."""
        choices = [
            {"index": index, "text": text_of(one), "logprobs": self._logprobs(one, 0)} | self._ending(one)
            for index, one in enumerate(self.generations)
        ]
        return self._chunk(choices, usage=self._usage(), metadata=self._metadata())

    @staticmethod
    def _logprobs(one: Generation, since: int) -> dict[str, Any] | None:
        if not one.want.logprobs:
            return None
        entries = one.output_logprobs[since:]
        return {
            "text_offset": [-1] * len(entries),
            "token_logprobs": [logprob for logprob, _, _ in entries],
            "tokens": [text for _, _, text in entries],
            "top_logprobs": [{text: logprob for logprob, _, text in top} for top in one.output_top[since:]],
        }


class Chat(_OpenAI):
    """`/v1/chat/completions`."""

    kind = "chat.completion.chunk"

    def opening(self) -> bytes:
        """See `Answer`."""
        delta = {"reasoning_content": None, "role": "assistant", "content": ""}
        return b"".join(self._delta(index, delta) for index in range(len(self.generations)))

    def event(self, one: Generation) -> bytes:
        """See `Answer`."""
        index, events = self._index[one], b""
        if one.ids and (one.finish is None or one.finish["type"] != "abort"):
            delta = {"reasoning_content": None, "content": one.model.text(one.ids[-1])}
            events = self._delta(index, delta, self._logprobs(one, -1))
        if one.finish is not None:
            events += self._delta(index, {"reasoning_content": None}, None, self._ending(one))
        return events

    def whole(self) -> object:
        """See `Answer`."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": text_of(one), "reasoning_content": None},
                "logprobs": self._logprobs(one, 0),
            }
            | self._ending(one)
            for index, one in enumerate(self.generations)
        ]
        return self._chunk(choices, usage=self._usage(), metadata=self._metadata()) | {"object": "chat.completion"}

    def _delta(
        self, index: int, delta: dict[str, Any], logprobs: object = None, ending: dict[str, Any] | None = None
    ) -> bytes:
        end = ending or {"finish_reason": None, "matched_stop": None}
        return _event(self._chunk([{"index": index, "delta": delta, "logprobs": logprobs} | end]))

    @staticmethod
    def _logprobs(one: Generation, since: int) -> dict[str, Any] | None:
        if not one.want.logprobs:
            return None

        def entry(logprob: float | None, text: str) -> dict[str, Any]:
            return {"token": text, "bytes": list(text.encode(errors="replace")), "logprob": logprob}

        tops = one.output_top[since:] or [[]] * len(one.output_logprobs[since:])
        return {
            "content": [
                entry(logprob, text) | {"top_logprobs": [entry(other, name) for other, _, name in top]}
                for (logprob, _, text), top in zip(one.output_logprobs[since:], tops, strict=True)
            ]
        }
