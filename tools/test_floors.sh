#!/usr/bin/env bash
# Tests with the oldest dependencies that pyproject.toml admits, in a venv of its own: what reads and writes storage
# (fsspec), documents (protobuf, flyteidl), text (google-re2), reports (jinja2, rich) and the command line (click).
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
venv=$root/build/floors-venv
rm -rf "$venv"
python3 -m venv "$venv"
mapfile -t floors < <("$root/.venv/bin/python" - "$root/pyproject.toml" <<'PY'
import sys
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import pip._vendor.tomli as tomllib

for requirement in tomllib.loads(Path(sys.argv[1]).read_text())["project"]["dependencies"]:
    print(requirement.split(";")[0].strip().replace(">=", "=="))
PY
)
echo "oldest: ${floors[*]}"
"$venv/bin/pip" install --quiet --disable-pip-version-check --editable "$root" "${floors[@]}" \
  pytest pytest-timeout pytest-xdist hypothesis botocore
cd "$root"
exec "$venv/bin/python" -m pytest -q -p no:cacheprovider -n auto --maxprocesses 4 --dist loadfile tests/proto \
  tests/readers/test_{cli,classify_command,flyte_conformance,report_terminal,signatures,store,watch,wire}.py \
  tests/reports/test_golden.py
