"""Fixtures of `tests.prefix`, for the tests of this folder."""

from tests.prefix import no_name_service, prefix, signal_handlers_restored

__all__ = ["no_name_service", "prefix", "signal_handlers_restored"]
