"""Values that every other part speaks in: frozen, without I/O."""
