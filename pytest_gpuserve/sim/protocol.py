"""Requests as they come in: JSON bodies to prompts, refused in SGLang's words."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pytest_gpuserve.sim.answer import Chat, Completion, Native
from pytest_gpuserve.sim.http import dumps
from pytest_gpuserve.sim.requests import Generation, Want

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpuserve.sim.http import Exchange
    from pytest_gpuserve.sim.requests import Engine

__all__ = ["ProtocolError", "body_of", "chat", "completions", "generate"]


class ProtocolError(Exception):
    """A request that is refused with `status` and a JSON `body`."""

    def __init__(self, body: object, status: int = 400) -> None:
        super().__init__(str(body))
        self.body = body
        self.status = status


def _native_error(message: str) -> ProtocolError:
    return ProtocolError({"error": {"message": message}})


def _openai_error(message: str) -> ProtocolError:
    return ProtocolError({"object": "error", "message": message, "type": "Bad Request", "param": None, "code": 400})


def body_of(exchange: Exchange) -> dict[str, Any]:
    """The JSON object that was sent; ProtocolError for anything else."""
    try:
        content = json.loads(exchange.body or b"null")
    except (ValueError, RecursionError) as error:
        raise _openai_error(f"1 validation error:\n  {{'type': 'json_invalid', 'msg': '{error}'}}") from error
    if not isinstance(content, dict):
        raise _openai_error(
            "1 validation error:\n  {'type': 'model_attributes_type', 'msg': 'Input should be an object'}"
        )
    return content


def _prompts(engine: Engine, value: object) -> tuple[list[list[int]], bool]:
    """Token ids of one prompt or several; True if it was a batch. `value`: text, ids, or a list of either."""
    if value is None:
        raise ValueError("Either text, input_ids or input_embeds should be provided.")
    if isinstance(value, str):
        return [engine.model.encode(value)], False
    if isinstance(value, list) and value:
        if all(type(token) is int for token in value):
            return [value], False
        if all(isinstance(text, str) for text in value):
            return [engine.model.encode(text) for text in value], True
        if all(isinstance(ids, list) and all(type(token) is int for token in ids) for ids in value):
            return value, True
    raise ValueError("a prompt is text, a list of token ids, or a list of either")


def _check(engine: Engine, want: Want) -> None:
    context, given = engine.model.context, len(want.prompt)
    if not given:
        raise ValueError("The input is empty.")
    if min(want.prompt) < 0 or max(want.prompt) >= max(engine.model.vocabulary, 8):
        raise ValueError(
            f"The input_ids {want.prompt[:10]} contains values greater than the vocab size ({engine.model.vocabulary})."
        )
    if given >= context:
        raise ValueError(f"The input ({given} tokens) is longer than the model's context length ({context} tokens).")
    if given + want.max_new_tokens > context:
        raise ValueError(
            f"Requested token count exceeds the model's maximum context length of {context} tokens. You requested a "
            f"total of {given + want.max_new_tokens} tokens: {given} tokens from the input messages and "
            f"{want.max_new_tokens} tokens for the completion. Please reduce the number of tokens in the input "
            "messages or the completion to fit within the limit."
        )
    if want.max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be at least 0, got {want.max_new_tokens}.")
    if want.logprobs and want.logprob_start > given:
        raise ValueError(
            f"req.logprob_start_len={want.logprob_start} is higher than the number of input tokens "
            f"len(req.origin_input_ids)={given}. Please use a smaller logprob_start_len."
        )


def _each(value: object, count: int) -> Sequence[Any]:
    """One value for all prompts, or one each."""
    return value if isinstance(value, list) and len(value) == count else [value] * count


def generate(engine: Engine, exchange: Exchange) -> None:
    """`/generate`: `text` or `input_ids`, one or a batch. A refused stream is 200 with an error event, as SGLang's."""
    body = body_of(exchange)
    stream = bool(body.get("stream"))
    source = body.get("input_ids") if body.get("input_ids") is not None else body.get("text")
    try:
        prompts, batch = _prompts(engine, source)
        count = len(prompts)
        wants = []
        for index, prompt in enumerate(prompts):
            sampling = _each(body.get("sampling_params") or {}, count)[index]
            wanted = sampling.get("max_new_tokens", 128)
            given: dict[str, Any] = {}
            rid = _each(body.get("rid"), count)[index]
            if rid is not None:
                given["rid"] = str(rid) if not batch or isinstance(body["rid"], list) else f"{rid}_{index}"
            start = _each(body.get("logprob_start_len"), count)[index]
            want = Want(
                prompt=prompt,
                max_new_tokens=128 if wanted is None else int(wanted),
                stream=stream,
                logprobs=bool(_each(body.get("return_logprob"), count)[index]),
                logprob_start=-1 if start is None else int(start),
                top=int(_each(body.get("top_logprobs_num"), count)[index] or 0),
                text_in_logprobs=bool(body.get("return_text_in_logprobs")),
                **given,
            )
            _check(engine, want)
            wants.append(want)
    except (ValueError, TypeError, AttributeError) as error:
        if not stream:
            raise _native_error(str(error)) from error
        refusal = {"message": str(error), "type": "invalid_request_error", "code": 400, "retryable": False}
        exchange.begin()
        exchange.finish(b"data: " + dumps({"error": refusal}) + b"\n\ndata: [DONE]\n\n")
        return
    generations = [Generation(engine, want) for want in wants]
    incremental = bool(engine.config.args["incremental_streaming_output"])
    answer = Native(exchange, generations, stream=stream, batch=batch, incremental=incremental)
    engine.submit(answer, generations)


