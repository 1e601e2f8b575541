"""The parts of `make pages`, and a page whose commands don't do as it says."""

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.pages.blocks import find_blocks
from tools.pages.environments import Environments, _link_torch, find_extra
from tools.pages.leftovers import write_dumps, write_kubectl, write_leftovers
from tools.pages.outputs import find_missing_line
from tools.pages.run import PageRun
from tools.pages.session import Session

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    "README.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/start/*.md")),
]

PAGE = """\
# A page

```console
cd sub   # made by the test
# a comment
echo one \\
    two
```

<!-- output of: cat here.txt -->
<!-- exit code 3: as documented -->
```bash
(exit 3)
```
"""


def test_a_block_has_its_language_line_comments_and_commands() -> None:
    """A block has its language, line and comments; each line, or continued line, is a command."""
    first, second = find_blocks(PAGE)
    assert (first.language, first.line, first.notes) == ("console", 4, {})
    assert first.find_commands() == ["cd sub   # made by the test", "echo one \\\n    two"]
    assert (second.language, second.line, second.exit_code) == ("bash", 13, 3)
    assert second.notes == {"output of": "cat here.txt", "exit code": "3: as documented"}


@pytest.mark.parametrize("comment", ["<!-- not run: -->", "<!-- ran: -->", "<!-- remark -->"])
def test_a_misspelled_comment_is_an_error(comment: str) -> None:
    """A comment without a reason, or of an unknown kind, is an error rather than ignored."""
    with pytest.raises(ValueError, match="line 3: <!--"):
        [*find_blocks(f"\n{comment}\n```console\nls\n```\n".removeprefix("\n"))]


def test_an_exit_code_without_a_reason_is_an_error() -> None:
    """The comment has to say why a command fails."""
    (block,) = find_blocks("<!-- exit code 3 -->\n```console\nls\n```\n")
    with pytest.raises(ValueError, match="REASON"):
        _ = block.exit_code


@pytest.mark.parametrize("page", PAGES)
def test_pages_have_only_known_comments_and_commands_above_outputs(page: str) -> None:
    """Comments before blocks are known ones; each shown output has its command above it."""
    commands = set()
    for block in find_blocks((ROOT / page).read_text(encoding="utf-8")):
        assert block.exit_code is None or block.is_command
        assert block.is_command or not {"not run", "not in CI"} & {*block.notes}
        assert block.notes.get("output of") in {None, *commands}
        if block.is_command and "not run" not in block.notes:
            commands |= {command.partition("  #")[0].strip() for command in block.find_commands()}


_RAISED_AT = re.compile(r"(\w+\.py):(\d+) in (\w+)")


@pytest.mark.parametrize("page", PAGES)
def test_lines_that_pages_show_are_those_that_raise(page: str) -> None:
    """Where a page shows the line at which an example raises, that line raises: `make pages`
    ignores numbers.
    """
    for block in find_blocks((ROOT / page).read_text(encoding="utf-8")):
        for name, line, function in _RAISED_AT.findall(block.text):
            example = ROOT / "examples" / name
            if not example.exists():
                continue
            source = example.read_text(encoding="utf-8")
            assert source.splitlines()[int(line) - 1].lstrip().startswith("raise "), block.text
            assert f"def {function}(" in source


@pytest.mark.parametrize(
    ("printed", "missing"),
    [
        ("noise\nfirst: rank 7 on host-9: 4 samples\n  Where: rank 7, a.py:1 in load\n", None),
        (
            "first: rank 3 on host-1: 7 samples\n  Retry: no\n",
            "  Where: rank 3, a.py:17 in load",
        ),
        (
            "  Where: rank 3, a.py:1 in load\nfirst: rank 3 on host-1: 7 samples\n",
            "  Where: rank 3, a.py:17 in load",
        ),
        ("second: rank 3 on host-1: 7 samples\n", "first: rank 3 on host-1: 7 samples"),
    ],
    ids=["other numbers", "a missing line", "another order", "another word"],
)
def test_printed_output_may_differ_in_numbers_but_not_in_words(
    printed: str, missing: str | None
) -> None:
    """Numbers and names may differ; words and the order of lines may not."""
    shown = (
        "first: rank 3 on host-1: 7 samples\n  Where: rank 3, a.py:17 in load\n         wrapped\n"
    )
    assert find_missing_line(shown, printed) == missing


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    variables = {"PATH": "/usr/bin:/bin"}
    with contextlib.closing(Session(tmp_path / "files", tmp_path, variables)) as shell:
        yield shell


def test_a_session_is_one_shell(session: Session) -> None:
    """Folder and variables stay; both streams and the exit code come back; there is no input."""
    session.run("mkdir sub && cd sub && export NAME=there", 10)
    ran = session.run('basename "$PWD"; echo "$NAME" >&2; cat; (exit 7)', 10)
    assert (ran.output, ran.code) == ("sub\nthere\n", 7)


@pytest.mark.slow
def test_a_hung_command_is_killed_and_has_no_exit_code(session: Session, tmp_path: Path) -> None:
    """A command over its time has no exit code, and its processes end with the shell."""
    began = time.monotonic()
    ran = session.run("echo begun; sleep 600; touch late", 1)
    assert (ran.output, ran.code) == ("begun\n", None)
    assert time.monotonic() - began < 30
    assert session.run("true", 10).code is None


