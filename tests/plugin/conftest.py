"""Fixtures of `tests.prefix`, for the tests of this folder."""

from tests.prefix import prefix, signal_handlers_restored

__all__ = ["prefix", "signal_handlers_restored"]
