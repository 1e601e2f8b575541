"""Exceptions as data: tracebacks, fingerprints, and where a stopped process stood."""
