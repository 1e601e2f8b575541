"""Exceptions as data: tracebacks, fingerprints, stacks of stopped processes. Imports `model`, `text`."""
