#!/usr/bin/env bash
# test_pythons.sh [VERSION...]
# Runs the quick tests and one job on each interpreter that is found, each in an environment of its own under build/.
# An interpreter is python3.x on PATH, or one of pyenv's. Versions: 3.10 3.12 3.13, as CI runs 3.11. Prints a table.
set -euo pipefail
cd "$(dirname "$0")/.."
versions=("${@:-3.10 3.12 3.13}")
rows=()
status=0
for version in ${versions[*]}; do
  python=
  for candidate in "python$version" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python3; do
    # pyenv's shim of a version that is not selected does not run
    if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then python=$candidate; break; fi
  done
  if [ -z "$python" ]; then
    rows+=("$version not found")
    continue
  fi
  venv=build/python$version-venv
  printf '\n== Python %s\n' "$version"
  PYTHON=$python tools/make_venv.sh "$venv"
  with=flytekit
  job=tests/plugin/test_jobs.py::test_a_worker_is_killed
  if ! "$venv/bin/python" -m pip show -q flytekit 2>/dev/null; then
    with="no flytekit"
    job=tests/torch_agent/test_faults_of_nodes.py::test_all_nodes_end_soon_after_a_rank_raises
  fi
  if "$venv/bin/pytest" -q -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder -m 'not slow' &&
    "$venv/bin/pytest" -q "$job"; then
    rows+=("$version passed, with $with")
  else
    rows+=("$version failed, with $with")
    status=1
  fi
done
printf '\n'
printf 'Python %s\n' "${rows[@]}"
exit "$status"
