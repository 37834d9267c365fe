"""The signature: what makes two failures one, whatever a server happened to say."""

import pytest

from pytest_gpuserve.model.failure import Failure, Kind
from pytest_gpuserve.model.phase import Phase


def signature(kind: Kind, message: str) -> str:
    return Failure.of(kind, Phase.SERVING, message).signature


@pytest.mark.parametrize(
    "message",
    [
        "two identical greedy requests differ: first {!r}, then {!r}",
        "asked for 16 tokens, got 12: {!r}",
        "{!r}: invalid UTF-8 in the text: {!r}",
        "every answer is token 7 over and over: {!r}",
    ],
)
def test_garbage_is_the_same_failure_whatever_it_says(message: str) -> None:
    texts = ["\xc3\xb6 don't", 'it\'s "so"', "don't 'quote' me", "a\nb", "\\", ""]
    assert len({signature(Kind.WRONG_OUTPUT, message.format(text, text[::-1])) for text in texts}) == 1


def test_what_is_wrong_with_an_output_is_part_of_it() -> None:
    told = ("'a': invalid UTF-8 in the text: 'b'", "'a': hardly any letters: 'b'", "the server's answer: it's empty")
    assert len({signature(Kind.WRONG_OUTPUT, one) for one in told}) == 3
    assert "the server's answer: it's empty" in signature(Kind.WRONG_OUTPUT, told[2])


def test_the_choice_that_was_refused_is_part_of_a_rejection() -> None:
    told = ("invalid choice: 'fa3'", "invalid choice: 'fa4'")
    assert len({signature(Kind.REJECTED, one) for one in told}) == 2
