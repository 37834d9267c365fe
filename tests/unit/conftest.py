"""Golden files: what a renderer makes of a fixed record, compared as text."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def golden() -> Callable[[str, str], None]:
    """`golden(name, text)` fails with a diff where `text` is not the file's; GOLDEN_UPDATE=1 writes the file."""

    def same(name: str, text: str) -> None:
        path = GOLDEN / name
        if os.environ.get("GOLDEN_UPDATE"):
            path.write_text(text)
        assert text == path.read_text()

    return same
