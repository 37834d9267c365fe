"""What runs inside the environment under test: the standard library and torch, nothing of this package."""
