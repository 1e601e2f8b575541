"""Leaves out tests whose packages are not installed."""

from __future__ import annotations

import importlib.util

import pytest

__all__ = ["need_the_plugin"]


def need_the_plugin() -> None:
    """Skip a test of ``firstfault run`` where the plugin cannot be imported."""
    lacking = [name for name in ("flytekit", "torch") if importlib.util.find_spec(name) is None]
    if lacking:
        pytest.skip(f"firstfault run needs the plugin, which needs {lacking[0]}")