def _openai(
    engine: Engine, exchange: Exchange, body: dict[str, Any], prompts: list[list[int]], limit: int, top: int | None
) -> None:
    stream = bool(body.get("stream"))
    try:
        wants = [
            Want(
                prompt=prompt,
                max_new_tokens=limit,
                stream=stream,
                logprobs=top is not None,
                top=top or 0,
                text_in_logprobs=True,
            )
            for prompt in prompts
        ]
        for want in wants:
            _check(engine, want)
    except (ValueError, TypeError) as error:
        raise _openai_error(str(error)) from error
    generations = [Generation(engine, want) for want in wants]
    usage = bool((body.get("stream_options") or {}).get("include_usage"))
    kind = Chat if exchange.path.endswith("chat/completions") else Completion
    model = str(body.get("model") or engine.config.served_name)
    answer = kind(exchange, generations, stream=stream, model=model, usage=usage)
    engine.submit(answer, generations)


def completions(engine: Engine, exchange: Exchange) -> None:
    """`/v1/completions`: `prompt` is text, token ids, or a list of either; 16 tokens unless `max_tokens` says."""
    body = body_of(exchange)
    if "prompt" not in body:
        raise _openai_error(
            "1 validation error:\n  {'type': 'missing', 'loc': ('body', 'prompt'), 'msg': 'Field required'}"
        )
    try:
        prompts, _ = _prompts(engine, body["prompt"])
    except ValueError as error:
        raise _openai_error(f"Prompt cannot be empty: {error}") from error
    top = body.get("logprobs")
    limit = body.get("max_tokens")
    _openai(engine, exchange, body, prompts, 16 if limit is None else int(limit), None if top is None else int(top))


def chat(engine: Engine, exchange: Exchange) -> None:
    """`/v1/chat/completions`: the messages' text is the prompt; without `max_tokens`, 128 tokens."""
    body = body_of(exchange)
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages) or not messages:
        raise _openai_error(
            "1 validation error:\n  {'type': 'missing', 'loc': ('body', 'messages'), 'msg': 'Field required'}"
        )
    lines = []
    for message in messages:
        content = message.get("content") or ""
        if isinstance(content, list):
            content = " ".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
        lines.append(f"{message.get('role')}: {content}")
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    top = int(body.get("top_logprobs") or 0) if body.get("logprobs") else None
    prompt = engine.model.encode("\n".join(lines))
    _openai(engine, exchange, body, [prompt], 128 if limit is None else int(limit), top)
