"""The output canary: the same prompts to two servers, and how far their logprobs are apart. Pure.

Three parts, because each sees what the others cannot (docs/measurement.md has the measurements):

- prefill: logprobs of a fresh prompt. They never read the KV cache.
- cached: logprobs of a suffix whose prefix is cached, which do.
- decode: logprobs of greedily generated tokens up to the first that differs, and at it; behind it the two sequences
  are different texts.

Two sound backends agree in about half of their tokens, so equal tokens are no test; and where a router flips on a tie
single logprobs jump, so the largest difference is none either. Mean and 99th percentile are.
"""

from __future__ import annotations

import math
import random
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pytest_gpuserve.measure.window import percentile

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = [
    "OUTPUT",
    "PARTS",
    "Answer",
    "Difference",
    "Prompt",
    "answer_of",
    "ask",
    "body_of",
    "compare",
    "prompts",
    "side_by_side",
]

PARTS = ("prefill", "cached", "decode")
OUTPUT = 32
_TOP = 5
_FIRST_WORD = 259
# (how many, tokens): short ones for decode, long ones so that attention has something to go wrong over.
_FRESH = ((3, 48), (3, 192), (2, 512))
_CACHED = (4, 192, 96)


@dataclass(frozen=True, slots=True)
class Prompt:
    """`tokens` to send; the first `cached` of them are sent before, as a prompt of their own."""

    tokens: tuple[int, ...]
    cached: int = 0

    @property
    def output(self) -> int:
        """How many tokens it asks for: behind a cached prefix it is the prompt's logprobs that are of interest."""
        return 1 if self.cached else OUTPUT

    @property
    def inputs(self) -> int:
        """How many logprobs of its tokens an answer has: not those of the prefix, and none of the first behind it."""
        return len(self.tokens) - self.cached - 1


