"""``firstfault help``, the completion of the shells, and how much the help imports."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.readers.commands import Ran

pytestmark = pytest.mark.slow

_LAZY = (
    *(
        "flytekit",
        "flyteidl",
        "torch",
        "numpy",
        "rich",
        "jinja2",
        "asyncio",
        "fsspec",
        "google.protobuf",
    ),
    *(
        "firstfault.credentials",
        "firstfault.model",
        "firstfault.strategies",
        "firstfault.output_reader",
    ),
)
_NOT_FOR_LOGS = (
    *(
        "flytekit",
        "flyteidl",
        "torch",
        "numpy",
        "rich",
        "jinja2",
        "asyncio",
        "fsspec",
        "google.protobuf",
        "stamina",
    ),
    *("ssl", "email", "importlib.metadata", "subprocess", "tempfile", "concurrent.futures"),
    *(
        "firstfault.wire.documents",
        "firstfault.reading.attempt",
        "firstfault.recorder",
        "firstfault.brief",
    ),
)
_LOG = """\
[rank0]: INFO step 1 loss 2.5
[rank1]: Traceback (most recent call last):
[rank1]:   File "/app/train.py", line 61, in <module>
[rank1]:     main()
[rank1]:   File "/app/train.py", line 47, in main
[rank1]:     loss = model(batch)
[rank1]: RuntimeError: mat1 and mat2 shapes cannot be multiplied (32x128 and 64x10)
[rank0]: torch.distributed.DistBackendError: [ProcessGroupGloo.cpp:540] Connection closed by peer [127.0.0.1]:41234
"""

_RUN = pytest.param("run", marks=pytest.mark.flyte)


def _run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "firstfault", *arguments]
    environment = {**os.environ, **environment}
    return subprocess.run(
        program,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment,
    )


@pytest.mark.parametrize("names", [(), ("show",)])
def test_help_command_prints_what_the_help_option_prints(
    names: tuple[str, ...], run: Callable[..., Ran]
) -> None:
    """`firstfault help COMMAND` prints what `firstfault COMMAND --help` prints."""
    assert run("help", *names) == run(*names, "--help")


@pytest.mark.parametrize("commands", [("", "show", "ls", "watch", "classify", "help"), _RUN])
def test_help_imports_little(commands: str | tuple[str, ...]) -> None:
    """The help of the group and of every command imports neither flytekit nor torch,
    nor what reads and judges.
    """
    code = (
        "import sys\nfrom firstfault.cli import main\nfor name in sys.argv[1:]:\n"
        "    try: main([*name.split(), '--help'])\n    except SystemExit: pass\n"
        f"print([name for name in {_LAZY!r} if name in sys.modules], file=sys.stderr)"
    )
    names = [commands] if isinstance(commands, str) else commands
    program = [sys.executable, "-c", code, *names]
    ran = subprocess.run(program, capture_output=True, text=True, timeout=60, check=True)
    assert (ran.stderr, ran.stdout.count("Usage: firstfault")) == ("[]\n", len(names))


def test_a_small_log_imports_little(tmp_path: Path) -> None:
    """A log is read and reported without storage, documents, an event loop, other distributions,
    and rich.
    """
    (tmp_path / "job.log").write_text(_LOG)
    code = (
        "import sys\nbefore = set(sys.modules)\nfrom firstfault.cli import main\ntry:"
        " main(['show', sys.argv[1]])\nexcept SystemExit: pass\nprint([name for name in"
        f" {_NOT_FOR_LOGS!r} if name in set(sys.modules) - before], file=sys.stderr)"
    )
    program = [sys.executable, "-c", code, str(tmp_path / "job.log")]
    ran = subprocess.run(program, capture_output=True, text=True, timeout=60, check=True)
    assert ran.stderr == "[]\n"
    assert ran.stdout.startswith("RuntimeError rank 1 no retry: mat1 and mat2 shapes")


@pytest.mark.flyte
@pytest.mark.timing
def test_the_help_of_run_is_fast() -> None:
    """The help of `firstfault run` takes less than half a second, the best of ten."""
    taken = []
    for _ in range(10):
        began = time.perf_counter()
        assert _run("run", "--help").returncode == 0
        taken.append(time.perf_counter() - began)
    assert min(taken) < 0.5, taken


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("firstfault sh", "plain,show"),
        ("firstfault help wa", "plain,watch"),
        ("firstfault show .fir", "file,.fir"),
        ("firstfault show --html rep", "file,rep"),
    ],
)
def test_commands_are_completed_and_uris_left_to_the_shell(words: str, answer: str) -> None:
    """Commands are completed, also for `firstfault help`; URIs and files are left to the shell."""
    count = str(len(words.split()) - 1)
    ran = _run(_FIRSTFAULT_COMPLETE="bash_complete", COMP_WORDS=words, COMP_CWORD=count)
    assert (ran.stdout.splitlines(), ran.stderr) == ([answer], "")


@pytest.mark.parametrize("command", ["show", "watch", _RUN])
def test_strategies_are_completed(command: str, tmp_path: Path) -> None:
    """--strategy completes built-in strategies and those of installed packages."""
    package = tmp_path / "theirs-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n", encoding="utf-8"
    )
    (package / "entry_points.txt").write_text(
        "[firstfault.strategies]\nearlybird = theirs:find\n", encoding="utf-8"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    words = f"firstfault {command} --strategy ea"
    ran = _run(
        _FIRSTFAULT_COMPLETE="bash_complete",
        COMP_WORDS=words,
        COMP_CWORD="3",
        PYTHONPATH=path,
    )
    assert ran.stdout.splitlines() == ["plain,earliest", "plain,earlybird"]


@pytest.mark.parametrize(
    ("shell", "test"),
    [
        (
            "bash",
            (
                "COMP_WORDS=(firstfault sh); COMP_CWORD=1; _firstfault_completion firstfault; echo"
                ' "${COMPREPLY[@]}"'
            ),
        ),
        ("zsh", "whence -w _firstfault_completion"),
        ("fish", "complete -C 'firstfault sh'"),
    ],
)
def test_the_documented_line_works_in_each_shell(shell: str, test: str, tmp_path: Path) -> None:
    """The documented line works in each shell that is installed."""
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    program = tmp_path / "firstfault"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m firstfault "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    line = f'eval "$(_FIRSTFAULT_COMPLETE={shell}_source firstfault)"'
    if shell == "zsh":
        line = f"autoload -Uz compinit && compinit -D; {line}"
    if shell == "fish":
        line = "_FIRSTFAULT_COMPLETE=fish_source firstfault | source"
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    ran = subprocess.run(
        [shell, "-c", f"{line}\n{test}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PATH": path},
    )
    assert ran.stdout.startswith(("show", "_firstfault_completion: function")), ran.stderr
