"""Exceptions as data: tracebacks, fingerprints, and the stacks of stopped processes. Imports `model` alone."""
