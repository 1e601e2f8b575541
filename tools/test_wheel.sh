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
# Tests of a file stay in one process and share its fixtures: a browser, a training job. Training jobs wait a lot, so
# there are more processes than cores, and the agent's layer runs beside the others. pytest-xdist waits for ever for a
# process that takes a crashed one's place.
cores=$(nproc)
parallel=(-q -n "$((cores < 4 ? cores + 2 : 5))" --dist loadfile --no-loadscope-reorder --max-worker-restart=0
  --durations=15)
nothing_chosen=5  # pytest's exit code
most_seconds=1200  # of one layer; three times what it takes on two busy cores

# Ends the tests of a layer if they still run when the time is over, and writes down what ran. A test's own limit does
# not end a process that is stopped or keeps Python's lock, and pytest-xdist waits for ever for a dead process if a
# child of it still has its pipe.
end_late() {
  local folder=$1 tests
  sleep "$most_seconds" || return 0
  tests=$(<"$folder/pid")
  {
    echo "not finished after $most_seconds s; the last test of each process, and all processes:"
    tail -n +1 "$folder"/running/*
    ps -u "$(id -u)" -o pid,ppid,stat,etimes,args | cut -c -200
  } >"$folder/late"
  pkill -ABRT -P "$tests"  # with the stacks of its threads
  pkill -CONT -P "$tests"
  sleep 20
  kill -INT "$tests"
  sleep 40
  kill -KILL "$tests"
}

# test_layer LAYER ENVIRONMENT [PYTEST-ARGUMENT...]: runs its tests, and writes pytest's exit code into LAYER/status
test_layer() {
  local layer=$1 python=$root/build/$2-venv/bin/python folder=$work/layers/$1 limit ended=0
  shift 2
  mkdir -p "$folder/running"
  printf '\n== tests of the layer %s\n' "$layer"
  end_late "$folder" >/dev/null 2>&1 &
  limit=$!
  (
    echo "$BASHPID" >"$folder/pid"
    export TESTS_LAYER=$layer TESTS_RUNNING=$folder/running
    exec "$python" -m pytest -o "cache_dir=$folder/cache" "${parallel[@]}" "$@" 2>"$folder/stderr"
  ) || ended=$?
  pkill -P "$limit" sleep || true
  tail -n 100 "$folder/stderr"  # of a process that crashed: its stacks
  if [ -f "$folder/late" ]; then
    cat "$folder/late"
  fi
  echo "$ended" >"$folder/status"
}

mkdir "$work/layers"
# With job control, because a shell lets what it starts in the background ignore SIGINT otherwise
set -m
{
  test_layer core core "$@"
  test_layer flyte wheel "$@"
} >"$work/layers/others" 2>&1 &
others=$!
test_layer torch torch "$@" >"$work/layers/torch.txt" 2>&1 &
torch=$!
set +m
trap 'kill -INT -- "-$others" "-$torch" 2>/dev/null || true; wait; rm -rf "$work"' EXIT
tail -n +1 --pid="$torch" -f "$work/layers/torch.txt"
wait "$torch" || true
tail -n +1 --pid="$others" -f "$work/layers/others"
wait "$others" || true
status=$nothing_chosen
for layer in core torch flyte; do
  ended=$(cat "$work/layers/$layer/status" 2>/dev/null || echo 1)
  if [ "$ended" -ne "$nothing_chosen" ] && { [ "$status" -eq "$nothing_chosen" ] || [ "$ended" -ne 0 ]; }; then
    status=$ended
  fi
done
if [ -d build/screenshots ]; then
  rm -rf "$root/build/screenshots"
  cp -r build/screenshots "$root/build/"
fi
exit "$status"
