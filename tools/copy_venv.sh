#!/usr/bin/env bash
# copy_venv.sh SOURCE TARGET [PACKAGE...]
# Copies an environment, without these packages. The copy consists of hard links, so it takes seconds; another
# installation of torch would take minutes.
set -euo pipefail
source=$(realpath "$1")
mkdir -p "$(dirname "$2")"
target=$(realpath "$2")
shift 2
rm -rf "$target"
cp -al "$source" "$target"
rm -f "$target/.made-for"
# Scripts name their interpreter. sed replaces a file by a new one, so those of SOURCE stay as they are.
grep -rIlZ --exclude-dir=__pycache__ "$source" "$target/bin" "$target/pyvenv.cfg" |
  xargs -0 sed -i "s|$source|$target|g"
if [ "$#" -gt 0 ]; then
  "$target/bin/python" -m pip --no-input --disable-pip-version-check uninstall --yes "$@"
fi
