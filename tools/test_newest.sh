#!/usr/bin/env bash
# test_newest.sh [TORCH]
# Tests with the newest torch, flytekit and kfpytorch on the index, or with this release of torch, such as 2.14.1, in a
# copy of .venv: the agent, jobs, and cascades, also those of the second NCCL backend with torch's own flight recorder.
# Prints the versions that pip chose.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
release=
if [[ ${1:-} =~ ^[0-9]+\.[0-9] ]]; then
  release=$1
  shift
fi
venv=$root/build/newest${release:+-$release}-venv
"$root/tools/quietly.sh" "installing torch ${release:-(the newest)}" "$root/tools/make_newest_venv.sh" "$venv" "$release"
"$venv/bin/python" -m pip list --format=freeze | grep -E '^(torch|flytekit|flytekitplugins-kfpytorch|fsspec|protobuf)=='
cd "$root"
pytest=("$venv/bin/python" -m pytest -q -p no:cacheprovider)
"${pytest[@]}" -n auto --maxprocesses 4 --dist loadfile -m 'not jobs' tests/torch_agent "$@"
"${pytest[@]}" tests/plugin/test_jobs.py::test_a_worker_is_killed tests/lab/test_generated.py tests/torchrun/test_jobs.py "$@"
exec "$venv/bin/python" lab/cascades/record.py --judge nccl-{hang-python,SIGKILL,raise}-version2.15-rank3-of4 \
  nccl-skip-version2.15-rank0-of4 nccl-hang-python-version2.15-raises-rank3-of4 \
  nccl-tensor-hang-version2.15-raises-rank0-of4
