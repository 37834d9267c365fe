"""What is wrong with an answer without any other to compare it with. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpuserve.model.words import number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpuserve.measure.canary import Answer

__all__ = ["answers_problem", "text_problem"]

_REPEATS = 16
# A sound model's text, whatever it is about, has more than that: "the the the the" has few different words, and
# mojibake few letters.
_DIFFERENT = 0.15
_LETTERS = 0.5
_ENOUGH = 24
_REPLACEMENT = "\ufffd"


def answers_problem(
    answers: Sequence[Answer], wanted: Sequence[int], inputs: Sequence[int] | None = None
) -> str | None:
    """The first of: fewer tokens than `wanted`, fewer logprobs than there must be, NaN, one token over and over in all.

    `wanted` and `inputs` hold one number an answer: of generated tokens, and of logprobs of its prompt. Without
    `inputs` the server was asked for no logprobs at all.
    """
    asked: Sequence[int | None] = [None] * len(answers) if inputs is None else inputs
    for answer, count, least in zip(answers, wanted, asked, strict=True):
        name = f"prompt {answer.prompt}"
        if not answer.ids:
            return f"{name}: an empty answer"
        if len(answer.ids) != count:
            return f"{name}: {len(answer.ids)} of {count} tokens"
        for what, values in (("its prompt", answer.inputs), ("its answer", answer.outputs)):
            missing = sum(value is None for value in values)
            if missing:
                return f"{name}: {missing} of {len(values)} logprobs of {what} are NaN"
        problem = _incomplete(answer, least, count) if least is not None else None
        if problem is not None:
            return f"{name}: {problem}"
    longer = [answer for answer in answers if len(answer.ids) >= _REPEATS]
    tokens = {token for answer in longer for token in answer.ids}
    # A model of random weights may well loop in one answer; in all of them on the same token it does not.
    if len(longer) > 1 and len(tokens) == 1:
        return f"every answer is token {tokens.pop()} over and over: {longer[0].text[:60]!r}"
    return None


def _incomplete(answer: Answer, inputs: int, outputs: int) -> str | None:
    """Logprobs that were asked for and are not there: what is not compared would pass for equal."""
    likeliest = sum(map(bool, answer.top))
    for what, there, count in (
        ("logprobs of its prompt", len(answer.inputs), inputs),
        ("logprobs of its answer", len(answer.outputs), outputs),
        ("lists of the likeliest tokens", likeliest, outputs),
    ):
        if there < count:
            return f"{there} of {count} {what}"
    return None


def text_problem(text: str) -> str | None:
    """For real weights and a prompt in words: invalid UTF-8, one word or letter over and over, hardly any letters."""
    # The last character may be cut in the middle by the token limit.
    if _REPLACEMENT in text.rstrip(_REPLACEMENT):
        return f"invalid UTF-8 in the text: {text[:80]!r}"
    shown = text.strip()
    if not shown:
        return "empty text"
    words = shown.split()
    if len(words) >= _ENOUGH and len(set(words)) < _DIFFERENT * len(words):
        return f"{number(len(set(words)), 'different word')} among {len(words)}: {shown[:80]!r}"
    if len(shown) >= _ENOUGH and len(set(shown)) <= 3:
        return f"the same characters over and over: {shown[:80]!r}"
    solid = [letter for letter in shown if not letter.isspace()]
    if len(solid) >= _ENOUGH and sum(letter.isalnum() for letter in solid) < _LETTERS * len(solid):
        return f"hardly any letters: {shown[:80]!r}"
    return None
