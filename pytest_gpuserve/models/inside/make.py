"""`python make.py FOLDER`: write seeded weights for FOLDER/config.json. Needs torch, no GPU, and takes seconds.

Numbers come from one pool of seeded normal numbers, read at an offset that depends on the tensor's name: a generator
for each of a billion weights would take minutes, and no two tensors share an offset. The safetensors file is written
directly (its format is a JSON header and raw bytes), tensor by tensor, so that memory stays at the pool's size.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from tensors import Tensor, tensors_of  # type: ignore[import-not-found,unused-ignore]  # beside this file, on purpose

if TYPE_CHECKING:
    from collections.abc import Iterator

# A prime: no tensor's row length divides it, so a tensor longer than the pool repeats nothing at the same column.
POOL = 16_777_259
BLOCK = 128
# fp8 e4m3 reaches 448; normal numbers times 64 stay inside it up to 7 sigma.
FP8_SPREAD = 64.0


class Pool:
    """Seeded normal numbers, as bf16 at any scale and as fp8 at one."""

    def __init__(self, seed: int) -> None:
        self.normal = torch.randn(POOL, generator=torch.Generator().manual_seed(seed))
        self.scaled: dict[tuple[str, float], Any] = {}

    def draw(self, name: str, count: int, kind: str, std: float) -> Iterator[bytes]:
        """`count` numbers of standard deviation `std` for the tensor `name`, as raw bytes in pieces."""
        key = (kind, std if kind != "fp8" else FP8_SPREAD)
        if key not in self.scaled:
            dtype = {"bf16": torch.bfloat16, "f32": torch.float32, "fp8": torch.float8_e4m3fn}[kind]
            self.scaled[key] = (self.normal * key[1]).to(dtype).view(torch.uint8).numpy()
        raw = self.scaled[key]
        size = raw.nbytes // POOL
        offset = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") % POOL
        while count:
            take = min(count, POOL - offset)
            yield raw[offset * size : (offset + take) * size].tobytes()
            count, offset = count - take, 0


def _count(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _with_scales(tensors: list[Tensor]) -> Iterator[Tensor]:
    """Every tensor, and after each fp8 one its block scales (`weight_scale_inv`, f32, one per 128 × 128 block)."""
    for tensor in tensors:
        yield tensor
        if tensor.kind == "fp8":
            blocks = tuple((size + BLOCK - 1) // BLOCK for size in tensor.shape)
            yield Tensor(f"{tensor.name}_scale_inv", blocks, value=tensor.std / FP8_SPREAD, kind="scale")


def _scales(tensor: Tensor) -> bytes:
    """Scales that differ from block to block by up to a factor of two, so that a scale read at a wrong place shows."""
    generator = torch.Generator().manual_seed(
        int.from_bytes(hashlib.sha256(tensor.name.encode()).digest()[:4], "little")
    )
    spread = torch.rand(tensor.shape, generator=generator) * 0.75 + 0.65
    raw: bytes = (spread * tensor.value).to(torch.float32).numpy().tobytes()
    return raw


def _write(out: BinaryIO, tensor: Tensor, pool: Pool) -> None:
    if tensor.kind == "scale":
        out.write(_scales(tensor))
    elif tensor.std:
        out.writelines(pool.draw(tensor.name, _count(tensor.shape), tensor.kind, tensor.std))
    else:
        dtype = torch.float32 if tensor.kind == "f32" else torch.bfloat16
        out.write(torch.full(tensor.shape, tensor.value, dtype=dtype).view(torch.uint8).numpy().tobytes())


def make(folder: Path, seed: int = 0) -> None:
    """Write `model.safetensors` beside `config.json` in `folder`."""
    config = json.loads((folder / "config.json").read_text())
    tensors = list(_with_scales(tensors_of(config)))
    sizes = {"bf16": ("BF16", 2), "f32": ("F32", 4), "scale": ("F32", 4), "fp8": ("F8_E4M3", 1)}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        dtype, size = sizes[tensor.kind]
        end = at + _count(tensor.shape) * size
        header[tensor.name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    pool = Pool(seed)
    with (folder / "model.safetensors").open("wb") as out:
        out.write(len(text).to_bytes(8, "little"))
        out.write(text)
        for tensor in tensors:
            _write(out, tensor, pool)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
