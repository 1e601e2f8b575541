"""The task function keeps its place in the source on its way to a spawned worker."""

from __future__ import annotations

import pickle
from functools import partial

from flytekitplugins.firstfault.elastic import pickled


def test_code_keeps_its_file() -> None:
    """A function that is pickled by value, and one inside it, name this file; so do their tracebacks and stacks."""

    def outer(number: int) -> object:
        def inner() -> int:
            return number

        return inner

    function = pickle.loads(pickled(partial(outer, 3)))  # noqa: S301 - pickled above
    inner = function()
    assert inner() == 3
    assert function.func is not outer, "it was pickled by reference"
    assert {function.func.__code__.co_filename, inner.__code__.co_filename} == {__file__}
