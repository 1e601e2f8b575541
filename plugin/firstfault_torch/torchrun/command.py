"""``firstfault torchrun``: torch's own launcher, with firstfault's agent."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from functools import partial

import click

from firstfault_start import without_collections

if importlib.util.find_spec("torch") is None:
    # The command line turns an ImportError of this module into advice on what to install.
    raise ModuleNotFoundError("No module named 'torch'", name="torch")


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
    """Run torchrun with these ARGUMENTS, and print which worker failed, why, and whether to run the job again.

    `--help` lists firstfault's own options, which begin with `--ff-`, and then torchrun's.

    \b
    Examples:
      firstfault torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint head:29400 train.py
      firstfault torchrun --ff-folder s3://bucket/runs/7 --standalone --nproc-per-node gpu train.py --lr 3e-4
    """  # noqa: D301 - click's mark of lines to keep
    from torch.distributed.elastic.multiprocessing.errors import record  # noqa: PLC0415 - loads torch
    from torch.distributed.run import get_args_parser, run  # noqa: PLC0415 - loads torch

    with without_collections():
        from firstfault_torch.guard import try_call  # noqa: PLC0415 - loads torch
        from firstfault_torch.torchrun.agent import is_told, stand_in  # noqa: PLC0415 - loads torch
        from firstfault_torch.torchrun.job import add_options, set_variables  # noqa: PLC0415 - loads torch

    stand_in()
    sys.argv[0] = "firstfault torchrun"
    parser = get_args_parser()
    add_options(parser)
    given = parser.parse_args(arguments)
    set_variables(given)
    # torch's `record` writes the error file for an outer agent, as its own torchrun does.
    _, error = try_call(partial(record(run), given), Exception)
    if error is not None and not is_told(error):
        traceback.print_exception(error)
    return 0 if error is None else 1  # as torchrun's
