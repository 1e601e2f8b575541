"""Fixtures of the tests of torchrun's jobs."""

from tests.prefix import prefix

__all__ = ["prefix"]
