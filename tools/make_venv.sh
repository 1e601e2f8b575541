#!/usr/bin/env bash
# Makes or refreshes .venv: this package (editable), its extras, and the development tools.
# Needs python3 (or $PYTHON) 3.10 or later with venv; pip installs everything else.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv
stamp=$venv/.made-for
python=${PYTHON:-python3}

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
  echo "firstfault needs Python 3.10 or later; name one with PYTHON=..., as in: make test PYTHON=python3.12" >&2
  exit 1
fi

made_for=$(cat "$stamp" 2>/dev/null || echo "$PWD")
rm -f "$stamp"
if [ ! -d "$venv" ]; then
  echo "making $venv: downloads PyTorch and the test tools; takes about 1.5 GB of disk with PyTorch's CPU build," \
    "several GB more with CUDA's (see CONTRIBUTING.md)"
fi
# .venv is incomplete, or was copied with its folder, and then its paths point to the other folder.
if [ "$made_for" != "$PWD" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  tools/quietly.sh "making $venv with $("$python" --version)" "$python" -m venv --clear "$venv"
fi

# Python compiles what it imports; pip would compile all of it
pip=("$venv/bin/python" -m pip --no-input --disable-pip-version-check install --no-compile)
tools/quietly.sh "updating pip" "${pip[@]}" --upgrade 'pip>=25.1' # the first with --group
# torch alone first: otherwise pip may download several candidates of some gigabytes each
tools/quietly.sh "installing torch" "${pip[@]}" -c constraints.txt torch
tools/quietly.sh "installing firstfault and what its tests need" \
  "${pip[@]}" -c constraints.txt -e '.[elastic,otel,s3]' --group dev
echo "$PWD" >"$stamp"
