#!/usr/bin/env bash
# test_wheel.sh WHEEL [PYTEST-ARGUMENT...]
# Runs the tests against an installed wheel, in a folder from which the sources cannot be reached:
# first the core of it in an environment with its core dependencies only, then all tests with all dependencies, and a
# job without an engine in an environment without flytekit.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
wheel=$(realpath "$1")
shift
quietly=$root/tools/quietly.sh
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset PYTHONPATH

"$quietly" "checking the content of $(basename "$wheel")" "$root/.venv/bin/python" "$root/tools/check_wheel.py" "$wheel"

"$quietly" "building it again" "$root/.venv/bin/python" -m build --no-isolation --wheel --outdir "$work/again" "$root"
cmp "$wheel" "$work/again/$(basename "$wheel")"  # the same bytes

core=$work/core
"$quietly" "making an environment for the core" "$root/.venv/bin/python" -m venv "$core"
"$quietly" "installing the wheel alone" "$core/bin/python" -m pip --no-input \
  --disable-pip-version-check install --no-compile "$wheel"
"$quietly" "using it without flytekit and torch" "$core/bin/python" "$root/tools/check_core.py"

"$quietly" "installing the wheel beside all dependencies" "$root/tools/make_wheel_venv.sh" "$wheel"

plain=$root/build/plain-venv
rm -rf "$plain"
cp -al "$root/build/wheel-venv" "$plain"
if "$plain/bin/python" -m pip show -q flytekit 2>/dev/null; then
  "$quietly" "removing flytekit from a copy" "$plain/bin/python" -m pip --no-input --disable-pip-version-check \
    uninstall --yes flytekit flytekitplugins-kfpytorch
fi
"$quietly" "running a job without Flyte" "$plain/bin/python" "$root/tools/check_plain.py"

# all that the tests read, but no source of the packages
cd "$root"
cp -r tests examples docs tools ./*.md LICENSE Makefile pyproject.toml constraints.txt "$work"
cd "$work"
status=0
most_again=5
# Tests of a file stay in one process and share its fixtures: a browser, a training job. One process more than there are
# cores: training jobs wait a lot.
parallel=(-q -n "$(($(nproc) < 4 ? $(nproc) + 1 : 4))" --dist loadfile --no-loadscope-reorder --durations=30)
pytest=("$root/build/wheel-venv/bin/python" -m pytest -o "cache_dir=$work/cache")
"${pytest[@]}" "${parallel[@]}" "$@" 2>"$work/stderr" || status=$?
tail -n 100 "$work/stderr" >&2  # of a process that crashed: its stacks
# A few tests may have failed only because the others kept the machine busy: these run once more, alone.
failed=$(grep -c '": true' "$work/cache/v/cache/lastfailed" 2>/dev/null || true)
if [ "$status" -eq 1 ] && [ "${failed:-0}" -gt 0 ] && [ "$failed" -le "$most_again" ]; then
  printf '\n%d tests failed beside others; they run again, alone\n' "$failed"
  status=0
  "${pytest[@]}" -q --last-failed "$@" || status=$?
fi
if [ -d build/screenshots ]; then
  rm -rf "$root/build/screenshots"
  cp -r build/screenshots "$root/build/"
fi
exit "$status"