def test_a_command_that_ends_the_shell_has_no_exit_code(session: Session) -> None:
    """`exit` in a pasted block would close the reader's terminal: there is no exit code."""
    assert session.run("exit 0", 10).code is None


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        ("pip install .", ""),
        ("pip install './firstfault[torch]'", "torch"),
        ("pip install 'a.whl[elastic,s3]'", "elastic,s3"),
    ],
)
def test_commands_with_the_same_extras_share_an_environment(command: str, extra: str) -> None:
    """Environments are shared by the extras of a command."""
    assert find_extra(command) == extra


_WRONG_PAGE = """\
```console
ls slurm-4711.out logs/rank-0.out
kubectl logs -l job=llama --prefix
false
```

<!-- exit code 0: it fails all the same -->
```console
(exit 4)
```

<!-- not run: needs a cluster -->
```console
firstfault-nowhere
```

<!-- not in CI: the step test does -->
```console
firstfault-nowhere
```

<!-- output of: ls slurm-4711.out logs/rank-0.out -->
```text
something else
```

<!-- file: saved.txt -->
```text
a saved file
```

```console
mkdir deeper && cd deeper
```

```console
grep -q saved saved.txt
```
"""


@pytest.mark.slow
def test_a_wrong_exit_code_or_output_is_a_problem(tmp_path: Path) -> None:
    """Another exit code or output is a problem; what isn't run is listed with its reason."""
    page = tmp_path / "wrong.md"
    page.write_text(_WRONG_PAGE, encoding="utf-8")
    subprocess.run(["git", "init", "--quiet", tmp_path / "origin"], check=True)
    write_leftovers(tmp_path / "leftovers")
    write_kubectl(tmp_path / "programs", tmp_path / "leftovers" / "slurm-4711.out")
    environments = Environments(tmp_path, "python3", shared=set())
    result = PageRun(str(page), tmp_path, environments, is_ci=True).run()
    assert [problem.splitlines()[1] for problem in result.problems] == [
        "exit code 1, expected (0,):",
        "exit code 4, expected (0,):",
        "something else",
    ]
    assert [line.rpartition(": ")[2] for line in result.not_run] == [
        "needs a cluster",
        "the step test does",
    ]
    assert [line.split()[4] for line in result.lines] == ["0", "0", "1", "4", "0", "0"]


def test_existing_dumps_are_not_overwritten(tmp_path: Path) -> None:
    """Files under the names of the dumps aren't overwritten, and only written ones are returned."""
    (tmp_path / "rank_1").write_text("theirs", encoding="utf-8")
    written = write_dumps(str(tmp_path / "rank_"))
    assert [path.name for path in written] == ["rank_0", "rank_2", "rank_3"]
    assert (tmp_path / "rank_1").read_text(encoding="utf-8") == "theirs"


@pytest.mark.slow
def test_an_environment_reuses_packages_of_shared_extras(tmp_path: Path) -> None:
    """A second environment for shared extras has the first one's packages."""
    environments = Environments(tmp_path, sys.executable, shared={""})
    for is_second in (False, True):
        with environments.prepare("") as venv:
            (packages,) = venv.glob("lib/python*/site-packages")
            assert (packages / "installed.py").exists() is is_second
            (packages / "installed.py").touch()


def test_an_environment_for_other_extras_is_made_anew(tmp_path: Path) -> None:
    """A second environment for other extras is made anew, as the first one was."""
    made = tmp_path / "made"
    python = tmp_path / "python3"  # a real environment takes seconds
    python.write_text(f'#!/bin/sh\nmkdir -p "$3" && echo "$3" >>"{made}"\n')
    python.chmod(0o755)
    environments = Environments(tmp_path, str(python), shared={"torch"})
    venvs = []
    for _ in range(2):
        with environments.prepare("") as venv:
            assert [*venv.iterdir()] == []
            (venv / "installed.py").touch()
            venvs.append(str(venv))
    assert made.read_text(encoding="utf-8").split() == venvs


def test_a_file_that_python_is_compiling_is_not_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that Python is about to rename isn't linked: it may be gone by then."""
    monkeypatch.setattr("tools.pages.environments.ROOT", tmp_path)
    packages = Path("lib", "python3", "site-packages")
    compiled = packages / "torch" / "__pycache__"
    for folder in (tmp_path / ".venv" / compiled, tmp_path / "bare" / packages):
        folder.mkdir(parents=True)
    for name in ("a.pyc", "b.pyc.140212"):
        (tmp_path / ".venv" / compiled / name).touch()
    _link_torch(tmp_path / "bare")
    assert [path.name for path in (tmp_path / "bare" / compiled).iterdir()] == ["a.pyc"]


def test_pages_share_the_error_of_an_environment_that_failed(tmp_path: Path) -> None:
    """A page that waits for an environment's packages gets the error of the page that made it."""
    environments = Environments(tmp_path, "/nowhere/python3", shared={""})
    for _ in range(2):
        with pytest.raises(FileNotFoundError, match="nowhere"), environments.prepare(""):
            pass
