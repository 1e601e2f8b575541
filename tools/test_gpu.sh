#!/usr/bin/env bash
# test_gpu.sh
# Runs faults of two ranks on one GPU with the newest torch, and prints a table for docs/project/accuracy.md; ten minutes.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
if ! nvidia-smi -L >/dev/null 2>&1; then
  echo "make gpu: nvidia-smi finds no GPU on this machine; nothing was run"
  exit 0
fi
venv=$root/build/newest-venv
[ -x "$venv/bin/python" ] ||
  "$root/tools/quietly.sh" "installing torch (the newest)" "$root/tools/make_newest_venv.sh" "$venv"
exec "$venv/bin/python" "$root/tools/gpu.py" "$@"
