#!/usr/bin/env bash
# test_newest.sh
# Tests with the newest torch, flytekit and kfpytorch on the index, in a copy of .venv: the agent, jobs, and cascades.
# Prints the versions that pip chose. On Linux this torch may bring several gigabytes of CUDA packages.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
venv=$root/build/newest-venv
quietly=$root/tools/quietly.sh
packages=(torch flytekit flytekitplugins-kfpytorch)
"$quietly" "copying .venv" "$root/tools/copy_venv.sh" "$root/.venv" "$venv"
# a user's own constraints, such as a cap on torch, would defeat the purpose
export PIP_CONSTRAINT=/dev/null
"$quietly" "installing the newest ${packages[*]}" "$venv/bin/python" -m pip --no-input --disable-pip-version-check \
  install --no-compile --upgrade "${packages[@]}"
"$venv/bin/python" -m pip list --format=freeze | grep -E '^(torch|flytekit|flytekitplugins-kfpytorch|fsspec|protobuf)=='
cd "$root"
pytest=("$venv/bin/python" -m pytest -q -p no:cacheprovider)
"${pytest[@]}" -n auto --maxprocesses 4 --dist loadfile -m 'not jobs' tests/torch_agent "$@"
exec "${pytest[@]}" tests/plugin/test_jobs.py::test_a_worker_is_killed tests/generated tests/torchrun/test_jobs.py "$@"
