"""Runs the commands of README and docs/start as pasted, in bare environments: ``make pages``.

Each page gets a bash, a clone of this tree, and a bare environment with its own pip for each
install command, without constraints. Only torch is there already: its wheel takes minutes to
download. An install command has three minutes. The exit code of each command has to be the
documented one, and where a page shows a command's output, the command has to print the same, apart
from numbers and names (tools/pages/outputs.py). Comments before a block mark those that can't run
here, with a reason (tools/pages/blocks.py).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tools.pages.blocks import Block, find_blocks
from tools.pages.environments import Environments, find_extra, find_python
from tools.pages.leftovers import write_dumps, write_kubectl, write_leftovers
from tools.pages.outputs import find_missing_line
from tools.pages.session import Ran, Session

ROOT = Path(__file__).parents[2]
REPOSITORY = "https://github.com/firstfault/firstfault"
INSTALL_SECONDS = 180
COMMAND_SECONDS = 120
_REPORT_CODES = (0, 10, 11)
"""Of `firstfault show`: what docs/reference/cli.md lists for a readable job."""
_DROPPED_VARIABLES = (
    "CI",
    "MAKEFLAGS",
    "MAKELEVEL",
    "PIP_CONSTRAINT",
    "PYTHONDONTWRITEBYTECODE",
    "PYTHONPATH",
    "VIRTUAL_ENV",
)
_DROPPED_PREFIXES = ("FIRSTFAULT", "GIT_", "SLURM")
_SHOWN_OUTPUT = 3000
_NOT_IN_CLONE = (
    ".git",
    ".venv",
    "build",
    "dist",
    "__pycache__",
    ".*_cache",
    ".hypothesis",
    ".firstfault",
)


@dataclass
class PageResult:
    """What happened on a page: a line for each command, what went wrong, and what wasn't run."""

    page: str
    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)


class PageRun:
    """Runs one page's blocks in order."""

    def __init__(
        self,
        page: str,
        folder: Path,
        environments: Environments,
        *,
        is_ci: bool,
        patience: float = 1,
    ) -> None:
        self._folder = folder
        self._environments = environments
        self._is_ci = is_ci
        self._install_seconds = INSTALL_SECONDS * patience
        self._command_seconds = COMMAND_SECONDS * patience
        self._result = PageResult(page)
        self._printed: dict[str, str] = {}
        self._work = folder / page.removesuffix(".md").replace("/", "-")
        self._saved = self._work / "saved"

    def run(self) -> PageResult:
        """Run the blocks, until a command takes too long."""
        blocks = list(find_blocks((ROOT / self._result.page).read_text(encoding="utf-8")))
        self._saved.mkdir(parents=True)
        start = self._work / "reader"
        start.mkdir(parents=True)
        is_cloning = any("git clone" in block.text for block in blocks if block.is_command)
        if not is_cloning:  # the page's reader has a clone already
            origin = str(self._folder / "origin")
            subprocess.run(["git", "clone", "-q", origin, str(start / "firstfault")], check=True)
            start /= "firstfault"
        shell = Session(self._work / "session", start, self._variables())
        with contextlib.closing(shell) as session:
            for block in blocks:
                if not self._run_block(block, session):
                    break
        return self._result

    def _variables(self) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if name not in _DROPPED_VARIABLES and not name.startswith(_DROPPED_PREFIXES)
        }
        return kept | {
            "PIP_NO_COMPILE": "1",  # Python compiles what it imports; pip would compile all of it
            # `git clone` of the published address copies this tree
            "PATH": f"{self._folder / 'programs'}:{kept['PATH']}",
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": f"url.file://{self._folder / 'origin'}.insteadOf",
            "GIT_CONFIG_VALUE_0": REPOSITORY,
        }

    def _run_block(self, block: Block, session: Session) -> bool:
        """Run a block, or save or compare it; return whether the shell still runs."""
        if "file" in block.notes:
            (self._saved / block.notes["file"]).write_text(block.text, encoding="utf-8")
        if "output of" in block.notes:
            self._compare(block)
        if not block.is_command:
            return True
        reason = block.find_reason_to_skip(is_ci=self._is_ci)
        if reason:
            self._result.not_run.append(f"{self._result.page}:{block.line}: {reason}")
            return True
        # the reader has them in the folder where the block begins
        session.run(f"cp -rn '{self._saved}'/. .", self._command_seconds)
        if "pip install" not in block.text:
            session.run(f"cp -rn '{self._folder / 'leftovers'}'/. .", self._command_seconds)
        commands = block.find_commands()
        for command in commands:
            if "pip install" in command:
                ran = self._install(command, session)
            else:
                ran = session.run(command, self._command_seconds)
            self._judge(block, command, ran, is_last=command is commands[-1])
            if ran.code is None:
                return False
        return True

    def _install(self, command: str, session: Session) -> Ran:
        """Run an install command in an environment of its own, which the commands below it use."""
        with self._environments.prepare(find_extra(command)) as venv:
            session.run(
                f"export VIRTUAL_ENV='{venv}' PATH='{venv}/bin':\"$PATH\"; hash -r",
                self._command_seconds,
            )
            return session.run(command, self._install_seconds)

    def _judge(self, block: Block, command: str, ran: Ran, *, is_last: bool) -> None:
        self._printed[command.partition("  #")[0].strip()] = ran.output
        expected: tuple[int, ...] = _REPORT_CODES if "firstfault show" in command else (0,)
        if is_last and block.exit_code is not None:
            expected = (block.exit_code,)
        place = f"{self._result.page}:{block.line}"
        ended = f"{ran.seconds:6.1f} s  exit code {ran.code}"
        self._result.lines.append(f"{ended}  {place}: {command.splitlines()[0]}")
        if ran.code not in expected:
            if ran.code is not None:
                ended = f"exit code {ran.code}"
            else:
                ended = f"no exit code after {ran.seconds:.0f} s: too slow, or the shell ended"
            self._result.problems.append(
                f"{place}: {command}\n{ended}, expected {expected}:\n{ran.output[-_SHOWN_OUTPUT:]}"
            )

    def _compare(self, block: Block) -> None:
        command = block.notes["output of"].strip("`")
        place = f"{self._result.page}:{block.line}"
        if command not in self._printed:
            self._result.problems.append(f"{place}: {command!r} wasn't run above")
            return
        # the pages' name for this machine
        printed = self._printed[command].replace(socket.gethostname(), "host-1")
        missing = find_missing_line(block.text, printed)
        if missing is not None:
            self._result.problems.append(
                f"{place}: {command} doesn't print this line, or not in this order:\n{missing}\n"
                f"It printed:\n{printed[-_SHOWN_OUTPUT:]}"
            )


