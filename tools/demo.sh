#!/usr/bin/env bash
# Trains on two nodes of two workers, with a failure that firstfault explains: with Flyte's task and its retry, or, where
# flytekit is not installed, without an engine.
set -euo pipefail
cd "$(dirname "$0")/.."
if .venv/bin/python -m pip show -q flytekit 2>/dev/null; then
  exec .venv/bin/firstfault run examples/recoverable.py train --nodes 2 --store build/demo
fi
echo "flytekit is not installed here, so the demo is examples/plain.py: no engine, and no retry"
folder=build/demo/plain-$(date +%Y%m%d-%H%M%S)
log=$folder/nodes.log
mkdir -p "$folder"
.venv/bin/python examples/plain.py "$folder" >"$log" 2>&1 || { cat "$log" >&2; exit 1; }
status=0
.venv/bin/firstfault show "$folder/0" || status=$?
if [ "$status" -ne 10 ]; then cat "$log" >&2; exit 1; fi # 10: there is a root cause, and it is not retried
.venv/bin/firstfault show "$folder/0" --html "$folder/report.html" || true
echo "nodes' output: $log"
