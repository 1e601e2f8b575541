#!/usr/bin/env bash
# test_wheel.sh WHEEL
# Installs the wheel in a separate environment and runs the tests from a separate folder, so that no module comes from
# the sources: first with the core dependencies only, as an engine uses the library, then with all extras.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
wheel=$(realpath "$1")
quietly=$root/tools/quietly.sh
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$quietly" "checking the files of $(basename "$wheel")" "${PYTHON:-python3}" "$root/tools/check_wheel.py" "$wheel"

cp -r "$root/tests" "$root/examples" "$root/pyproject.toml" "$root/constraints.txt" "$work"
rm -rf "$work/tests/docs" # they check the documentation, and a wheel has none
cd "$work"
unset PYTHONPATH
"$quietly" "making an environment for the wheel" "${PYTHON:-python3}" -m venv venv
pip=(venv/bin/python -m pip --no-input --disable-pip-version-check install)
"$quietly" "updating pip" "${pip[@]}" --upgrade 'pip>=25.1'

"$quietly" "installing the wheel alone" "${pip[@]}" "$wheel"
"$quietly" "using the library without flytekit and torch" venv/bin/python - <<'PY'
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

absent = [name for name in ("flytekit", "torch", "s3fs") if importlib.util.find_spec(name)]
assert not absent, f"{absent} came with the core dependencies"

import firstfault

for name in firstfault.__all__:
    getattr(firstfault, name)

command = str(Path(sys.executable).with_name("firstfault"))
for arguments, expected, words in (
    (["--help"], 0, "not available: `firstfault run` needs "),
    (["show", tempfile.mkdtemp()], 3, "no error document"),
    (["run", "training.py", "train"], 1, "pip install 'firstfault[elastic]'"),
):
    done = subprocess.run([command, *arguments], capture_output=True, text=True, env={"COLUMNS": "200"})
    assert done.returncode == expected, (arguments, done)
    assert words in " ".join((done.stdout + done.stderr).split()), (arguments, done)
PY

"$quietly" "installing torch" "${pip[@]}" -c constraints.txt torch
"$quietly" "installing the extras and what the tests need" \
  "${pip[@]}" -c constraints.txt "$wheel[elastic,s3]" --group test
"$quietly" "checking where the packages come from" venv/bin/python - <<'PY'
import sys
from pathlib import Path

import firstfault
import firstfault_proto
import flytekitplugins.firstfault

site = Path(sys.prefix, "lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "site-packages").resolve()
for package in (firstfault, firstfault_proto, flytekitplugins.firstfault):
    home = Path(package.__file__).resolve()
    assert home.is_relative_to(site), f"{package.__name__} was loaded from {home}, not from {site}"
PY
# tests with the S3 server, whole jobs, real signals and sockets would test the same code as on the sources
venv/bin/pytest -m 'not jobs and not s3' tests/proto tests/readers \
  tests/reports/test_{cascade,golden,message}.py \
  tests/plugin/test_{agent,config,kfpytorch_behaviours,single,task,taxonomy}.py
