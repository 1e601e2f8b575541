#!/usr/bin/env bash
# Builds the source distribution and the wheel into dist/, with .venv if it is there, else with a small environment:
# packing needs no torch.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
if ! "$python" -c 'import build, hatchling' 2>/dev/null; then
  venv=build/pack-venv
  [ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
  python=$venv/bin/python
  "$python" -m pip install --quiet --no-input --disable-pip-version-check build 'hatchling>=1.24'
fi
rm -rf dist
"$python" -m build --no-isolation