def prompts(vocabulary: int, longest: int, seed: int = 0) -> tuple[Prompt, ...]:
    """Random token ids below `vocabulary`; no prompt with its answer is longer than `longest` tokens."""
    generator = random.Random(f"canary {seed}")
    ids = range(min(_FIRST_WORD, vocabulary // 2), vocabulary)

    def some(count: int) -> tuple[int, ...]:
        return tuple(generator.choices(ids, k=count))

    room = longest - OUTPUT
    fresh = [Prompt(some(min(size, room))) for count, size in _FRESH for _ in range(count)]
    count, prefix, suffix = _CACHED
    prefix = min(prefix, room * prefix // (prefix + suffix))
    return (*fresh, *(Prompt(some(min(prefix + suffix, room)), cached=prefix) for _ in range(count)))


@dataclass(slots=True, kw_only=True)
class Answer:
    """`inputs`: logprobs of the prompt's tokens (behind the cached prefix if there is one); None where the server has
    none or NaN. `ids`, `outputs`: the generated tokens and their logprobs; `top`: at each, the likeliest tokens.
    """

    prompt: int
    cached: int
    inputs: list[float | None]
    ids: list[int] = field(default_factory=list)
    outputs: list[float | None] = field(default_factory=list)
    top: list[dict[int, float]] = field(default_factory=list)
    text: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self) | {"top": [sorted(at.items(), key=lambda pair: -pair[1]) for at in self.top]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Answer:
        """Inverse of `to_json`."""
        return cls(**{**data, "top": [{int(token): float(value) for token, value in at} for at in data["top"]]})


def ask(
    send: Callable[[dict[str, Any]], Mapping[str, Any]], plan: Sequence[Prompt], *, logprobs: bool = True
) -> list[Answer]:
    """Send the prompts one by one through `send`, which posts a body to `/generate` and gives the parsed answer.

    One by one, so that every server computes them in batches of one: what differs is the server. Without `logprobs`
    the answers have none, and cannot be compared.
    """
    answers = []
    for number, prompt in enumerate(plan):
        if prompt.cached:
            send(body_of(prompt.tokens[: prompt.cached], 1))
        raw = send(body_of(prompt.tokens, prompt.output, logprobs=prompt.cached if logprobs else None))
        answers.append(answer_of(number, raw))
    return answers


def body_of(tokens: Sequence[int], count: int, *, logprobs: int | None = None) -> dict[str, Any]:
    """A greedy request for `count` tokens; with their logprobs, and the prompt's from token number `logprobs` on."""
    body: dict[str, Any] = {
        "input_ids": list(tokens),
        "sampling_params": {"max_new_tokens": count, "temperature": 0.0, "ignore_eos": True},
    }
    if logprobs is not None:
        body |= {"return_logprob": True, "logprob_start_len": logprobs, "top_logprobs_num": _TOP}
    return body


def answer_of(number: int, raw: Mapping[str, Any]) -> Answer:
    """What `/generate` gave for prompt `number`."""
    meta = raw.get("meta_info") or {}
    pairs = [(_finite(entry[0]), int(entry[1])) for entry in meta.get("output_token_logprobs") or ()]
    return Answer(
        prompt=number,
        cached=int(meta.get("cached_tokens") or 0),
        # The first has no token before it, or none that the server has computed: always None.
        inputs=[_finite(entry[0]) for entry in (meta.get("input_token_logprobs") or ())[1:]],
        ids=[token for _, token in pairs] or [int(token) for token in raw.get("output_ids") or ()],
        outputs=[value for value, _ in pairs],
        top=[
            {int(entry[1]): value for entry in at or () if (value := _finite(entry[0])) is not None}
            for at in meta.get("output_top_logprobs") or ()
        ],
        text=str(raw.get("text", "")),
    )


def _finite(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One part's |Δ logprob| in nats over `count` tokens. `worst` is the prompt that differs most, by its mean.

    `equal` (decode only): at which token each prompt's answer first differs, `OUTPUT` for never.
    """

    part: str
    mean: float
    p99: float
    count: int
    worst: int
    equal: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.part}: mean {self.mean:.3f}, p99 {self.p99:.3f} nats over {self.count} tokens"


def compare(plan: Sequence[Prompt], mine: Sequence[Answer], reference: Sequence[Answer]) -> tuple[Difference, ...]:
    """How far two servers' answers are apart, by part; a part without a common figure is left out.

    What is NaN or missing is not compared: only answers that `plausible` finds nothing wrong with are whole.
    """
    found: dict[str, dict[int, list[float]]] = {part: {} for part in PARTS}
    equal = []
    for number, (prompt, a, b) in enumerate(zip(plan, mine, reference, strict=True)):
        part = "cached" if prompt.cached else "prefill"
        found[part][number] = [abs(x - y) for x, y in zip(a.inputs, b.inputs, strict=False) if None not in (x, y)]  # type: ignore[operator]
        if not prompt.cached:
            first, distances = _decode(a, b)
            equal.append(first)
            found["decode"][number] = distances
    differences = []
    for part, by_prompt in found.items():
        everything = [value for values in by_prompt.values() for value in values]
        if everything:
            worst = max((number for number in by_prompt if by_prompt[number]), key=lambda one: fmean(by_prompt[one]))
            differences.append(
                Difference(
                    part=part,
                    mean=fmean(everything),
                    p99=percentile(everything, 0.99),
                    count=len(everything),
                    worst=worst,
                    equal=tuple(equal) if part == "decode" else (),
                )
            )
    return tuple(differences)


def _decode(a: Answer, b: Answer) -> tuple[int, list[float]]:
    """The first token that differs, and the distances up to it and at it."""
    same = 0
    while same < min(len(a.ids), len(b.ids)) and a.ids[same] == b.ids[same]:
        same += 1
    distances = [
        abs(x - y) for x, y in zip(a.outputs[:same], b.outputs[:same], strict=False) if x is not None and y is not None
    ]
    if same < min(len(a.top), len(b.top)):
        distances += [
            abs(ours[token] - _value(theirs, token))
            for ours, theirs in ((a.top[same], b.top[same]), (b.top[same], a.top[same]))
            if ours and theirs
            for token in [max(ours, key=ours.__getitem__)]
        ]
    return same, distances


def _value(top: Mapping[int, float], token: int) -> float:
    """A token's logprob; of one that is not among the likeliest at most theirs, which is what is taken."""
    return top.get(token, min(top.values()))


def side_by_side(
    plan: Sequence[Prompt],
    mine: Sequence[Answer],
    reference: Sequence[Answer],
    names: tuple[str, str],
    differences: Sequence[Difference],
) -> str:
    """The evidence for a person: of each part the prompt that differs most, token by token, and both texts."""
    lines = []
    for one in differences:
        prompt, a, b = plan[one.worst], mine[one.worst], reference[one.worst]
        lines += [str(one), f"Prompt {one.worst}: {len(prompt.tokens)} tokens, {prompt.cached} of them cached before."]
        if one.part == "decode":
            lines += [f"{name:>12}: {answer.text!r}" for name, answer in zip(names, (a, b), strict=True)]
            rows = [
                (f"{x} / {y}" if x != y else str(x), u, v)
                for x, y, u, v in zip(a.ids, b.ids, a.outputs, b.outputs, strict=False)
            ]
        else:
            tokens = prompt.tokens[prompt.cached + 1 :]
            rows = [(str(x), u, v) for x, u, v in zip(tokens, a.inputs, b.inputs, strict=False)]
        lines.append(f"{'token':>16} {names[0]:>24} {names[1]:>40} {'difference':>12}")
        lines += [
            f"{token:>16} {_shown(u):>24} {_shown(v):>40} {_shown(None if None in (u, v) else abs(u - v)):>12}"  # type: ignore[operator]
            for token, u, v in rows
        ]
        lines.append("")
    return "\n".join(lines)


def _shown(value: float | None) -> str:
    return "NaN" if value is None else f"{value:.4f}"
