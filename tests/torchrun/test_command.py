"""``firstfault torchrun``: its options beside torch's, and what it says about bad input."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.run import get_args_parser

from firstfault.cli import main
from firstfault_start import handler
from firstfault_torch.torchrun.agent import replace_launcher_agent
from firstfault_torch.torchrun.command import add_help
from firstfault_torch.torchrun.settings import read_options, set_variables
from firstfault_torch.torchrun.variables import drop_invalid
from lab.cascades.cases import Way
from tests.torchrun.nodes import run_job

NESTS = """
import subprocess, sys
ended = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "../raises.py"])
sys.exit(ended.returncode)
"""
"""A program that starts a launcher of its own."""
BAD_VALUES = {
    "FIRSTFAULT_ATTEMPT": "must be a number, 0 or more, not 'first'",
    "FIRSTFAULT_STRATEGY": "must be one of evidence, earliest, not 'first'",
    "FIRSTFAULT_PORT": "must be a port from 1 to 65535, not 'first'",
    "FIRSTFAULT_RESTARTS": "must be one of policy, torch, not 'first'",
}


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    made = get_args_parser()
    add_help(made)
    return made


def test_options_set_their_variables_also_between_torchs(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options set their variables, also between torch's own;
    what follows the program is the program's.
    """
    given = (
        "--nnodes 2 --ff-attempt 3 --standalone --ff-restarts torch --ff-folder f train.py"
        " --ff-node its-own"
    )
    monkeypatch.setattr(
        os, "environ", {"FIRSTFAULT_STRATEGY": "earliest", "FIRSTFAULT_ATTEMPT": "1"}
    )
    arguments = parser.parse_args(given.split())
    set_variables(arguments)
    assert os.environ == {
        "FIRSTFAULT_ATTEMPT": "3",
        "FIRSTFAULT_RESTARTS": "torch",
        "FIRSTFAULT_FOLDER": "f",
        "FIRSTFAULT_STRATEGY": "earliest",
    }
    assert arguments.training_script_args == ["--ff-node", "its-own"]
    options = read_options(os.environ)
    assert (options.strategy, options.restarts_follow_policy) == ("earliest", False)
    assert read_options({}).restarts_follow_policy


def test_help_has_torchs_and_firstfaults_options(parser: argparse.ArgumentParser) -> None:
    """The help has torch's options and firstfault's, each with its variable."""
    text = " ".join(parser.format_help().split())
    assert "--nproc-per-node" in text
    for name in ("FOLDER", "ATTEMPT", "NODE", "STRATEGY", "RESTARTS"):
        assert f"--ff-{name.lower()} {name} " in text
        assert f"Variable: FIRSTFAULT_{name}" in text
    assert text.startswith("usage: ")
    assert text.index("--ff-decisions") < text.index("--ff-keep-torch-box") < text.index("--nnodes")
    *_, examples = parser.format_help().partition("\nexamples:\n")
    lines = examples.splitlines()
    assert len(lines) >= 2
    assert all(line.startswith("  firstfault torchrun --") for line in lines)


