"""``firstfault doctor`` tells what is wrong with an environment,
and as what a job in it would be recorded.
"""

import itertools
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from firstfault.utils.toml import parse_toml
from firstfault_torch.compat.versions import TESTED_RELEASES
from firstfault_torch.torchrun import doctor
from firstfault_torch.torchrun.variables import VARIABLES

pytestmark = pytest.mark.slow

NOT_HERE = (
    "import sys; sys.modules['torch'] = None; from firstfault.cli import main; main(['doctor',"
    " '--json'])"
)
ROOT = Path(__file__).parents[2]
DOCTOR = ("-m", "firstfault", "doctor", "--json")


def _doctor(folder: Path, *command: str, **environment: str) -> tuple[int, dict[str, Any]]:
    """Return the exit code, and the checks that a job would not pass, by name;
    under "all" every text.
    """
    ended = subprocess.run(
        [sys.executable, *(command or DOCTOR)],
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    checks = json.loads(ended.stdout)["checks"]
    refused = {check["name"]: check["text"] for check in checks if check["ok"] is False}
    return ended.returncode, {**refused, "all": {check["name"]: check["text"] for check in checks}}


def test_a_good_environment_passes_all_checks(tmp_path: Path) -> None:
    """All is well, the folder is as before, and each part of the identity has its source."""
    code, told = _doctor(
        tmp_path,
        FIRSTFAULT="true",
        SLURM_JOB_ID="4711",
        SLURM_RESTART_COUNT="2",
        POD_NAMESPACE="ml",
    )
    assert (code, set(told), list(tmp_path.iterdir())) == (0, {"all"}, [])
    assert told["all"]["versions"] == "firstfault was tested with these releases"
    assert (
        told["all"]["recorder"]
        == "collectives of gloo are found in torch's flight recorder (gloo:all_reduce)"
    )
    assert told["all"]["job"] == "4711 (SLURM_JOB_ID)"
    assert told["all"]["attempt"] == "2 (SLURM_RESTART_COUNT)"
    assert (
        told["all"]["node"]
        == f"{socket.gethostname()} (the host's name); namespace: ml (POD_NAMESPACE)"
    )
    assert told["all"]["documents"].startswith(f"{tmp_path}/.firstfault/torchrun/4711/2")


def test_a_missing_firstfault_variable_fails_no_check(tmp_path: Path) -> None:
    """`firstfault torchrun` works now, and plain torchrun would with the variable:
    that's no failure of a check.
    """
    code, told = _doctor(tmp_path, FIRSTFAULT="", PET_RDZV_ID="")
    assert (code, set(told)) == (0, {"all"})
    assert told["all"]["switch"] == "FIRSTFAULT is not set: only `firstfault torchrun` records"
    assert told["all"]["job"].startswith(
        "no variable names it: torchrun's --rdzv-id, else the start's time"
    )
    assert told["all"]["attempt"] == "0: no variable counts attempts"
    assert doctor._conclude([], is_plain_recorded=False) == [
        "works now: `firstfault torchrun`",
        "would also work with FIRSTFAULT=1: torchrun, and other launchers with torch's agent",
    ]
    assert doctor._conclude([], is_plain_recorded=True)[0].startswith("works now: torchrun, ")
    assert doctor._conclude(["torch"], is_plain_recorded=False)[0].startswith("doesn't record yet")


def test_a_storage_without_its_package_is_one_row(tmp_path: Path) -> None:
    """One row names the missing package and the folder that is used instead;
    no other row names a place.
    """
    code = f"import sys; sys.modules.update(s3fs=None, obstore=None); {NOT_HERE}"
    given = {"FIRSTFAULT": "1", "FIRSTFAULT_FOLDER": "s3://bucket/runs", "TMPDIR": str(tmp_path)}
    _, told = _doctor(tmp_path, "-c", code, **given)
    assert "install the extra s3" in told["storage"]
    assert told["storage"].endswith(
        f"documents go to {tmp_path}/.firstfault-{os.geteuid()}/torchrun instead"
    )
    assert {"documents", "fallback"} & told["all"].keys() == set()


def test_problems_of_jax_and_ray_and_temporary_folders_are_named(tmp_path: Path) -> None:
    """JAX's workers, a callback that Ray Train can't load,
    and a taken place for temporary files are named.
    """
    callbacks = "firstfault_torch.no_such.Callback"
    taken = tmp_path / f".firstfault-{os.geteuid()}"
    taken.symlink_to(tmp_path)
    others = {"RAY_TRAIN_CALLBACKS": callbacks, "TMPDIR": str(tmp_path)}
    code, told = _doctor(tmp_path, FIRSTFAULT="1", JAX_COORDINATOR_ADDRESS="a:1", **others)
    assert (code, set(told)) == (1, {"all", "switch"})
    assert "JaxRun starts no torchrun" in told["switch"]
    assert f"{taken}-<random>/torchrun ({taken} isn't this user's alone)" in told["all"]["fallback"]
    assert (
        "no_such.Callback fails each training of Ray Train: AttributeError"
        in told["all"]["callback"]
    )


def test_each_problem_of_a_bad_environment_is_named(tmp_path: Path) -> None:
    """Another Python for the workers, a folder that is a file and a
    misspelled mode are all named.
    """
    (tmp_path / "file").touch()
    given = {
        "FIRSTFAULT_FOLDER": "file",
        "PYTHON_EXEC": "/bin/false",
        "FIRSTFAULT_DECISIONS": "obsrve",
    }
    code, told = _doctor(tmp_path, FIRSTFAULT="", **given)
    assert (code, set(told)) == (1, {"all", "workers", "storage", "decisions"})
    assert told["workers"].startswith("/bin/false doesn't read firstfault.pth")
    assert "Not a directory" in told["storage"]
    assert told["decisions"].startswith(
        "FIRSTFAULT_DECISIONS must be off, observe or act, not 'obsrve': "
    )


def test_rows_say_what_the_settings_mean(tmp_path: Path) -> None:
    """The rows say what the variables mean; without them, what the defaults mean."""
    _, told = _doctor(tmp_path, "-c", NOT_HERE)
    assert told["all"]["exit codes"] == "1 after any failure (FIRSTFAULT_EXIT_CODES is not set)"
    assert (
        told["all"]["hang"]
        == "a job without progress is reported after 60 s (FIRSTFAULT_HANG is not set)"
    )
    assert told["all"]["port"] == "a free one (FIRSTFAULT_PORT is not set)"
    given = {
        "FIRSTFAULT_EXIT_CODES": "pytorchjob",
        "FIRSTFAULT_HANG": "warn:30,end:300",
        "FIRSTFAULT_PORT": "29410",
    }
    _, told = _doctor(tmp_path, "-c", NOT_HERE, **given)
    codes = "203 (retry), 207 (system), 93 (stop), else 1 (FIRSTFAULT_EXIT_CODES=pytorchjob)"
    assert told["all"]["exit codes"] == codes
    meaning = (
        "a job without progress is reported after 30 s and ended after 300 s"
        " (FIRSTFAULT_HANG=warn:30,end:300)"
    )
    assert told["all"]["hang"] == meaning
    assert told["all"]["port"] == "29410: the first node's agent listens on it"
    _, told = _doctor(tmp_path, "-c", NOT_HERE, FIRSTFAULT_HANG="off")
    assert told["all"]["hang"] == "stalls aren't reported (FIRSTFAULT_HANG=off)"


def test_a_misspelled_setting_fails_the_check(tmp_path: Path) -> None:
    """A misspelled value fails the check, although the job would be recorded without it."""
    given = {
        "FIRSTFAULT_EXIT_CODES": "defualt",
        "FIRSTFAULT_HANG": "warn:soon",
        "FIRSTFAULT_PORT": "http",
    }
    code, told = _doctor(tmp_path, FIRSTFAULT="1", FIRSTFAULT_ATTEMPT="first", **given)
    assert (code, set(told)) == (1, {"all", "exit codes", "hang", "port", "attempt"})
    assert (
        told["port"]
        == "FIRSTFAULT_PORT must be a port from 1 to 65535, not 'http': the value is ignored"
    )
    assert told["exit codes"].startswith(
        "FIRSTFAULT_EXIT_CODES must be default, pytorchjob, or codes from 1 to 255"
    )
    assert told["hang"].startswith('FIRSTFAULT_HANG must be "off", or seconds like "warn:60"')
    conclusion = "records, but ignores invalid values: repair what is marked with NO (port)"
    assert doctor._conclude(["port"], is_plain_recorded=True) == [conclusion]


BAD_VALUES = {
    "FIRSTFAULT": "maybe",
    "FIRSTFAULT_ATTEMPT": "first",
    "FIRSTFAULT_STRATEGY": "best",
    "FIRSTFAULT_RESTARTS": "always",
    "FIRSTFAULT_HANG": "sometimes",
    "FIRSTFAULT_EXIT_CODES": "all",
    "FIRSTFAULT_DECISIONS": "acts",
    "FIRSTFAULT_PORT": "http",
    "FIRSTFAULT_KEEP_TORCH_BOX": "maybe",
    "FIRSTFAULT_TERMINATION_LOG": "/no/such/folder/log",
    "FLYTE_INTERNAL_ERROR_PROPAGATION": "best",
    "FIRSTFAULT_WEBHOOK": "hooks.example/s3cret",
    "FIRSTFAULT_NOTIFY_STALLS": "maybe",
    "FIRSTFAULT_REDACT": "corp-\\w+\n(s3cret",
    "FIRSTFAULT_SOURCE": "our repository",
    "FIRSTFAULT_STORAGE_CLIENT": "boto3",
    "NCCL_RAS_ADDR": "localhost",
}
"""A value of each variable that can have a wrong one."""
ANY_VALUE = {
    "FIRSTFAULT_FOLDER",  # the row "storage" is about it
    "FIRSTFAULT_JOB",
    "FIRSTFAULT_NODE",
    "FIRSTFAULT_NAMESPACE",
    "FIRSTFAULT_PREVIOUS",
    "FIRSTFAULT_TIME_LIMIT_FILE",
    "FIRSTFAULT_DEBUG",
    "NODE_NAME",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT",
    "TORCHELASTIC_ERROR_FILE",
    "NO_COLOR",
    "FORCE_COLOR",
}
PAGE = ROOT / "docs" / "reference" / "options.md"


def test_all_documented_variables_are_checked() -> None:
    """The page on options, the doctor's table and the bad values of this test name the same."""
    _, _, section = PAGE.read_text(encoding="utf-8").partition("\n## Environment variables\n")
    rows = re.findall(r"^\| (`[A-Z_`, ]+`) \|", section.partition("\n### ")[0], re.MULTILINE)
    documented = {name for row in rows for name in re.findall(r"[A-Z_]+", row)}
    assert documented == VARIABLES.keys() == BAD_VALUES.keys() | ANY_VALUE


def test_each_bad_value_fails_the_check(tmp_path: Path) -> None:
    """Each has a row of its own, which quotes no credential, and the exit code is 1."""
    code, told = _doctor(tmp_path, "-c", NOT_HERE, **BAD_VALUES)
    assert code == 1
    told.pop("torch")
    assert len(told.keys() - {"all"}) == len(BAD_VALUES)
    texts = "\n".join(told[name] for name in told.keys() - {"all"})
    assert "s3cret" not in texts
    assert [name for name in BAD_VALUES if not re.search(rf"\b{name}\b", texts)] == []
    assert told["redact"] == (
        "line 2 of FIRSTFAULT_REDACT is not a regular expression of RE2 (missing )); it hides"
        " nothing"
    )


def test_an_object_storage_is_not_asked_for_an_older_run(tmp_path: Path) -> None:
    """A storage isn't asked for an older run of this name,
    so only the attempt's number gives the plain name.
    """
    (tmp_path / "runs").mkdir()
    code = (
        "import sys; sys.modules['torch'] = None; from firstfault_torch.torchrun import doctor;"
        " doctor._check_storage = lambda: ((True, 'storage', ''), None); from firstfault.cli import"
        " main; main(['doctor', '--json'])"
    )
    given = {
        "FIRSTFAULT_FOLDER": "s3://bucket/runs",
        "FIRSTFAULT_JOB": "llama",
        "TMPDIR": str(tmp_path),
    }
    _, told = _doctor(tmp_path, "-c", code, **given)
    place = (
        "s3://bucket/runs/llama-<time>-<host>-<process>/0: set FIRSTFAULT_ATTEMPT for"
        " s3://bucket/runs/llama/0"
    )
    assert told["all"]["documents"] == place
    _, told = _doctor(tmp_path, "-c", code, **given, FIRSTFAULT_ATTEMPT="1")
    assert told["all"]["documents"].startswith("s3://bucket/runs/llama/1, ")
    _, told = _doctor(tmp_path, "-c", code, **{**given, "FIRSTFAULT_FOLDER": "runs"})
    assert told["all"]["documents"] == f"{tmp_path}/runs/llama/0, if no run before has this name"


def test_an_untested_release_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer or older release is named with the tested ones, also of Flyte 2 and Ray."""
    versions = {
        "torch": "2.16.0+cpu",
        "flytekit": "1.9.1",
        "flyte": "2.13.0",
        "ray": "2.9.3",
        "nvidia-resiliency-ext": "0.4.1",
    }
    monkeypatch.setattr("importlib.metadata.version", versions.__getitem__)
    assert doctor._check_versions()[2] == (
        "firstfault was not tested with torch 2.16.0+cpu (tested: 2.3 to 2.15), flytekit 1.9.1"
        " (tested: 1.15 to 1.16), flyte 2.13.0 (tested: 2.12), ray 2.9.3 (tested: 2.60)"
    )


def test_one_table_has_the_tested_releases() -> None:
    """pyproject.toml has the same minimums, and docs/reference/versions.md the same packages and
    releases.
    """
    first = {name: releases[0] for name, releases in TESTED_RELEASES.items()}
    project = parse_toml((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    required = {
        (found[1], tuple(map(int, found[2].split(".")[:2])))
        for requirement in (*itertools.chain(*extras), f"Python{project['requires-python']}")
        if (found := re.match(r"([\w-]+)>=([\d.]+)", requirement)) and found[1] in first
    }
    assert required == {(name, release) for name, release in first.items() if name != "ray"}
    page = (ROOT / "docs/reference/versions.md").read_text(encoding="utf-8")
    rows = [row.split("|")[1:3] for row in page.splitlines() if row.startswith("|")][2:]
    listed: dict[str, set[tuple[int, ...]]] = {}
    names: list[str] = []  # of a row without any: those of the row above
    for packages, releases in rows:
        names = packages.strip().split(", ") if packages.strip() else names
        for name in names:
            for release in re.findall(r"\d+\.\d+", releases):
                listed.setdefault(name, set()).add(tuple(map(int, release.split("."))))
    assert {name: (min(some), max(some)) for name, some in listed.items()} == TESTED_RELEASES


def test_a_missing_torch_is_reported(tmp_path: Path) -> None:
    """Where torch is not installed, it says so."""
    code, told = _doctor(tmp_path, "-c", NOT_HERE, FIRSTFAULT="1")
    assert (code, set(told)) == (1, {"all", "torch"})
    assert told["torch"] == "not installed in this Python: in a clone, pip install '.[torch]'"
    assert "versions" not in told["all"], "only a torch that is there can be tested"


@pytest.mark.s3
def test_a_storage_is_written_listed_and_read(s3: Any, tmp_path: Path) -> None:
    """A storage is written, listed and read; a bucket that does not exist is named."""
    # importing it takes seconds
    environment, without_torch = (
        {"FIRSTFAULT": "1", **s3.environment()},
        (
            "-c",
            NOT_HERE,
        ),
    )
    folder = s3.uri("runs")
    _, told = _doctor(tmp_path, *without_torch, **environment, FIRSTFAULT_FOLDER=folder)
    assert (set(told), told["all"]["storage"].partition(" in ")[0]) == (
        {"all", "torch"},
        f"wrote, listed and read {folder}",
    )
    _, told = _doctor(
        tmp_path,
        *without_torch,
        **environment,
        FIRSTFAULT_FOLDER="s3://no-such-bucket/runs",
    )
    assert set(told) == {"all", "torch", "storage"}
