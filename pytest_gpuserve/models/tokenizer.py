"""A made tokenizer: byte-level, with made-up words for the ids beyond the bytes, so that every id decodes to text.

It encodes text as bytes (there are no merges) and decodes whatever a model with random weights says into readable,
valid UTF-8. Written by hand as the `tokenizers` library's JSON, so that no package is needed to make it.
"""

from __future__ import annotations

from typing import Any

__all__ = ["tokenizer_config", "tokenizer_json"]

_SPECIAL = ("<unk>", "<s>", "</s>")
_CONSONANTS = "bdfgklmnprstvz"
_VOWELS = "aeiou"
_SYLLABLES = tuple(consonant + vowel for consonant in _CONSONANTS for vowel in _VOWELS)


def _byte_symbols() -> list[str]:
    """GPT-2's 256 printable stand-ins for bytes, in byte order (openai/gpt-2 `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    symbols, extra = [], 0
    for byte in range(256):
        if byte in printable:
            symbols.append(chr(byte))
        else:
            symbols.append(chr(256 + extra))
            extra += 1
    return symbols


def _word(number: int) -> str:
    syllables = []
    while True:
        number, digit = divmod(number, len(_SYLLABLES))
        syllables.append(_SYLLABLES[digit])
        if number == 0:
            break
        number -= 1
    # "Ġ" is the byte symbol of a space: each made-up word begins with one.
    return "Ġ" + "".join(syllables) + "x"


def tokenizer_json(vocabulary: int) -> dict[str, Any]:
    """`tokenizer.json` with exactly `vocabulary` ids (at least 259)."""
    symbols = _byte_symbols()
    tokens = [*_SPECIAL, *symbols, *(_word(number) for number in range(vocabulary - len(_SPECIAL) - len(symbols)))]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for number, token in enumerate(_SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [],
        },
    }


def tokenizer_config(context: int) -> dict[str, Any]:
    """`tokenizer_config.json`, with a chat template that only joins the messages."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<unk>",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "chat_template": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:",
    }
