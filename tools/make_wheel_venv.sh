#!/usr/bin/env bash
# make_wheel_venv.sh WHEEL
# Makes build/wheel-venv: a copy of .venv in which the wheel is installed instead of the sources.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
venv=$root/build/wheel-venv
pip=("$venv/bin/python" -m pip --no-input --disable-pip-version-check)

"$root/tools/copy_venv.sh" "$venv"
"${pip[@]}" uninstall --yes firstfault
extra=$("${pip[@]}" show -q flytekit 2>/dev/null && echo elastic || echo torch)
"${pip[@]}" install -c "$root/constraints.txt" "$1[$extra,otel,s3]"
