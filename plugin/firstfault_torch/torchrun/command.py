"""``firstfault torchrun``: torch's own launcher, with firstfault's agent."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from typing import NoReturn

import click

from firstfault.cli import missing_package
from firstfault.errors import FirstFaultError
from firstfault_start import is_off, without_collections

_HAS_TORCH = importlib.util.find_spec("torch") is not None
_NAME = "firstfault torchrun"
_OPTION_PREFIX = "--ff-"
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
    if is_off():
        _become_plain_torchrun(arguments)
    from torch.distributed.elastic.multiprocessing.errors import (  # noqa: PLC0415 - loads torch
        record,
    )
    from torch.distributed.run import get_args_parser, run  # noqa: PLC0415 - loads torch

    with without_collections():
        from firstfault_torch.guard import try_call  # noqa: PLC0415 - loads torch
        from firstfault_torch.torchrun.agent import (  # noqa: PLC0415 - loads torch
            is_reported,
            replace_launcher_agent,
        )
        from firstfault_torch.torchrun.settings import set_variables  # noqa: PLC0415 - loads torch

    replace_launcher_agent()
    sys.argv[0] = _NAME
    parser = get_args_parser()
    add_help(parser)
    suggest_options(parser)
    parsed = parser.parse_args(arguments)
    set_variables(parsed)
    # torch's `record` writes the error file for an outer agent, as its own torchrun does.
    _, error = try_call(partial(record(run), parsed), Exception)
    if error is not None and not is_reported(error):
        traceback.print_exception(error)
    return 0 if error is None else 1  # as torchrun's


def _become_plain_torchrun(arguments: Sequence[str]) -> NoReturn:
    """Replace this process by torch's own launcher, which runs its own agent.

    A new program, and not a call: a switch that turns firstfault off must also work where
    firstfault is what fails.
    """
    # The working folder must not hide modules of torch's, as it does not for the program torchrun.
    flags = ["-P"] if sys.version_info >= (3, 11) else []
    words = [sys.executable, *flags, "-m", "torch.distributed.run", *drop_own_options(arguments)]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(words[0], words)  # noqa: S606 - the user's job


def drop_own_options(arguments: Sequence[str]) -> list[str]:
    """Return torchrun's arguments without firstfault's options; the script's arguments stay."""
    if not any(word.startswith(_OPTION_PREFIX) for word in arguments):
        return list(arguments)
    from torch.distributed.run import get_args_parser  # noqa: PLC0415 - loads torch

    from firstfault_torch.torchrun.settings import list_options  # noqa: PLC0415 - loads torch

    parser = get_args_parser()
    flags = []
    for option, is_flag in list_options():
        # without the checks of values: a misspelled one must not stop a job that ignores it
        parser.add_argument(option, nargs=0 if is_flag else None, action=_Ignored)
        flags += [option] if is_flag else []
    # what follows the script, which may have options with the same names
    length = len(arguments) - len(parser.parse_args(arguments).training_script_args)
    words = iter(arguments[:length])
    kept = []
    for word in words:
        name, equals, _ = word.partition("=")
        if not word.startswith(_OPTION_PREFIX):
            kept.append(word)
        elif not equals and not any(flag.startswith(name) for flag in flags):
            next(words, None)  # the value of an option that isn't a flag
    return [*kept, *arguments[length:]]


class _Ignored(argparse.Action):
    def __call__(self, *_: object) -> None:
        """Store nothing."""


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
    from firstfault_torch.torchrun.settings import (  # noqa: PLC0415 - the list of commands doesn't need it
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
