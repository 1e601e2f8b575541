#!/usr/bin/env bash
# test_wheel.sh WHEEL [PYTEST-ARGUMENT...]
# Runs the tests against an installed wheel, in a folder from which the sources cannot be reached. Each layer of tests
# runs where the packages that it may not need are not installed: the core without torch and flytekit, the agent
# without flytekit, the rest with all. A failure in one layer does not keep the next one from running.
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
"$quietly" "installing it with all dependencies, without flytekit, and without torch" \
  "$root/tools/make_wheel_venv.sh" "$wheel"

# all that the tests read, but no source of the packages
cd "$root"
cp -rL --preserve=timestamps tests lab examples docs skills tools ./*.md LICENSE Makefile pyproject.toml constraints.txt "$work"
cd "$work"
# Tests of a file stay in one process and share its fixtures: a browser, a training job. Two processes more than there
# are cores: training jobs wait a lot. pytest-xdist waits for ever for a process that takes a crashed one's place.
parallel=(-q -n "$(($(nproc) < 4 ? $(nproc) + 2 : 5))" --dist loadfile --no-loadscope-reorder --max-worker-restart=0
  --durations=15)
nothing_chosen=5  # pytest's exit code
most_seconds=1200  # of one layer; three times what it takes on two busy cores
status=$nothing_chosen

# Ends the tests if they still run when the time is over, and writes down what ran. A test's own limit does not end a
# process that is stopped or keeps Python's lock, and pytest-xdist waits for ever for a dead process if a child of it
# still has its pipe.
end_late() {
  sleep "$most_seconds" || return 0
  local tests
  tests=$(<"$work/pid")
  {
    echo "not finished after $most_seconds s; the last test of each process, and all processes:"
    tail -n +1 "$work"/running/*
    ps -u "$(id -u)" -o pid,ppid,stat,etimes,args | cut -c -200
  } >"$work/late"
  pkill -ABRT -P "$tests"  # with the stacks of its threads
  pkill -CONT -P "$tests"
  sleep 20
  kill -INT "$tests"
  sleep 40
  kill -KILL "$tests"
}

mkdir "$work/running"
export TESTS_RUNNING=$work/running
for layer in core:core torch:torch flyte:wheel; do
  python=$root/build/${layer#*:}-venv/bin/python
  printf '\n== tests of the layer %s\n' "${layer%:*}"
  ended=0
  end_late >/dev/null 2>&1 &
  limit=$!
  # in the foreground, because a shell lets what it starts in the background ignore SIGINT
  (
    echo "$BASHPID" >"$work/pid"
    TESTS_LAYER=${layer%:*} exec "$python" -m pytest -o "cache_dir=$work/cache" "${parallel[@]}" "$@" 2>"$work/stderr"
  ) || ended=$?
  pkill -P "$limit" sleep || true
  tail -n 100 "$work/stderr" >&2  # of a process that crashed: its stacks
  if [ -f "$work/late" ]; then
    cat "$work/late"
    rm "$work/late"
  fi
  if [ "$ended" -ne "$nothing_chosen" ] && { [ "$status" -eq "$nothing_chosen" ] || [ "$ended" -ne 0 ]; }; then
    status=$ended
  fi
done
if [ -d build/screenshots ]; then
  rm -rf "$root/build/screenshots"
  cp -r build/screenshots "$root/build/"
fi
exit "$status"
