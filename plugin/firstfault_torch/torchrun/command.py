"""``firstfault torchrun``: torch's own launcher, with firstfault's agent."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import re
import sys
import traceback
from functools import partial
from typing import NoReturn

import click

from firstfault.cli import missing_package
from firstfault.errors import FirstFaultError
from firstfault_start import without_collections

_HAS_TORCH = importlib.util.find_spec("torch") is not None
_NAME = "firstfault torchrun"
_UNKNOWN_OPTION = re.compile(r"unrecognized arguments: (--[\w-]+)")
"""argparse's message."""
_EXAMPLES = """\
examples:
  firstfault torchrun --standalone --nproc-per-node 8 train.py --lr 3e-4
  firstfault torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint head:29400 train.py
  firstfault torchrun --ff-folder s3://bucket/7 --ff-hang warn:60,end:300 --standalone train.py
"""


@click.command(
    context_settings={
        "ignore_unknown_options": True,
        "allow_extra_args": True,
        "allow_interspersed_args": False,
        "help_option_names": [],
    },
    add_help_option=False,
    short_help=None if _HAS_TORCH else "(needs the extra torch)",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def torchrun(arguments: tuple[str, ...]) -> int:
    """Run torchrun with these ARGUMENTS, and print which worker failed, why, and whether to run the
    job again.

    `--help` lists firstfault's own options, which begin with `--ff-`, and then torchrun's.

    \b
    Examples:
      firstfault torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint head:29400 train.py
      firstfault torchrun --ff-folder s3://bucket/runs/7 --standalone train.py --lr 3e-4
    """  # noqa: D301 - click's mark of lines to keep
    if not _HAS_TORCH:
        return _explain_missing_torch(arguments)
    from torch.distributed.elastic.multiprocessing.errors import (  # noqa: PLC0415 - loads torch
        record,
    )
    from torch.distributed.run import get_args_parser, run  # noqa: PLC0415 - loads torch

    with without_collections():
        from firstfault_torch.guard import try_call  # noqa: PLC0415 - loads torch
        from firstfault_torch.torchrun.agent import is_told, stand_in  # noqa: PLC0415 - loads torch
        from firstfault_torch.torchrun.job import set_variables  # noqa: PLC0415 - loads torch

    stand_in()
    sys.argv[0] = _NAME
    parser = get_args_parser()
    add_help(parser)
    suggest_options(parser)
    given = parser.parse_args(arguments)
    set_variables(given)
    # torch's `record` writes the error file for an outer agent, as its own torchrun does.
    _, error = try_call(partial(record(run), given), Exception)
    if error is not None and not is_told(error):
        traceback.print_exception(error)
    return 0 if error is None else 1  # as torchrun's


def suggest_options(parser: argparse.ArgumentParser) -> None:
    """Let the parser's message about an unknown option name the most similar one."""
    refuse, options = parser.error, parser._option_string_actions  # noqa: SLF001 - no public name

    def error(message: str) -> NoReturn:
        unknown = _UNKNOWN_OPTION.match(message)
        similar = (
            difflib.get_close_matches(unknown[1], options, 1, 0.8) if unknown is not None else []
        )
        refuse(f"{message}; did you mean {similar[0]!r}?" if similar else message)

    parser.error = error  # type: ignore[method-assign]


def add_help(parser: argparse.ArgumentParser) -> None:
    """Add firstfault's options to torch's parser, and examples at the end of its help."""
    from firstfault_torch.torchrun.job import (  # noqa: PLC0415 - the list of commands doesn't need it
        add_options,
    )

    add_options(parser)
    parser.epilog = _EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter  # keeps the lines of the examples


def _explain_missing_torch(arguments: tuple[str, ...]) -> int:
    """Print the help without torch's options if it was asked for.

    Raises:
        FirstFaultError: the job can't run; the message has what to install.
    """
    reason = missing_package(f"`{_NAME}`", ModuleNotFoundError(name="torch"), "torch")
    if arguments[:1] not in {("--help",), ("-h",)}:
        raise FirstFaultError(reason)
    parser = argparse.ArgumentParser(
        _NAME, description=f"{reason}. It then has torchrun's options, too."
    )
    add_help(parser)
    parser.print_help()
    return 0