def test_without_torch_the_command_says_what_to_install() -> None:
    """Where torch isn't installed, the command says what to install, as `firstfault run` does."""
    code = "import sys; sys.modules['torch'] = None; from firstfault.cli import main; main()"
    reason = (
        "`firstfault torchrun` needs torch, which is not installed; install the extra torch: in a"
        " clone pip install '.[torch]', else 'firstfault[torch]' from your index; for torch's CPU"
        " build, first run pip install torch --index-url https://download.pytorch.org/whl/cpu"
    )
    words = [sys.executable, "-c", code, "torchrun"]
    ended = subprocess.run(
        [*words, "train.py"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (1, f"firstfault: {reason}\n")
    ended = subprocess.run(
        [*words, "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0
    assert reason in " ".join(ended.stdout.split())
    assert "--ff-folder FOLDER" in ended.stdout
    assert "\nexamples:\n  firstfault torchrun " in ended.stdout
    ended = subprocess.run(
        [*words[:-1], "help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "torchrun  (needs the extra torch)" in ended.stdout


@pytest.mark.parametrize("variable", BAD_VALUES)
def test_a_bad_option_is_refused_and_a_bad_variable_ignored(
    variable: str,
    parser: argparse.ArgumentParser,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A bad value of an option is refused; that of a variable is left out, with a warning,
    and the training runs.
    """
    option = f"--ff-{variable.rpartition('_')[2].lower()}"
    with pytest.raises(SystemExit) as refused:
        parser.parse_args([option, "first", "train.py"])
    assert refused.value.code == 2
    assert f"argument {option}: {BAD_VALUES[variable]}" in capsys.readouterr().err
    monkeypatch.setattr(os, "environ", {variable: "first", "FIRSTFAULT_NODE": "host"})
    drop_invalid()
    assert caplog.messages == [f"firstfault: ignoring {variable}: it {BAD_VALUES[variable]}"]
    assert os.environ == {"FIRSTFAULT_NODE": "host"}


def test_bad_variables_are_named_at_the_start_without_credentials(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They are named when the job starts, without a credential; rules for redaction stay."""
    rules = {"FIRSTFAULT_REDACT": "(s3cret\nvalid-\\w+"}
    monkeypatch.setattr(os, "environ", {"FIRSTFAULT_WEBHOOK": "hook/s3cret", **rules})
    drop_invalid()
    assert os.environ == rules
    assert [text.split(" must ")[0] for text in caplog.messages] == [
        (
            "firstfault: line 1 of FIRSTFAULT_REDACT is not a regular expression of RE2 (missing ));"
            " it hides nothing"
        ),
        "firstfault: ignoring FIRSTFAULT_WEBHOOK: it",
    ]


def test_an_unsupported_torch_runs_its_own_agent_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If torch's launcher has no such agent, its own one runs the workers, with a warning."""
    monkeypatch.delattr("torch.distributed.launcher.api.LocalElasticAgent")
    before = rendezvous_handler_registry.create_handler
    replace_launcher_agent()
    assert rendezvous_handler_registry.create_handler == before
    assert "torch's own agent runs the workers" in caplog.text


@pytest.mark.parametrize("value", ["1", "True"])
def test_a_broken_installation_runs_torchs_agent_with_a_warning(
    value: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If firstfault cannot be imported, torch's own agent runs the workers, with a warning."""
    monkeypatch.setenv("FIRSTFAULT", value)
    monkeypatch.setattr(
        rendezvous_handler_registry, "create_handler", lambda parameters: parameters
    )
    monkeypatch.setitem(sys.modules, "firstfault_torch.torchrun.agent", None)
    handler()
    assert rendezvous_handler_registry.create_handler("parameters") == "parameters"
    assert "torch's own agent runs the workers" in caplog.text


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("--nope", "--nope"),
        ("--ff-hangs", "--ff-hangs; did you mean '--ff-hang'?"),
        ("--nprc_per_node=2", "--nprc_per_node=2; did you mean '--nproc_per_node'?"),
    ],
)
def test_an_unknown_option_is_refused_with_a_similar_one(
    option: str, told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused in the words of torch, and a similar one is named."""
    monkeypatch.setattr(sys, "argv", ["firstfault"])
    monkeypatch.setattr("firstfault_torch.torchrun.agent.replace_launcher_agent", lambda: None)
    with pytest.raises(SystemExit) as refused:
        main(["torchrun", option, "train.py"])
    assert refused.value.code == 2
    assert capsys.readouterr().err.endswith(
        f"firstfault torchrun: error: unrecognized arguments: {told}\n"
    )


@pytest.mark.jobs
@pytest.mark.parametrize("codes", ["", "unknown:76"])
def test_ff_keep_torch_box_prints_torchs_box_after_firstfaults_lines(
    codes: str, tmp_path: Path
) -> None:
    """With --ff-keep-torch-box, torch's box follows firstfault's lines, whatever the exit code."""
    (tmp_path / "raises.py").write_text("raise ValueError('batch 7 has no labels')")
    options = ["--nproc-per-node=1", "--ff-keep-torch-box"]
    variables = {"FIRSTFAULT_EXIT_CODES": codes} if codes else {}
    way = Way("firstfault")
    job = run_job(
        tmp_path,
        ["../raises.py"],
        way,
        nodes=1,
        options=options,
        environments={0: variables},
    )
    (node,) = job.nodes
    assert node.code == (76 if codes else 1)
    assert node.headline == "ValueError, rank 0 on host-0: batch 7 has no labels"
    _, more, box = node.err.partition("\n  More: ")
    assert more
    assert box.count("errors.ChildFailedError: \n=====") == 1
    assert "Root Cause (first observed failure)" in box


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("arguments", "headline"),
    [
        ("missing.py", "exit code 2, rank 0 on host-0: can't open file '/"),
        (
            "--no-python ./missing",
            "FileNotFoundError, the agent of host-0: [Errno 2] No such file or directory: './m",
        ),
        ("--run-path ../raises.py", "ValueError, rank 0 on host-0: batch 7 has no labels"),
        ("../nests.py", "ChildFailedError, rank 0 on host-0: "),
    ],
)
def test_a_program_that_cannot_run_ends_with_the_reason(
    arguments: str, headline: str, tmp_path: Path
) -> None:
    """The lines at the end say why, and that a retry is doubtful;
    a variable with a bad value prevents nothing.
    """
    (tmp_path / "raises.py").write_text("raise ValueError('batch 7 has no labels')")
    (tmp_path / "nests.py").write_text(NESTS)
    way = Way("firstfault" if "--run-path" in arguments else "forked")
    variables = {"FIRSTFAULT": "1", "FIRSTFAULT_ATTEMPT": "first"}
    job = run_job(
        tmp_path,
        arguments.split(),
        way,
        nodes=1,
        options=["--nproc-per-node=1"],
        environments={0: variables},
    )
    (node,) = job.nodes
    assert (node.code, job.left) == (1, [])
    assert node.headline.startswith(headline)
    is_certain = arguments == "missing.py"
    retry = (
        "no: the script doesn't exist, so it would fail again"
        if is_certain
        else "unclear: the same "
    )
    (line,) = [line for line in node.lines if line.startswith("  Retry: ")]
    assert line.startswith(f"  Retry: {retry}")
    assert node.err.splitlines()[-1] == f"  More: firstfault show {node.prefix}"
    assert node.err.count(BAD_VALUES["FIRSTFAULT_ATTEMPT"]) == 1
    assert node.err.count("\n  More: ") == 1


LAUNCHER_HOOKS = """
import atexit, os, threading, time
from pathlib import Path


class Kept:
    def __del__(self, touch=Path("destroyed").touch):
        touch()


def work():
    time.sleep(1)
    Path("thread").touch()


if "RANK" not in os.environ:
    kept = Kept()
    file = open("file", "w")
    file.write("not flushed")
    atexit.register(Path("at-exit").touch)
    threading.Thread(target=work).start()
"""
"""What others run in a launcher's process: a function for its end, and a thread."""


@pytest.mark.jobs
@pytest.mark.parametrize("command", ["firstfault", "torch.distributed.run"])
@pytest.mark.parametrize("codes", ["", "stop:93,unknown:93,retry:93"])
def test_a_failed_launcher_ends_at_once(command: str, codes: str, tmp_path: Path) -> None:
    """It waits for threads, calls functions for the exit, flushes files, and has its code; but
    Python doesn't destroy its modules, which takes as long as all else after a failure.
    """
    (tmp_path / "sitecustomize.py").write_text(LAUNCHER_HOOKS)
    (tmp_path / "train.py").write_text('raise ValueError("batch 7 has no labels")')
    words = ["-m", command, *["torchrun"] * (command == "firstfault"), "--standalone", "train.py"]
    variables = {"PYTHONPATH": str(tmp_path), "FIRSTFAULT": "1", "FIRSTFAULT_EXIT_CODES": codes}
    ended = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == (93 if codes else 1), ended.stderr
    assert "ValueError" in ended.stderr
    found = {name for name in ("thread", "at-exit", "destroyed") if (tmp_path / name).exists()}
    assert found == {"thread", "at-exit"}
    assert (tmp_path / "file").read_text() == "not flushed"
