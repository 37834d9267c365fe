"""Fixtures of the process tests."""

from .supervised import bench  # noqa: F401
