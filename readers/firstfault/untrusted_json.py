"""Parses JSON that any process may have written."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["parse_json"]


def parse_json(text: str | bytes) -> Any:
    """Return what a JSON text says.

    Raises:
        ValueError: it is not JSON, or nested too deep.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("the JSON is nested too deep") from error
