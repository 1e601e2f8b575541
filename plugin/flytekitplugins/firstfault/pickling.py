"""Pickles the task function for spawned workers, as cloudpickle does, with the files of its code.

cloudpickle 3.1.3 and later replace the file of each code object by "<dynamic-code>". Then no traceback and no stack
would name the file of a task function.
"""

from __future__ import annotations

import io
from collections import ChainMap
from types import CodeType
from typing import TYPE_CHECKING, Any, ClassVar

import cloudpickle

if TYPE_CHECKING:
    from collections.abc import Callable


def pickled(value: Any) -> bytes:
    """Return a value as bytes that ``pickle.loads`` reads, as ``cloudpickle.dumps`` does."""
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def _reduced(code: CodeType) -> tuple[Any, ...]:
    make, arguments = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return _with_file, (code.co_filename, make, arguments)


def _with_file(file: str, make: Callable[..., CodeType], arguments: tuple[Any, ...]) -> CodeType:
    return make(*arguments).replace(co_filename=file)


class _Pickler(cloudpickle.Pickler):
    dispatch_table: ClassVar[Any] = ChainMap({CodeType: _reduced}, cloudpickle.Pickler.dispatch_table)