def find_shared_extras(pages: list[str], *, is_ci: bool) -> set[str]:
    """Return the extras that more than one command of the pages installs."""
    counts = Counter(
        find_extra(command)
        for page in pages
        for block in find_blocks((ROOT / page).read_text(encoding="utf-8"))
        if block.is_command and not block.find_reason_to_skip(is_ci=is_ci)
        for command in block.find_commands()
        if "pip install" in command
    )
    return {extra for extra, count in counts.items() if count > 1}


def make_origin(folder: Path) -> None:
    """Make a repository of this tree, which readers clone."""
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*_NOT_IN_CLONE), symlinks=True)
    for command in (
        ["init", "--quiet"],
        ["add", "--all"],
        [
            "-c",
            "user.name=firstfault",
            "-c",
            "user.email=firstfault@localhost",
            "commit",
            "--quiet",
            "-m",
            "This tree",
        ],
    ):
        subprocess.run(["git", "-C", str(folder), *command], check=True)


def main() -> int:
    """Run the pages; print each command, what wasn't run, and what went wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pages", nargs="*", help="default: README.md and docs/start/*.md")
    parser.add_argument(
        "--ci",
        action="store_true",
        default="CI" in os.environ,
        help="leave out what other steps of CI run; or set CI",
    )
    parser.add_argument("--all-bare", action="store_true", help="share no environments")
    parser.add_argument("--patience", type=float, default=1, help="multiplies time limits")
    parser.add_argument("--keep", action="store_true", help="leave build/pages-*")
    options = parser.parse_args()
    started = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/start/*.md"))
    pages = options.pages or ["README.md", *started]
    (ROOT / "build").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="pages-", dir=ROOT / "build"))
    began = time.monotonic()
    dumps = write_dumps()
    try:
        make_origin(folder / "origin")
        write_leftovers(folder / "leftovers")
        write_kubectl(folder / "programs", folder / "leftovers" / "slurm-4711.out")
        shared = set() if options.all_bare else find_shared_extras(pages, is_ci=options.ci)
        environments = Environments(folder, find_python(), shared=shared)
        # an install waits half of the time for downloads
        with ThreadPoolExecutor(max_workers=2) as pool:
            how = {"is_ci": options.ci, "patience": options.patience}
            runs = [PageRun(page, folder, environments, **how) for page in pages]
            results = list(pool.map(PageRun.run, runs))
    finally:
        for dump in dumps:
            dump.unlink(missing_ok=True)
        if not options.keep:
            shutil.rmtree(folder)
    problems = [problem for result in results for problem in result.problems]
    print("\n".join(line for result in results for line in result.lines))
    print("not run:", *(line for result in results for line in result.not_run), sep="\n  ")
    print(f"{len(results)} pages, {time.monotonic() - began:.0f} s, {len(problems)} problems")
    print("\n\n".join(problems), file=sys.stderr)
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
