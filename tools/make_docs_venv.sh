#!/usr/bin/env bash
# make_docs_venv.sh
# Makes build/docs-venv, if it isn't there yet: Sphinx and this package without extras. The pages on the API need
# neither torch nor flytekit, because docs/conf.py imitates them.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=build/docs-venv
stamp="$PWD, $(cat pyproject.toml "$0" | sha256sum)"
[ "$(cat "$venv/.made-with" 2>/dev/null)" = "$stamp" ] && exit 0
mapfile -t choice < <(tools/choose_python.sh)
if [ "${#choice[@]}" -eq 0 ]; then exit 1; fi
"${choice[0]}" -m venv --clear "$venv"
pip=("$venv/bin/python" -m pip --no-input --disable-pip-version-check install --quiet --no-compile)
"${pip[@]}" --upgrade 'pip>=25.1' # the first with --group
"${pip[@]}" --editable . --group docs
echo "$stamp" >"$venv/.made-with"
