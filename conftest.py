"""What the project's own tests need of pytest: `pytester` runs pytest inside a test."""

pytest_plugins = ["pytester"]
