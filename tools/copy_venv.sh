#!/usr/bin/env bash
# copy_venv.sh TARGET
# Copies .venv to TARGET. The copy consists of hard links, so it takes seconds; another installation of torch would take
# minutes.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
venv=$1
rm -rf "$venv"
mkdir -p "$(dirname "$venv")"
cp -al "$root/.venv" "$venv"
rm "$venv/.made-for"
# Scripts name their interpreter. sed replaces a file by a new one, so those of .venv stay as they are.
grep -rIlZ --exclude-dir=__pycache__ "$root/.venv" "$venv/bin" "$venv/pyvenv.cfg" |
  xargs -0 sed -i "s|$root/\.venv|$venv|g"
