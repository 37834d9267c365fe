"""A language model that is a hash function: tokens and logprobs depend on the prefix alone.

Two equal greedy requests agree exactly. Two sound configurations choose the same tokens, with logprobs that differ by
a little noise of their own (attention backend, KV dtype), as real kernels do. A scenario's `output` breaks it.
"""

from __future__ import annotations

import math
import random
import zlib
from dataclasses import dataclass

__all__ = ["EOS", "Model", "Noise"]

EOS = 2
_MASK = (1 << 64) - 1
_ODD = 0x9E3779B97F4A7C15
_ADD = 0xD1B54A32D192ED03
_SEED = 0x243F6A8885A308D3
_ALTERNATIVES = 20
_WORDS = tuple(
    (  # noqa: SIM905 - a list literal of words is unreadable
        "time year people way day thing world life hand part child eye woman place work week case point company number "
        "group problem fact river stone light water paper music table garden letter window morning evening summer "
        "winter road town field forest island harbour valley mountain bridge market kitchen engine signal pattern "
        "the a of and to in is it that for with as on by from at one two some many new old small large early late "
        "walks finds keeps turns opens carries follows crosses watches builds reads writes holds brings leaves"
    ).split()
)
_MOJIBAKE = ("\ufffd", "ã\x82", "�Ä", "ÿþ", "蝙", "ðŸ", "Ã¶Ã", "╬╬")


@dataclass(frozen=True, slots=True)
class Noise:
    """A configuration's rounding: amplitudes in nats, and keys (attention backend; for decode, KV dtype as well)."""

    prefill_key: str
    decode_key: str
    prefill: float = 0.02
    decode: float = 0.02

    @classmethod
    def of(cls, attention: str, kv_dtype: str) -> Noise:
        """An fp8 or fp4 KV cache shows in decode only, about five times bf16's noise (measured on an H200)."""
        coarse = kv_dtype.startswith(("fp8", "fp4", "nvfp4", "mxfp8"))
        return cls(attention, f"{attention}/{kv_dtype}", decode=0.1 if coarse else 0.02)


def _mix(value: int) -> int:
    value ^= value >> 31
    value = value * _ODD & _MASK
    return value ^ value >> 29


def _unit(value: int) -> float:
    return (_mix(value) >> 11) / (1 << 53)


class Model:
    """`vocabulary` tokens (0 is "!", 2 the end of text), a context of `context` tokens. A state stands for a prefix."""

    def __init__(self, vocabulary: int, context: int, noise: Noise, output: str | None = None) -> None:
        self.vocabulary = max(8, vocabulary)
        self.context = context
        self.output = output
        self._prefill = (zlib.crc32(noise.prefill_key.encode()) << 17, noise.prefill)
        self._decode = (zlib.crc32(noise.decode_key.encode()) << 19, noise.decode)
        self._random = random.Random()  # garbage differs from request to request: that is the fault

    def encode(self, text: str) -> list[int]:
        """One token a word; the beginning-of-text token in front."""
        return [1, *(3 + zlib.crc32(word.encode()) % (self.vocabulary - 3) for word in text.split())]

    def text(self, token: int) -> str:
        """What a token adds to the text."""
        if token == 0:
            return "!"
        if token <= EOS:
            return ""
        if self.output == "garbage":
            return _MOJIBAKE[token % len(_MOJIBAKE)]
        return " " + _WORDS[token * 7919 % len(_WORDS)]

    def states(self, tokens: list[int]) -> list[int]:
        """The state after each token of a prompt."""
        state, found = _SEED, []
        for token in tokens:
            state = ((state ^ token + 1) * _ODD + _ADD) & _MASK
            found.append(state)
        return found

    @staticmethod
    def after(state: int, token: int) -> int:
        """The state once `token` follows."""
        return ((state ^ token + 1) * _ODD + _ADD) & _MASK

    def next_token(self, state: int) -> int:
        """What this server answers after `state`."""
        if self.output == "repeat":
            return 0
        if self.output == "garbage":
            return self._random.randrange(3, self.vocabulary)
        return self._greedy(state)

    def logprob(self, state: int, token: int, *, decode: bool) -> float | None:
        """Natural log of the probability of `token` after `state`; None where the server has NaN (JSON has none)."""
        if self.output == "nan":
            return None
        if self.output == "garbage":
            return -4.0 - 8.0 * self._random.random()
        if self.output == "repeat" and decode:
            return 0.0
        key, amplitude = self._decode if decode else self._prefill
        noise = amplitude * (2 * _unit(state ^ key ^ token) - 1)
        return min(0.0, self._clean(state, token) + noise)

    def top(self, state: int, count: int, *, decode: bool) -> list[tuple[float | None, int]]:
        """The `count` likeliest tokens after `state`, likeliest first."""
        tokens = [self._greedy(state), *(self._alternative(state, rank) for rank in range(_ALTERNATIVES))]
        pairs = [(self.logprob(state, token, decode=decode), token) for token in tokens[:count]]
        return sorted(pairs, key=lambda pair: -(pair[0] if pair[0] is not None else 0.0))

    def _greedy(self, state: int) -> int:
        return 3 + _mix(state) % (self.vocabulary - 3)

    def _alternative(self, state: int, rank: int) -> int:
        return 3 + (_mix(state) + (rank + 1) * 101) % (self.vocabulary - 3)

    def _clean(self, state: int, token: int) -> float:
        """Half to four fifths for the greedy token, halves of the rest for its alternatives, crumbs for all others."""
        best = 0.5 + 0.3 * _unit(state)
        rest = math.log(1 - best)
        if token == self._greedy(state):
            return math.log(best)
        for rank in range(_ALTERNATIVES):
            if token == self._alternative(state, rank):
                return rest - (rank + 1) * math.log(2)
        return rest - 6 - 4 * _unit(state ^ token * _ADD)
