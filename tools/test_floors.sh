#!/usr/bin/env bash
# test_floors.sh [TORCH]
# Tests with the oldest dependencies that pyproject.toml admits: first, in a venv of its own, what reads and writes
# storage (fsspec), documents (protobuf; flyteidl to compare), text (google-re2), reports (jinja2, rich) and the
# command line (click); then, in a copy of .venv, the plugin with the oldest flytekit, also in a real job. With TORCH, such as 2.3.1,
# the plugin is tested with that release too; its CUDA packages take 5 GB.
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

project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
for requirement in [*project["dependencies"], *project["optional-dependencies"]["flyte"]]:
    print(requirement.split(";")[0].strip().replace(">=", "=="))
PY
)
echo "oldest: ${floors[*]}"
"$venv/bin/pip" install --quiet --disable-pip-version-check --editable "$root" "${floors[@]}" \
  pytest pytest-timeout pytest-xdist hypothesis botocore
cd "$root"
"$venv/bin/python" - <<'PY'
import importlib.util

import firstfault

extras = [name for name in ("flytekit", "torch", "s3fs") if importlib.util.find_spec(name)]
assert not extras, f"{extras} came with the core dependencies"
for name in firstfault.__all__:
    getattr(firstfault, name)
PY
"$venv/bin/python" -m pytest -q -p no:cacheprovider -n auto --maxprocesses 4 --dist loadfile tests/proto \
  tests/readers/test_{classify_and_prune,cli,flyte_conformance,signatures,store,terminal,watch,wire}.py \
  tests/reports/test_golden.py

venv=$root/build/flytekit-floor-venv
"$root/tools/copy_venv.sh" "$root/.venv" "$venv"
oldest=$(sed -n 's/^elastic = .*"flytekit>=\([0-9.]*\)".*/\1/p' "$root/pyproject.toml")
echo "oldest: flytekit==$oldest ${1:+torch==$1}"
"$venv/bin/pip" install --quiet --disable-pip-version-check "flytekit==$oldest.0" ${1:+"torch==$1"}
of_torch=()
if [ -n "${1:-}" ]; then
  of_torch=(tests/plugin/test_faults.py tests/torch_agent/test_{failure_broadcast,liveness,settlement}.py)
fi
# this release warns of its own use of `disable_deck`
exec "$venv/bin/python" -m pytest -q -p no:cacheprovider -n 2 -W 'ignore:`disable_deck`' \
  tests/plugin/test_{config,task}.py tests/plugin/test_jobs.py::test_a_worker_is_killed "${of_torch[@]}"
