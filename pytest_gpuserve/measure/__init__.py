"""Measurement: load, statistics, output comparison, telemetry. No pytest here: `suite` turns verdicts into checks."""
