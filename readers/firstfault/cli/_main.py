"""The command group with its small commands ``help``, ``classify`` and ``prune``, and the handling of errors."""

from __future__ import annotations

import difflib
import json
import logging
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from firstfault.cli._ls import ls
from firstfault.cli._show import show
from firstfault.cli._support import EXIT, debug_option, debugging, echo, fail, missing_package
from firstfault.cli._watch import watch
from firstfault.errors import FirstFaultError, UsageError
from firstfault.utils.text import counted, parse_json, printable

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from click.shell_completion import CompletionItem

COMMANDS_GROUP = "firstfault.commands"
"""Entry-point group for the commands of other distributions, such as our plugin."""


class _CommandGroup(click.Group):
    """Loads commands of other distributions on their first use, and suggests a command for a misspelt one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *(point.name for point in _entry_points())})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        # built-in commands first: another distribution can't replace them
        own = super().get_command(ctx, cmd_name)
        return own or next((_load_command(point) for point in _entry_points() if point.name == cmd_name), None)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            known = self.list_commands(ctx)
            meant = difflib.get_close_matches(name.lower(), known, n=1)
            hint = f"did you mean {meant[0]!r}?" if meant else f"commands are {_join_names(known)}"
            raise click.UsageError(f"unknown command {name!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)


def _join_names(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _entry_points() -> tuple[EntryPoint, ...]:
    import importlib.metadata  # noqa: PLC0415 - slow, and built-in commands don't need it

    return tuple(importlib.metadata.entry_points(group=COMMANDS_GROUP))


def _load_command(point: EntryPoint) -> click.Command:
    """Return a command of another distribution; if its packages are missing, one that prints what to install."""
    try:
        command: click.Command = point.load()
    except ImportError as error:
        reason = missing_package(f"`firstfault {point.name}`", error)

        def explain() -> None:
            raise FirstFaultError(reason)

        # any argument is accepted, so that the command prints what to install instead of a usage error
        return click.Command(
            point.name,
            callback=explain,
            short_help=f"(not available: {reason})",
            context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
        )
    return command


@click.group(
    cls=_CommandGroup,
    invoke_without_command=True,
    subcommand_metavar="COMMAND [ARGS]...",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="firstfault")
@debug_option
@click.pass_context
def group(context: click.Context) -> None:
    """Find out which worker killed a distributed training job, why, and whether to run it again.

    \b
    Examples:
      firstfault show s3://bucket/metadata/propeller/f3a9/n0/data/0
      firstfault show --html report.html .firstfault/runs/f3a9/0
      firstfault ls --since 7d s3://bucket/metadata/propeller
      firstfault run train.py train --nodes 2
      firstfault watch s3://bucket/metadata/propeller/f3a9/n0/data/0
    """  # noqa: D301 - click's mark of lines to keep
    if context.invoked_subcommand is None:
        raise click.UsageError(f"missing command; commands are {_join_names(group.list_commands(context))}", context)


# --- small commands -------------------------------------------------------------------------------------------------


def _complete_commands(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem | str]:
    del parameter
    return [name for name in group.list_commands(context) if name.startswith(incomplete)]


@click.command("help")
@click.argument("command", required=False, shell_complete=_complete_commands)
@click.pass_context
def help_(context: click.Context, command: str | None) -> int:
    """Show the help of COMMAND; without it the list of commands.

    \b
    Examples:
      firstfault help
      firstfault help show
    """  # noqa: D301 - click's mark of lines to keep
    shown = root = context.find_root()
    if command is not None:
        name, found, _ = group.resolve_command(root, [command])
        shown = click.Context(found, root, name) if found is not None else root
    click.echo(shown.get_help())
    return EXIT.OK


@click.command()
@click.option(
    "--signatures",
    "files",
    multiple=True,
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="A TOML file of signatures, matched before the built-in ones; may be repeated.",
)
@debug_option
def classify(files: tuple[str, ...]) -> int:
    """Classify error texts: a fault of the process that wrote the text, or a reaction to another one.

    Reads JSON lines {"id", "exception_type", "message"} on stdin, writes for each
    {"id", "role", "category", "pointer", "signature"}: role is primary (the process's own fault), secondary
    (a reaction to another failure) or ambiguous; pointer is the peer that the text names, or null.

    \b
    Examples:
      echo '{"id": 1, "message": "Connection closed by peer [10.0.0.7]:4242"}' | firstfault classify
      firstfault classify --signatures ours.toml < errors.jsonl
    """  # noqa: D301 - click's mark of lines to keep
    from firstfault.evidence import built_in_signatures, load_signatures  # noqa: PLC0415 - `--help` needs none of these
    from firstfault.evidence import classify as classified  # noqa: PLC0415

    signatures = built_in_signatures()
    # each file is put in front, so the first FILE of the command line is matched first
    for file in reversed(files):
        signatures = load_signatures(file) + signatures
    for number, row in _iter_rows():
        message, kind = _format_cell(row, "message", number), _format_cell(row, "exception_type", number)
        found = classified(message, kind, signatures=signatures)
        answer = {
            "id": row.get("id"),
            "role": found.role.value,
            "category": found.category,
            "pointer": found.pointer.as_dict() if found.pointer is not None else None,
            "signature": found.signature or None,
        }
        click.echo(json.dumps(answer))
    return EXIT.OK


def _iter_rows() -> Iterator[tuple[int, dict[str, Any]]]:
    if sys.stdin is None:
        raise UsageError("stdin is closed; give it lines of JSON")
    # one line at a time: an answer is printed before the next line is read
    for number, line in enumerate(sys.stdin, start=1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            raise UsageError(f"line {number} of stdin is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise UsageError(f'line {number} of stdin must be an object such as {{"id": 1, "message": "..."}}')
        yield number, row


def _format_cell(row: dict[str, Any], key: str, number: int) -> str:
    value = row.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UsageError(f"{key!r} in line {number} of stdin must be a string")
    return value


_OWN = {"firstfault.run", "inputs.pb", "logs", "raw", "report.html"}
"""What a run's folder may contain in addition to its attempts."""


@click.command()
@click.argument("folder", default=".", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--keep", default=20, show_default=True, type=click.IntRange(min=0), metavar="N", help="Runs to keep.")
@debug_option
def prune(folder: Path, keep: int) -> int:
    """Remove old runs below FOLDER, by default the current one.

    This covers the runs of `firstfault run` and of torchrun's jobs below .firstfault, and runs directly in FOLDER, for
    a FOLDER that FIRSTFAULT_FOLDER names. It keeps the last N of each, runs that may still be active, and runs with
    foreign files.

    \b
    Examples:
      firstfault prune
      firstfault prune --keep 5 /shared/runs
    """  # noqa: D301 - click's mark of lines to keep
    from firstfault.run_folder import PRUNED, runs_in  # noqa: PLC0415

    removed, freed = 0, 0
    for name in ("", *PRUNED):
        for run in runs_in(folder / name)[keep:]:
            if why := _explain_kept_run(run):
                fail(f"kept {run}: {why}")
                continue
            # lstat: deleting a link frees nothing of its target
            size = sum(path.lstat().st_size for path in run.rglob("*") if not path.is_dir())
            shutil.rmtree(run)
            echo(f"removed {run}")
            removed, freed = removed + 1, freed + size
    echo(f"removed {counted(removed, 'run')}, {freed / 1e6:.1f} MB")
    return EXIT.OK


def _explain_kept_run(run: Path) -> str:
    """Return why a run isn't removed; empty if it is."""
    from firstfault.run_folder import may_go_on  # noqa: PLC0415 - as above

    # FOLDER may be any folder, so only what firstfault made is ever deleted
    foreign = sorted(path.name for path in run.iterdir() if path.name not in _OWN and not path.name.isdecimal())
    if foreign:
        return f"firstfault did not make {', '.join(foreign)} in it"
    return "it may still go on" if may_go_on(run) else ""


for _command in (classify, help_, ls, prune, show, watch):
    group.add_command(_command)


# --- errors ---------------------------------------------------------------------------------------------------------


def _format_usage_error(error: click.ClickException) -> str:
    """Return a usage error in one line, with a pointer to --help unless it already suggests something."""
    text = error.format_message().rstrip(".")
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is None or text.endswith("?"):
        return text
    return f"{text} (see '{context.command_path} --help')"


_CLIENTS = ("aiobotocore", "asyncio", "azure", "botocore", "fsspec", "gcsfs", "google", "s3fs", "stamina")
"""Loggers of the storages' clients: what they would print is part of the error's one line."""


class _OneLine(logging.Formatter):
    """Formats a log record as one line without control characters: it may quote a document."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Return the record's line."""
        is_own = record.name.startswith("firstfault")  # the line has the name
        return " ".join(printable(record.message if is_own else super().formatMessage(record)).split())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with one of `EXIT`."""
    if sys.stdout is None:  # closed: the caller wants the exit code alone
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - open until the process ends
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    # errors become one line of ours; the clients would log each failed request in addition
    for client in _CLIENTS:
        logging.getLogger(client).setLevel(logging.CRITICAL)
    try:
        # in standalone mode click would print errors in its own form and exit with its own codes
        code = group.main(args=arguments, prog_name="firstfault", standalone_mode=False)
    except click.ClickException as error:
        fail(_format_usage_error(error))
        sys.exit(EXIT.USAGE)
    except (click.Abort, KeyboardInterrupt):
        fail("interrupted")
        sys.exit(EXIT.INTERRUPTED)
    except FirstFaultError as error:
        # with --debug Python prints the traceback
        if debugging():
            raise
        fail(str(error))
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output is gone: no traceback
        sys.exit(EXIT.TOOL_FAILED)
    except Exception as error:
        if debugging():
            raise
        fail(f"unexpected {type(error).__name__}: {error} (run with --debug for a traceback)")
        sys.exit(EXIT.TOOL_FAILED)
    sys.exit(code if isinstance(code, int) else EXIT.OK)
