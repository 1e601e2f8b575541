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
.venv/bin/python examples/plain.py "$folder"
status=0
.venv/bin/firstfault show "$folder/0" --html "$folder/report.html" || status=$?
echo "report: $folder/report.html"
if [ "$status" -ne 10 ]; then exit 1; fi
