"""All optional parts can be deleted: the rest imports, passes tests of its own,
and shows a recorded failure.
"""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

TESTS = Path(__file__).resolve().parents[1]
ROOTS = {
    "firstfault": "readers",
    "firstfault_logs": "readers",
    "firstfault_proto": "proto",
    "firstfault_torch": "plugin",
    "firstfault_inprocess": "plugin",
    "flytekitplugins.firstfault": "plugin/flytekitplugins",
    "flyteplugins.firstfault": "plugin/flyteplugins",
}
"""Our packages, and the folder of each in a checkout."""
OPTIONAL = (
    "readers/firstfault_logs",
    "readers/firstfault/kubernetes",
    "readers/firstfault/slurm",
    "plugin/firstfault_torch/hang",
    "plugin/firstfault_inprocess",
    "plugin/firstfault_torch/notifiers.py",
    "plugin/firstfault_torch/ray_train",
    "plugin/firstfault_torch/torchrun",
    "plugin/flytekitplugins/firstfault/flyteadmin",
    "plugin/flytekitplugins/firstfault/local",
    "plugin/flyteplugins/firstfault",
)
NEIGHBOURS = (
    "readers/test_classify_and_prune.py",
    "torch_agent/test_launch_options.py",
    "torch_agent/test_seal.py",
    "plugin/test_config.py",
)
"""Quick tests of what stands next to the optional parts."""
NAME = "SIGKILL-rank0-of4"
CHECK = """
import importlib, json, sys
import pytest
from click.testing import CliRunner
from firstfault.cli import EXIT
from firstfault.cli._main import group
from firstfault.errors import UsageError

modules, tests, cascade, empty = json.loads(sys.argv[1])
for name in modules:
    try:
        importlib.import_module(name)
    except (ModuleNotFoundError, UsageError) as error:
        # an extra, such as a storage's client, need not be installed
        lacking = (error.__cause__ or error).name
        assert "firstfault" not in lacking, (name, error)
shown = CliRunner().invoke(group, ["show", cascade], standalone_mode=False)
assert "SIGKILL" in shown.output, shown
assert CliRunner().invoke(group, ["show", empty], standalone_mode=False).return_value is EXIT.NOTHING_FOUND
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-m", "not slow", *tests]))
"""


def _copy(folder: Path) -> None:
    """Copy our packages, the tests and a recorded cascade, laid out as in a checkout."""
    for package, root in ROOTS.items():
        spec = find_spec(package)
        assert spec.origin is not None
        shutil.copytree(Path(spec.origin).parent, folder / root / package.rpartition(".")[2])
    shutil.copy(TESTS.parent / "pyproject.toml", folder)
    shutil.copytree(
        TESTS, folder / "tests", ignore=shutil.ignore_patterns("recorded", "golden", "__pycache__")
    )
    with zipfile.ZipFile(
        TESTS.parent / "lab" / "cascades" / "recorded" / f"{NAME}.zip"
    ) as recorded:
        recorded.extractall(folder / "cascade")
    (folder / "empty").mkdir()


def _modules(folder: Path) -> list[str]:
    files = [
        file.relative_to(folder / root).with_suffix("")
        for root in ("readers", "proto", "plugin")
        for file in (folder / root).rglob("*.py")
    ]
    # kfpytorch replaces task types of the process, and __main__ runs the command
    names = {".".join(file.parts).removesuffix(".__init__") for file in files}
    return sorted(
        name for name in names if not name.endswith((".__main__", ".firstfault.kfpytorch"))
    )


def test_the_rest_works_without_the_optional_folders(tmp_path: Path) -> None:
    """Without them every module imports, `firstfault show` finds the cause, and other tests pass.

    As nothing imports an optional part (import-linter), not even another one, they need not be
    deleted one by one.
    """
    _copy(tmp_path)
    for optional in OPTIONAL:
        path = tmp_path / optional
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    told = json.dumps(
        [_modules(tmp_path), [f"tests/{file}" for file in NEIGHBOURS], "cascade", "empty"]
    )
    roots = os.pathsep.join(str(tmp_path / root) for root in ("readers", "proto", "plugin"))
    done = subprocess.run(
        [sys.executable, "-c", CHECK, told],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "TESTS_LAYER"}
        | {"PYTHONPATH": roots},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
