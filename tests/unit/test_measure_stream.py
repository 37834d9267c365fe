"""The reader of SGLang's stream: any cut of the bytes gives the same counts, and what is not an answer is told."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpuserve.measure.stream import TokenStream


def event(count: int, text: str, ids: list[int], **meta: object) -> bytes:
    document = {"text": text, "output_ids": ids, "meta_info": {"id": "x", "completion_tokens": count, **meta}}
    return b"data: " + json.dumps(document, ensure_ascii=False).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
# What an answer may say to mislead a reader of bytes.
NASTY = st.text() | st.sampled_from(['"completion_tokens": 99', "\n\n", "data: {", '\\"completion_tokens\\":7'])


@settings(deadline=None)
@given(texts=st.lists(NASTY, min_size=1, max_size=8), cuts=st.lists(st.integers(0, 4000), max_size=30))
def test_any_cut_of_the_stream_gives_the_same_counts(texts, cuts) -> None:
    sent = [event(number, text + "x", [number]) for number, text in enumerate(texts, 1)]
    data = b"".join(sent) + DONE
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    stream, fed, seen = TokenStream(), 0, []
    for begin, end in pairwise(edges):
        seen.append(stream.feed(data[begin:end]))
        fed = end
        whole = sum(sum(map(len, sent[: n + 1])) <= fed for n in range(len(sent)))
        assert seen[-1] == whole
    assert seen == sorted(seen)
    assert stream.count == len(texts)
    assert stream.problem(len(texts)) is None


@pytest.mark.parametrize(
    ("data", "wanted", "told"),
    [
        (event(4, "a b", [1, 2, 3, 4]) + DONE, 8, "4 of 8 tokens"),
        (
            event(4, "a", [1], finish_reason={"type": "abort", "message": "Abort in waiting queue"}),
            8,
            "4 of 8 tokens (finish reason abort: Abort in waiting queue)",
        ),
        (
            b'data: {"error": {"message": "The input is too long", "code": 400}}\n\n' + DONE,
            8,
            "0 of 8 tokens (The input is too long)",
        ),
        (event(8, "", []) + DONE, 8, "8 tokens by the server's count, and an empty answer"),
        (b"", 8, "0 of 8 tokens"),
        (b"<html>Bad Gateway</html>", 8, "0 of 8 tokens"),
        (event(9, "a", [1] * 9) + DONE, 8, "9 of 8 tokens"),
    ],
    ids=["short", "aborted", "refused", "empty", "nothing", "not a stream", "too many"],
)
def test_what_is_not_the_answer_that_was_asked_for_is_told(data, wanted, told) -> None:
    stream = TokenStream()
    stream.feed(data)
    assert stream.problem(wanted) == told


def test_an_incremental_stream_whose_last_token_has_no_text_is_an_answer() -> None:
    stream = TokenStream()
    stream.feed(event(1, "a", [5]) + event(2, "", [2]) + DONE)
    assert stream.problem(2) is None
