#!/usr/bin/env bash
# demo.sh [plain]
# Trains on two nodes of two workers, with a failure that firstfault explains: with Flyte's task and its retry, or, where
# flytekit is not installed and if "plain" is given, without an engine.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "${1:-}" != plain ]; then
  if .venv/bin/python -m pip show -q flytekit 2>/dev/null; then
    exec .venv/bin/firstfault run examples/recoverable.py train --nodes 2 --store build/demo
  fi
  echo "flytekit is not installed here, so the demo is examples/plain.py: no engine, and no retry"
fi
folder=build/demo/plain-$(date +%Y%m%d-%H%M%S)
log=$folder/nodes.log
mkdir -p "$folder"
.venv/bin/python examples/plain.py "$folder" >"$log" 2>&1 || { cat "$log" >&2; exit 1; }
status=0
.venv/bin/firstfault show "$folder/0" || status=$?
# 10: there is a root cause, and it is not retried
if [ "$status" -ne 10 ] || ! grep -q '^SIGKILL, rank 3 on worker-1' "$log"; then cat "$log" >&2; exit 1; fi
.venv/bin/firstfault show "$folder/0" --html "$folder/report.html" || true
echo "nodes' output: $log"
