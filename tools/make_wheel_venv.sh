#!/usr/bin/env bash
# make_wheel_venv.sh WHEEL
# Makes three environments, each without the sources: build/wheel-venv, a copy of .venv in which the wheel is installed
# instead; build/torch-venv, a copy of that without flytekit; and build/core-venv, without torch either.
set -euo pipefail
cd "$(dirname "$0")/.."
pip=(build/wheel-venv/bin/python -m pip --no-input --disable-pip-version-check)

tools/copy_venv.sh .venv build/wheel-venv firstfault
extra=$("${pip[@]}" show -q flytekit 2>/dev/null && echo elastic || echo torch)
"${pip[@]}" install --no-compile -c constraints.txt "$1[$extra,flyte,otel,s3]"
tools/copy_venv.sh build/wheel-venv build/torch-venv flytekit flytekitplugins-kfpytorch
tools/copy_venv.sh build/torch-venv build/core-venv torch
