#!/usr/bin/env bash
# make_wheel_venv.sh WHEEL
# Makes build/wheel-venv: a copy of .venv in which the wheel is installed instead of the sources.
# The copy consists of hard links, so it takes seconds; another installation of torch would take minutes.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
venv=$root/build/wheel-venv
pip=("$venv/bin/python" -m pip --no-input --disable-pip-version-check)

rm -rf "$venv"
mkdir -p "$root/build"
cp -al "$root/.venv" "$venv"
rm "$venv/.made-for"
# Scripts name their interpreter. sed replaces a file by a new one, so those of .venv stay as they are.
grep -rIlZ --exclude-dir=__pycache__ "$root/.venv" "$venv/bin" "$venv/pyvenv.cfg" |
  xargs -0 sed -i "s|$root/\.venv|$venv|g"
"${pip[@]}" uninstall --yes firstfault
"${pip[@]}" install -c "$root/constraints.txt" "$1[elastic,otel,s3]"
