"""Records a rank that no agent starts: one of srun, mpirun, deepspeed, Ray,
or Lightning's own launcher.

``python -m firstfault_torch.record train.py ...`` runs a program in this process's place; ``import
firstfault_torch.record``, as a program's first import, records the program that runs. See
docs/start/torchrun.md.
"""

from __future__ import annotations

import os
import sys

from firstfault_start import begin_rank, is_off, mark_rank

_USAGE = """\
usage: python -m firstfault_torch.record train.py ...
       python -m firstfault_torch.record -m package.module ...
"""


def _get_command() -> list[str]:
    """Return this process's command line without this module."""
    at = next(
        number
        for number, item in enumerate(sys.orig_argv)
        if item.endswith("firstfault_torch.record")
    )
    option = sys.orig_argv[at].removesuffix("firstfault_torch.record")
    before = sys.orig_argv[:at] if option else sys.orig_argv[: at - 1]
    option = (option or sys.orig_argv[at - 1]).removesuffix("m")  # "-um" is "-u -m"
    return [*before, *([option] if option != "-" else []), *sys.orig_argv[at + 1 :]]


if __name__ != "__main__":
    begin_rank()
elif len(sys.argv) == 1:
    sys.stderr.write(_USAGE)
    sys.exit(2)
else:
    if not is_off():
        mark_rank()
    os.execv(sys.executable, _get_command())  # noqa: S606 - the user's program
