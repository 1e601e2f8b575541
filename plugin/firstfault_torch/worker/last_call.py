"""Whether a call is the last thing that a program does: what fails in it takes no work away.

Most programs end with ``dist.destroy_process_group()``. Their main function has not returned then,
but nothing of it is left to run, which the instructions behind the call show, in its frame and in
each frame below.
"""

from __future__ import annotations

import dis
from types import FrameType

_ENDS = {"RETURN_VALUE", "RETURN_CONST"}
_WITHOUT_EFFECT = {
    "NOP",
    "POP_TOP",
    "LOAD_CONST",
    "LOAD_FAST",
    "STORE_FAST",
    "EXTENDED_ARG",
    "CACHE",
}
"""Instructions between a call and the return of its frame that run no code: they drop the result,
or return a value.
"""


def is_last_call(frame: FrameType | None) -> bool:
    """Whether the present call of `frame` is the last one of the whole program, if it returns."""
    while frame is not None:
        if not _is_last_in_frame(frame):
            return False
        frame = frame.f_back
    return True


def _is_last_in_frame(frame: FrameType) -> bool:
    behind = (item for item in dis.get_instructions(frame.f_code) if item.offset > frame.f_lasti)
    rest = next((item.opname for item in behind if item.opname not in _WITHOUT_EFFECT), "")
    return rest in _ENDS
