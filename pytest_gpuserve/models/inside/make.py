"""`python make.py FOLDER`: write seeded weights for FOLDER/config.json. Needs torch, no GPU, and takes seconds.

Numbers come from one pool of seeded normal numbers, read at an offset that depends on the tensor's name: a generator
for each of a billion weights would take minutes, and no two tensors share an offset. The safetensors file is written
directly (its format is a JSON header and raw bytes), tensor by tensor, so that memory stays at the pool's size.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from tensors import Tensor, tensors_of  # type: ignore[import-not-found,unused-ignore]  # beside this file, on purpose

if TYPE_CHECKING:
    from collections.abc import Iterator

# A prime: no tensor's row length divides it, so a tensor longer than the pool repeats nothing at the same column.
POOL = 16_777_259
E8M0_BIAS = 127

_STORED = {
    "bf16": ("BF16", torch.bfloat16),
    "f32": ("F32", torch.float32),
    "scale-f32": ("F32", torch.float32),
    "fp8": ("F8_E4M3", torch.float8_e4m3fn),
    "scale-fp8": ("F8_E4M3", torch.float8_e4m3fn),
    "bits": ("U8", torch.uint8),
    "e8m0": ("U8", torch.uint8),
}


def _seed(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "little")


def _raw(tensor: Any) -> memoryview:
    raw: memoryview = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
    return raw


class Pool:
    """Seeded normal numbers, stored at each type and scale that was asked for."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.normal = torch.randn(POOL, generator=self.generator)
        self.stored: dict[tuple[str, float], Any] = {}

    def draw(self, tensor: Tensor) -> Iterator[memoryview]:
        """The random numbers of `tensor`, as pieces of the pool: gigabytes are written that were never copied."""
        key = (tensor.kind, tensor.std)
        if key not in self.stored:
            if tensor.kind == "bits":
                numbers = torch.randint(0, 256, (POOL,), generator=self.generator, dtype=torch.uint8)
            else:
                numbers = (self.normal * tensor.std).to(_STORED[tensor.kind][1])
            self.stored[key] = _raw(numbers)
        raw = self.stored[key]
        size = raw.nbytes // POOL
        count, offset = math.prod(tensor.shape), _seed(tensor.name) % POOL
        while count:
            take = min(count, POOL - offset)
            yield raw[offset * size : (offset + take) * size]
            count, offset = count - take, 0


def _scales(tensor: Tensor) -> Any:
    """Scales that differ from place to place, so that one read at a wrong place shows in the output."""
    generator = torch.Generator().manual_seed(_seed(tensor.name))
    spread = torch.rand(tensor.shape, generator=generator)
    if tensor.kind == "e8m0":
        exponent = torch.floor(math.log2(tensor.value) + spread * 2 - 0.5)
        return (exponent + E8M0_BIAS).to(torch.uint8)
    return ((spread * 0.75 + 0.65) * tensor.value).to(_STORED[tensor.kind][1])


def _content(tensor: Tensor, pool: Pool) -> Iterator[memoryview]:
    if tensor.kind in ("scale-f32", "scale-fp8", "e8m0"):
        yield _raw(_scales(tensor))
    elif tensor.std or tensor.kind == "bits":
        yield from pool.draw(tensor)
    else:
        yield _raw(torch.full((math.prod(tensor.shape),), tensor.value, dtype=_STORED[tensor.kind][1]))


def make(folder: Path, seed: int = 0) -> None:
    """Write `model.safetensors` beside `config.json` in `folder`."""
    tensors = tensors_of(json.loads((folder / "config.json").read_text()))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        name, dtype = _STORED[tensor.kind]
        end = at + math.prod(tensor.shape) * dtype.itemsize
        header[tensor.name] = {"dtype": name, "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    pool = Pool(seed)
    with (folder / "model.safetensors").open("wb") as out:
        out.write(len(text).to_bytes(8, "little"))
        out.write(text)
        for tensor in tensors:
            out.writelines(_content(tensor, pool))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
