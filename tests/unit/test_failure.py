"""The signature: what makes two failures one, whatever a server happened to say."""

import pytest

from pytest_gpuserve.model.failure import Failure, Kind, normalise, signature_of
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


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            "shapes cannot be multiplied (7x5120 and 2560x248320)",
            "shapes cannot be multiplied (51x5120 and 5120x248320)",
        ),
        ("expected [7, 5120], got 7x5120x64", "expected [51, 5120], got 51x640x64"),
        ("Tried to allocate 12GiB, 3.5 GiB free", "Tried to allocate 8GiB, 1 GiB free"),
        ("no answer within 600000ms", "no answer within 1800000ms"),
        ("TP3 and rank12 wait for GPU0", "TP0 and rank1 wait for GPU7"),
        ("sglang::scheduler_TP0, signal 6", "sglang::scheduler_TP7, signal 6"),
        ("at 0x7f00aB in f", "at 0x55 in f"),
        ("request 5f2c9d8e7a6b5c4d3e2f1a0b9c8d7e6f is lost", "request 0b9c8d7e6f5f2c9d8e7a6b5c4d3e2f1a is lost"),
    ],
)
def test_what_varies_from_run_to_run_is_no_part_of_it(one: str, other: str) -> None:
    assert signature_of(one) == signature_of(other)


def test_a_shape_is_no_address() -> None:
    assert normalise("2560x248320") == "<n>x<n>"
    assert normalise("a 0x248320 b") == "a <addr> b"


@pytest.mark.parametrize(
    "name", ["sm_120", "compute_120f", "fp8_e4m3", "w8a8", "H200", "x86_64", "4bit", "int8", "fa3"]
)
def test_a_digit_of_a_name_is_part_of_it(name: str) -> None:
    assert normalise(f"no kernel for {name} here") == f"no kernel for {name} here"


# Signatures of records written before shapes and quantities were numbers: `compare` finds the same failure in both.
BEFORE = [
    ("ValueError: head_dim 64 is not supported", "ValueError: head_dim <n> is not supported #cccaf16e"),
    (
        "RuntimeError: /a/b.cuh:37: invalid at 0x7f01, port 30000",
        "RuntimeError: <path>:<n>: invalid at <addr>, port <n> #3d6784fe",
    ),
]


@pytest.mark.parametrize(("line", "signature"), BEFORE)
def test_the_signatures_of_older_records_hold(line: str, signature: str) -> None:
    assert signature_of(line) == signature
