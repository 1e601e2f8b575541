#!/usr/bin/env bash
# make_venv.sh [FOLDER]
# Makes or refreshes .venv or another folder: this package (editable), its extras, and the development tools.
# tools/choose_python.sh chooses the interpreter; it must have venv. pip installs everything else.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}
stamp=$venv/.made-for

mapfile -t choice < <(tools/choose_python.sh)
if [ "${#choice[@]}" -eq 0 ]; then exit 1; fi
made_for=$(cat "$stamp" 2>/dev/null || echo "$PWD")
is_new=1
# Otherwise .venv is incomplete, or was copied with its folder, and then its paths point to the other folder.
if [ "$made_for" = "$PWD" ] && "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  mapfile -t present < <(PYTHON=$venv/bin/python tools/choose_python.sh)
  # an environment without Flyte is made again if there is an interpreter that can have it by now
  if [ "${present[1]:-}" = elastic ] || [ "${present[1]:-}" = "${choice[1]}" ]; then
    choice=("${present[@]}")
    is_new=
  fi
fi
python=${choice[0]} extra=${choice[1]} note=${choice[2]}
if [ -n "$note" ]; then echo "$note"; fi

rm -f "$stamp"
if [ ! -d "$venv" ]; then
  echo "making $venv: downloads PyTorch and the test tools; takes about 1.5 GB of disk with PyTorch's CPU build," \
    "several GB more with CUDA's (see CONTRIBUTING.md)"
fi
if [ -n "$is_new" ]; then
  tools/quietly.sh "making $venv with $("$python" --version)" "$python" -m venv --clear "$venv"
fi

# Python compiles what it imports; pip would compile all of it
pip=("$venv/bin/python" -m pip --no-input --disable-pip-version-check install --no-compile)
tools/quietly.sh "updating pip" "${pip[@]}" --upgrade 'pip>=25.1' # the first with --group
# torch alone first: otherwise pip may download several candidates of some gigabytes each
tools/quietly.sh "installing torch" "${pip[@]}" -c constraints.txt torch
tools/quietly.sh "installing firstfault and what its tests need" \
  "${pip[@]}" -c constraints.txt -e ".[$extra,otel,s3]" --group dev
echo "$PWD" >"$stamp"
