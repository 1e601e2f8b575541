"""Whether a call is the last thing that a program does, shown by the instructions behind it."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import contextlib, sys
from firstfault_torch.worker.last_call import is_last_call

def end():
    print(is_last_call(sys._getframe(1)), flush=True)

def main():
    loss = 0.5
    {}

{}
"""
LAST = {
    "alone": ("end()", "main()"),
    "guarded": ("end()", "if __name__ == '__main__':\n    main()"),
    "in a condition": ("if loss:\n        end()", "main()"),
    "in a finally": ("try:\n        loss += 1\n    finally:\n        end()", "main()"),
    "before a value": ("end()\n    return loss", "main()"),
    "with a result": ("result = end()\n    return result", "main()"),
    "below a wrapper": ("end()", "def call(function):\n    return function()\ncall(main)"),
}
NOT_LAST = {
    "more in its frame": ("end()\n    print('saves the model')", "main()"),
    "more in the module": ("end()", "main()\nprint('saves the model')"),
    "a context manager's exit": ("with contextlib.nullcontext():\n        end()", "main()"),
    "a context manager around": ("end()", "with contextlib.nullcontext():\n    main()"),
    "a value that is computed": ("end()\n    return loss + 1", "main()"),
    "an exit": ("end()", "sys.exit(main())"),
    "an exception": (
        "try:\n        raise ValueError\n    finally:\n        end()",
        "with contextlib.suppress(ValueError):\n    main()",
    ),
    "a loop": ("for _ in range(1):\n        end()", "main()"),
}


@pytest.mark.parametrize(
    ("parts", "is_last"),
    [*((parts, True) for parts in LAST.values()), *((parts, False) for parts in NOT_LAST.values())],
    ids=[*LAST, *NOT_LAST],
)
def test_only_a_call_before_returns_is_the_last_one(
    tmp_path: Path, parts: tuple[str, str], is_last: bool
) -> None:
    """Only a call behind which each frame returns at once is the last one."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(*parts))
    ran = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[0] == str(is_last)
