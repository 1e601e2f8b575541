"""Fixtures of `tests.prefix`, for the tests of this folder."""

from tests.prefix import prefix

__all__ = ["prefix"]
