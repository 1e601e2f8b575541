"""Fixtures of the plugin's tests."""

from tests.prefix import prefix
from tests.readers.commands import run

__all__ = ["prefix", "run"]
