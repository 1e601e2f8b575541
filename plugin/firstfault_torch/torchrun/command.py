"""``firstfault torchrun``: torch's own launcher, with firstfault's agent."""

from __future__ import annotations

import sys

import click


@click.command(
    context_settings={
        "ignore_unknown_options": True,
        "allow_extra_args": True,
        "allow_interspersed_args": False,
        "help_option_names": [],
    },
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def torchrun(arguments: tuple[str, ...]) -> int:
    """Run torchrun with these ARGUMENTS, and say which worker failed, why, and whether to run the job again.

    \b
    Examples:
      firstfault torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint head:29400 train.py
    """  # noqa: D301 - click's mark of lines to keep
    from torch.distributed.run import main  # noqa: PLC0415 - loads torch

    from firstfault_torch.torchrun.agent import stand_in  # noqa: PLC0415 - loads torch

    stand_in()
    sys.argv[0] = "firstfault torchrun"
    main(list(arguments))
    return 0
