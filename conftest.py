"""What the project's own tests need of pytest: `pytester` runs pytest inside a test."""

from pathlib import Path

TESTS = Path(__file__).parent / "tests"
pytest_plugins = ["pytester"]


def pytest_ignore_collect(collection_path, config):
    """A matrix run in this checkout is about servers: the project's own tests, and what they import, stay out of it."""
    return True if TESTS in collection_path.parents and config.getoption("gpu_matrix", None) else None
